"""Parked keys: held in order, out of the way of all others, until somebody replays or discards them.

A key is parked while its row in `key_state` has `retry_at = 'infinity'`. Every claim leaves such a key out, in the
snapshot in which it looks for messages. So the messages themselves may lie in either table meanwhile: the claim that
ends the first moves it to `parked` (`inbox.due`), the mover below moves what stands behind it, and deliveries go on
into the inbox. Whoever moves or deletes them locks the key's row first.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from inbox.claim import FITTING
from inbox.peek import finding
from mailroom import locks
from mailroom.audit import auditing, check_actor
from mailroom.message import COLUMNS, DELIVERED, SELECTED, Message, messages
from mailroom.names import DEFAULT_SCHEMA, Key, count, count_or_all, inbox_name, key_text, schema_name, utf8
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import AnyConnection, run

PARTITION_CHANNEL = locks.channel("'{schema}.inbox_{inbox}'::regclass")

MOVED_ROWS = 10_000  # at most in one transaction of the mover
MOVED_KEYS = 2_000  # parked keys it looks at in one


@dataclass(frozen=True, slots=True)
class Moved:
    """What the mover did: how many messages it moved, where it goes on, and whether it stopped at a bound (`more`)."""

    messages: int
    cursor: str
    more: bool


# Keys are looked at from a cursor that goes round, and only those with something to move are locked: however many keys
# are parked, an idle pass is so many probes of two indexes and writes nothing. LATERAL with LIMIT keeps it that way,
# for an EXISTS may be joined by reading the whole inbox. Nothing is waited for: a key that is being replayed or
# discarded is passed over, and so is a message whose late failure somebody still records, who may be about to wait for
# the key. With the key's row locked here, a replay that waited for it sees all that was moved in its next statement.
# It does so at READ COMMITTED. `touched` is for one at REPEATABLE READ, whose older snapshot would miss what was moved
# and leave it behind for ever: a row that was only locked it may lock, one that was written gives it 40001.
# What is moved stays in the server, as it is stored: so that is what counts for its bound.
MOVE = Sql(
    """
WITH looked AS MATERIALIZED (
    SELECT key FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at = 'infinity' AND key > %(cursor)s::text
    ORDER BY key LIMIT %(keys)s::bigint),
behind AS MATERIALIZED (
    SELECT l.key FROM looked AS l, LATERAL (SELECT FROM {schema}.inbox_{inbox} WHERE key = l.key LIMIT 1) AS i),
held AS MATERIALIZED (
    SELECT s.key FROM (SELECT * FROM behind) AS b, LATERAL (
        SELECT key FROM {schema}.key_state AS k
        WHERE k.inbox = '{inbox}' AND k.key = b.key AND k.retry_at = 'infinity' FOR UPDATE SKIP LOCKED) AS s),
picked AS MATERIALIZED (
    SELECT i.* FROM (SELECT * FROM held) AS h, LATERAL (
        SELECT ctid AS place, clock, coalesce(octet_length(value), pg_catalog.pg_column_size(value_json)) AS size
        FROM {schema}.inbox_{inbox}
        WHERE key = h.key ORDER BY clock LIMIT %(rows)s::bigint FOR UPDATE SKIP LOCKED) AS i
    LIMIT %(rows)s::bigint),{fitting},
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*),
aside AS (
    INSERT INTO {schema}.parked ({delivered}) SELECT {delivered} FROM gone ORDER BY key, clock),
touched AS (
    UPDATE {schema}.key_state SET parked_at = parked_at
    WHERE inbox = '{inbox}' AND key = ANY (ARRAY(SELECT DISTINCT key FROM gone)))
SELECT (SELECT count(*) FROM gone),
       (SELECT CASE WHEN count(*) < %(keys)s::bigint THEN '' ELSE max(key) END FROM looked),
       (SELECT count(*) = %(rows)s::bigint OR count(*) > (SELECT count(*) FROM fitting) FROM picked)
""",
    columns=("bigint", "text", "boolean"),
    fitting=FITTING % "size",
    delivered=DELIVERED,
)


def moving_parked(
    schema: str, inbox: str, cursor: str, *, keys: int = MOVED_KEYS, rows: int = MOVED_ROWS
) -> Operation[Moved]:
    """Move messages that stand behind a parked one out of the inbox, where they cost nobody anything.

    Looks at `keys` parked keys above `cursor`, begins anew with '', and moves `rows` messages and 32 MiB of values at
    most. To be called again and again: as long as a key is parked, deliveries go on into the inbox.
    """
    found = yield MOVE.at(schema=schema, inbox=inbox)(cursor=cursor, keys=keys, rows=rows)
    [(moved, reached, more)] = found
    return Moved(moved, cursor if more else reached, more)


# -- Looking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """A parked key: how many messages it holds, the clock of the first, and why and since when it is parked.

    `attempts` is how often the message that it was parked for had been tried.
    """

    key: str
    messages: int
    clock: int | None
    attempts: int
    parked_at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed attempt at a message: the `attempt`-th, and what followed (`outcome`: retry, park or skip).

    A replay stands among them, with `outcome` replay and `attempt` 0: from then on they count from 1.
    """

    at: datetime
    key: str
    clock: int
    message_id: UUID
    attempt: int
    outcome: str
    error: str
    worker: str


CHOSEN = """
    SELECT key, attempts, parked_at, last_error FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at = 'infinity'
      AND (%(keys)s::text[] IS NULL OR key = ANY(%(keys)s::text[]))
      AND (%(reason)s::text IS NULL OR position(%(reason)s::text IN last_error) > 0)
    ORDER BY parked_at, key LIMIT %(limit)s::bigint"""
HELD = """
    SELECT {columns} FROM {{schema}}.parked WHERE inbox = '{{inbox}}' AND key = {key}
    UNION ALL SELECT {columns} FROM {{schema}}.inbox_{{inbox}} WHERE key = {key}"""
CLOCKS = HELD.format(columns="clock", key="c.key")

KEYS = Sql(
    """
WITH chosen AS MATERIALIZED ({chosen})
SELECT key, messages, clock, attempts::bigint, parked_at, last_error
FROM chosen AS c, LATERAL (SELECT count(*) AS messages, min(clock) AS clock FROM ({clocks}) AS held) AS h
ORDER BY parked_at, key
""",
    columns=("text", "bigint", "bigint", "bigint", "timestamptz", "text"),
    chosen=CHOSEN,
    clocks=CLOCKS,
)

MESSAGES = Sql(
    """
SELECT {selected} FROM ({held}) AS held
WHERE EXISTS (SELECT FROM {schema}.key_state
              WHERE inbox = '{inbox}' AND key = %(key)s::text AND retry_at = 'infinity')
ORDER BY clock LIMIT %(limit)s::bigint
""",
    columns=COLUMNS,
    selected=SELECTED,
    held=HELD.format(columns=DELIVERED, key="%(key)s::text"),
)

ATTEMPTS = Sql(
    """
SELECT at, key, clock, message_id, attempt::bigint, outcome, error, worker FROM {schema}.attempt
WHERE inbox = '{inbox}' AND (%(key)s::text IS NULL OR key = %(key)s::text) ORDER BY id DESC LIMIT %(limit)s::bigint
""",
    columns=("timestamptz", "text", "bigint", "uuid", "bigint", "text", "text", "text"),
)


# -- Acting -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changed:
    """What a replay or discard did: to how many keys and messages, and how many of the keys work again (`freed`)."""

    keys: int
    messages: int
    freed: int


# In key order, as everything that locks several keys, so that two of these cannot deadlock.
LOCK = Sql(
    """
SELECT s.key FROM ({chosen}) AS c JOIN {schema}.key_state AS s ON s.inbox = '{inbox}' AND s.key = c.key
WHERE s.retry_at = 'infinity' ORDER BY s.key FOR UPDATE OF s
""",
    columns=("text",),
    chosen=CHOSEN,
)

# What the keys have in the inbox already stays where it is; it is counted, since it is replayed as well. Attempts are
# counted from the history of a message (`inbox.failure`), so it is told there that they begin anew.
REPLAY = Sql(
    """
WITH back AS (
    DELETE FROM {schema}.parked WHERE inbox = '{inbox}' AND key = ANY(%(keys)s::text[]) RETURNING {delivered}),
placed AS (
    INSERT INTO {schema}.inbox_{inbox} ({delivered}) SELECT {delivered} FROM back ORDER BY key, clock
    RETURNING key, clock),
first AS MATERIALIZED (SELECT key, count(*) AS messages, min(clock) AS clock FROM placed GROUP BY key),
anew AS (
    INSERT INTO {schema}.attempt (inbox, key, clock, message_id, attempt, outcome, error)
    SELECT '{inbox}', f.key, f.clock, a.message_id, 0, 'replay', coalesce(%(why)s::text, 'replayed')
    FROM first AS f, LATERAL (
        SELECT message_id FROM {schema}.attempt
        WHERE inbox = '{inbox}' AND key = f.key AND clock = f.clock ORDER BY id DESC LIMIT 1) AS a),
freed AS (
    DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = ANY(%(keys)s::text[]))
SELECT c.key, coalesce(p.messages, 0) + h.messages, least(p.clock, h.clock)
FROM pg_catalog.unnest(%(keys)s::text[]) AS c (key)
LEFT JOIN first AS p USING (key),
LATERAL (SELECT count(*) AS messages, min(clock) AS clock FROM {schema}.inbox_{inbox} AS i
         WHERE i.key = c.key) AS h
ORDER BY c.key
""",
    columns=("text", "bigint", "bigint"),
    delivered=DELIVERED,
)
# Set also where it stays what it is: the row must be locked until the commit. Left out for a floor that looks low
# enough, a janitor that cannot see these messages yet would raise it above them meanwhile, and no claim find them.
# The healthy floor may also stand above what the keys have in the inbox already.
LOWER = Sql(
    """
UPDATE {schema}.inbox_registry
SET floor = least(floor, %(lowest)s::bigint - 1), healthy_floor = least(healthy_floor, %(lowest)s::bigint - 1)
WHERE name = '{inbox}'
"""
)
# Always, and not only if a worker sleeps: to find that out takes a lock that workers going to sleep would wait for
# until the caller commits.
RING = Sql(
    "SELECT pg_notify({partition_channel}, '') IS NULL",
    columns=("boolean",),
    partition_channel=PARTITION_CHANNEL,
)


def _replaying(schema: str, inbox: str, keys: list[str], actor: str, why: str | None) -> Operation[Changed]:
    """Put the messages of these keys, whose rows are locked, back into the inbox, and let the keys go on.

    Nothing is overtaken. All of it becomes visible at once, at the commit, and what a claim decides it decides in one
    snapshot, floor included:

    - A claim whose snapshot is older finds the key parked and leaves it out, with what was delivered since. If its
      snapshot is even older than the parking, the head that it wants is gone for it: the one that comes back is
      another row. A claim whose snapshot is younger sees all messages of the key, the lowest clock among them.
    - A delivery adds higher clocks, to the inbox, where they are in their place.
    - The mover is kept out by the key's row: one that came first has committed before REPLAY begins and sees what was
      moved, one that comes later finds the row locked, or gone and not to be found again in its snapshot.
    - The healthy floor passes no messages of a key whose row is locked; what it had passed before, REPLAY sees.
    - A janitor that raises a floor has the registry's row locked when LOWER comes, which waits and then lowers what
      was set; or it comes after LOWER, passes over the locked row, and looks anew once all this is visible.
    """
    names = {"schema": schema, "inbox": inbox}
    replayed = yield REPLAY.at(**names)(keys=keys, why=why)
    yield from auditing(schema, "replay", [(inbox, key, number) for key, number, _ in replayed], actor, why)
    yield RING.at(**names)()
    lowest = min((clock for _, _, clock in replayed if clock is not None), default=None)
    if lowest is not None:
        yield LOWER.at(**names)(lowest=lowest)
    return Changed(len(keys), sum(number for _, number, _ in replayed), len(keys))


# What a delivery adds at this moment is not seen and stays: the key goes on with it, or holds it.
DISCARD = Sql(
    """
WITH doomed AS MATERIALIZED (
    SELECT c.key, d.last, d.messages FROM pg_catalog.unnest(%(keys)s::text[]) AS c (key), LATERAL (
        SELECT max(clock) AS last, count(*) AS messages
        FROM (SELECT clock FROM ({clocks}) AS held ORDER BY clock LIMIT %(limit)s::bigint) AS first) AS d),
parked AS (
    DELETE FROM {schema}.parked AS p USING doomed AS d
    WHERE p.inbox = '{inbox}' AND p.key = d.key AND p.clock <= d.last),
waiting AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING doomed AS d WHERE i.key = d.key AND i.clock <= d.last),
freed AS (
    DELETE FROM {schema}.key_state AS s USING doomed AS d
    WHERE s.inbox = '{inbox}' AND s.key = d.key
      AND NOT EXISTS (SELECT FROM {schema}.parked AS p
                      WHERE p.inbox = '{inbox}' AND p.key = d.key AND p.clock > d.last)
      AND NOT EXISTS (SELECT FROM {schema}.inbox_{inbox} AS i WHERE i.key = d.key AND i.clock > d.last)
    RETURNING s.key)
SELECT key, messages, EXISTS (SELECT FROM freed AS f WHERE f.key = d.key) FROM doomed AS d ORDER BY key
""",
    columns=("text", "bigint", "boolean"),
    clocks=CLOCKS,
)


def _discarding(
    schema: str, inbox: str, keys: list[str], per_key: int | None, actor: str, why: str | None
) -> Operation[Changed]:
    discarded = yield DISCARD.at(schema=schema, inbox=inbox)(keys=keys, limit=per_key)
    yield from auditing(schema, "discard", [(inbox, key, number) for key, number, _ in discarded], actor, why)
    return Changed(len(keys), sum(number for _, number, _ in discarded), sum(freed for _, _, freed in discarded))


class Parked:
    """The parked keys of one inbox; free to share between threads.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. What changes something does so
    in the caller's transaction and never commits; with `dry_run` it only tells what it would do. It raises
    `NotInTransaction` on an autocommit connection outside a transaction. `actor` says who acts and `why` for what
    reason; both go into the table `audit`, a row per key. `keys` is one key, several, or None for all parked keys;
    `reason` narrows them to those whose reason contains that text. Raises `UnknownInbox`.
    """

    def __init__(self, inbox: str, schema: str = DEFAULT_SCHEMA) -> None:
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inbox!r}, schema={self.schema!r})"

    def keys(
        self,
        connection: AnyConnection,
        keys: Key | Collection[Key] | None = None,
        *,
        reason: str | None = None,
        limit: int | None = 100,
    ) -> list[ParkedKey]:
        """Return parked keys, at most `limit` (None: all), the longest parked first; their messages are counted."""
        return run(connection, self._keys(_chosen(keys, reason, limit)))

    def messages(self, connection: AnyConnection, key: Key, limit: int = 10) -> list[Message]:
        """Return the first messages that a parked key holds, in clock order; none if it is not parked."""
        return run(connection, self._messages(key_text(key), count(limit, "limit")))

    def attempts(self, connection: AnyConnection, key: Key | None = None, limit: int = 100) -> list[Attempt]:
        """Return the failed attempts, the last first: of one key or of all, parked or not. Kept for 14 days."""
        text = None if key is None else key_text(key)
        return run(connection, self._attempts(text, count(limit, "limit")))

    def replay(
        self,
        connection: AnyConnection,
        keys: Key | Collection[Key] | None,
        *,
        actor: str,
        reason: str | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Changed:
        """Let parked keys go on from their first message, with all their messages in order and attempts from 1.

        At most `limit` keys, the longest parked first. Until the caller commits, floors of the inbox do not move: so
        commit soon. What fails again is parked again.
        """
        check_actor(actor, why)
        return run(connection, self._replay(_chosen(keys, reason, limit), actor, why, dry_run))

    def discard(
        self,
        connection: AnyConnection,
        keys: Key | Collection[Key] | None,
        *,
        actor: str,
        reason: str | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Changed:
        """Throw away messages of parked keys for good: the first `limit` of each key, None for all of them.

        A key that has none left works again. Any other stays parked: to drop the bad message and go on with the next
        one, discard with `limit=1`, then `replay`.
        """
        check_actor(actor, why)
        per_key = count_or_all(limit, "limit")
        return run(connection, self._discard(_chosen(keys, reason, None), per_key, actor, why, dry_run))

    @property
    def _names(self) -> dict[str, str]:
        return {"schema": self.schema, "inbox": self.inbox}

    def _keys(self, chosen: dict[str, object]) -> Operation[list[ParkedKey]]:
        yield from finding(self.schema, self.inbox)
        rows = yield KEYS.at(**self._names)(**chosen)
        return [ParkedKey(*row) for row in rows]

    def _messages(self, key: str, limit: int) -> Operation[list[Message]]:
        yield from finding(self.schema, self.inbox)
        return messages((yield MESSAGES.at(**self._names)(key=key, limit=limit)))

    def _attempts(self, key: str | None, limit: int) -> Operation[list[Attempt]]:
        yield from finding(self.schema, self.inbox)
        rows = yield ATTEMPTS.at(**self._names)(key=key, limit=limit)
        return [Attempt(*row) for row in rows]

    def _replay(self, chosen: dict[str, object], actor: str, why: str | None, dry_run: bool) -> Operation[Changed]:
        yield IN_TRANSACTION
        if dry_run:
            found = yield from self._keys(chosen)
            return Changed(len(found), sum(each.messages for each in found), len(found))
        keys = yield from self._locking(chosen)
        if not keys:
            return Changed(0, 0, 0)
        return (yield from _replaying(self.schema, self.inbox, keys, actor, why))

    def _discard(
        self, chosen: dict[str, object], per_key: int | None, actor: str, why: str | None, dry_run: bool
    ) -> Operation[Changed]:
        yield IN_TRANSACTION
        if dry_run:
            held = [each.messages for each in (yield from self._keys(chosen))]
            doomed = [number if per_key is None else min(number, per_key) for number in held]
            return Changed(len(held), sum(doomed), sum(map(int.__eq__, held, doomed)))
        keys = yield from self._locking(chosen)
        if not keys:
            return Changed(0, 0, 0)
        return (yield from _discarding(self.schema, self.inbox, keys, per_key, actor, why))

    def _locking(self, chosen: dict[str, object]) -> Operation[list[str]]:
        yield from finding(self.schema, self.inbox)
        return [key for (key,) in (yield LOCK.at(**self._names)(**chosen))]


def _chosen(keys: Key | Collection[Key] | None, reason: str | None, limit: int | None) -> dict[str, object]:
    if reason is not None:
        utf8(reason, "reason")
    texts = None if keys is None else list(_texts(keys))
    return {"keys": texts, "reason": reason, "limit": count_or_all(limit, "limit")}


def _texts(keys: Key | Collection[Key]) -> Iterator[str]:
    # A text is a collection, too, of its letters.
    if isinstance(keys, Collection) and not isinstance(keys, str):
        yield from map(key_text, keys)
    else:
        yield key_text(keys)
