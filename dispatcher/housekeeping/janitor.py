"""The janitor: the housekeeping beside deliveries, which keeps claims fast and tables small.

Each round releases scheduled messages and sends periodic ones that are due, raises the floors of inboxes, moves
messages of parked keys to `parked`, continues large batches of Spark whose drivers have left them, and answers readers
of links that have received what this node lost. Once a minute it deletes what is obsolete, and what waits for longer
than its inbox keeps messages; and it makes and drops the days of the archive. It never waits for users' transactions:
what they have locked comes in a later round. The same goes for an inbox that causes an error, such as one that is being
removed.

Its cost depends on changes, not on the number of inboxes: it checks the floor of an inbox after a delivery, and as long
as messages are reaped there. In each round it also checks a few other inboxes in turn, since other processes deliver
and replay too.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime

import psycopg

from dispatcher.delivery.deliver import releasing
from dispatcher.delivery.portion import Portion
from dispatcher.housekeeping import healthy_floor
from dispatcher.housekeeping.expiry import expiring, listing_expiring
from dispatcher.housekeeping.periodic import PeriodicSends
from dispatcher.housekeeping.set_back import bringing_back_attempted, bringing_back_suspected
from dispatcher.housekeeping.total_floor import listing_total, raising_sent_floor, sweeping_stable
from dispatcher.housekeeping.trim import Held, Kept, Trim
from inbox.by_key.parked_keys import MovedParked, moving_parked
from mailroom import events
from mailroom.figures.keys import PARKED
from mailroom.links.handshake.diverged import finding_claims, renewing
from mailroom.logs.segments import (
    Emptied,
    Over,
    dropping_segment,
    listing_old_logs,
    listing_readers,
    making_segment,
    sweeping_receipts,
    sweeping_ticks,
)
from mailroom.logs.segments import emptying as emptying_segment
from mailroom.logs.segments import listing_over as listing_segments
from mailroom.metrics.recorder import KEPT
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.order.expressions import BY_CLOCK
from mailroom.order.total import R_IS_BOUNDED
from mailroom.registry.archive_days import dropping_day, emptying, lacking, listing_over, making_ahead
from mailroom.roles.advice import advise
from mailroom.session.commit import SWEPT_AT_ONCE, sweeping_tokens
from mailroom.session.settings import refusal
from mailroom.sql.operation import Operation, Sql, filled
from mailroom.sql.runner import run_async, run_in_transaction
from mailroom.sql.sqlstate import Meaning, meaning
from mailroom.values.names import shown
from outbox.bulk import ABANDONED_AFTER_S, BulkLost, advancing, listing_left

log = logging.getLogger("mailroom.dispatcher")

STEP = 1_000  # clocks a floor may lag behind before raising it is worth a transaction
STEPS = 10  # steps of one inbox's healthy floor per round
IN_TURN = 10  # inboxes checked in turn per round
RELEASED_ROWS = 10_000
SWEEP_INTERVAL_S = 60.0
SWEPT_ROWS = 10_000  # at most per table and statement; the rest comes in the next round
KEPT_DAYS = {"attempt": 14, "audit": 400, "outbox_jdbc_id": 7}
BATCHES_KEPT_DAYS = 400


class Janitor:
    """Does the housekeeping of one node over an autocommit connection. `monotonic` is its clock, in seconds.

    It continues a large batch of Spark that has not moved for `abandoned_after_s` seconds by the database's clock.
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
        self._trim = Trim(schema)
        self._periodic = PeriodicSends(schema, monotonic)
        self._swept = float("-inf")
        self._cursors: dict[str, str] = {}
        self._turn = ""
        self._watched: dict[str, int | None] = {}  # the oldest clock seen in each inbox whose floor may move
        self._faulty: set[str] = set()
        self._held: set[int] = set()  # segments of logs that inboxes hold back
        self._left: list[str] = []  # names of the batches that this janitor continues

    def watch(self, inboxes: Iterable[str]) -> None:
        """Check the floors of these inboxes in the next round: they got messages."""
        for inbox in inboxes:
            self._watched.setdefault(inbox, None)

    async def run_once(self, connection: psycopg.AsyncConnection) -> int:
        """Do one round; return how many subjects are unfinished, so that the next round should come soon.

        Raises an error only if the connection is lost or the server read-only.
        """
        unfinished = 0
        with self._passing(connection, "scheduled messages"), self._portion.tried():
            await run_async(connection, releasing(self._schema, rows=self._portion.of(RELEASED_ROWS)))
        with self._passing(connection, "periodic messages"):
            unfinished += await self._periodic.send_due(connection)
        unfinished += await self.move_on(connection)
        failing: list[FailingInbox] = []
        with self._passing(connection, "failing keys"):
            failing = await run_async(connection, listing_failing(self._schema))
        for inbox in (each.inbox for each in failing if each.holds_parked):
            with self._passing(connection, f"parked keys of {inbox}"):
                moved = await run_async(connection, moving_parked(self._schema, inbox, self._cursors.get(inbox, "")))
                self._cursors[inbox] = moved.cursor
                unfinished += moved.more
        for inbox in (each.inbox for each in failing if each.has_floors):
            with self._passing(connection, f"the healthy floor of {inbox}"):
                unfinished += await self._raise_healthy_floor(connection, inbox)
        with self._passing(connection, "claims of readers"):
            await self._answer_claims(connection)
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

    async def move_on(self, connection: psycopg.AsyncConnection) -> int:
        """Move the next chunk of each batch of Spark that its driver has left, once its last chunk was delivered.

        Returns how many go on. Raises as `run_once` does.
        """
        going_on = 0
        with self._passing(connection, "large batches of Spark"):
            left = await run_async(connection, listing_left(self._schema, self._left, self._abandoned_after_s))
            self._left = [each.name for each in left]
            for each in left:
                with self._passing(connection, f"the batch {shown(each.name)}"):
                    if not each.waits:
                        await run_in_transaction(connection, advancing(self._schema, each.name))
                    going_on += 1
        return going_on

    def _choosing(self) -> Operation[list[str]]:
        watched = list(self._watched)  # a copy: deliveries add others meanwhile
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
                return False  # it was just removed, or has no floor
            floor, oldest, clock, is_bounded = state
            lags = (clock if oldest is None else oldest - 1) - floor >= STEP
            # Watched as long as it moves. An empty inbox is raised once: its next delivery calls `watch`.
            if oldest is not None and (lags or oldest != before):
                self._watched[inbox] = oldest
            if lags:
                await run_in_transaction(connection, raising_floor(self._schema, inbox))
            if is_bounded:
                await run_async(connection, raising_sent_floor(self._schema, inbox))
        except psycopg.errors.LockNotAvailable:
            self.watch([inbox])
            raise
        return lags

    async def _raise_healthy_floor(self, connection: psycopg.AsyncConnection, inbox: str) -> bool:
        if not await run_async(connection, healthy_floor.lagging(self._schema, inbox)):
            return False
        for _ in range(STEPS):
            if not await run_in_transaction(connection, healthy_floor.raising(self._schema, inbox)):
                return False
        return True

    async def _sweep(self, connection: psycopg.AsyncConnection, failing: Iterable["FailingInbox"]) -> bool:
        """Delete obsolete rows, one step per table; return whether more may be left for the next round."""
        more = 0
        with self._passing(connection, "attempts"):
            await run_async(connection, bringing_back_attempted(self._schema, SWEPT_ROWS))
        for each in failing:
            with self._passing(connection, f"key_state of {each.inbox}"):
                await run_async(connection, sweeping_key_state(self._schema, each.inbox, each.lanes))
                await run_async(connection, bringing_back_suspected(self._schema, each.inbox, SWEPT_ROWS))
        expires: list[str] = []
        with self._passing(connection, "the list of inboxes whose messages expire"):
            expires = await run_async(connection, listing_expiring(self._schema))
        for inbox in expires:
            with self._passing(connection, f"old messages of {inbox}"):
                expired = await run_async(connection, expiring(self._schema, inbox, SWEPT_ROWS))
                more += expired >= SWEPT_ROWS
                self._tell_expired(inbox, expired)
        total: list[str] = []
        with self._passing(connection, "the list of total inboxes"):
            total = await run_async(connection, listing_total(self._schema))
        for inbox in total:
            with self._passing(connection, f"what was stable of {inbox}"):
                more += await run_async(connection, sweeping_stable(self._schema, inbox, SWEPT_ROWS)) >= SWEPT_ROWS
        await self._turn_days(connection)
        more += await self._turn_segments(connection)
        more += await self._trim_links(connection)
        with self._passing(connection, "history"):
            more += await run_async(connection, sweeping_history(self._schema))
        with self._passing(connection, "statistics"):
            more += await run_async(connection, sweeping_statistics(self._schema)) >= SWEPT_ROWS
        with self._passing(connection, "batches of Spark"):
            more += await run_async(connection, sweeping_batches(self._schema))
        with self._passing(connection, "commit tokens"):
            more += await run_async(connection, sweeping_tokens(self._schema)) >= SWEPT_AT_ONCE
        return more > 0

    def _tell_expired(self, inbox: str, expired: int) -> None:
        if expired:
            log.info("inbox %s: %d messages expired (expire_s) and were removed", inbox, expired)
            events.emit(events.MessagesExpired(self._schema, inbox, expired))

    async def _turn_days(self, connection: psycopg.AsyncConnection) -> None:
        """Make the days of the archive ahead, before those that are over are emptied; then drop those."""
        over: list[tuple[date, bool]] = []
        with self._passing(connection, "the days of the archive"):
            if await run_async(connection, lacking(self._schema)):
                await run_in_transaction(connection, making_ahead(self._schema))
            over = await run_async(connection, listing_over(self._schema))
        for day, is_empty in over:
            with self._passing(connection, f"day {day} of the archive"):
                await run_in_transaction(connection, (dropping_day if is_empty else emptying)(self._schema, day))

    async def _turn_segments(self, connection: psycopg.AsyncConnection) -> int:
        """Make new segments of logs, empty and drop those that are over; delete old ticks and receipts."""
        more = 0
        old: list[str] = []
        over: list[Over] = []
        readers: list[str] = []
        with self._passing(connection, "the segments of logs"):
            old = await run_async(connection, listing_old_logs(self._schema))
            over = await run_async(connection, listing_segments(self._schema))
            readers = await run_async(connection, listing_readers(self._schema))
            more += await run_async(connection, sweeping_ticks(self._schema)) >= SWEPT_ROWS
        for log_name in old:
            with self._passing(connection, f"a new segment of log {log_name}"):
                await run_in_transaction(connection, making_segment(self._schema, log_name))
        for each in over:
            with self._passing(connection, f"segment {each.segment} of log {each.log}"):
                if each.is_empty:
                    await run_in_transaction(connection, dropping_segment(self._schema, each))
                else:
                    self._tell(each, await run_in_transaction(connection, emptying_segment(self._schema, each)))
        for inbox in readers:
            with self._passing(connection, f"receipts of {inbox}"):
                more += await run_async(connection, sweeping_receipts(self._schema, inbox)) >= SWEPT_ROWS
        return more

    def _tell(self, over: Over, emptied: Emptied) -> None:
        """Log that inboxes hold a segment back, once for each, and what was dropped though they had not read it."""
        for inbox, lost in emptied.lost:
            log.warning(
                "log %s: %d messages of segment %d were dropped that inbox %s had not read, since the log drops what "
                "is unread", over.log, lost, over.segment, inbox,
            )  # fmt: skip
            events.emit(events.MessagesLost(self._schema, inbox, over.log, lost))
        if emptied.holders and over.segment not in self._held:
            self._held.add(over.segment)
            log.warning(
                "log %s: what %s had not read of segment %d is kept, and takes up disk: start a worker, or drop the "
                "inbox", over.log, ", ".join(emptied.holders), over.segment,
            )  # fmt: skip

    async def _trim_links(self, connection: psycopg.AsyncConnection) -> int:
        self._trim.over(connection)
        more = 0
        links: list[Kept] = []
        origins: list[Held] = []
        with self._passing(connection, "the list of links"):
            links = await run_async(connection, self._trim.listing_links())
            origins = await run_async(connection, self._trim.listing_origins())
        for link in links:
            with self._passing(connection, f"rows for {link.name}"):
                if link.is_full:
                    await run_in_transaction(connection, self._trim.cutting_full(link))
                more += await run_async(connection, self._trim.trimming_rows(link))
        for origin in origins:
            with self._passing(connection, f"receipts of {origin.name}"):
                more += await run_async(connection, self._trim.trimming_receipts(origin))
        return more

    async def _answer_claims(self, connection: psycopg.AsyncConnection) -> None:
        if not await run_async(connection, finding_claims(self._schema)):
            return
        renewed = await run_in_transaction(connection, renewing(self._schema))
        if renewed is None:
            return
        for claim in renewed.claims:
            log.error(
                "this node lost messages that %s had received (up to row %d; here are rows up to %d). It goes on as "
                "incarnation %d; to see which messages they were, there: mailroom link report",
                claim.reader, claim.seq, claim.newest, renewed.incarnation,
            )  # fmt: skip

    @contextlib.contextmanager
    def _passing(self, connection: psycopg.AsyncConnection, what: str) -> Iterator[None]:
        """Pass over what the database refuses until a later round: a table that is gone or locked stops no other."""
        try:
            yield
        except psycopg.errors.LockNotAvailable:
            log.debug("%s: locked by another session", what)  # or by our own lane, which delivers a large batch
        except psycopg.Error as error:
            if meaning(error, connection) in (Meaning.LOST, Meaning.READ_ONLY):
                raise
            if what not in self._faulty:
                reason = refusal(error) or f"{type(error).__name__} ({error.sqlstate})"
                advised = advise(error, "dispatcher", schema=self._schema)
                log.warning("%s: passed over for now: %s%s", what, reason, f". {advised}" if advised else "")
            self._faulty.add(what)
        except BulkLost as error:
            if what not in self._faulty:
                log.error("%s", error)
            self._faulty.add(what)
        else:
            self._faulty.discard(what)


def moving_all_parked(schema: str) -> Operation[None]:
    """Move all messages of parked keys to `parked`, except those locked by others; in autocommit, step by step."""
    for each in (yield from listing_failing(schema)):
        moved = MovedParked(0, cursor="", more=each.holds_parked)
        while moved.more or moved.cursor:
            moved = yield from moving_parked(schema, each.inbox, moved.cursor)


INBOXES = Sql(
    """
SELECT name, true FROM {schema}.inbox_registry WHERE name = ANY (%(named)s::text[])
UNION ALL (
    SELECT name, false FROM {schema}.inbox_registry WHERE name > %(after)s::text ORDER BY name LIMIT %(rows)s::bigint)
""",
    columns=("text", "boolean"),
)


def listing_inboxes(schema: str, named: list[str], *, after: str, rows: int) -> Operation[tuple[list[str], list[str]]]:
    """Return those of the `named` inboxes that exist, and the next `rows` names after `after`."""
    found = yield INBOXES.at(schema=schema)(named=named, after=after, rows=rows)
    return [name for name, is_named in found if is_named], [name for name, is_named in found if not is_named]


@dataclass(frozen=True, slots=True)
class FailingInbox:
    """An inbox with failing keys: whether some are parked, and the log that it reads, with its lanes, if it does."""

    inbox: str
    holds_parked: bool
    log: str | None
    lanes: int | None

    @property
    def has_floors(self) -> bool:
        """Whether its messages come with rising clocks: what is diverted from a log has old ones."""
        return self.log is None


# Steps through the index from inbox to inbox, however many failing keys each of them has.
FAILING = Sql(
    """
WITH RECURSIVE failing AS (
    SELECT min(inbox) AS inbox FROM {schema}.key_state
    UNION ALL
    SELECT (SELECT min(inbox) FROM {schema}.key_state AS k WHERE k.inbox > t.inbox) FROM failing AS t
    WHERE t.inbox IS NOT NULL)
SELECT r.name, EXISTS (SELECT FROM {schema}.key_state AS k
                       WHERE k.inbox = r.name AND {parked}),
       r.log, (SELECT l.lanes::bigint FROM {schema}.log_registry AS l WHERE l.name = r.log)
FROM failing AS t JOIN {schema}.inbox_registry AS r ON r.name = t.inbox ORDER BY r.name
""",
    into=FailingInbox,
    parked=filled(PARKED, row="k"),
)


def listing_failing(schema: str) -> Operation[list[FailingInbox]]:
    """Return the inboxes that have failing keys."""
    return FAILING.named((yield FAILING.at(schema=schema)()))


# -- Floors -----------------------------------------------------------------------------------------------------------

FLOOR_STATE = Sql(
    """
SELECT floor, (SELECT clock FROM {schema}.inbox_{inbox} WHERE {by_clock} > r.floor ORDER BY {by_clock} LIMIT 1),
       last_value, {is_bounded}
FROM {schema}.inbox_registry r, {schema}.clock WHERE name = '{inbox}' AND log IS NULL
""",
    columns=("bigint", "bigint", "bigint", "boolean"),
    by_clock=BY_CLOCK,
    is_bounded=R_IS_BOUNDED,
)


def reading_floor(schema: str, inbox: str) -> Operation[tuple[int, int | None, int, bool] | None]:
    """Return the inbox's floor, the clock of its oldest message or None, the node's clock, and whether it is given
    out up to a bound; None if it is gone, or reads a log: what is diverted from there has old clocks.
    """
    rows = yield FLOOR_STATE.at(schema=schema, inbox=inbox)()
    return rows[0] if rows else None


# SKIP LOCKED: a replay locks this row until its caller commits.
HOLD = Sql(
    "SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}' FOR NO KEY UPDATE SKIP LOCKED",
    columns=("bigint",),
)
OLDEST = Sql(
    "SELECT clock FROM {schema}.inbox_{inbox} WHERE {by_clock} > %(floor)s::bigint ORDER BY {by_clock} LIMIT 1",
    columns=("bigint",),
    by_clock=BY_CLOCK,
)
# What waits to be fanned out has its clocks already.
CLOCK = Sql(
    """
SELECT least(last_value, (SELECT clock - 1 FROM {schema}.fan_out ORDER BY clock LIMIT 1)) FROM {schema}.clock
""",
    columns=("bigint",),
)
RAISE = Sql(
    "UPDATE {schema}.inbox_registry SET floor = %(floor)s::bigint WHERE name = '{inbox}' AND floor < %(floor)s::bigint"
)


def raising_floor(schema: str, inbox: str) -> Operation[None]:
    """Raise the inbox's floor to just below its oldest message, in a READ COMMITTED transaction of its own.

    The registry's row is locked first, and the oldest message read in a later statement. A message that is being reaped
    still counts, since the delete may be rolled back. One that is being delivered has a higher clock than any before.
    One that is being replayed has a lower clock, and the replay lowers the floor under the same lock.
    """
    names = {"schema": schema, "inbox": inbox}
    rows = yield HOLD.at(**names)()
    if not rows:
        return
    floor = rows[0][0]
    oldest = yield OLDEST.at(**names)(floor=floor)
    if not oldest:
        # In an empty inbox only the clock bounds what may come, and only while no delivery is under way.
        yield DISPATCH_LOCK.at(schema=schema)()
        oldest = yield OLDEST.at(**names)(floor=floor)
    if oldest:
        raised = oldest[0][0] - 1
    else:
        [(raised,)] = yield CLOCK.at(schema=schema)()
    yield RAISE.at(**names)(floor=raised)


# -- Sweeping ---------------------------------------------------------------------------------------------------------

# A key_state row whose messages are gone is left when the snapshot of the claim that took them was older than the row.
# Only the oldest due rows are read: due rows that still have messages are worked off by the workers. LATERAL keeps this
# to one index probe per key. A row that is locked, or was written since, is left alone: its messages may be too new
# for this snapshot. The key '' stands for a total inbox as a whole, and is left to its claims.
IDLE_KEYS = Sql(
    """
WITH due AS MATERIALIZED (
    SELECT key, greatest(clock, alone_to) AS clock, alone_to, retry_at FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at <= clock_timestamp() AND key <> '' ORDER BY retry_at, key
    LIMIT %(rows)s::bigint),
idle AS MATERIALIZED (
    SELECT d.key, d.alone_to, d.retry_at FROM due AS d LEFT JOIN LATERAL (
        SELECT clock FROM {schema}.inbox_{inbox} WHERE key = d.key AND clock <= d.clock LIMIT 1) AS i ON true
    WHERE i.clock IS NULL{is_read}),
held AS MATERIALIZED (
    SELECT s.key FROM (SELECT * FROM idle) AS i, LATERAL (
        SELECT key FROM {schema}.key_state AS k
        WHERE k.inbox = '{inbox}' AND k.key = i.key AND k.retry_at = i.retry_at AND k.alone_to = i.alone_to
        FOR UPDATE SKIP LOCKED) AS s)
DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = ANY (ARRAY(SELECT key FROM held))
"""
)


# And the log has none of them any more: what failed there is diverted by the next claim of its lane.
IS_READ = """ AND d.clock <= (
        SELECT r.clock FROM {schema}.log_receipt AS r
        WHERE r.inbox = '{inbox}' AND r.lane = {schema}.lane_of(d.key, {lanes})
        ORDER BY r.epoch DESC, r.clock DESC LIMIT 1)"""


def sweeping_key_state(schema: str, inbox: str, lanes: int | None = None) -> Operation[None]:
    """Delete key_state rows of failing keys whose messages are gone. `lanes`: how many its log has, if it reads one."""
    is_read = "" if lanes is None else IS_READ
    yield IDLE_KEYS.at(is_read=is_read, schema=schema, inbox=inbox, lanes=str(lanes))(rows=SWEPT_ROWS)


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
    """Delete the oldest rows past their retention (`KEPT_DAYS`); return whether more may be left."""
    more = False
    for table, days in KEPT_DAYS.items():
        [(deleted,)] = yield OLD.at(schema=schema, table=table)(days=days, rows=SWEPT_ROWS)
        more = more or deleted >= SWEPT_ROWS
    return more


MINUTES = Sql(
    """
WITH old AS MATERIALIZED (
    SELECT minute, inbox FROM {schema}.stat_minute
    WHERE minute < coalesce(%(now)s::timestamptz, clock_timestamp()) - %(kept)s::text::interval
    ORDER BY minute, inbox LIMIT %(rows)s::bigint),
gone AS (
    DELETE FROM {schema}.stat_minute AS s USING old WHERE s.minute = old.minute AND s.inbox = old.inbox RETURNING 1)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)


def sweeping_statistics(schema: str, *, now: datetime | None = None) -> Operation[int]:
    """Delete the oldest statistics that are older than 48 hours; return how many rows.

    `now` is until when their age counts; None is the database's clock.
    """
    kept = f"{KEPT.total_seconds():.0f} s"
    [(deleted,)] = yield MINUTES.at(schema=schema)(now=now, kept=kept, rows=SWEPT_ROWS)
    return int(deleted)


# The last batch of a stream stays: it shows a query that starts over from swept batches that the stream is not new.
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
    """Delete the oldest Spark batches older than `BATCHES_KEPT_DAYS`; return whether more may be left."""
    [(deleted,)] = yield BATCHES.at(schema=schema)(days=BATCHES_KEPT_DAYS, rows=SWEPT_ROWS)
    return bool(deleted >= SWEPT_ROWS)
