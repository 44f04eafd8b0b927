"""The janitor: what is done beside delivering, so that claims stay fast and tables small.

Often: scheduled messages that are due are sent on, inboxes' floors are raised, what stands behind parked messages is
moved aside, large batches of Spark go on whose drivers have left them. Once a minute: what nobody needs any more is
deleted. It waits for no transaction of users: what they hold is passed over and comes next time. So is an inbox that is
in trouble, such as one that is being removed.

It costs per change and not per inbox: floors are looked at where something was delivered, and as long as something is
reaped there. A few others are looked at in turn, for what nobody tells of: deliveries and replays of other processes.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator

import psycopg

from dispatcher import healthy_floor
from dispatcher.deliver import releasing
from dispatcher.portion import Portion
from inbox.parked import Moved, moving_parked
from mailroom.clock import LOCK
from mailroom.commit import SWEPT_AT_ONCE, sweeping_tokens
from mailroom.names import shown
from mailroom.schema import BY_CLOCK
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async
from mailroom.sql.sqlstate import Meaning, meaning
from outbox.bulk import ABANDONED_AFTER_S, BulkLost, advancing, listing_left

log = logging.getLogger("mailroom.dispatcher")

STEP = 1_000  # clocks a floor may lag behind before it is worth a transaction
STEPS = 10  # of one inbox's healthy floor, each time
IN_TURN = 10  # inboxes looked at in turn, each time
RELEASED_ROWS = 10_000
SWEEP_INTERVAL_S = 60.0
SWEPT_ROWS = 10_000  # at most of one table and in one statement; more are left for the next step
KEPT_DAYS = {"attempt": 14, "audit": 400, "outbox_jdbc_id": 7}
BATCHES_KEPT_DAYS = 400


class Janitor:
    """Keeps the house of one node over a connection in autocommit; `monotonic` is its clock, in seconds.

    A large batch of Spark that was not moved for `abandoned_after_s`, by the database's clock, goes on.
    """

    def __init__(
        self,
        schema: str,
        monotonic: Callable[[], float] = time.monotonic,
        abandoned_after_s: float = ABANDONED_AFTER_S,
    ) -> None:
        self._schema = schema
        self._monotonic = monotonic
        self._abandoned_after_s = abandoned_after_s
        self._portion = Portion()
        self._swept = float("-inf")
        self._cursors: dict[str, str] = {}
        self._turn = ""
        self._watched: dict[str, int | None] = {}  # the oldest clock seen in an inbox whose floor is about to move
        self._faulty: set[str] = set()
        self._left: list[str] = []  # names of batches that are moved on

    def watch(self, inboxes: Iterable[str]) -> None:
        """Look at the floors of these, since something was delivered to them."""
        for inbox in inboxes:
            self._watched.setdefault(inbox, None)

    async def run_once(self, connection: psycopg.AsyncConnection) -> int:
        """Go through the house once; returns how much calls for coming back soon.

        Raises what the connection did not outlive.
        """
        unfinished = 0
        with self._passing(connection, "scheduled messages"), self._portion.tried():
            await run_async(connection, releasing(self._schema, rows=self._portion.of(RELEASED_ROWS)))
        with self._passing(connection, "large batches of Spark"):
            unfinished += await self._move_on(connection)
        failing: dict[str, bool] = {}
        with self._passing(connection, "keys in trouble"):
            failing = await run_async(connection, listing_failing(self._schema))
        for inbox in (inbox for inbox, holds_parked in failing.items() if holds_parked):
            with self._passing(connection, f"parked keys of {inbox}"):
                moved = await run_async(connection, moving_parked(self._schema, inbox, self._cursors.get(inbox, "")))
                self._cursors[inbox] = moved.cursor
                unfinished += moved.more
        for inbox in failing:
            with self._passing(connection, f"the healthy floor of {inbox}"):
                unfinished += await self._raise_healthy_floor(connection, inbox)
        if self._monotonic() - self._swept >= SWEEP_INTERVAL_S:
            if await self._sweep(connection, failing):
                unfinished += 1
            else:
                self._swept = self._monotonic()
        inboxes: list[str] = []
        with self._passing(connection, "the list of inboxes"):
            inboxes = await run_async(connection, self._choosing())
        for inbox in inboxes:
            with self._passing(connection, f"the floor of {inbox}"):
                unfinished += await self._raise_floor(connection, inbox)
        return unfinished

    async def _move_on(self, connection: psycopg.AsyncConnection) -> int:
        """Move the next chunk of each batch that its driver has left, once its last one was taken."""
        left = await run_async(connection, listing_left(self._schema, self._left, self._abandoned_after_s))
        self._left = [each.name for each in left]
        for each in left:
            if not each.waits:
                with self._passing(connection, f"the batch {shown(each.name)}"):
                    async with connection.transaction():
                        await run_async(connection, advancing(self._schema, each.name))
        return len(left)

    def _choosing(self) -> Operation[list[str]]:
        watched = list(self._watched)  # others are added meanwhile
        listed, in_turn = yield from listing_inboxes(self._schema, watched, after=self._turn, rows=IN_TURN)
        for inbox in set(watched).difference(listed):
            del self._watched[inbox]
        self._turn = in_turn[-1] if len(in_turn) == IN_TURN else ""
        return list(dict.fromkeys(listed + in_turn))

    async def _raise_floor(self, connection: psycopg.AsyncConnection, inbox: str) -> bool:
        before = self._watched.pop(inbox, None)
        try:
            state = await run_async(connection, reading_floor(self._schema, inbox))
            if state is None:
                return False  # it was removed this instant
            floor, oldest, clock = state
            lags = (clock if oldest is None else oldest - 1) - floor >= STEP
            # Watched as long as it moves. With none alive it is raised once: what comes will be told of.
            if oldest is not None and (lags or oldest != before):
                self._watched[inbox] = oldest
            if lags:
                async with connection.transaction():
                    await run_async(connection, raising_floor(self._schema, inbox))
        except psycopg.errors.LockNotAvailable:
            self.watch([inbox])
            raise
        return lags

    async def _raise_healthy_floor(self, connection: psycopg.AsyncConnection, inbox: str) -> bool:
        if not await run_async(connection, healthy_floor.lagging(self._schema, inbox)):
            return False
        for _ in range(STEPS):
            async with connection.transaction():
                if not await run_async(connection, healthy_floor.raising(self._schema, inbox)):
                    return False
        return True

    async def _sweep(self, connection: psycopg.AsyncConnection, failing: Iterable[str]) -> bool:
        """Tell whether more may be left: what comes by the message grows faster than one step a minute takes away."""
        more = 0
        for inbox in failing:
            with self._passing(connection, f"notes of {inbox}"):
                await run_async(connection, sweeping_key_state(self._schema, inbox))
        with self._passing(connection, "history"):
            more += await run_async(connection, sweeping_history(self._schema))
        with self._passing(connection, "batches of Spark"):
            more += await run_async(connection, sweeping_batches(self._schema))
        with self._passing(connection, "commit tokens"):
            more += await run_async(connection, sweeping_tokens(self._schema)) >= SWEPT_AT_ONCE
        return more > 0

    @contextlib.contextmanager
    def _passing(self, connection: psycopg.AsyncConnection, what: str) -> Iterator[None]:
        """Leave for the next time what the database refuses: one table that is gone or locked stops no other."""
        try:
            yield
        except psycopg.errors.LockNotAvailable:
            log.debug("%s: locked by somebody else", what)  # or the lane delivers a large batch
        except psycopg.Error as error:
            if meaning(error, connection) in (Meaning.LOST, Meaning.READ_ONLY):
                raise
            if what not in self._faulty:
                log.warning("%s: not looked after for now: %s (%s)", what, type(error).__name__, error.sqlstate)
            self._faulty.add(what)
        except BulkLost as error:
            if what not in self._faulty:
                log.error("%s", error)
            self._faulty.add(what)
        else:
            self._faulty.discard(what)


def moving_all_parked(schema: str) -> Operation[None]:
    """Move aside all that stands behind parked messages and nobody holds; in autocommit, in steps that commit."""
    for inbox, holds_parked in (yield from listing_failing(schema)).items():
        moved = Moved(0, cursor="", more=holds_parked)
        while moved.more or moved.cursor:
            moved = yield from moving_parked(schema, inbox, moved.cursor)


INBOXES = Sql(
    """
SELECT name, true FROM {schema}.inbox_registry WHERE name = ANY (%(named)s::text[])
UNION ALL (
    SELECT name, false FROM {schema}.inbox_registry WHERE name > %(after)s::text ORDER BY name LIMIT %(rows)s::bigint)
""",
    columns=("text", "boolean"),
)


def listing_inboxes(schema: str, named: list[str], *, after: str, rows: int) -> Operation[tuple[list[str], list[str]]]:
    """Return which of the named there are, and so many names in their order."""
    found = yield INBOXES.at(schema=schema)(named=named, after=after, rows=rows)
    return [name for name, is_named in found if is_named], [name for name, is_named in found if not is_named]


# From one inbox to the next by the index, however many keys each of them has there.
FAILING = Sql(
    """
WITH RECURSIVE troubled AS (
    SELECT min(inbox) AS inbox FROM {schema}.key_state
    UNION ALL
    SELECT (SELECT min(inbox) FROM {schema}.key_state AS k WHERE k.inbox > t.inbox) FROM troubled AS t
    WHERE t.inbox IS NOT NULL)
SELECT r.name, EXISTS (SELECT FROM {schema}.key_state AS k WHERE k.inbox = r.name AND k.retry_at = 'infinity')
FROM troubled AS t JOIN {schema}.inbox_registry AS r ON r.name = t.inbox ORDER BY r.name
""",
    columns=("text", "boolean"),
)


def listing_failing(schema: str) -> Operation[dict[str, bool]]:
    """Return the names of the inboxes that have keys in trouble, and whether some of those are parked."""
    return dict((yield FAILING.at(schema=schema)()))


# -- Floors -----------------------------------------------------------------------------------------------------------

FLOOR_STATE = Sql(
    """
SELECT floor, (SELECT clock FROM {schema}.inbox_{inbox} WHERE {by_clock} > r.floor ORDER BY {by_clock} LIMIT 1),
       last_value
FROM {schema}.inbox_registry r, {schema}.clock WHERE name = '{inbox}'
""",
    columns=("bigint", "bigint", "bigint"),
    by_clock=BY_CLOCK,
)


def reading_floor(schema: str, inbox: str) -> Operation[tuple[int, int | None, int] | None]:
    """Return the inbox's floor, the clock of its oldest message if it has one, and the node's; None if not listed."""
    rows = yield FLOOR_STATE.at(schema=schema, inbox=inbox)()
    return rows[0] if rows else None


# Passed over while a replay has it, for as long as its caller does not commit.
HOLD = Sql(
    "SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}' FOR NO KEY UPDATE SKIP LOCKED",
    columns=("bigint",),
)
OLDEST = Sql(
    "SELECT clock FROM {schema}.inbox_{inbox} WHERE {by_clock} > %(floor)s::bigint ORDER BY {by_clock} LIMIT 1",
    columns=("bigint",),
    by_clock=BY_CLOCK,
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
IDLE_KEYS = Sql(
    """
WITH due AS MATERIALIZED (
    SELECT key, greatest(clock, alone_to) AS clock, alone_to, retry_at FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at <= clock_timestamp() ORDER BY retry_at, key LIMIT %(rows)s::bigint),
idle AS MATERIALIZED (
    SELECT d.key, d.alone_to, d.retry_at FROM due AS d LEFT JOIN LATERAL (
        SELECT clock FROM {schema}.inbox_{inbox} WHERE key = d.key AND clock <= d.clock LIMIT 1) AS i ON true
    WHERE i.clock IS NULL),
held AS MATERIALIZED (
    SELECT s.key FROM (SELECT * FROM idle) AS i, LATERAL (
        SELECT key FROM {schema}.key_state AS k
        WHERE k.inbox = '{inbox}' AND k.key = i.key AND k.retry_at = i.retry_at AND k.alone_to = i.alone_to
        FOR UPDATE SKIP LOCKED) AS s)
DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = ANY (ARRAY(SELECT key FROM held))
"""
)


def sweeping_key_state(schema: str, inbox: str) -> Operation[None]:
    """Delete notes of keys in trouble whose messages are gone."""
    yield IDLE_KEYS.at(schema=schema, inbox=inbox)(rows=SWEPT_ROWS)


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
      AND NOT EXISTS (SELECT FROM {schema}.spark_bulk AS u WHERE u.name = b.name AND u.batch = b.batch)
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
