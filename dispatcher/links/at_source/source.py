"""A session at a source: every step over it has a limit of time, and it is rung when something was stamped for us."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import psycopg
from psycopg import sql

from dispatcher.lanes.leading import open_session
from dispatcher.links.at_source.asleep import falling_asleep, naming_channel, waking_up
from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.session import settings
from mailroom.session.disconnect import answered_within
from mailroom.session.listener import LISTEN
from mailroom.sql.operation import Operation, T
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import run_async, run_in_transaction

# A batch is found by the primary key; a plan that was made while `transit` was empty must not scan it. Policies may
# hold readers apart: whether they hide what is ours is asked (`mailroom.links.handshake.hello`).
SOURCE_SESSION = settings.UNATTENDED | settings.UNDER_POLICIES | {
    "statement_timeout": "30s", "lock_timeout": "2s", "idle_session_timeout": "60s",
    "enable_seqscan": "off", "enable_bitmapscan": "off", "plan_cache_mode": "force_generic_plan",
}  # fmt: skip
ANSWER_S = 10.0  # how long the source may take for a step


class SourceFailed(Exception):
    """A step at the source failed, or it is not reached; `error` says how. The target is well."""

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__)
        self.error = error


class Source:
    """An autocommit session at the source, whose schema is `schema`."""

    def __init__(self, connection: psycopg.AsyncConnection, schema: str) -> None:
        self.connection = connection
        self.schema = schema
        self.is_asleep = False
        self._link: int | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the session can no longer be used."""
        return self.connection.closed

    async def ask(self, operation: Operation[T], within_s: float | None = None) -> T:
        """Run an operation of single statements; whatever the database or the network refuses is `SourceFailed`."""
        return await self.answer(run_async(self.connection, operation), within_s)

    async def transaction(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction."""
        return await self.answer(run_in_transaction(self.connection, operation))

    async def answer(self, work: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """Return the result of `work`, which waits for this session; it is disconnected after `within_s` seconds."""
        try:
            return await answered_within(self.connection, work, ANSWER_S if within_s is None else within_s)
        except (psycopg.Error, OSError) as error:
            raise SourceFailed(error) from error

    async def listen(self, link: int) -> None:
        """Be rung for a link, while asleep."""
        if self._link != link:
            channel = await self.ask(naming_channel(self.schema, link))
            await self.answer(self.connection.execute(LISTEN.format(sql.Identifier(channel))))
            self._link = link

    async def fall_asleep(self) -> None:
        """Have whatever is stamped from now on ring. Look for rows once more before `wait`."""
        await self.ask(falling_asleep(self.schema))
        self.is_asleep = True

    async def wake_up(self) -> None:
        """Be rung no longer: a NOTIFY takes a lock of the whole server."""
        if self.is_asleep:
            await self.ask(waking_up(self.schema))
            self.is_asleep = False

    async def wait(self, rung: asyncio.Event, timeout_s: float) -> None:
        """Wait until the source rings, or `rung` is set, at most so long."""
        waits = [asyncio.create_task(each) for each in (self._hear(timeout_s), _set(rung))]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            results = await asyncio.gather(*waits, return_exceptions=True)
        rung.clear()
        for result in results:
            if isinstance(result, psycopg.Error | OSError):
                raise SourceFailed(result) from result

    async def _hear(self, timeout_s: float) -> None:
        # Cancelled while it waits it sends nothing, since the session is idle. What it has read is seen in the tables.
        async for _ in self.connection.notifies(timeout=timeout_s, stop_after=1):
            pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.asynccontextmanager
async def open_source(dsn: str, schema: str) -> AsyncIterator[Source]:
    """Open a session at a source. Raises `SourceFailed`, and `ConfigurationError` if `dsn` leads through a pooler."""
    async with contextlib.AsyncExitStack() as session:
        try:
            connection = await session.enter_async_context(open_session(dsn, "links", SOURCE_SESSION))
        except (ConnectionFailed, psycopg.Error, OSError, TimeoutError) as error:
            raise SourceFailed(error) from error
        if is_pooled(connection):
            raise ConfigurationError(
                "the connection string leads through a pooler, and a link needs a session of its own: give one that "
                "leads to the server itself",
                code="MR-pooler-in-the-way",
            )
        yield Source(connection, schema)
