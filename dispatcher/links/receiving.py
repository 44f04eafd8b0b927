"""The one session at the target over which everything from all origins is received, and the room for it.

Origins take turns, a step each, in the order in which they ask. A step never waits for a source: whatever it needs from
there has been read before.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psycopg

from dispatcher.links.at_source.bounds import Position
from dispatcher.links.at_source.fetch import FetchedBatch
from dispatcher.links.receive import Reception
from dispatcher.links.receiver import Receiver, Taking
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run_async, run_in_transaction

# What all batches in memory may have together, and one of them, in bytes.
# D-links-21: Memory is shared out, not reserved.
TOTAL_BYTES = 64 * 1024 * 1024
BATCH_BYTES = 16 * 1024 * 1024


class Receiving:
    """Shares an autocommit connection among the origins of a node."""

    def __init__(self, connection: psycopg.AsyncConnection, schema: str) -> None:
        self._connection = connection
        self._receiver = Receiver(connection, schema)
        self._turn = asyncio.Lock()  # it is fair: the task that has waited longest is next

    @property
    def is_lost(self) -> bool:
        """Whether the connection can no longer be used."""
        return self._connection.closed

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation of single statements."""
        async with self._turn:
            return await run_async(self._connection, operation)

    async def transaction(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction."""
        async with self._turn:
            return await run_in_transaction(self._connection, operation)

    async def receive(
        self, origin: int, batch: FetchedBatch, position: Position, taking: Taking | None = None
    ) -> Reception:
        """Receive a batch; see `Receiver`."""
        async with self._turn:
            return await self._receiver.receive(origin, batch, position, taking=taking)


class Room:
    """How much may be in memory: every origin has its own share, so that none waits for another's batch.

    An origin has two batches in memory: one that is received, and the next one, which is fetched meanwhile. Only a
    message that is larger than the share may wait: one such at a time is in memory.
    """

    def __init__(self, total_bytes: int = TOTAL_BYTES, batch_bytes: int = BATCH_BYTES) -> None:
        self._total_bytes = total_bytes
        self._batch_bytes = batch_bytes
        self._large = asyncio.Lock()
        self.origins = 1

    @property
    def share(self) -> int:
        """The bytes that a batch of one origin may have now."""
        return max(1, min(self._batch_bytes, self._total_bytes // max(1, 2 * self.origins)))

    @contextlib.asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Hold that many bytes in this block."""
        if size <= self.share:
            yield
        else:
            async with self._large:
                yield
