"""The breakers of prefixes of keys, as workers keep to them while one is open (`mailroom.registry.breakers`).

The claims know nothing of them. Before a claim, and in a transaction of its own, a worker has what waits of an open
prefix wait (`deferring`): keys without a row in `key_state` get one, and failing keys are due later. When it is time,
one key of the prefix is made due (`granting`), and the worker that claims it tries one message. Whatever becomes of it,
the next one comes later: that is on record before the try begins, so the death of a worker changes nothing. The breaker
is closed after the COMMIT of a message that was claimed while it was open.

Each worker looks through all keys of a prefix once, when it first sees that the breaker is open, and after that at what
has come since. So it does not matter whether another worker got to the end of it.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import datetime

from inbox.by_key.claim import PIN
from inbox.limits import DUE_IN, LONGEST_TRY_S, TRY_S
from mailroom.order.expressions import BY_CLOCK
from mailroom.registry.breakers import DEFERRED_S, NOW, OF_PREFIX, WHY, Prefix, closing_prefixes
from mailroom.sql.operation import Operation, Sql

AT_ONCE = 1_000  # keys, or messages that have come, that one statement looks at
MOST_OPEN = 1_000  # open breakers of one inbox: more of them are a matter for the breaker of the whole

# It waits for a change of the setting, and a change for it: that closes what was opened by the setting before.
OPEN = Sql(
    """
INSERT INTO {schema}.my_breaker (inbox, prefix, separator, opened_at, opened_why, try_at)
SELECT '{inbox}', %(prefix)s::text, breaker_by, t.now, %(why)s::text, t.now + {first_s}::float8 * interval '1 s'
FROM (SELECT breaker_by FROM {schema}.my_limit
      WHERE inbox = '{inbox}' AND breaker_percent IS NOT NULL AND breaker_by = %(separator)s::text FOR SHARE) AS l
CROSS JOIN (SELECT {now} AS now) AS t
WHERE (SELECT count(*) FROM {schema}.my_breaker WHERE inbox = '{inbox}') < {most}
ON CONFLICT (inbox, prefix) DO NOTHING RETURNING true
""",
    columns=("boolean",),
    now=NOW,
    first_s=str(TRY_S),
    most=str(MOST_OPEN),
)
# They cannot be closed while a worker has their keys wait. Several may do that at once.
SEE = Sql(
    """
SELECT prefix, separator, opened_at, trying, {due_in}
FROM {schema}.my_breaker WHERE inbox = '{inbox}' ORDER BY prefix FOR SHARE
""",
    columns=("text", "text", "timestamptz", "text", "float8"),
    due_in=DUE_IN.format(now=NOW, longest_s=LONGEST_TRY_S),
)
NEWEST = Sql(
    """
SELECT coalesce((SELECT clock FROM {schema}.inbox_{inbox} ORDER BY {by_clock} DESC LIMIT 1), 0)
""",
    columns=("bigint",),
    by_clock=BY_CLOCK,
)
# Only keys without a row get one, by the snapshot: so there is no wait for a batch that has such a row in hand.
MAKE = """made AS (
    INSERT INTO {schema}.my_key_state (inbox, key, clock, attempts, retry_at, last_error)
    SELECT '{inbox}', w.key, 0, 0, {now} + interval '{deferred_s} s', %(why)s::text FROM wanted AS w
    WHERE (SELECT s.clock FROM {schema}.my_key_state AS s WHERE s.inbox = '{inbox}' AND s.key = w.key) IS NULL
    ORDER BY w.key
    ON CONFLICT (inbox, key) DO NOTHING RETURNING key)"""
NEXT = """SELECT key FROM {schema}.inbox_{inbox} AS i
     WHERE i.key %s AND i.key < %%(end)s::text ORDER BY key LIMIT 1"""
# From key to key, since a key may have many messages. The prefix itself is a key that may be far from the others.
WALK = Sql(
    """
WITH RECURSIVE walk (key, step) AS (
    (SELECT n.key, 1 FROM ({first}) AS n)
    UNION ALL
    SELECT n.key, w.step + 1 FROM walk AS w, LATERAL ({next}) AS n WHERE w.step < {at_once}),
wanted AS MATERIALIZED (
    SELECT key FROM walk
    UNION ALL
    SELECT %(prefix)s::text WHERE EXISTS (SELECT FROM {schema}.inbox_{inbox} WHERE key = %(prefix)s::text)),
{make}
SELECT (SELECT key FROM walk WHERE step = {at_once}), (SELECT count(*) FROM made)
""",
    columns=("text", "bigint"),
    first=NEXT % ">= %(first)s::text",
    next=NEXT % "> w.key",
    make=MAKE,
    now=NOW,
    deferred_s=str(DEFERRED_S),
    at_once=str(AT_ONCE),
)
ARRIVED = Sql(
    """
WITH seen AS MATERIALIZED (
    SELECT key, clock FROM {schema}.inbox_{inbox} WHERE {by_clock} > %(after)s::bigint
    ORDER BY {by_clock} LIMIT {at_once}),
wanted AS MATERIALIZED (
    SELECT DISTINCT key FROM seen
    WHERE split_part(key, %(separator)s::text, 1) = ANY (%(prefixes)s::text[])),
{make}
SELECT (SELECT clock FROM seen OFFSET {at_once} - 1), (SELECT count(*) FROM made)
""",
    columns=("bigint", "bigint"),
    by_clock=BY_CLOCK,
    make=MAKE,
    now=NOW,
    deferred_s=str(DEFERRED_S),
    at_once=str(AT_ONCE),
)
# Parked and paused keys are never due, and the keys that are to be tried stay as they are. Those that are
# locked are left, and not waited for. The time is in a SELECT of its own, or it would be no condition for the index.
PUT_OFF = Sql(
    """
UPDATE {schema}.my_key_state AS s SET retry_at = {now} + interval '{deferred_s} s'
FROM (SELECT key FROM {schema}.my_key_state
      WHERE inbox = '{inbox}' AND key = ANY (ARRAY(
            SELECT key FROM {schema}.my_due
            WHERE inbox = '{inbox}' AND retry_at < (SELECT {now} + interval '{soon_s} s')
              AND split_part(key, %(separator)s::text, 1) = ANY (%(prefixes)s::text[])
              AND key <> ALL (%(trying)s::text[])))
        AND retry_at < (SELECT {now} + interval '{soon_s} s')
      ORDER BY key FOR UPDATE SKIP LOCKED) AS k
WHERE s.inbox = '{inbox}' AND s.key = k.key
""",
    now=NOW,
    deferred_s=str(DEFERRED_S),
    soon_s=str(2 * int(LONGEST_TRY_S)),
)
LOCK_DUE = Sql(
    """
SELECT separator, trying FROM {schema}.my_breaker
WHERE inbox = '{inbox}' AND prefix = %(prefix)s::text AND {due_in} <= 0::float8 FOR UPDATE
""",
    columns=("text", "text"),
    due_in=DUE_IN.format(now=NOW, longest_s=LONGEST_TRY_S),
)
# Whether a transaction has the first message of the key. If none has, none gets it before this one ends.
IN_HAND = Sql(
    """
WITH head AS MATERIALIZED (SELECT min(clock) AS clock FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text),
free AS MATERIALIZED (
    SELECT clock FROM {schema}.inbox_{inbox}
    WHERE key = %(key)s::text AND clock = (SELECT clock FROM head) FOR UPDATE SKIP LOCKED)
SELECT (SELECT clock FROM head) IS NOT NULL AND NOT EXISTS (SELECT FROM free)
""",
    columns=("boolean",),
)
# The one with the fewest attempts, or a message that fails for reasons of its own would be tried again and again. By
# `suspect_to` it is one message; by its clock the janitor sees that there is something for the row to do.
# D-reap-14: A breaker of a prefix has its keys wait as failing keys do.
GIVE = Sql(
    """
WITH given AS MATERIALIZED (
    SELECT s.key, (SELECT min(clock) FROM {schema}.inbox_{inbox} AS i WHERE i.key = s.key) AS head
    FROM {schema}.my_key_state AS s
    WHERE s.inbox = '{inbox}' AND {of_prefix} AND s.retry_at < 'infinity'
      AND EXISTS (SELECT FROM {schema}.inbox_{inbox} AS i WHERE i.key = s.key)
    ORDER BY s.attempts, s.key LIMIT 1)
UPDATE {schema}.my_key_state AS s
SET retry_at = {now}, suspect_to = greatest(s.suspect_to, g.head),
    clock = CASE WHEN s.attempts = 0 THEN g.head ELSE s.clock END
FROM given AS g WHERE s.inbox = '{inbox}' AND s.key = g.key RETURNING s.key
""",
    columns=("text",),
    of_prefix=OF_PREFIX.format(key="s.key"),
    now=NOW,
)
MOVE_ON = Sql(
    """
UPDATE {schema}.my_breaker
SET trying = %(key)s::text, tries = tries + 1, try_at = {now} + interval '1 s' * least(
    {longest_s}::float8, {first_s}::float8 * power(2::float8, least(tries, 30)::float8 + 1::float8))
WHERE inbox = '{inbox}' AND prefix = %(prefix)s::text
""",
    now=NOW,
    first_s=str(TRY_S),
    longest_s=str(LONGEST_TRY_S),
)
HAS_FAILED = Sql(
    """
UPDATE {schema}.my_breaker SET trying = NULL
WHERE inbox = '{inbox}' AND prefix = %(prefix)s::text AND trying = %(key)s::text
""",
)
IS_OPEN = Sql(
    "SELECT EXISTS (SELECT FROM {schema}.inbox_registry WHERE name = '{inbox}' AND paused_at IS NULL)",
    columns=("boolean",),
)


@dataclass(frozen=True, slots=True)
class OpenPrefix:
    """An open breaker. `trying` is the key that was given to be tried, `try_in_s` when the next one may be."""

    prefix: str
    separator: str
    opened_at: datetime
    trying: str | None
    try_in_s: float


def opening_prefix(schema: str, inbox: str, of: Prefix, why: str, now: datetime | None = None) -> Operation[bool]:
    """Open the breaker of a prefix; return false if it is open, or if the inbox has no such breakers any more."""
    rows = yield OPEN.at(schema=schema, inbox=inbox)(prefix=of.prefix, separator=of.separator, why=why, now=now)
    return bool(rows)


@dataclass(frozen=True, slots=True)
class Deferred:
    """What a worker has seen: the open breakers, and that their keys wait, of all messages up to `clock`."""

    open: Sequence[OpenPrefix] = ()
    clock: int = 0

    @property
    def known(self) -> Container[tuple[str, datetime]]:
        """The breakers all of whose keys were looked through."""
        return {(each.prefix, each.opened_at) for each in self.open}


NOTHING = Deferred()


def deferring(schema: str, inbox: str, before: Deferred = NOTHING, now: datetime | None = None) -> Operation[Deferred]:
    """Have the keys of open prefixes wait: all of those that are new since `before`, what has come of the others.

    In a transaction of its own. What is delivered after this, and before the claim that follows, slips through.
    """
    names = {"schema": schema, "inbox": inbox}
    found = [OpenPrefix(*row) for row in (yield SEE.at(**names)(now=now))]
    if not found:
        return NOTHING
    yield PIN.at()()
    [(newest,)] = yield NEWEST.at(**names)()
    known, separator = before.known, found[0].separator
    prefixes = [each.prefix for each in found]
    for each in found:
        if (each.prefix, each.opened_at) not in known:
            yield from _walking(names, Prefix(each.prefix, each.separator), now)
    after: int | None = before.clock
    while before.open and after is not None and after < newest:
        [(after, _)] = yield ARRIVED.at(**names)(after=after, separator=separator, prefixes=prefixes, why=WHY, now=now)
    trying = [each.trying for each in found if each.trying is not None]
    yield PUT_OFF.at(**names)(separator=separator, prefixes=prefixes, trying=trying, now=now)
    return Deferred(found, newest)


def _walking(names: dict[str, str], of: Prefix, now: datetime | None) -> Operation[None]:
    bounds = of.bounds
    upto: str | None = bounds["start"]
    while upto is not None:
        [(upto, _)] = yield WALK.at(**names)(prefix=of.prefix, first=upto, end=bounds["end"], why=WHY, now=now)


def granting(schema: str, inbox: str, prefix: str, now: datetime | None = None) -> Operation[bool]:
    """Make one key of the prefix due, if it is time and none is being tried; return whether one is.

    In a transaction of its own, and after `deferring`: so that a key that was given before, and was not tried,
    waits again.
    """
    names = {"schema": schema, "inbox": inbox}
    rows = yield LOCK_DUE.at(**names)(prefix=prefix, now=now)
    [(is_open,)] = yield IS_OPEN.at(**names)()
    if not rows or not is_open:
        return False
    yield PIN.at()()
    [(separator, trying)] = rows
    of = Prefix(prefix, separator)
    if trying is not None:
        [(is_in_hand,)] = yield IN_HAND.at(**names)(key=trying)
        if is_in_hand:
            return False
        yield PUT_OFF.at(**names)(separator=separator, prefixes=[prefix], trying=[], now=now)
    given = yield GIVE.at(**names)(now=now, **of.bounds)
    if not given:
        return False
    yield MOVE_ON.at(**names)(prefix=prefix, key=given[0][0], now=now)
    return True


def failing_try(schema: str, inbox: str, prefix: str, key: str) -> Operation[None]:
    """Record that the try of this key has failed: before the next claim it is put off as the others are."""
    yield HAS_FAILED.at(schema=schema, inbox=inbox)(prefix=prefix, key=key)


def closing_prefix(schema: str, inbox: str, prefix: str) -> Operation[bool]:
    """Close the breaker of a prefix, in a transaction of its own; return whether it was open."""
    return bool((yield from closing_prefixes(schema, inbox, prefix)))
