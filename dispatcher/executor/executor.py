"""Where an execution's transactions begin and end, and the floor above which it looks."""

import time
from collections.abc import Callable

import psycopg

from dispatcher.deliverer import MAX_BYTES, ROWS
from dispatcher.executor.execute import BOUND_S, Execution, executing
from dispatcher.executor.guest import clearing_session
from dispatcher.floor import Floor
from dispatcher.portion import Portion
from mailroom.session.pooler import is_pooled
from mailroom.sql.runner import run_async


class Applier:
    """Executes over one autocommit connection of its own, one transaction per batch.

    `rows` and `max_bytes` bound a full batch (one executable at least), of which `portion` says how much is tried, and
    `bound_s` how long it may take, in seconds by `monotonic`, which is also the clock of its `Floor`.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection,
        schema: str,
        *,
        rows: int = ROWS,
        max_bytes: int = MAX_BYTES,
        portion: Portion | None = None,
        bound_s: float = BOUND_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._rows = self._rows_next = rows
        self._max_bytes = max_bytes
        self._portion = portion or Portion()
        self._bound_s = bound_s
        self._ours = not is_pooled(connection)
        self._monotonic = monotonic
        self._floor = Floor("outbox_executable", monotonic)

    async def drain(self, progress: Callable[[Execution], None] | None = None) -> int:
        """Execute until there is nothing left; returns how many executables were taken."""
        taken = 0
        while True:
            execution = await self.execute()
            taken += execution.taken
            if progress is not None:
                progress(execution)
            if not execution.more:
                return taken

    async def execute(self) -> Execution:
        """Execute one batch, or one step of a range."""
        start = self._floor.start()
        rows, max_bytes = self._portion.of(self._rows_next), self._portion.of(self._max_bytes)
        try:
            with self._portion.tried():
                async with self._connection.transaction():
                    execution = await run_async(
                        self._connection,
                        executing(
                            self._schema,
                            start=start,
                            rows=rows,
                            max_bytes=max_bytes,
                            ours=self._ours,
                            bound_s=self._bound_s,
                            monotonic=self._monotonic,
                        ),
                    )
        except psycopg.Error:
            self._floor = Floor("outbox_executable", self._monotonic)
            raise
        self._rows_next = execution.rows(self._rows)
        if execution.guest and self._ours:
            try:
                await run_async(self._connection, clearing_session())
            except psycopg.Error:
                await self._connection.close()  # what the guest left goes with it
                raise
        await run_async(self._connection, self._floor.raising(self._schema, execution))
        return execution
