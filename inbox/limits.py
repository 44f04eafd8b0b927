"""The limits of an inbox, as its workers keep to them: a bucket of tokens, slots, and a breaker.

All three stand in the database (`mailroom.registry.limits`), so no worker has to know of another one.

The bucket: a claim is bounded by the tokens that were taken for it before, in a transaction of their own. In the
batch's own transaction the row would be locked while handlers run. So a worker that dies loses the tokens of one batch:
fewer messages are claimed than allowed, and never more.

A slot is a row that the transaction of a batch locks. It needs no lease: the server frees it when that transaction
ends, however it ends.

The breaker is open or closed. While it is open, one worker at a time has the slot 0 and tries one message at `try_at`.
It commits that the breaker is closed together with the message. If the message fails, `try_at` moves on before its
batch is rolled back, so while the slot is still locked.
"""

from dataclasses import dataclass
from datetime import datetime

from inbox.by_key.parked_keys import NOTIFY
from mailroom.sql.operation import Operation, Sql

TICK_S = 0.1  # below the wanted number, a claim waits for the tokens of so long a time, and not for each single one
TRY_S = 10.0  # from the opening of a breaker to the first try
LONGEST_TRY_S = 300.0  # each failed try doubles the time to the next one, up to this

NOW = "coalesce(%(now)s::timestamptz, clock_timestamp())"

# The time is read after the row is locked, and once: with an earlier one the wait for the lock would be counted again
# by the next. A clock that was set back by less than a second fills nothing until it is where it was; by more, the
# rate goes on from now.
# D-reap-12: Limits are asked for before a claim, and are not part of it.
TAKE = Sql(
    """
WITH held AS MATERIALIZED (
    SELECT rate_per_s, burst::float8 AS burst, tokens, filled_at FROM {schema}.my_limit
    WHERE inbox = '{inbox}' AND rate_per_s IS NOT NULL FOR UPDATE),
seen AS MATERIALIZED (SELECT h.*, {now} AS at FROM held AS h),
timed AS MATERIALIZED (
    SELECT s.*, CASE WHEN filled_at > at + interval '1 s' THEN at ELSE greatest(at, filled_at) END AS now
    FROM seen AS s),
filled AS MATERIALIZED (
    SELECT rate_per_s, now, least(burst, tokens + %(back)s::bigint::float8 + rate_per_s * greatest(
               0::float8, extract(epoch FROM now - filled_at)::float8)) AS tokens,
           least(%(wanted)s::bigint::float8, burst, greatest(1::float8, floor(rate_per_s * {tick_s}::float8))) AS enough
    FROM timed),
granted AS MATERIALIZED (
    SELECT f.*, CASE WHEN tokens >= enough THEN least(%(wanted)s::bigint::float8, floor(tokens))
                     ELSE 0::float8 END AS number
    FROM filled AS f),
taken AS (
    UPDATE {schema}.my_limit AS l SET tokens = g.tokens - g.number, filled_at = g.now FROM granted AS g
    WHERE l.inbox = '{inbox}')
SELECT number::bigint, greatest((enough - tokens) / rate_per_s, 0::float8) FROM granted
""",
    columns=("bigint", "float8"),
    now=NOW,
    tick_s=str(TICK_S),
)
GIVE_BACK = Sql(
    """
UPDATE {schema}.my_limit SET tokens = least(burst::float8, tokens + %(back)s::bigint::float8) WHERE inbox = '{inbox}'
"""
)
# A try that lies further ahead than any can have been set is one of a clock that was set back since, and is due.
DUE_IN = (
    "CASE WHEN try_at <= {now} + interval '{longest_s} s' THEN extract(epoch FROM try_at - {now})::float8 ELSE 0 END"
)
SEE = Sql(
    """
SELECT rate_per_s IS NOT NULL, concurrency::bigint, breaker_percent::bigint, opened_at IS NOT NULL,
       CASE WHEN try_at IS NOT NULL THEN {due_in} END, breaker_by,
       CASE WHEN breaker_by IS NULL THEN false
            ELSE EXISTS (SELECT FROM {schema}.my_breaker WHERE inbox = '{inbox}') END
FROM {schema}.my_limit WHERE inbox = '{inbox}'
""",
    columns=("boolean", "bigint", "bigint", "boolean", "float8", "text", "boolean"),
    due_in=DUE_IN.format(now=NOW, longest_s=LONGEST_TRY_S),
)
# No ORDER BY: below a security barrier the sort would lock all rows before one of them is taken.
SLOT = Sql(
    """
SELECT slot::bigint FROM {schema}.my_slot
WHERE inbox = '{inbox}' AND slot >= %(first)s::integer AND slot <= %(last)s::integer
LIMIT 1 FOR UPDATE SKIP LOCKED
""",
    columns=("bigint",),
)
OPEN = Sql(
    """
UPDATE {schema}.my_limit
SET opened_at = t.now, opened_why = %(why)s::text, tries = 0, try_at = t.now + {first_s}::float8 * interval '1 s'
FROM (SELECT {now} AS now) AS t
WHERE inbox = '{inbox}' AND opened_at IS NULL AND breaker_percent IS NOT NULL RETURNING true
""",
    columns=("boolean",),
    now=NOW,
    first_s=str(TRY_S),
)
# The power is bounded, or after a thousand tries it would be no number any more.
# D-reap-13: An open breaker is not a pause.
MOVE_ON = Sql(
    """
UPDATE {schema}.my_limit
SET tries = least(tries, 30) + 1,
    try_at = {now} + interval '1 s' * least(
        {longest_s}::float8, {first_s}::float8 * power(2::float8, least(tries, 30)::float8 + 1::float8))
WHERE inbox = '{inbox}' AND opened_at IS NOT NULL
""",
    now=NOW,
    first_s=str(TRY_S),
    longest_s=str(LONGEST_TRY_S),
)
# An operator writes the table itself, since the views are for those who may take messages.
CLOSING = """
UPDATE {schema}.{limit} SET opened_at = NULL, opened_why = NULL, try_at = NULL, tries = 0
WHERE inbox = '{inbox}' AND opened_at IS NOT NULL RETURNING true
"""
CLOSE = Sql(CLOSING, columns=("boolean",), limit="my_limit")
CLOSE_BY_HAND = Sql(CLOSING, columns=("boolean",), limit="limits")


@dataclass(frozen=True, slots=True)
class Limited:
    """Which limits an inbox has. `try_in_s` is the number of seconds until a message is tried, negative after that.

    `breaker_by` is the separator after a prefix of a key if there is a breaker for each, and `has_open`: one is open.
    """

    is_rated: bool = False
    concurrency: int | None = None
    breaker_percent: int | None = None
    is_open: bool = False
    try_in_s: float | None = None
    breaker_by: str | None = None
    has_open: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether each claim has to ask first, in its own transaction."""
        return self.concurrency is not None or self.breaker_percent is not None


NONE = Limited()


@dataclass(frozen=True, slots=True)
class HeldBy:
    """A claim was held by a limit: rate, concurrency or breaker. It should ask again in about `for_s` seconds."""

    limit: str
    for_s: float


def taking(
    schema: str, inbox: str, wanted: int, back: int = 0, now: datetime | None = None
) -> Operation[tuple[int, float] | None]:
    """Take tokens for at most `wanted` messages, and give back `back` of those taken before; None without a rate.

    Returns how many were taken, and if none were, in how many seconds there are enough. In a transaction of its own,
    which others wait for.
    """
    rows = yield TAKE.at(schema=schema, inbox=inbox)(wanted=wanted, back=back, now=now)
    return (rows[0][0], rows[0][1]) if rows else None


def giving_back(schema: str, inbox: str, back: int) -> Operation[None]:
    """Give back tokens of which nothing was claimed. In a transaction that ends at once."""
    yield GIVE_BACK.at(schema=schema, inbox=inbox)(back=back)


def seeing(schema: str, inbox: str, now: datetime | None = None) -> Operation[Limited]:
    """Return which limits the inbox has."""
    rows = yield SEE.at(schema=schema, inbox=inbox)(now=now)
    return Limited(*rows[0]) if rows else NONE


def locking_slot(schema: str, inbox: str, concurrency: int) -> Operation[bool]:
    """Lock a slot until the transaction ends; return false if none is free."""
    return bool((yield SLOT.at(schema=schema, inbox=inbox)(first=1, last=concurrency)))


def trying(schema: str, inbox: str, now: datetime | None = None) -> Operation[Limited | None]:
    """Lock the slot of the worker that tries, until the transaction ends; None if another one has it.

    Returns what is seen after that, since the last holder may have closed the breaker, or moved its time.
    """
    if not (yield SLOT.at(schema=schema, inbox=inbox)(first=0, last=0)):
        return None
    return (yield from seeing(schema, inbox, now))


def opening(schema: str, inbox: str, why: str, now: datetime | None = None) -> Operation[bool]:
    """Open the breaker; return false if it is open already, or if the inbox has none any more."""
    return bool((yield OPEN.at(schema=schema, inbox=inbox)(why=why, now=now)))


def moving_on(schema: str, inbox: str, now: datetime | None = None) -> Operation[None]:
    """Record that a try has failed: the next one comes later."""
    yield MOVE_ON.at(schema=schema, inbox=inbox)(now=now)


def closing(schema: str, inbox: str, *, by_hand: bool = False) -> Operation[bool]:
    """Close the breaker; return whether it was open. Sleeping workers wake up at the COMMIT."""
    was_open = bool((yield (CLOSE_BY_HAND if by_hand else CLOSE).at(schema=schema, inbox=inbox)()))
    if was_open:
        yield NOTIFY.at(schema=schema, inbox=inbox)()
    return was_open
