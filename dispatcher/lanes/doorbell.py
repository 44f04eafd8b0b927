"""The doorbell: writers send NOTIFY only while the dispatcher sleeps, and no wake-up is lost when it goes to sleep.

A NOTIFY takes a lock at commit that the whole cluster shares: one per commit divides writers' throughput by 2 to 10. So
the dispatcher holds a session lock while it is awake, and the outbox's trigger rings only when it is free.
"""

import asyncio
from collections.abc import Awaitable, Callable

import psycopg

from dispatcher.delivery.writers import reading_writers, remaining
from mailroom.session.listener import Listener, heard
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async

FIRST_PAUSE_S = 0.004
BUSY_PAUSE_S = 0.005  # pause between drains while messages keep coming: cheaper than one NOTIFY each
# D-doorbell-5: A lane that is rung for a few messages sleeps on after them.
BUSY = 4  # messages per pause that are worth another pause; for fewer the doorbell is cheaper
UNSURE_POLL_S = 0.05  # longest sleep if the lock was not held: another session held it, so writers may not have rung

AWAKE_KEY = locks.key("'{schema}.{outbox}'::regclass")
# Never wait for this lock: a waiting session makes writers see it as taken, and no dispatcher would be awake.
# D-doorbell-2: NOTIFY only while the dispatcher sleeps.
# D-doorbell-4: "Awake" is tried for, never waited for.
TAKE = Sql(
    "SELECT pg_try_advisory_lock({awake_lock}, {awake_key})",
    columns=("boolean",),
    awake_lock=locks.AWAKE,
    awake_key=AWAKE_KEY,
)
RELEASE = Sql(
    "SELECT pg_advisory_unlock({awake_lock}, {awake_key})",
    columns=("boolean",),
    awake_lock=locks.AWAKE,
    awake_key=AWAKE_KEY,
)


class Doorbell:
    """Alternates between awake and asleep. `connection` is the one that empties the outbox `table`."""

    def __init__(
        self, connection: psycopg.AsyncConnection, schema: str, table: str, listener: Listener, poll_interval_s: float
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._table = table
        self._listener = listener
        self._poll_interval_s = poll_interval_s
        self._is_rung = False  # it has slept without "awake" until a writer rang, and so will every later writer
        self.awake = False

    async def serve(
        self,
        drain: Callable[[], Awaitable[int]],
        goes_on: Callable[[], bool],
        *,
        first: Callable[[], Awaitable[int]] | None = None,
        rest: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """Stay awake as long as messages come, then sleep until the doorbell rings or the poll is due.

        The message that woke us is delivered first. `first`, if given, delivers one batch only, so that "awake" is
        taken before a whole backlog is drained, and writers beside it stop ringing; it returns how much there was to
        do. `rest`, if given, drains on the way to sleep: it may look first, by a statement of its own, and be done if
        that sees nothing.

        One that was rung for less than `BUSY` sleeps on: without "awake" each writer rings, so there is none to wait
        for.

        The order makes sure that no writer is missed: (1) release "awake" and wait for the answer; (2) in a new
        statement read the writers, then drain; (3) until each of them has ended, drain with a backoff, and once more
        after the last one; (4) sleep. A writer locks the outbox before it checks "awake", and holds that lock until
        its rows are visible. So one that saw us awake is among the writers of (2), or the drain takes its rows.
        """
        rest = rest or drain
        ring = self._listener.next_ring()
        taken = await (first or drain)()
        if self._is_rung and 0 < taken < BUSY:
            self._is_rung = goes_on() and await heard(ring, self._poll_interval_s)
            return
        self._is_rung = False
        await self._take()
        while taken >= BUSY and goes_on():
            await asyncio.sleep(BUSY_PAUSE_S)
            taken = await drain()
            await self._take()
        held = self.awake
        ring = self._listener.next_ring()
        await self._release()
        writers = await run_async(self._connection, reading_writers(self._schema, self._table))
        await rest()
        pause_s = FIRST_PAUSE_S
        while writers and goes_on():
            if await heard(ring, pause_s):
                return  # others write: stay awake, and do all of this again before the next sleep
            writers = remaining(writers, await run_async(self._connection, reading_writers(self._schema, self._table)))
            await rest()
            pause_s = min(2 * pause_s, self._poll_interval_s)
        if goes_on():
            is_rung = await heard(ring, self._poll_interval_s if held else min(UNSURE_POLL_S, self._poll_interval_s))
            self._is_rung = held and is_rung

    async def _take(self) -> None:
        # Without the lock everything works too: a writer is checking it right now, or another session holds it.
        if not self.awake:
            self.awake = await run_async(self._connection, self._taking())

    def _taking(self) -> Operation[bool]:
        [(taken,)] = yield TAKE.at(schema=self._schema, outbox=self._table)()
        return bool(taken)

    async def _release(self) -> None:
        if self.awake:
            await run_async(self._connection, self._releasing())
            self.awake = False

    def _releasing(self) -> Operation[None]:
        yield RELEASE.at(schema=self._schema, outbox=self._table)()
