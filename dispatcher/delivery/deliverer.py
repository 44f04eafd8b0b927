"""Runs the transactions of deliveries: clock recovery, the ceiling, the floor, and messages that are refused."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

import psycopg

from dispatcher.delivery.dead import tell_of_dead
from dispatcher.delivery.deliver import Delivery, delivering, looking, reading_oldest
from dispatcher.delivery.fan_out import FannedOut, fan_out
from dispatcher.delivery.floor import START, Floor, ScanStart
from dispatcher.delivery.portion import Portion
from dispatcher.delivery.refusal import Undeliverable, dead_lettering, finding_refused
from dispatcher.delivery.sift import reason_of
from mailroom import events
from mailroom.links.marks import marking
from mailroom.links.start import starting
from mailroom.order import sequences
from mailroom.order.clock import WARN_CLOCK, raising_ceiling
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.runner import run_async, run_in_transaction
from mailroom.sql.sqlstate import Meaning, meaning

log = logging.getLogger("mailroom.dispatcher")

BATCH_ROWS = 10_000
MAX_BYTES = 32 * 1024 * 1024
# A try at a single message that finds two costs twice as much as one that finds one saves. So such deliveries must be
# usual: where as many take one message as take more, one try in eight is made, and costs next to nothing.
SINGLES = 3  # deliveries of a single message, one after the other, before the next one is expected to be one
# Before the delivery and not of it, which would have to return them: so they are of the oldest messages then.
TRACEPARENTS = Sql(
    """
WITH {start},
oldest AS MATERIALIZED (
    SELECT headers FROM {schema}.outbox WHERE position > (SELECT position FROM start) ORDER BY position LIMIT 128)
SELECT headers ->> 'traceparent'::text FROM oldest WHERE headers ->> 'traceparent'::text IS NOT NULL
""",
    columns=("text",),
    start=START,
)


def reading_traceparents(schema: str, start: ScanStart) -> Operation[list[str]]:
    """Return the headers `traceparent` of the oldest messages in the outbox."""
    return [traceparent for (traceparent,) in (yield TRACEPARENTS.at(schema=schema)(**start.values()))]


COUNTED = tuple(name for name in events.MessagesDelivered._fields if name in Delivery.__dataclass_fields__)


class Deliverer:
    """Delivers over an autocommit connection of its own, one transaction per batch.

    `rows` and `max_bytes` limit a full batch (at least one message); `portion` says how much of it to try. `progress`
    is called with each delivery. `monotonic` is the clock of the `Floor`. A transaction meets at most that many
    `partitions`, None for what the server has room for.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection,
        schema: str,
        *,
        rows: int = BATCH_ROWS,
        max_bytes: int = MAX_BYTES,
        portion: Portion | None = None,
        progress: Callable[[Delivery], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        partitions: int | None = None,
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._rows = rows
        self._max_bytes = max_bytes
        self._portion = portion or Portion()
        self._progress = progress
        self._monotonic = monotonic
        self._floor = Floor("outbox", monotonic)
        self._recovered = False
        self._partitions = partitions
        self._has_links = self._has_many = self._has_bounds = self._has_logs = False
        self._is_plain, self._singles = True, 0

    async def drain(self, now: datetime | None = None) -> int:
        """Deliver until a batch is not full; return how many messages were taken."""
        taken = 0
        while True:
            delivery = await self.deliver(now)
            taken += delivery.taken
            if not delivery.more:
                return taken

    async def drain_rest(self) -> int:
        """Drain if a look finds something: on the way to sleep it seldom does, and an empty delivery costs far more."""
        is_rest = not self._recovered or await run_async(self._connection, looking(self._schema, self._floor.above()))
        return await self.drain() if is_rest else 0

    async def deliver(self, now: datetime | None = None) -> Delivery:
        """Deliver one batch. Only the messages that the database refuses go to `dead_letter`."""
        if not self._recovered:
            # Before this connection gives out its first clock: a crash may have set the sequence back.
            started = await self._transaction(starting(self._schema))
            sequences.tell(started.raised)
            if started.clock >= WARN_CLOCK:
                log.warning("the clock is at %d, more than half of its range", started.clock)
            if started.moved:
                log.warning(
                    "this node is in another database or server than before, so its links may not be read: run "
                    "mailroom node moved; or, if it is a copy of a node that lives on, mailroom node new-id"
                )
            elif started.jumped:
                log.info("the server has started anew: the clock goes on at %d", started.clock)
            self._recovered = True
        traceparents = await self._traceparents() if events.heard(events.DeliveryTraced) else []
        began = self._monotonic()
        with self._portion.tried():
            delivery = await self._deliver(self._portion.of(self._rows), self._portion.of(self._max_bytes), now)
        if delivery.taken and traceparents:
            took_s = self._monotonic() - began
            events.emit(events.DeliveryTraced(self._schema, delivery.taken, traceparents, took_s))
        if delivery.taken and events.heard(events.MessagesDelivered):
            counts = {name: getattr(delivery, name) for name in COUNTED}
            events.emit(events.MessagesDelivered(self._schema, **counts, seconds=self._monotonic() - began))
        await tell_of_dead(self._connection, self._schema, ["deliver"], delivery.dead)
        if self._progress is not None:
            self._progress(delivery)
        return delivery

    async def _deliver(self, most: int, max_bytes: int, now: datetime | None) -> Delivery:
        part, fanned = _Part(most), FannedOut()
        while True:
            start = await self._before_oldest() if part.is_alone else self._floor.start()
            try:
                delivery = await self._transaction(self._delivering(start, part.rows, max_bytes, now))
            except psycopg.Error as error:
                self._floor = Floor("outbox", self._monotonic)
                if meaning(error) is not Meaning.DATA:
                    raise
                await self._narrow(part, error, start, max_bytes, now)
                if not part.rows:
                    return _dead(part.dead)
                continue
            self._has_links, self._is_plain = delivery.has_links, delivery.is_plain
            self._has_many, self._has_bounds = delivery.has_many, delivery.has_bounds
            self._has_logs = delivery.has_logs
            if delivery.taken:
                self._singles = self._singles + 1 if delivery.is_single else 0
            if delivery.waits:
                done = await fan_out(self._connection, self._schema, self._partitions)
                fanned = fanned.plus(done)
                if not delivery.taken:
                    continue  # that came from an earlier delivery, which did not get that far
            if delivery.ceiling is not None:
                await self._transaction(raising_ceiling(self._schema, delivery.ceiling))
                continue
            if delivery.is_mark_wanted:
                await self._transaction(marking(self._schema))
            await run_async(self._connection, self._floor.raising(self._schema, delivery))
            return replace(
                delivery,
                taken=delivery.taken + part.dead,
                delivered=delivery.delivered + fanned.copies,
                dead=delivery.dead + part.dead + fanned.dead,
                woken=delivery.woken + fanned.woken,
                inboxes=[*delivery.inboxes, *fanned.inboxes],
                more=delivery.more or part.rows < most,
            )

    def _delivering(self, start: ScanStart, rows: int, max_bytes: int, now: datetime | None) -> Operation[Delivery]:
        return delivering(
            self._schema, start=start, rows=rows, max_bytes=max_bytes, now=now, has_links=self._has_links,
            has_many=self._has_many, has_bounds=self._has_bounds, has_logs=self._has_logs, is_plain=self._is_plain,
            is_single=self._singles >= SINGLES, partitions=self._partitions,
        )  # fmt: skip

    async def _narrow(
        self, part: "_Part", error: psycopg.Error, start: ScanStart, max_bytes: int, now: datetime | None
    ) -> None:
        """Bury what the database refuses by itself, or else have fewer messages delivered."""
        if part.is_alone:
            names = (error.diag.constraint_name, error.diag.table_name, error.diag.column_name)
            alone = Undeliverable(start.position + 1, reason_of(error.sqlstate or "", *names))
            part.dead += await self._dead_letter([alone])
            part.rows = 0
            return
        part.failures += 1
        if part.failures == 1:
            part.rows, refused = await self._find_refused(start, part.rows, max_bytes, now)
            part.dead += await self._dead_letter(refused)
            part.rows -= len(refused)
        elif part.failures > 2:
            # The delivery is refused, but no message by itself: halve the batch down to one. Not at the second failure:
            # a subscription can become visible just before the partition of its inbox does.
            part.rows = max(1, part.rows // 2)

    async def _traceparents(self) -> list[str]:
        return await run_async(self._connection, reading_traceparents(self._schema, self._floor.above()))

    async def _before_oldest(self) -> ScanStart:
        # Above this floor one row is exactly that message, even if one with a lower position commits meanwhile.
        oldest = await run_async(self._connection, reading_oldest(self._schema))
        return ScanStart() if oldest is None else ScanStart(oldest - 1)

    async def _find_refused(
        self, start: ScanStart, rows: int, max_bytes: int, now: datetime | None
    ) -> tuple[int, list[Undeliverable]]:
        return await self._transaction(
            finding_refused(self._schema, start=start, rows=rows, max_bytes=max_bytes, now=now)
        )

    async def _dead_letter(self, refused: list[Undeliverable]) -> int:
        if not refused:
            return 0
        return await self._transaction(dead_lettering(self._schema, refused))

    async def _transaction(self, operation: Operation[T]) -> T:
        return await run_in_transaction(self._connection, operation)


@dataclass(slots=True)
class _Part:
    """How many messages are tried, after so many failures on data, and how many were buried on the way."""

    rows: int
    failures: int = 0
    dead: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the one that is tried is to blame if it fails."""
        return self.failures > 1 and self.rows == 1


def _dead(count: int) -> Delivery:
    return Delivery(count, 0, last=None, clock=None, ceiling=None, woken=0, more=True, dead=count)
