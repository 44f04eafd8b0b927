"""Limits of an inbox: how fast and how many at once its workers handle messages, and when they stop by themselves.

Workers keep to them (`inbox.limits`); they stand in the database, so that they hold for all workers together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mailroom.registry.breakers import closing_prefixes
from mailroom.sql.operation import Operation, Sql

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


LIMITS = ("rate", "burst", "concurrency", "breaker", "breaker_by")


def limiting(schema: str, names: Sequence[str], given: Mapping[str, Any]) -> Operation[None]:
    """Set the limits of registered inboxes, as far as they are given: 0 ends one, and `""` ends `breaker_by`."""
    limits = {name: given.get(name) for name in LIMITS}
    if all(limit is None for limit in limits.values()):
        return
    yield SET.at(schema=schema)(names=list(names), **limits)
    of_prefixes = {"breaker": limits["breaker"], "breaker_by": limits["breaker_by"]}
    for name in [name for (name,) in (yield ENDING.at(schema=schema)(names=list(names), **of_prefixes))]:
        yield from closing_prefixes(schema, name, by_hand=True)
    yield MAKE_SLOTS.at(schema=schema)(names=list(names), slots=limits["concurrency"] or 0)
