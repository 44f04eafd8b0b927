"""Logs who is in the way: which session of Mailroom waits long for a lock, for which lock, and who holds it.

A waiting session cannot ask, so another one does: a lane's keeper, or one beside a `deliver_all`. It covers all of
Mailroom in the database, so workers and commands need none of their own.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import cache

import psycopg

from mailroom.errors import ConnectionFailed
from mailroom.session import settings
from mailroom.sql.runner import run_async
from mailroom.sql.waits import LONG_S, NotedWait, reading_waits

log = logging.getLogger("mailroom.dispatcher")

LOOK_INTERVAL_S = 1.0


class Telling:
    """Tells each long wait in one database once. The lanes of a process share it, and take turns in looking."""

    def __init__(self) -> None:
        self._noted = NotedWait()
        self._looked = float("-inf")

    async def look(self, connection: psycopg.AsyncConnection) -> None:
        """Look which sessions wait, unless another look was within the last second."""
        if time.monotonic() - self._looked < LOOK_INTERVAL_S:
            return
        self._looked = time.monotonic()
        for wait in self._noted.long(await run_async(connection, reading_waits())):
            log.warning("%s", wait)


def telling(connection: psycopg.AsyncConnection) -> Telling:
    """Return what all lanes of this process share that work on this connection's database."""
    return _telling(connection.info.host, connection.info.port, connection.info.dbname)


@cache
def _telling(host: str, port: int, database: str) -> Telling:
    return Telling()


@contextlib.asynccontextmanager
async def told(dsn: str) -> AsyncIterator[None]:
    """Log long waits while this block runs: over a session of its own, which a short block never opens."""

    async def look() -> None:
        await asyncio.sleep(LONG_S / 2)
        try:
            connection = await settings.connect_async(dsn, "waits", settings.UNATTENDED)
            async with connection:
                while True:
                    await telling(connection).look(connection)
                    await asyncio.sleep(LOOK_INTERVAL_S)
        except (psycopg.Error, ConnectionFailed) as error:
            log.debug("cannot tell who is in the way: %s", type(error).__name__)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait([looking])
