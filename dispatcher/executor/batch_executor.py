"""Runs the executor's transactions, one per batch, and keeps the floor above which they read."""

import time
from collections.abc import Callable

import psycopg

from dispatcher.delivery.dead import tell_of_dead
from dispatcher.delivery.deliverer import BATCH_ROWS, MAX_BYTES
from dispatcher.delivery.floor import Floor, ScanStart
from dispatcher.delivery.portion import Portion
from dispatcher.executor.applying.user_code import clearing_session
from dispatcher.executor.execute import BOUND_S, executing
from dispatcher.executor.execution import Execution
from mailroom import events
from mailroom.order import sequences
from mailroom.order.sequences import raising_sequences
from mailroom.sql.operation import Operation
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import StatementsGone, run_async, run_in_transaction


class BatchExecutor:
    """Executes batches over an autocommit connection of its own, one transaction each.

    `rows` and `max_bytes` limit a full batch (at least one executable); `portion` says how much of it to try. It begins
    nothing more after `bound_s` seconds. `progress` is called with each execution. `monotonic` is the clock for the
    time limit and of the `Floor`.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection,
        schema: str,
        *,
        rows: int = BATCH_ROWS,
        max_bytes: int = MAX_BYTES,
        portion: Portion | None = None,
        progress: Callable[[Execution], None] | None = None,
        bound_s: float = BOUND_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._rows = self._rows_next = rows
        self._max_bytes = max_bytes
        self._portion = portion or Portion()
        self._progress = progress
        self._bound_s = bound_s
        self._own_session = not is_pooled(connection)
        self._monotonic = monotonic
        self._floor = Floor("outbox_executable", monotonic)
        self._started = False

    async def drain(self) -> int:
        """Execute until nothing is left; return how many executables were taken."""
        taken = 0
        while True:
            execution = await self.execute()
            taken += execution.taken
            if not execution.more:
                return taken

    async def execute(self) -> Execution:
        """Execute one batch, or one step of a range."""
        if not self._started:
            # Rows may have been copied here without their sequence: what is sent from now on comes after them.
            sequences.tell(await run_in_transaction(self._connection, raising_sequences(self._schema)))
            self._started = True
        start, began = self._floor.start(), self._monotonic()
        rows, max_bytes = self._portion.of(self._rows_next), self._portion.of(self._max_bytes)
        try:
            with self._portion.tried():
                execution = await self._executed(start, rows, max_bytes)
        except psycopg.Error:
            self._floor = Floor("outbox_executable", self._monotonic)
            raise
        if execution.taken and events.heard(events.ExecutablesExecuted):
            taken, dead, replied = execution.taken, execution.dead, execution.replied
            took_s = self._monotonic() - began
            events.emit(events.ExecutablesExecuted(self._schema, taken, dead, replied, took_s))
        self._rows_next = execution.rows(self._rows)
        if execution.ran_user_code and self._own_session:
            try:
                await run_async(self._connection, clearing_session(), prepared=False)
            except psycopg.Error:
                await self._connection.close()  # ends what user code left in the session
                raise
        await run_async(self._connection, self._floor.raising(self._schema, execution))
        await tell_of_dead(self._connection, self._schema, ["execute"], execution.dead)
        if self._progress is not None:
            self._progress(execution)
        return execution

    async def _executed(self, start: ScanStart, rows: int, max_bytes: int) -> Execution:
        def operation() -> Operation[Execution]:
            return executing(
                self._schema,
                start=start,
                rows=rows,
                max_bytes=max_bytes,
                own_session=self._own_session,
                bound_s=self._bound_s,
                monotonic=self._monotonic,
            )

        try:
            return await run_in_transaction(self._connection, operation())
        except StatementsGone:
            # A function or trigger of the batch dropped them, and would do so again: so this time nothing is prepared.
            return await run_in_transaction(self._connection, operation(), prepared=False)
