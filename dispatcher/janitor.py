"""The janitor: what the keeper does beside the lease, so that claims stay fast and tables small.

Often: scheduled messages that are due are sent on, each inbox's floor is raised, what stands behind parked messages is
moved aside. Once a minute: what nobody needs any more is deleted. It waits for no transaction of users: what they hold
is passed over and comes next time.
"""

import time
from collections.abc import Callable

import psycopg

from dispatcher.deliver import releasing
from inbox.parked import Moved, moving_aside
from mailroom.commit import SWEPT_AT_ONCE, sweeping_tokens
from mailroom.operation import Operation, Sql
from mailroom.schema import BY_CLOCK
from mailroom.stamping import LOCK
from mailroom.transaction import run_async

STEP = 1_000  # clocks a floor may lag behind before it is worth a transaction
SWEEP_INTERVAL_S = 60.0
SWEPT_ROWS = 10_000  # at most of one table and in one statement; more are left for the next step
KEPT_DAYS = {"attempt": 14, "audit": 400, "outbox_jdbc_id": 7}
BATCHES_KEPT_DAYS = 400


class Janitor:
    """Keeps the house of one node over a connection in autocommit; `monotonic` is its clock, in seconds."""

    def __init__(self, schema: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._schema = schema
        self._monotonic = monotonic
        self._swept = float("-inf")
        self._cursors: dict[str, str] = {}

    async def keep_house(self, connection: psycopg.AsyncConnection) -> int:
        """Go through the house once; returns how much calls for coming back soon."""
        await run_async(connection, releasing(self._schema))
        unfinished = 0
        inboxes = await run_async(connection, listing_inboxes(self._schema))
        for inbox, holds_parked in inboxes.items():
            if await run_async(connection, lagging(self._schema, inbox)):
                async with connection.transaction():
                    await run_async(connection, raising_floor(self._schema, inbox))
                unfinished += 1
            if holds_parked:
                moved = await run_async(connection, moving_aside(self._schema, inbox, self._cursors.get(inbox, "")))
                self._cursors[inbox] = moved.cursor
                unfinished += moved.more
        if self._monotonic() - self._swept >= SWEEP_INTERVAL_S:
            if await self._sweep(connection, list(inboxes)):
                unfinished += 1
            else:
                self._swept = self._monotonic()
        return unfinished

    async def _sweep(self, connection: psycopg.AsyncConnection, inboxes: list[str]) -> bool:
        """Tell whether more may be left: what comes by the message grows faster than one step a minute takes away."""
        for inbox in inboxes:
            await run_async(connection, sweeping_notes(self._schema, inbox))
        more = await run_async(connection, sweeping_history(self._schema))
        more = await run_async(connection, sweeping_batches(self._schema)) or more
        return await run_async(connection, sweeping_tokens(self._schema)) >= SWEPT_AT_ONCE or more


def moving_all_aside(schema: str) -> Operation[None]:
    """Move aside all that stands behind parked messages and nobody holds; in autocommit, in steps that commit."""
    for inbox, holds_parked in (yield from listing_inboxes(schema)).items():
        moved = Moved(0, cursor="", more=holds_parked)
        while moved.more or moved.cursor:
            moved = yield from moving_aside(schema, inbox, moved.cursor)


INBOXES = Sql(
    """
SELECT name, EXISTS (SELECT FROM {schema}.key_state AS k WHERE k.inbox = r.name AND k.retry_at = 'infinity')
FROM {schema}.inbox_registry AS r
WHERE EXISTS (SELECT FROM pg_catalog.pg_inherits AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
              WHERE i.inhparent = '{schema}.inbox'::regclass::oid AND c.relname = ('inbox_' || r.name)::name)
ORDER BY name
""",
    columns=("text", "boolean"),
)


def listing_inboxes(schema: str) -> Operation[dict[str, bool]]:
    """Return the names of the inboxes that have their partition, and whether they have parked keys."""
    return dict((yield INBOXES.at(schema=schema)()))


# -- Floors -----------------------------------------------------------------------------------------------------------

PROBE = Sql(
    f"""
SELECT floor, coalesce((SELECT clock - 1 FROM {{schema}}.inbox_{{inbox}} WHERE {BY_CLOCK} > r.floor
                        ORDER BY {BY_CLOCK} LIMIT 1), last_value)
FROM {{schema}}.inbox_registry r, {{schema}}.clock WHERE name = '{{inbox}}'
""",
    columns=("bigint", "bigint"),
)


def lagging(schema: str, inbox: str) -> Operation[bool]:
    """Tell whether the inbox's floor could be raised by enough to be worth it; a look, nothing more."""
    rows = yield PROBE.at(schema=schema, inbox=inbox)()
    return bool(rows) and rows[0][1] - rows[0][0] >= STEP


# Passed over while a replay has it, for as long as its caller does not commit: the lease is renewed beside this.
HOLD = Sql(
    "SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}' FOR NO KEY UPDATE SKIP LOCKED",
    columns=("bigint",),
)
OLDEST = Sql(
    f"SELECT clock FROM {{schema}}.inbox_{{inbox}} WHERE {BY_CLOCK} > %(floor)s::bigint ORDER BY {BY_CLOCK} LIMIT 1",
    columns=("bigint",),
)
CLOCK = Sql("SELECT last_value FROM {schema}.clock", columns=("bigint",))
RAISE = Sql(
    "UPDATE {schema}.inbox_registry SET floor = %(floor)s::bigint WHERE name = '{inbox}' AND floor < %(floor)s::bigint"
)


def raising_floor(schema: str, inbox: str) -> Operation[None]:
    """Raise the inbox's floor to just below its oldest message, in a READ COMMITTED transaction of its own.

    The row is locked first and the oldest read in a later statement: a row that somebody is reaping still counts,
    since its delete may be rolled back, and one that is being delivered has a higher clock than any that was. One that
    is being replayed has a lower one, and whoever replays it lowers the floor under the same lock.
    """
    names = {"schema": schema, "inbox": inbox}
    rows = yield HOLD.at(**names)()
    if not rows:
        return
    floor = rows[0][0]
    oldest = yield OLDEST.at(**names)(floor=floor)
    if not oldest:
        # With none alive only the clock bounds what may come, and only while no delivery is under way.
        yield LOCK.at(schema=schema)()
        oldest = yield OLDEST.at(**names)(floor=floor)
    if oldest:
        raised = oldest[0][0] - 1
    else:
        [(raised,)] = yield CLOCK.at(schema=schema)()
    yield RAISE.at(**names)(floor=raised)


# -- Sweeping ---------------------------------------------------------------------------------------------------------

# Left when a claim's snapshot was older than the note on what it took. The oldest due are looked at: whatever stands
# before a note of nothing, workers take. LATERAL keeps it to a probe of the key's index for each. A row that somebody
# else has is left alone, and so is one that was written since: what it is about may be too new for this snapshot.
NOTES = Sql(
    """
WITH due AS MATERIALIZED (
    SELECT key, clock, retry_at FROM {schema}.key_state WHERE inbox = '{inbox}' AND retry_at <= clock_timestamp()
    ORDER BY retry_at, key LIMIT %(rows)s::bigint),
idle AS MATERIALIZED (
    SELECT d.key, d.retry_at FROM due AS d LEFT JOIN LATERAL (
        SELECT clock FROM {schema}.inbox_{inbox} WHERE key = d.key AND clock <= d.clock LIMIT 1) AS i ON true
    WHERE i.clock IS NULL),
held AS MATERIALIZED (
    SELECT s.key FROM (SELECT * FROM idle) AS i, LATERAL (
        SELECT key FROM {schema}.key_state AS k
        WHERE k.inbox = '{inbox}' AND k.key = i.key AND k.retry_at = i.retry_at FOR UPDATE SKIP LOCKED) AS s)
DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = ANY (ARRAY(SELECT key FROM held))
"""
)


def sweeping_notes(schema: str, inbox: str) -> Operation[None]:
    """Delete notes of keys in trouble whose messages are gone."""
    yield NOTES.at(schema=schema, inbox=inbox)(rows=SWEPT_ROWS)


OLD = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.{table} WHERE id = ANY (ARRAY(
        SELECT id FROM {schema}.{table} WHERE at < clock_timestamp() - %(days)s::float8 * interval '1 day'
        ORDER BY at LIMIT %(rows)s::bigint))
    RETURNING 1)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)


def sweeping_history(schema: str) -> Operation[bool]:
    """Delete the oldest of what is older than it is kept (`KEPT_DAYS`), and tell whether more of it may be left."""
    more = False
    for table, days in KEPT_DAYS.items():
        [(deleted,)] = yield OLD.at(schema=schema, table=table)(days=days, rows=SWEPT_ROWS)
        more = more or deleted >= SWEPT_ROWS
    return more


# The last batch of a stream stays: it tells one that begins anew, with batches that were swept, that it is not new.
BATCHES = Sql(
    """
WITH old AS MATERIALIZED (
    SELECT name, batch FROM {schema}.spark_batch AS b
    WHERE at < clock_timestamp() - %(days)s::float8 * interval '1 day'
      AND (batch < 0 OR EXISTS (SELECT FROM {schema}.spark_batch AS n WHERE n.name = b.name AND n.batch > b.batch))
    ORDER BY at LIMIT %(rows)s::bigint),
gone AS (
    DELETE FROM {schema}.spark_batch AS b USING old WHERE b.name = old.name AND b.batch = old.batch RETURNING 1)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)


def sweeping_batches(schema: str) -> Operation[bool]:
    """Delete the oldest of the batches of Spark that are older than 400 days; tell whether more may be left."""
    [(deleted,)] = yield BATCHES.at(schema=schema)(days=BATCHES_KEPT_DAYS, rows=SWEPT_ROWS)
    return bool(deleted >= SWEPT_ROWS)
