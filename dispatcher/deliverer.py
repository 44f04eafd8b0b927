"""Where a delivery's transactions begin and end: clock recovery, the ceiling, the floor, and the one bad message."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import psycopg

from dispatcher.deliver import Delivery, burying, delivering, reading_oldest, recovering_clock
from dispatcher.floor import Floor
from mailroom.clock import WARN_CLOCK
from mailroom.operation import Operation, T
from mailroom.stamping import raising_ceiling
from mailroom.transaction import run_async

log = logging.getLogger("mailroom.dispatcher")

DATA_ERRORS = ("22", "23", "54")  # classes of SQLSTATE: data exception, constraint violation, program limit exceeded
ROWS = 10_000
MAX_BYTES = 32 * 1024 * 1024


class Deliverer:
    """Delivers over one autocommit connection of its own, one transaction per batch.

    `rows` and `max_bytes` bound a batch (one message at least); `monotonic` is the clock of its `Floor`.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection,
        schema: str,
        *,
        rows: int = ROWS,
        max_bytes: int = MAX_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._rows = rows
        self._max_bytes = max_bytes
        self._monotonic = monotonic
        self._floor = Floor("outbox", monotonic)
        self._recovered = False

    async def drain(self, now: datetime | None = None, progress: Callable[[Delivery], None] | None = None) -> int:
        """Deliver until a batch comes that is not full; returns how many messages were taken."""
        taken = 0
        while True:
            delivery = await self.deliver(now)
            taken += delivery.taken
            if progress is not None:
                progress(delivery)
            if not delivery.more:
                return taken

    async def deliver(self, now: datetime | None = None) -> Delivery:
        """Deliver one batch. A message that the database refuses goes to `dead_letter`, and only that one."""
        if not self._recovered:
            # Before the first clock is given out on this connection: a crash may have set the sequence back.
            clock = await self._transaction(recovering_clock(self._schema))
            if clock >= WARN_CLOCK:
                log.warning("the clock stands at %d, more than half of what it can ever count", clock)
            self._recovered = True
        rows, failed = self._rows, False
        while True:
            alone = failed and rows == 1
            floor = await self._before_oldest() if alone else self._floor.start()
            try:
                delivery = await self._transaction(
                    delivering(self._schema, floor=floor, rows=rows, max_bytes=self._max_bytes, now=now)
                )
            except psycopg.Error as error:
                self._floor = Floor("outbox", self._monotonic)
                if (error.sqlstate or "")[:2] not in DATA_ERRORS:
                    raise
                if alone:
                    return await self._bury(floor + 1, error)
                # Once more first: a subscription may have become visible just before its inbox's partition was known.
                rows, failed = (max(1, rows // 2) if failed else rows), True
                continue
            if delivery.ceiling is not None:
                await self._transaction(raising_ceiling(self._schema, delivery.ceiling))
                continue
            await run_async(self._connection, self._floor.raising(self._schema, delivery))
            return replace(delivery, more=delivery.more or rows < self._rows)

    async def _before_oldest(self) -> int:
        # Above this floor one row is that very message, even if one that stands before it commits meanwhile.
        oldest = await run_async(self._connection, reading_oldest(self._schema))
        return 0 if oldest is None else oldest - 1

    async def _bury(self, position: int, error: psycopg.Error) -> Delivery:
        # Not the error's detail: it repeats the row.
        names = (error.diag.constraint_name, error.diag.table_name, error.diag.column_name)
        reason = f"{type(error).__name__} ({error.sqlstate}) {' '.join(name for name in names if name)}".strip()
        log.error("a message could not be delivered and went to dead_letter: %s", reason)
        dead = await self._transaction(burying(self._schema, position=position, reason=reason))
        return Delivery(dead, 0, 0, 0, 0, dead, None, None, None, 0, more=True)

    async def _transaction(self, operation: Operation[T]) -> T:
        async with self._connection.transaction():
            return await run_async(self._connection, operation)
