"""Parked keys: held in order, away from all other keys, until an operator replays or discards them.

A key is parked while its row in `key_state` has `retry_at = 'infinity'`. Every claim leaves such a key out, in the same
snapshot in which it reads the messages. So the messages may be in either table meanwhile: the claim that ends the first
one moves it to `parked` (`inbox.due`), `moving_parked` moves those behind it, and deliveries still insert into the
inbox. Whoever moves or deletes messages of a parked key locks the key's row first.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from inbox import total_parked
from inbox.claim import FITTING
from inbox.peek import finding
from inbox.total_parked import CHOSEN
from mailroom import locks
from mailroom.answer import ASKS, Undone, answering_undone
from mailroom.audit import auditing, check_actor
from mailroom.errors import ConfigurationError
from mailroom.message import COLUMNS, DELIVERED, SELECTED, Message, messages
from mailroom.names import DEFAULT_SCHEMA, Key, count, count_or_all, inbox_name, key_text, schema_name, utf8
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.total import is_total

log = logging.getLogger("mailroom.choice")

PARTITION_CHANNEL = locks.channel("'{schema}.inbox_{inbox}'::regclass")

MOVED_ROWS = 10_000  # messages that one transaction moves at most
MOVED_KEYS = 2_000  # parked keys that it checks at most


@dataclass(frozen=True, slots=True)
class MovedParked:
    """How many messages were moved, where to continue, and whether the transaction stopped at a bound (`more`)."""

    messages: int
    cursor: str
    more: bool


# Keys are checked from a rotating cursor, and only those with something to move are locked: however many keys are
# parked, an idle pass costs two index probes per key and writes nothing. LATERAL with LIMIT keeps it that way, since
# EXISTS may be planned as a join that reads the whole inbox. SKIP LOCKED: this statement waits for nothing. It skips a
# key that is being replayed or discarded, and a message that another session locks to record a late failure, since that
# session may be about to wait for the key.
# Because the key's row is locked here, a replay at READ COMMITTED that waited for it sees everything that was moved in
# its next statement. `touched` is for a replay at REPEATABLE READ: its older snapshot would miss the moved messages and
# leave them behind for ever. A row that was only locked it could lock; a row that was updated gives it 40001.
# The moved values stay in the server as they are stored, so their stored size counts for the bound.
MOVE = Sql(
    """
WITH checked AS MATERIALIZED (
    SELECT key FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at = 'infinity' AND key > %(cursor)s::text
    ORDER BY key LIMIT %(keys)s::bigint),
behind AS MATERIALIZED (
    SELECT l.key FROM checked AS l, LATERAL (SELECT FROM {schema}.inbox_{inbox} WHERE key = l.key LIMIT 1) AS i),
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
moved AS (
    INSERT INTO {schema}.parked ({delivered}) SELECT {delivered} FROM gone ORDER BY key, clock),
touched AS (
    UPDATE {schema}.key_state SET parked_at = parked_at
    WHERE inbox = '{inbox}' AND key = ANY (ARRAY(SELECT DISTINCT key FROM gone)))
SELECT (SELECT count(*) FROM gone),
       (SELECT CASE WHEN count(*) < %(keys)s::bigint THEN '' ELSE max(key) END FROM checked),
       (SELECT count(*) = %(rows)s::bigint OR count(*) > (SELECT count(*) FROM fitting) FROM picked)
""",
    columns=("bigint", "text", "boolean"),
    fitting=FITTING % "size",
    delivered=DELIVERED,
)


def moving_parked(
    schema: str, inbox: str, cursor: str, *, keys: int = MOVED_KEYS, rows: int = MOVED_ROWS
) -> Operation[MovedParked]:
    """Move messages behind parked ones from the inbox to `parked`, where they do not slow down claims.

    Checks at most `keys` parked keys above `cursor`; '' starts at the first key. Moves at most `rows` messages and 32
    MiB of values. Call it periodically: deliveries still insert messages of a parked key into the inbox.
    """
    found = yield MOVE.at(schema=schema, inbox=inbox)(cursor=cursor, keys=keys, rows=rows)
    [(moved, reached, more)] = found
    return MovedParked(moved, cursor if more else reached, more)


# -- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """A parked key: how many messages it holds, the clock of the first one, and since when and why it is parked.

    `attempts` is the number of attempts at the message that the key was parked for. The key '' stands for the whole of
    a total inbox.
    """

    key: str
    messages: int
    clock: int | None
    attempts: int
    parked_at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed attempt at a message: its number, counted from 1, and its `outcome` (retry, park or skip).

    A replay is listed too, with `outcome` replay and `attempt` 0: the attempts after it count from 1 again.
    """

    at: datetime
    key: str
    clock: int
    message_id: UUID
    attempt: int
    outcome: str
    error: str
    worker: str


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
    """How many keys and messages a replay or discard changed; `freed` counts the keys that are no longer parked."""

    keys: int
    messages: int
    freed: int


# Keys are locked in key order, as everywhere, so that two of these statements cannot deadlock.
LOCK = Sql(
    """
SELECT s.key FROM ({chosen}) AS c JOIN {schema}.key_state AS s ON s.inbox = '{inbox}' AND s.key = c.key
WHERE s.retry_at = 'infinity' ORDER BY s.key FOR UPDATE OF s
""",
    columns=("text",),
    chosen=CHOSEN,
)

# Messages of the keys that are in the inbox already stay there; they are counted, since they are replayed as well.
# Attempts are counted from the history of a message (`inbox.failure`), so a replay is recorded there to restart the
# count.
REPLAY = Sql(
    """
WITH back AS (
    DELETE FROM {schema}.parked WHERE inbox = '{inbox}' AND key = ANY(%(keys)s::text[]) RETURNING {delivered}),
placed AS (
    INSERT INTO {schema}.inbox_{inbox} ({delivered}) SELECT {delivered} FROM back ORDER BY key, clock
    RETURNING key, clock),
first AS MATERIALIZED (SELECT key, count(*) AS messages, min(clock) AS clock FROM placed GROUP BY key),
restarted AS (
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
# The row is updated even if its floors stay the same, because it must be locked until the commit. Otherwise a janitor
# that does not see the replayed messages yet could raise the floor above them, and no claim would find them.
# The healthy floor may also be above messages of the keys that were in the inbox already.
LOWER = Sql(
    """
UPDATE {schema}.inbox_registry
SET floor = least(floor, %(lowest)s::bigint - 1), healthy_floor = least(healthy_floor, %(lowest)s::bigint - 1)
WHERE name = '{inbox}'
"""
)
# Notify always, and not only if a worker sleeps: that check takes a lock, and workers about to sleep would wait for it
# until the caller commits.
NOTIFY = Sql(
    "SELECT pg_notify({partition_channel}, '') IS NULL",
    columns=("boolean",),
    partition_channel=PARTITION_CHANNEL,
)


def _replaying(schema: str, inbox: str, keys: list[str], actor: str, why: str | None) -> Operation[Changed]:
    """Put the messages of these keys, whose key_state rows are locked, back into the inbox, and free the keys.

    No message is overtaken. All changes become visible together, at the commit, and a claim decides everything,
    including the floor, in one snapshot:

    - A claim with an older snapshot sees the key as parked and leaves it out, with all messages delivered since. If its
      snapshot is even older than the parking, the head that it selects no longer exists: the one that comes back is
      another row. A claim with a newer snapshot sees all messages of the key, including the lowest clock.
    - A delivery inserts higher clocks into the inbox, which are in order there.
    - The key's row excludes `moving_parked`. If that locked the row first, it has committed before REPLAY begins, which
      sees what was moved. If it comes later, it finds the row locked, or deleted.
    - The healthy floor does not pass messages of a key whose row is locked. REPLAY sees those it passed before.
    - A janitor that raises a floor either holds the lock on the registry row when LOWER runs, which then waits and
      lowers the new floor; or it comes after LOWER, skips the locked row, and reads again once all this is visible.
    """
    names = {"schema": schema, "inbox": inbox}
    replayed = yield REPLAY.at(**names)(keys=keys, why=why)
    yield from auditing(schema, "replay", [(inbox, key, number) for key, number, _ in replayed], actor, why)
    yield NOTIFY.at(**names)()
    lowest = min((clock for _, _, clock in replayed if clock is not None), default=None)
    if lowest is not None:
        yield LOWER.at(**names)(lowest=lowest)
    return Changed(len(keys), sum(number for _, number, _ in replayed), len(keys))


# A message that is delivered at this moment is not seen and stays: the key continues with it, or holds it.
DISCARD = Sql(
    """
WITH doomed AS MATERIALIZED (
    SELECT c.key, d.last, d.messages FROM pg_catalog.unnest(%(keys)s::text[]) AS c (key), LATERAL (
        SELECT max(clock) AS last, count(*) AS messages
        FROM (SELECT clock FROM ({clocks}) AS held ORDER BY clock LIMIT %(limit)s::bigint) AS first) AS d),
parked AS (
    DELETE FROM {schema}.parked AS p USING doomed AS d
    WHERE p.inbox = '{inbox}' AND p.key = d.key AND p.clock <= d.last
    RETURNING p.key, p.clock, p.message_id, p.kind, p.headers),
waiting AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING doomed AS d WHERE i.key = d.key AND i.clock <= d.last
    RETURNING i.key, i.clock, i.message_id, i.kind, i.headers),
freed AS (
    DELETE FROM {schema}.key_state AS s USING doomed AS d
    WHERE s.inbox = '{inbox}' AND s.key = d.key
      AND NOT EXISTS (SELECT FROM {schema}.parked AS p
                      WHERE p.inbox = '{inbox}' AND p.key = d.key AND p.clock > d.last)
      AND NOT EXISTS (SELECT FROM {schema}.inbox_{inbox} AS i WHERE i.key = d.key AND i.clock > d.last)
    RETURNING s.key)
SELECT key, messages, EXISTS (SELECT FROM freed AS f WHERE f.key = d.key), NULL::bigint AS clock,
       NULL::uuid, NULL::text, NULL::text
FROM doomed AS d
UNION ALL
SELECT key, NULL, NULL, clock, message_id, headers::text, (
    SELECT error_class FROM {schema}.attempt AS a
    WHERE a.inbox = '{inbox}' AND a.key = gone.key AND a.clock = gone.clock ORDER BY id DESC LIMIT 1)
FROM (SELECT * FROM parked UNION ALL SELECT * FROM waiting) AS gone WHERE {asks}
ORDER BY key, clock
""",
    columns=("text", "bigint", "boolean", "bigint", "uuid", "text", "text"),
    clocks=CLOCKS,
    asks=ASKS,
)


def _replaying_whole(schema: str, inbox: str, actor: str, why: str | None) -> Operation[Changed]:
    """Free a total inbox, whose key_state row is locked; its messages are in their places."""
    names = {"schema": schema, "inbox": inbox}
    [(number,)] = yield total_parked.REPLAY.at(**names)(why=why)
    yield from auditing(schema, "replay", [(inbox, "", number)], actor, why)
    yield NOTIFY.at(**names)()
    return Changed(1, number, 1)


def _discarding(
    schema: str, inbox: str, keys: list[str], per_key: int | None, actor: str, why: str | None, *, is_total: bool
) -> Operation[Changed]:
    if is_total:
        rows = yield total_parked.DISCARD.at(schema=schema, inbox=inbox)(limit=per_key)
    else:
        rows = yield DISCARD.at(schema=schema, inbox=inbox)(keys=keys, limit=per_key)
    discarded = [row[:3] for row in rows if row[1] is not None]
    commands = (row for row in rows if row[1] is None)
    yield from answering_undone(schema, [Undone.of(id, key, *rest) for key, _, _, _, id, *rest in commands])
    yield from auditing(schema, "discard", [(inbox, key, number) for key, number, _ in discarded], actor, why)
    return Changed(len(keys), sum(number for _, number, _ in discarded), sum(freed for _, _, freed in discarded))


class _Operations:
    """What both classes do, as operations."""

    def __init__(self, inbox: str, *, schema: str = DEFAULT_SCHEMA) -> None:
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inbox!r}, schema={self.schema!r})"

    def _keys(
        self, keys: Key | Collection[Key] | None = None, *, matching: str | None = None, limit: int | None = 100
    ) -> Operation[list[ParkedKey]]:
        """Return at most `limit` parked keys (None: all), the longest parked first, and count their messages."""
        chosen = _chosen(keys, matching, limit)
        statement = total_parked.KEYS if (yield from self._whole(keys)) else KEYS
        return [ParkedKey(*row) for row in (yield statement.at(**self._names)(**chosen))]

    def _messages(self, key: Key | None = None, limit: int = 10) -> Operation[list[Message]]:
        """Return the first messages that a parked key holds, in clock order; none if the key is not parked.

        Leave the key out for a total inbox, and give one for any other.
        """
        text, first = None if key is None else key_text(key), count(limit, "limit")
        if (yield from self._whole(key)):
            return messages((yield total_parked.MESSAGES.at(**self._names)(limit=first)))
        if text is None:
            raise ConfigurationError(
                f"Inbox {self.inbox!r} parks single keys: say which one (--key K).", code="MR-key-needed"
            )
        return messages((yield MESSAGES.at(**self._names)(key=text, limit=first)))

    def _attempts(self, key: Key | None = None, limit: int = 100) -> Operation[list[Attempt]]:
        """Return the failed attempts of one key or of all, parked or not, newest first. They are kept for 14 days."""
        text, last = None if key is None else key_text(key), count(limit, "limit")
        yield from finding(self.schema, self.inbox)
        return [Attempt(*row) for row in (yield ATTEMPTS.at(**self._names)(key=text, limit=last))]

    def _replay(
        self,
        keys: Key | Collection[Key] | None,
        *,
        actor: str,
        matching: str | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[Changed]:
        """Put the messages of parked keys back into the inbox, in order; their attempts count from 1 again.

        At most `limit` keys are replayed, the longest parked first. A key that fails again is parked again. Commit
        soon: until then the floors of the inbox cannot rise.
        """
        check_actor(actor, why)
        chosen = _chosen(keys, matching, limit)
        yield IN_TRANSACTION
        if dry_run:
            found = yield from self._keys(keys, matching=matching, limit=limit)
            self._tell_of_none(found, keys, matching)
            return Changed(len(found), sum(each.messages for each in found), len(found))
        whole = yield from self._whole(keys)
        held = yield from self._locking(chosen)
        self._tell_of_none(held, keys, matching)
        if not held:
            return Changed(0, 0, 0)
        if whole:
            return (yield from _replaying_whole(self.schema, self.inbox, actor, why))
        return (yield from _replaying(self.schema, self.inbox, held, actor, why))

    def _discard(
        self,
        keys: Key | Collection[Key] | None,
        *,
        actor: str,
        matching: str | None = None,
        per_key: int | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[Changed]:
        """Delete messages of parked keys for good: of each key the first `per_key` messages, or all with None.

        At most `limit` keys are chosen, the longest parked first. Of a total inbox the first `per_key` messages of all
        go. Commands among them that ask for a reply get one of status 500, in the same transaction.

        A key with no messages left is no longer parked. Any other key stays parked: to drop the bad message and
        continue with the next one, discard with `per_key=1`, then `replay`.
        """
        check_actor(actor, why)
        per_key = count_or_all(per_key, "per_key")
        chosen = _chosen(keys, matching, limit)
        yield IN_TRANSACTION
        if dry_run:
            numbers = [each.messages for each in (yield from self._keys(keys, matching=matching, limit=limit))]
            self._tell_of_none(numbers, keys, matching)
            doomed = [number if per_key is None else min(number, per_key) for number in numbers]
            return Changed(len(numbers), sum(doomed), sum(map(int.__eq__, numbers, doomed)))
        whole = yield from self._whole(keys)
        held = yield from self._locking(chosen)
        self._tell_of_none(held, keys, matching)
        if not held:
            return Changed(0, 0, 0)
        return (yield from _discarding(self.schema, self.inbox, held, per_key, actor, why, is_total=whole))

    def _whole(self, keys: Key | Collection[Key] | None) -> Operation[bool]:
        """Return whether this is a total inbox, which is parked as a whole; then no keys may be given."""
        yield from finding(self.schema, self.inbox)
        whole = yield from is_total(self.schema, self.inbox)
        if whole and keys is not None:
            raise ConfigurationError(
                f"Inbox {self.inbox!r} has total order and is parked as a whole: leave the key out (--all).",
                code="MR-total-order-has-no-keys",
            )
        return whole

    def _locking(self, chosen: dict[str, object]) -> Operation[list[str]]:
        return [key for (key,) in (yield LOCK.at(**self._names)(**chosen))]

    def _tell_of_none(self, found: Collection[object], keys: object, matching: str | None) -> None:
        if not found and not (keys is None and matching is None):
            log.warning("inbox %s: no parked key is chosen by these keys or this matching", self.inbox)

    @property
    def _names(self) -> dict[str, str]:
        return {"schema": self.schema, "inbox": self.inbox}


class Parked(_Operations):
    """The parked keys of one inbox. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. `replay` and `discard` make
    their changes in the caller's transaction and never commit; with `dry_run` they change nothing and return what they
    would do. `actor` says who acts and `why` gives the reason; both are written to the table `audit`, one row per key.
    `keys` is one key, several, or None for all parked keys; `matching` limits them to keys whose reason contains that
    text. `limit` is a number of keys. A choice by keys or `matching` that finds no parked key changes nothing, and a
    warning is logged. A total inbox is parked as a whole: for it, leave the keys out.

    Raises `UnknownInbox`. `replay` and `discard` raise `NotInTransaction` on an autocommit connection outside a
    transaction.
    """

    keys = on_connection(_Operations._keys)
    messages = on_connection(_Operations._messages)
    attempts = on_connection(_Operations._attempts)
    replay = on_connection(_Operations._replay)
    discard = on_connection(_Operations._discard)


class AsyncParked(_Operations):
    """`Parked` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    keys = on_async_connection(_Operations._keys)
    messages = on_async_connection(_Operations._messages)
    attempts = on_async_connection(_Operations._attempts)
    replay = on_async_connection(_Operations._replay)
    discard = on_async_connection(_Operations._discard)


def _chosen(keys: Key | Collection[Key] | None, matching: str | None, limit: int | None) -> dict[str, object]:
    if matching is not None:
        utf8(matching, "matching")
    texts = None if keys is None else list(_texts(keys))
    return {"keys": texts, "matching": matching, "limit": count_or_all(limit, "limit")}


def _texts(keys: Key | Collection[Key]) -> Iterator[str]:
    # A str is a Collection too, of its characters.
    if isinstance(keys, Collection) and not isinstance(keys, str):
        yield from map(key_text, keys)
    else:
        yield key_text(keys)
