"""How workers are woken: a delivery sends one NOTIFY for its batch, and only if a worker of that inbox sleeps.

That one worker is awake does not mean that the others are, so the rule is the inverse of the dispatcher's. A worker
about to sleep takes a shared session lock "asleep", claims once more, and waits. A delivery tries to lock "asleep"
exclusively. If it cannot, it notifies. If it can, it holds the lock until its transaction ends, and a worker about to
sleep waits for that before its last claim.

The workers of all inboxes that read a log sleep on the log too, by the same rule: a delivery into it tries one lock and
sends one NOTIFY, however many read it. The inbox's own lock says that the inbox has a worker, and its own channel rings
for what is put into it by hand.
"""

import asyncio

import psycopg

from mailroom.session.home import Home
from mailroom.session.listener import HEARTBEAT_S, Listener, heard, naming
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async

PARTITION_KEY = locks.key("'{schema}.inbox_{inbox}'::regclass")
# D-doorbell-6: Workers are woken by the inverse rule.
FALL_ASLEEP = Sql(
    "SELECT pg_advisory_lock_shared({asleep_lock}, {partition_key}) IS NULL",
    columns=("boolean",),
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
)
LOG_KEY = locks.key("'{schema}.log_{log}'::regclass")
# D-logs-11: Readers of a log sleep on the log.
FALL_ASLEEP_ON_LOG = Sql(
    "SELECT pg_advisory_lock_shared({asleep_lock}, {partition_key}) IS NULL, "
    "pg_advisory_lock_shared({asleep_lock}, {log_key}) IS NULL",
    columns=("boolean", "boolean"),
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
    log_key=LOG_KEY,
)
WAKE_UP_ON_LOG = Sql(
    "SELECT pg_advisory_unlock_shared({asleep_lock}, {log_key}), "
    "pg_advisory_unlock_shared({asleep_lock}, {partition_key})",
    columns=("boolean", "boolean"),
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
    log_key=LOG_KEY,
)
READS = Sql("SELECT log FROM {schema}.inbox_registry WHERE name = '{inbox}' AND log IS NOT NULL", columns=("text",))
WAKE_UP = Sql(
    "SELECT pg_advisory_unlock_shared({asleep_lock}, {partition_key})",
    columns=("boolean",),
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
)


class InboxListener(Listener):
    """The listener of one worker, for all its loops; it holds the lock "asleep" while any of them sleeps."""

    def __init__(self, home: Home | str, schema: str, inbox: str) -> None:
        super().__init__(home, schema, f"inbox_{inbox}", f"worker listener {inbox}")
        self._inbox = {"schema": schema, "inbox": inbox}
        self._log: str | None = None
        self._sleepers: set[object] = set()
        self._wanted = asyncio.Event()
        self._asleep = asyncio.Event()

    async def asleep(self, loop: object, timeout_s: float) -> bool:
        """Count a loop as asleep, and wait at most `timeout_s` until deliveries notify; return whether they do."""
        self._sleepers.add(loop)
        self._wanted.set()
        return await heard(self._asleep, timeout_s)

    def wake_up(self, loop: object) -> None:
        """Count a loop as awake."""
        self._sleepers.discard(loop)

    def release(self) -> None:
        """Let no loop wait any longer, neither for a notification nor, without a connection, for the lock."""
        self._asleep.set()
        self.ring()

    async def attend(self, connection: psycopg.AsyncConnection) -> None:
        """Hold the lock "asleep" while a loop sleeps, and receive notifications."""
        self._asleep.clear()
        while True:
            while not await heard(self._wanted, HEARTBEAT_S):
                # All loops are busy, but notifications for other, sleeping workers arrive here too. Unread, they would
                # pile up, in the end on the server.
                await self.beat(connection)
                async for _ in connection.notifies(timeout=0):
                    pass
            await run_async(connection, self._running(FALL_ASLEEP, FALL_ASLEEP_ON_LOG))
            self._asleep.set()
            while self._sleepers:
                await self.hear(connection)
            self._asleep.clear()
            self._wanted.clear()
            await run_async(connection, self._running(WAKE_UP, WAKE_UP_ON_LOG))

    def _naming(self) -> Operation[list[str]]:
        """Return the channels to listen on: the inbox's own, and that of the log that it reads."""
        channels = yield from super()._naming()
        found = yield READS.at(**self._inbox)()
        self._log = found[0][0] if found else None
        if self._log is not None:
            channels.append((yield from naming(self._inbox["schema"], f"log_{self._log}")))
        return channels

    def _running(self, statement: Sql, on_log: Sql) -> Operation[None]:
        if self._log is None:
            yield statement.at(**self._inbox)()
        else:
            yield on_log.at(**self._inbox, log=self._log)()
