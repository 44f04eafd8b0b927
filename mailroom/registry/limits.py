"""Limits of an inbox: how fast and how many at once its workers handle messages, and when they stop by themselves.

Workers keep to them (`inbox.limits`); they stand in the database, so that they hold for all workers together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mailroom.errors import ConfigurationError
from mailroom.names import shown
from mailroom.numbers import whole
from mailroom.registry.breakers import closing_prefixes
from mailroom.sql.operation import Operation, Sql

MOST_PER_S = 1_000_000
MOST_SLOTS = 10_000


@dataclass(frozen=True, slots=True)
class InboxLimits:
    """Limits as they were given: None for one that stays as it is, 0 for one that ends. See `creation`."""

    rate: float | None = None
    burst: int | None = None
    concurrency: int | None = None
    breaker: int | None = None
    breaker_by: str | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for a limit that cannot be."""
        rate = self.rate
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if rate is not None and not (is_number and 0 <= rate <= MOST_PER_S):
            given = shown(rate) if is_number else type(rate).__name__
            raise ConfigurationError(
                f"rate must be a number of messages per second, at most {MOST_PER_S:,}, 0 for no limit, not {given}.",
                code="MR-invalid-argument",
            )
        if self.burst is not None:
            whole(self.burst, "burst", 1, MOST_PER_S, ConfigurationError)
            if not rate:
                raise ConfigurationError("burst goes with a rate: give both.", code="MR-invalid-argument")
        if self.concurrency is not None:
            whole(self.concurrency, "concurrency", 0, MOST_SLOTS, ConfigurationError)
        if self.breaker is not None:
            whole(self.breaker, "breaker", 0, 100, ConfigurationError)
        by = self.breaker_by
        if by is not None and by != "":
            if not (isinstance(by, str) and len(by) == 1 and "!" <= by <= "~"):
                raise ConfigurationError(
                    "breaker_by must be one printable character of ASCII, and no space: what ends a key's prefix, such "
                    f"as '/'. Or it is '', for one breaker of the whole inbox. It cannot be {shown(by)}.",
                    code="MR-invalid-argument",
                )
            if not self.breaker:
                raise ConfigurationError("breaker_by goes with a breaker: give both.", code="MR-invalid-argument")

    @property
    def are_given(self) -> bool:
        """Whether any is to change."""
        given = (self.rate, self.concurrency, self.breaker, self.breaker_by)
        return any(each is not None for each in given)


# A bucket begins full. If its rate changes, what has come in at the old rate is settled; the time is read once more
# after that, so that what comes in between is lost, and never counted twice.
SET = Sql(
    """
INSERT INTO {schema}.limits AS l (inbox, rate_per_s, burst, concurrency, breaker_percent, breaker_by, tokens)
SELECT name, nullif(%(rate)s::float8, 0::float8), {burst}, nullif(%(concurrency)s::integer, 0),
       nullif(%(breaker)s::integer, 0), nullif(%(breaker_by)s::text, ''), {burst}
FROM pg_catalog.unnest(%(names)s::text[]) AS given (name)
ON CONFLICT (inbox) DO UPDATE SET
    rate_per_s = CASE WHEN %(rate)s::float8 IS NULL THEN l.rate_per_s ELSE excluded.rate_per_s END,
    burst = CASE WHEN %(rate)s::float8 IS NULL THEN l.burst ELSE excluded.burst END,
    concurrency = CASE WHEN %(concurrency)s::integer IS NULL THEN l.concurrency ELSE excluded.concurrency END,
    breaker_percent = CASE WHEN %(breaker)s::integer IS NULL THEN l.breaker_percent ELSE excluded.breaker_percent END,
    breaker_by = CASE WHEN %(breaker)s::integer = 0 THEN NULL
                      WHEN %(breaker_by)s::text IS NULL THEN l.breaker_by ELSE excluded.breaker_by END,
    tokens = CASE WHEN %(rate)s::float8 IS NULL THEN l.tokens
                  WHEN l.rate_per_s IS NULL THEN excluded.tokens
                  ELSE least(excluded.burst::float8,
                             l.tokens + l.rate_per_s * greatest(
                                 0::float8, extract(epoch FROM clock_timestamp() - l.filled_at)::float8)) END,
    filled_at = CASE WHEN %(rate)s::float8 IS NULL THEN l.filled_at ELSE clock_timestamp() END,
    opened_at = CASE WHEN %(breaker)s::integer = 0 THEN NULL ELSE l.opened_at END
""",
    burst="coalesce(%(burst)s::integer, greatest(1, ceil(coalesce(%(rate)s::float8, 1::float8))::integer))",
)
# Slots above a lowered number stay, and no worker takes them: to delete one would wait for the batch that has it.
MAKE_SLOTS = Sql(
    """
INSERT INTO {schema}.slot (inbox, slot)
SELECT name, slot
FROM pg_catalog.unnest(%(names)s::text[]) AS given (name)
CROSS JOIN pg_catalog.generate_series(0, %(slots)s::integer) AS slot
ON CONFLICT (inbox, slot) DO NOTHING
"""
)
# The breakers of prefixes that end with the setting under which they were opened.
ENDING = Sql(
    """
SELECT DISTINCT inbox FROM {schema}.breaker
WHERE inbox = ANY (%(names)s::text[])
  AND (%(breaker)s::integer = 0 OR separator <> %(breaker_by)s::text) ORDER BY inbox
""",
    columns=("text",),
)


def limiting(schema: str, names: Sequence[str], limits: InboxLimits) -> Operation[None]:
    """Set the limits of registered inboxes, as far as they are given."""
    if limits.are_given:
        yield SET.at(schema=schema)(
            names=list(names), rate=limits.rate, burst=limits.burst, concurrency=limits.concurrency,
            breaker=limits.breaker, breaker_by=limits.breaker_by,
        )  # fmt: skip
        given = {"breaker": limits.breaker, "breaker_by": limits.breaker_by}
        for name in [name for (name,) in (yield ENDING.at(schema=schema)(names=list(names), **given))]:
            yield from closing_prefixes(schema, name, by_hand=True)
        yield MAKE_SLOTS.at(schema=schema)(names=list(names), slots=limits.concurrency or 0)
