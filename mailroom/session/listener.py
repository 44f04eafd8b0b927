"""A listener turns notifications into wake-ups, over an autocommit connection of its own, never in a transaction.

On each connection the order is LISTEN, wake-up, wait: the owner's scan after the wake-up finds what came while there
was no connection. Owners also poll, so nothing depends on a notification alone.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import psycopg
from psycopg import sql

from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.session import backoff, settings
from mailroom.session.disconnect import answered_within, disconnect
from mailroom.session.home import Home
from mailroom.session.repeats import Repeats, cause
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import run_async

log = logging.getLogger("mailroom.session.listener")

HEARTBEAT_S = 5.0
ANSWER_S = 3.0
LONGEST_PAUSE_S = 30.0
# A paused listener holds back vacuum and the notification queue for all. The heartbeat keeps a live one from
# this timeout, which ends a paused one where TCP timeouts cannot (on a Unix socket).
LISTENER_SESSION = settings.UNATTENDED | {"idle_session_timeout": "60s"}

CHANNEL = Sql("SELECT {channel} FROM (SELECT '{schema}.{table}'::regclass AS t) AS named", columns=("text",))
LISTEN = sql.SQL("LISTEN {}")
LISTENS = Sql("SELECT count(*) FROM pg_listening_channels()", columns=("bigint",))


class Listener:
    """Listens on the channel of one table; `run` does so until cancelled."""

    def __init__(self, home: Home | str, schema: str, table: str, role: str) -> None:
        self._home = Home.of(home)
        self._role = role
        self._repeats = Repeats()
        self._names = (schema, table)
        self._next = asyncio.Event()
        self._connection: psycopg.AsyncConnection | None = None
        self._heartbeat_at = 0.0

    def ring(self) -> None:
        """Wake all that wait for the next ring."""
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    def rung(self, channel: str | None) -> None:
        """Ring for a notification on that channel; None: for any that were missed while there was no listener."""
        self.ring()

    def next_ring(self) -> asyncio.Event:
        """Return the event that the next ring sets. Take it before a scan and wait for it after: no ring is missed."""
        return self._next

    async def run(self) -> None:
        """Listen until cancelled, and reconnect when the connection is lost. Through a pooler, do nothing."""
        failures = 0
        while True:
            try:
                async with self._listening() as connection:
                    if connection is None:
                        await asyncio.Event().wait()
                        return
                    failures = 0
                    self._repeats.over()
                    self.rung(None)
                    await self.attend(connection)
            except (psycopg.Error, ConnectionFailed, ConfigurationError, OSError, TimeoutError) as error:
                # Without LISTEN the owner still polls, so no error here ends it.
                failures += 1
                why = cause(error)
                if (again := self._repeats.struck(why)) is not None:
                    log.warning("%s: not listening, polling meanwhile (%s)%s", self._role, why, again)
                self.rung(None)
                await asyncio.sleep(backoff.pause_s(failures, LONGEST_PAUSE_S))

    def listen_anew(self) -> None:
        """Reconnect: a connection that does not read its notifications holds back the queue."""
        if self._connection is not None:
            disconnect(self._connection)

    async def attend(self, connection: psycopg.AsyncConnection) -> None:
        """Serve the listening connection until it breaks."""
        while True:
            await self.hear(connection)

    async def hear(self, connection: psycopg.AsyncConnection) -> None:
        """Wait for one notification and ring, or until the heartbeat is due."""
        async for notification in connection.notifies(timeout=self._until_heartbeat_s(), stop_after=1):
            self.rung(notification.channel)
        if not self._until_heartbeat_s():
            await self.beat(connection)

    async def beat(self, connection: psycopg.AsyncConnection) -> None:
        """Ask the server whether the connection still listens."""
        self._home.check_room()
        # Dropped packets give no error, and the kernel of a paused server answers keepalives.
        channels = await answered_within(connection, run_async(connection, _counting_channels()), ANSWER_S)
        if not channels:
            raise psycopg.OperationalError("the session has ceased to listen")
        self._heartbeat_at = time.monotonic() + HEARTBEAT_S

    def _naming(self) -> Operation[list[str]]:
        """Return the channels to listen on."""
        return [(yield from naming(*self._names))]

    def _until_heartbeat_s(self) -> float:
        return max(0.0, self._heartbeat_at - time.monotonic())

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[psycopg.AsyncConnection | None]:
        """Open a listening connection, or yield None behind a pooler; close it in any case.

        A pooler would run the next statement on another connection, and give the listening one to others.
        """
        connection = await self._home.connect_async(self._role, LISTENER_SESSION)
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
                for channel in await run_async(connection, self._naming()):
                    await connection.execute(LISTEN.format(sql.Identifier(channel)))
                self._heartbeat_at = time.monotonic() + HEARTBEAT_S
                self._connection = connection
                yield connection
        finally:
            self._connection = None
            await connection.close()


def naming(schema: str, table: str) -> Operation[str]:
    """Return the name of a table's channel."""
    [(channel,)] = yield CHANNEL.at(schema=schema, table=table, channel=locks.channel("t"))()
    return str(channel)


def _counting_channels() -> Operation[int]:
    [(count,)] = yield LISTENS.at()()
    return int(count)


async def heard(ring: asyncio.Event, timeout_s: float) -> bool:
    """Wait for a ring, at most `timeout_s` seconds; return whether it came."""
    # Not wait_for: before Python 3.12 it drops a cancellation that comes together with the ring.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await ring.wait()
    return ring.is_set()
