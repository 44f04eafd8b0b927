"""Housekeeping: runs the janitor over a session of its own while the lane leads, so its errors never end the lane.

It does not share the keeper's session: the lease must be renewed on time, however long a round takes.
"""

import asyncio
import logging

import psycopg

from dispatcher.housekeeping.janitor import Janitor
from dispatcher.lanes.leading import KEEPER, open_session
from mailroom.errors import ConnectionFailed
from mailroom.session import backoff
from mailroom.session.home import Home
from mailroom.session.repeats import Repeats, cause

log = logging.getLogger("mailroom.dispatcher")

# Pause between two rounds. Short while floors move, since under a held snapshot a claim reads all rows that were reaped
# since the last round; and while messages of parked keys move to `parked`.
# D-daemon-3: Housekeeping has a session of its own.
INTERVAL_S = 0.5
BUSY_INTERVAL_S = 0.1
LONGEST_PAUSE_S = 30.0


class Housekeeping:
    """Runs a janitor over a session of its own."""

    def __init__(self, home: Home, janitor: Janitor) -> None:
        self._home = home
        self._janitor = janitor
        self._repeats = Repeats()

    async def run(self, leading: asyncio.Event) -> None:
        """Run rounds while `leading` is set, and reconnect whenever the connection is lost, until cancelled."""
        failures = 0
        while True:
            await leading.wait()
            try:
                async with open_session(self._home, "dispatcher housekeeping", KEEPER) as session:
                    while leading.is_set():
                        unfinished = await self._janitor.run_once(session)
                        failures = 0
                        self._repeats.over()
                        await asyncio.sleep(BUSY_INTERVAL_S if unfinished else INTERVAL_S)
            except (psycopg.Error, ConnectionFailed, OSError, TimeoutError) as error:
                failures += 1
                pause_s = backoff.pause_s(failures, LONGEST_PAUSE_S)
                if pause_s >= 1:  # earlier, the lane has usually lost its connections too, and logs that
                    why = cause(error)
                    if (again := self._repeats.struck(why)) is not None:
                        log.warning("dispatcher housekeeping: failed (%s), trying again%s", why, again)
                await asyncio.sleep(pause_s)
