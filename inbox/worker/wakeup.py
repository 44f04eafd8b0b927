"""How workers are woken: a delivery sends one NOTIFY for its batch, and only if a worker of that inbox sleeps.

One awake worker says nothing of the others, so the rule is the inverse of the dispatcher's: a worker about to sleep
takes a shared session lock "asleep", scans once more, and waits; a delivery that cannot have that lock for itself
rings. One that can holds it to its end, and the worker about to sleep waits for it before it scans.
"""

import asyncio

import psycopg

from mailroom import locks
from mailroom.session.listener import HEARTBEAT_S, Bell, heard
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async

PARTITION_KEY = locks.key("'{schema}.inbox_{inbox}'::regclass")
FALL_ASLEEP = Sql(
    "SELECT pg_advisory_lock_shared({asleep_lock}, {partition_key}) IS NULL",
    columns=("boolean",),
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
)
WAKE_UP = Sql(
    "SELECT pg_advisory_unlock_shared({asleep_lock}, {partition_key})",
    columns=("boolean",),
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
)


class InboxListener(Bell):
    """The bell of an inbox, for the lanes of one worker; the lock "asleep" is held while any of them sleeps."""

    def __init__(self, dsn: str, schema: str, inbox: str) -> None:
        super().__init__(dsn, schema, f"inbox_{inbox}", f"worker listener {inbox}")
        self._inbox = {"schema": schema, "inbox": inbox}
        self._sleepers: set[object] = set()
        self._wanted = asyncio.Event()
        self._asleep = asyncio.Event()

    async def asleep(self, loop: object, timeout_s: float) -> bool:
        """Count a lane as asleep, and wait until deliveries ring for it, at most so long; tell whether they do."""
        self._sleepers.add(loop)
        self._wanted.set()
        return await heard(self._asleep, timeout_s)

    def wake_up(self, loop: object) -> None:
        """Count a lane as awake."""
        self._sleepers.discard(loop)

    def release(self) -> None:
        """Let no lane wait any more, neither for a ring nor, without a connection, for somebody who would ring."""
        self._asleep.set()
        self.ring()

    async def attend(self, connection: psycopg.AsyncConnection) -> None:
        """Hold "asleep" while a lane sleeps, and hear what rings."""
        self._asleep.clear()
        while True:
            while not await heard(self._wanted, HEARTBEAT_S):
                # All lanes work, but other workers may sleep, and their bell is this one: what nobody takes would pile
                # up, in the end before the server.
                await self.beat(connection)
                async for _ in connection.notifies(timeout=0):
                    pass
            await run_async(connection, self._running(FALL_ASLEEP))
            self._asleep.set()
            while self._sleepers:
                await self.hear(connection)
            self._asleep.clear()
            self._wanted.clear()
            await run_async(connection, self._running(WAKE_UP))

    def _running(self, statement: Sql) -> Operation[None]:
        yield statement.at(**self._inbox)()
