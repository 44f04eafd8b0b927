"""Listening: a connection to itself, autocommit, never in a transaction, that turns notifications into wake-ups.

The order on each connection is LISTEN, then a ring (so that its owner scans), then waiting; whatever came while there
was no connection is found by that scan. Owners poll besides: nothing rests on a notification alone.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import psycopg
from psycopg import sql

from mailroom import backoff, locks
from mailroom.operation import Operation, Sql
from mailroom.settings import session_dsn
from mailroom.severing import answered
from mailroom.transaction import run_async

log = logging.getLogger("mailroom.bell")

HEARTBEAT_S = 5.0
ANSWER_S = 3.0
LONGEST_PAUSE_S = 30.0

CHANNEL = Sql("SELECT {channel} FROM (SELECT '{schema}.{table}'::regclass AS t) AS named", columns=("text",))


class Bell:
    """The bell of one table; `run` listens until cancelled."""

    def __init__(self, dsn: str, schema: str, table: str, role: str) -> None:
        self._dsn = session_dsn(dsn, role)
        self._names = {"schema": schema, "table": table, "channel": locks.channel("t")}
        self._next = asyncio.Event()

    def ring(self) -> None:
        """Wake whoever waits for the next ring."""
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    def next_ring(self) -> asyncio.Event:
        """Return what the next ring will set: take it before a scan, wait for it after, and none is missed."""
        return self._next

    async def run(self) -> None:
        """Listen, and connect again whenever the connection is lost, until cancelled."""
        failures = 0
        while True:
            try:
                async with listening(self._dsn, self._names) as connection:
                    failures = 0
                    self.ring()
                    await self.attend(connection)
            except (psycopg.Error, OSError, TimeoutError) as error:
                # Any trouble with LISTEN leaves polling; it is never a reason to stop.
                log.warning("not listening, polling meanwhile: %s", type(error).__name__)
                self.ring()
            failures += 1
            await asyncio.sleep(backoff.pause_s(failures, LONGEST_PAUSE_S))

    async def attend(self, connection: psycopg.AsyncConnection) -> None:
        """Do what is to be done with the listening connection, until it breaks."""
        while True:
            await self.hear(connection, HEARTBEAT_S)

    async def hear(self, connection: psycopg.AsyncConnection, timeout_s: float) -> None:
        """Wait for one notification, ring, and make sure that a silent connection is alive."""
        heard = False
        async for _ in connection.notifies(timeout=timeout_s, stop_after=1):
            heard = True
            self.ring()
        if not heard:
            # A black hole answers nothing and gives no error; the kernel answers keepalives for a paused server.
            await answered(connection, connection.execute("SELECT 1"), ANSWER_S)


def _naming(names: dict[str, str]) -> Operation[str]:
    [(channel,)] = yield CHANNEL.at(**names)()
    return str(channel)


async def heard(ring: asyncio.Event, timeout_s: float) -> bool:
    """Wait for a ring, at most so long; true if it came."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ring.wait(), timeout_s)
    return ring.is_set()


@contextlib.asynccontextmanager
async def listening(dsn: str, names: dict[str, str]) -> AsyncIterator[psycopg.AsyncConnection]:
    """Give a connection that listens to the bell of a table; it is closed afterwards, whatever its state."""
    connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    try:
        channel = await run_async(connection, _naming(names))
        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        yield connection
    finally:
        await connection.close()
