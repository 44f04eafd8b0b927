"""Parked keys: held in order, away from all other keys, until an operator replays or discards them.

A key is parked while its row in `key_state` has `parked_at`; then `retry_at` is infinity. Every claim leaves such a key
out, in the same snapshot in which it reads the messages. So the messages may be in either table meanwhile: the claim
that ends the first one moves it to `parked` (`inbox.by_key.due`), `moving_parked` moves those after it, and deliveries
still insert into the inbox. Moving or deleting messages of a parked key takes a lock on the key's row first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from inbox.by_key.claim import FITTING
from inbox.keeping import DISCARDED as ARCHIVED_DISCARDS
from mailroom.errors import ConfigurationError
from mailroom.message.answer import ASKS
from mailroom.message.columns import DELIVERED
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.schema import acts
from mailroom.schema.audit import auditing
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql

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
# D-reap-18: A lock on a parked key's row comes before any change of its messages.
MOVE = Sql(
    """
WITH checked AS MATERIALIZED (
    SELECT key FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at = 'infinity' AND parked_at IS NOT NULL AND key > %(cursor)s::text
    ORDER BY key LIMIT %(keys)s::bigint),
behind AS MATERIALIZED (
    SELECT l.key FROM checked AS l, LATERAL (SELECT FROM {schema}.inbox_{inbox} WHERE key = l.key LIMIT 1) AS i),
held AS MATERIALIZED (
    SELECT s.key FROM (SELECT * FROM behind) AS b, LATERAL (
        SELECT key FROM {schema}.key_state AS k
        WHERE k.inbox = '{inbox}' AND k.key = b.key AND k.parked_at IS NOT NULL FOR UPDATE SKIP LOCKED) AS s),
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
    """Move messages after parked ones from the inbox to `parked`, where they do not slow down claims.

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


# Which parked keys are meant, for all inboxes; of a total inbox there is one at most, ''.
CHOSEN = """
    SELECT key, attempts, parked_at, last_error FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at = 'infinity' AND parked_at IS NOT NULL
      AND (%(keys)s::text[] IS NULL OR key = ANY(%(keys)s::text[]))
      AND (%(matching)s::text IS NULL OR position(%(matching)s::text IN last_error) > 0)
    ORDER BY parked_at, key LIMIT %(limit)s::bigint"""
# Through the table of all inboxes, as all that only read do: a right to each would not cover new ones.
HELD = """
    SELECT {columns} FROM {{schema}}.parked WHERE inbox = '{{inbox}}' AND key = {key}
    UNION ALL SELECT {columns} FROM {{schema}}.inbox WHERE inbox = '{{inbox}}' AND key = {key}"""
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
              WHERE inbox = '{inbox}' AND key = %(key)s::text AND parked_at IS NOT NULL)
ORDER BY clock LIMIT %(limit)s::bigint
""",
    columns=COLUMNS,
    selected=SELECTED,
    held=HELD.format(columns=DELIVERED, key="%(key)s::text"),
)


def listing(schema: str, inbox: str, chosen: Mapping[str, object], statement: Sql = KEYS) -> Operation[list[ParkedKey]]:
    """Return what is parked of what is chosen, the longest parked first."""
    return [ParkedKey(*row) for row in (yield statement.at(schema=schema, inbox=inbox)(**chosen))]


def reading(schema: str, inbox: str, key: str | None, limit: int) -> Operation[list[Message]]:
    """Return the first messages of a parked key, by clock. Raises `ConfigurationError` without a key."""
    if key is None:
        raise ConfigurationError(f"Inbox {inbox!r} parks single keys: say which one (--key K).", code="MR-key-needed")
    return messages((yield MESSAGES.at(schema=schema, inbox=inbox)(key=key, limit=limit)))


# -- Acting -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changed:
    """How many keys and messages a replay or discard changed; `freed` counts the keys that are no longer parked."""

    keys: int
    messages: int
    freed: int


# Of a key that is paused too: it stays paused, and nothing else is left of it.
UNPARKED = (
    "parked_at = NULL, clock = 0, attempts = 0, last_error = NULL, alone_to = 0, suspect_to = 0, resume_at = NULL"
)
# Messages of the keys that are in the inbox already stay there; they are counted, since they are replayed as well.
# Attempts are counted from the history of a message (`inbox.by_key.failure`), so a replay is recorded there to restart
# the count.
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
    DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = ANY(%(keys)s::text[]) AND paused_at IS NULL),
paused AS (
    UPDATE {schema}.key_state SET {unparked}
    WHERE inbox = '{inbox}' AND key = ANY(%(keys)s::text[]) AND paused_at IS NOT NULL)
SELECT c.key, coalesce(p.messages, 0) + h.messages, least(p.clock, h.clock)
FROM pg_catalog.unnest(%(keys)s::text[]) AS c (key)
LEFT JOIN first AS p USING (key),
LATERAL (SELECT count(*) AS messages, min(clock) AS clock FROM {schema}.inbox_{inbox} AS i
         WHERE i.key = c.key) AS h
ORDER BY c.key
""",
    columns=("text", "bigint", "bigint"),
    delivered=DELIVERED,
    unparked=UNPARKED,
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


def replaying(schema: str, inbox: str, keys: list[str], actor: str, why: str | None) -> Operation[Changed]:
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
    yield from auditing(schema, acts.PARKED_REPLAY, [(inbox, key, number) for key, number, _ in replayed], actor, why)
    yield NOTIFY.at(**names)()
    lowest = min((clock for _, _, clock in replayed if clock is not None), default=None)
    if lowest is not None:
        yield LOWER.at(**names)(lowest=lowest)
    return Changed(len(keys), sum(number for _, number, _ in replayed), len(keys))


# A message that is delivered at this moment is not seen and stays: the key continues with it, or holds it.
# A row for each key, with how many messages; and one for each command among them, without that number.
DISCARDED = {
    "key": "text",
    "messages": "bigint",
    "is_free": "boolean",
    "clock": "bigint",
    "id": "uuid",
    "headers": "text",
    "error": "text",
}
DISCARD = Sql(
    """
WITH doomed AS MATERIALIZED (
    SELECT c.key, d.last, d.messages FROM pg_catalog.unnest(%(keys)s::text[]) AS c (key), LATERAL (
        SELECT max(clock) AS last, count(*) AS messages
        FROM (SELECT clock FROM ({clocks}) AS held ORDER BY clock LIMIT %(limit)s::bigint) AS first) AS d),
parked AS (
    DELETE FROM {schema}.parked AS p USING doomed AS d
    WHERE p.inbox = '{inbox}' AND p.key = d.key AND p.clock <= d.last
    RETURNING p.*),
waiting AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING doomed AS d WHERE i.key = d.key AND i.clock <= d.last
    RETURNING i.*),
gone AS MATERIALIZED (SELECT {delivered} FROM parked UNION ALL SELECT {delivered} FROM waiting){archived},
emptied AS MATERIALIZED (
    SELECT d.key FROM doomed AS d
    WHERE NOT EXISTS (SELECT FROM {schema}.parked AS p
                      WHERE p.inbox = '{inbox}' AND p.key = d.key AND p.clock > d.last)
      AND NOT EXISTS (SELECT FROM {schema}.inbox_{inbox} AS i WHERE i.key = d.key AND i.clock > d.last)),
freed AS (
    DELETE FROM {schema}.key_state AS s USING emptied AS e
    WHERE s.inbox = '{inbox}' AND s.key = e.key AND s.paused_at IS NULL),
paused AS (
    UPDATE {schema}.key_state AS s SET {unparked} FROM emptied AS e
    WHERE s.inbox = '{inbox}' AND s.key = e.key AND s.paused_at IS NOT NULL)
SELECT key, messages, EXISTS (SELECT FROM emptied AS e WHERE e.key = d.key), NULL::bigint AS clock,
       NULL::uuid, NULL::text, NULL::text
FROM doomed AS d
UNION ALL
SELECT key, NULL, NULL, clock, message_id, headers::text, (
    SELECT error_class FROM {schema}.attempt AS a
    WHERE a.inbox = '{inbox}' AND a.key = gone.key AND a.clock = gone.clock ORDER BY id DESC LIMIT 1)
FROM gone WHERE {asks}
ORDER BY key, clock
""",
    columns=DISCARDED,
    delivered=DELIVERED,
    archived=ARCHIVED_DISCARDS,
    clocks=CLOCKS,
    unparked=UNPARKED,
    asks=ASKS,
)


def discarding(schema: str, inbox: str, keys: list[str], per_key: int | None) -> Operation[list[Any]]:
    """Delete the first messages of these keys, whose key_state rows are locked; return the rows of `DISCARD`."""
    return DISCARD.named((yield DISCARD.at(schema=schema, inbox=inbox)(keys=keys, limit=per_key)))
