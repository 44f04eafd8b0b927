"""The house: it is kept over a session of its own, while the lane leads, and its trouble is never the lane's.

Apart from the lease, which has to be renewed on time, however long something in the house takes.
"""

import asyncio
import logging

import psycopg

from dispatcher.janitor import Janitor
from dispatcher.lane import KEEPER, open_session
from mailroom.errors import ConnectionFailed
from mailroom.session import backoff

log = logging.getLogger("mailroom.dispatcher")

# How often it is looked after: often while floors move, for what a claim passes over under a held snapshot is what was
# reaped since the last look; and while a parked key's messages are moved aside.
INTERVAL_S = 0.5
BUSY_INTERVAL_S = 0.1
LONGEST_PAUSE_S = 30.0


class Housekeeping:
    """A janitor and the session it works over."""

    def __init__(self, dsn: str, janitor: Janitor) -> None:
        self._dsn = dsn
        self._janitor = janitor

    async def run(self, leading: asyncio.Event) -> None:
        """Keep it while `leading` is set, and connect again whenever the connection is lost, until cancelled."""
        failures = 0
        while True:
            await leading.wait()
            try:
                async with open_session(self._dsn, "dispatcher housekeeping", KEEPER) as session:
                    while leading.is_set():
                        unfinished = await self._janitor.run_once(session)
                        failures = 0
                        await asyncio.sleep(BUSY_INTERVAL_S if unfinished else INTERVAL_S)
            except (psycopg.Error, ConnectionFailed, OSError, TimeoutError) as error:
                failures += 1
                pause_s = backoff.pause_s(failures, LONGEST_PAUSE_S)
                if pause_s >= 1:  # before that, the lane has lost its connections too, and says so
                    log.warning("the house is not kept (%s), trying again", type(error).__name__)
                await asyncio.sleep(pause_s)
