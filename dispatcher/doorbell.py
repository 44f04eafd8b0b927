"""The doorbell: NOTIFY reaches the dispatcher only while it sleeps, and no wake-up is lost on the way to sleep.

NOTIFY in every commit takes a lock shared by the whole cluster and costs writers 2 to 10 times their throughput. So
the dispatcher holds a session lock while it is awake, and the outbox's trigger rings only when nobody holds it.
"""

import asyncio
from collections.abc import Awaitable, Callable

import psycopg

from dispatcher.writers import reading_writers, remaining
from mailroom import locks
from mailroom.session.listener import Bell, heard
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async

FIRST_PAUSE_S = 0.004
BUSY_PAUSE_S = 0.005  # a nap between drains while messages keep coming: cheaper than being rung for each
BUSY = 4  # messages in a nap that are worth another one; fewer come cheaper by the bell
UNSURE_POLL_S = 0.05  # sleep at most so long after not having been awake: writers may have counted on it

AWAKE_KEY = locks.key("'{schema}.{outbox}'::regclass")
# Tried, not waited for: a session in the queue for the lock would make writers believe that somebody is awake.
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
    """Awake and asleep by turns; `connection` is the one that empties the outbox `table`."""

    def __init__(
        self, connection: psycopg.AsyncConnection, schema: str, table: str, bell: Bell, poll_interval_s: float
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._table = table
        self._bell = bell
        self._poll_interval_s = poll_interval_s
        self.awake = False

    async def serve(
        self,
        drain: Callable[[], Awaitable[int]],
        goes_on: Callable[[], bool],
        *,
        first: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """Be awake as long as messages come, then sleep until the bell rings or the poll is due: one turn of the lane.

        What woke us is delivered before anything else: by `first` if given, which delivers one batch only, so that
        writers beside a backlog do not ring until its end.

        The order makes sure that no writer is missed: (1) let go of "awake" and wait for the answer; (2) in a new
        statement read the writers, then drain; (3) until each of them has left, drain with a back-off, and once more
        after the last has left; (4) sleep. A writer takes its lock on the outbox before it looks at "awake" and drops
        it after its rows are visible: one that saw us awake is among the writers of (2), or its rows in the drain.
        """
        taken = await (first or drain)()
        await self._take()
        while taken >= BUSY and goes_on():
            await asyncio.sleep(BUSY_PAUSE_S)
            taken = await drain()
            await self._take()
        held = self.awake
        ring = self._bell.next_ring()
        await self._release()
        writers = await run_async(self._connection, reading_writers(self._schema, self._table))
        await drain()
        pause_s = FIRST_PAUSE_S
        while writers and goes_on():
            if await heard(ring, pause_s):
                return  # others write: back to being awake, and all of this again before the next sleep
            writers = remaining(writers, await run_async(self._connection, reading_writers(self._schema, self._table)))
            await drain()
            pause_s = min(2 * pause_s, self._poll_interval_s)
        if goes_on():
            await heard(ring, self._poll_interval_s if held else min(UNSURE_POLL_S, self._poll_interval_s))

    async def _take(self) -> None:
        # Not had, everything goes on without it: a writer is looking this instant, or another session holds it.
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
