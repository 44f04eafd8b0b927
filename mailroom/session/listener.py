"""Listening: a connection to itself, autocommit, never in a transaction, that turns notifications into wake-ups.

The order on each connection is LISTEN, then a ring (so that its owner scans), then waiting; whatever came while there
was no connection is found by that scan. Owners poll besides: nothing rests on a notification alone.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import psycopg
from psycopg import sql

from mailroom import locks, settings
from mailroom.errors import ConnectionFailed
from mailroom.session import backoff
from mailroom.session.disconnect import answered, sever
from mailroom.session.pooler import is_pooled
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async

log = logging.getLogger("mailroom.session.listener")

HEARTBEAT_S = 5.0
ANSWER_S = 3.0
LONGEST_PAUSE_S = 30.0
# A listener that is paused holds back vacuum and the queue of notifications for everybody. The heartbeat shows that
# this one is not. Where the kernel does not find one that takes nothing any more (a Unix socket), this ends it.
SESSION = settings.UNATTENDED | {"idle_session_timeout": "60s"}

CHANNEL = Sql("SELECT {channel} FROM (SELECT '{schema}.{table}'::regclass AS t) AS named", columns=("text",))
LISTEN = sql.SQL("LISTEN {}")
LISTENS = Sql("SELECT count(*) FROM pg_listening_channels()", columns=("bigint",))


class Bell:
    """The bell of one table; `run` listens until cancelled."""

    def __init__(self, dsn: str, schema: str, table: str, role: str) -> None:
        self._dsn = dsn
        self._role = role
        self._names = {"schema": schema, "table": table, "channel": locks.channel("t")}
        self._next = asyncio.Event()
        self._connection: psycopg.AsyncConnection | None = None
        self._heartbeat_at = 0.0

    def ring(self) -> None:
        """Wake whoever waits for the next ring."""
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    def next_ring(self) -> asyncio.Event:
        """Return what the next ring will set: take it before a scan, wait for it after, and none is missed."""
        return self._next

    async def run(self) -> None:
        """Listen, and connect again whenever the connection is lost, until cancelled. Through a pooler, do nothing."""
        failures = 0
        while True:
            try:
                async with self._listening() as connection:
                    if connection is None:
                        await asyncio.Event().wait()
                        return
                    failures = 0
                    self.ring()
                    await self.attend(connection)
            except (psycopg.Error, ConnectionFailed, OSError, TimeoutError) as error:
                # Any trouble with LISTEN leaves polling; it is never a reason to stop.
                failures += 1
                pause_s = backoff.pause_s(failures, LONGEST_PAUSE_S)
                if backoff.is_worth_a_line(failures, pause_s):
                    log.warning("%s: not listening, polling meanwhile (%s)", self._role, type(error).__name__)
                self.ring()
                await asyncio.sleep(pause_s)

    def listen_anew(self) -> None:
        """Drop the connection, which holds notifications back if it does not take them, and listen on another."""
        if self._connection is not None:
            sever(self._connection)

    async def attend(self, connection: psycopg.AsyncConnection) -> None:
        """Do what is to be done with the listening connection, until it breaks."""
        while True:
            await self.hear(connection)

    async def hear(self, connection: psycopg.AsyncConnection) -> None:
        """Wait for one notification and ring; or until it is time to make sure that the connection is alive."""
        async for _ in connection.notifies(timeout=self._until_heartbeat_s(), stop_after=1):
            self.ring()
        if not self._until_heartbeat_s():
            await self.beat(connection)

    async def beat(self, connection: psycopg.AsyncConnection) -> None:
        """Have the server say that the connection still listens."""
        # A black hole answers nothing and gives no error; the kernel answers keepalives for a paused server.
        channels = await answered(connection, run_async(connection, _counting_channels()), ANSWER_S)
        if not channels:
            raise psycopg.OperationalError("the session has ceased to listen")
        self._heartbeat_at = time.monotonic() + HEARTBEAT_S

    def _until_heartbeat_s(self) -> float:
        return max(0.0, self._heartbeat_at - time.monotonic())

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[psycopg.AsyncConnection | None]:
        """Give a connection that listens, None if a pooler is in the way; it is closed afterwards, whatever its state.

        A pooler gives the next statement another server connection, and to others the one that listens.
        """
        connection = await settings.connect_async(self._dsn, self._role, SESSION)
        try:
            if is_pooled(connection):
                log.warning(
                    "%s: polling only, since a pooler is in the way: for wake-ups, listen_dsn takes a connection "
                    "string that leads to the server itself",
                    self._role,
                )
                await connection.close()
                yield None
            else:
                channel = await run_async(connection, _naming(self._names))
                await connection.execute(LISTEN.format(sql.Identifier(channel)))
                self._heartbeat_at = time.monotonic() + HEARTBEAT_S
                self._connection = connection
                yield connection
        finally:
            self._connection = None
            await connection.close()


def _naming(names: dict[str, str]) -> Operation[str]:
    [(channel,)] = yield CHANNEL.at(**names)()
    return str(channel)


def _counting_channels() -> Operation[int]:
    [(count,)] = yield LISTENS.at()()
    return int(count)


async def heard(ring: asyncio.Event, timeout_s: float) -> bool:
    """Wait for a ring, at most so long; true if it came."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ring.wait(), timeout_s)
    return ring.is_set()
