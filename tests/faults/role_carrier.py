"""A carrier: all that a link does, once through and in turns: stamp, fetch, receive, acknowledge, trim.

It uses the daemon's own parts without its lanes, lease and waiting. So what it does is the same each time, and each
statement of it can be struck by its number.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import psycopg

from dispatcher.delivery.deliverer import Deliverer
from dispatcher.housekeeping.trim import Trim
from dispatcher.lanes.leading import KEEPER, LANE, open_session
from dispatcher.links import receive
from dispatcher.links.at_source.acknowledge import acknowledging, making_durable
from dispatcher.links.at_source.bounds import bounding, reading_position
from dispatcher.links.at_source.fetch import fetching
from dispatcher.links.receiver import Receiver
from mailroom.errors import ConnectionFailed
from mailroom.links.handshake.hello import LinkTaken, asking_topics, greeting, matching
from mailroom.links.handshake.target import introducing, opening, pinning, reading_origins
from mailroom.session import settings
from mailroom.sql.runner import run_async, run_in_transaction
from mailroom.values.names import DEFAULT_SCHEMA as SCHEMA
from tests.faults.role import Control
from tests.faults.task import Task
from tests.support.links import wanted_topics

ROWS = 4  # of a batch: what is sent for one case takes several
ATTEMPTS = 6


def play(task: Task, control: Control) -> None:
    """Carry what there is from `task.direct` to `task.dsn`, and begin anew where a session was lost."""
    asyncio.run(carry(task.direct, task.dsn))
    control.report(passes=control.passes)


async def carry(source: str, target: str) -> None:
    """Carry what there is until nothing is left; a session that is lost is made anew, as the daemon does."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await _carry(source, target)
            return
        except (psycopg.Error, ConnectionFailed, LinkTaken):
            if attempt == ATTEMPTS:
                raise


@dataclass(slots=True)
class _Sessions:
    """One for each purpose, as in the daemon: a fault strikes one of them alone."""

    delivering: psycopg.AsyncConnection
    asking: psycopg.AsyncConnection
    receiving: psycopg.AsyncConnection
    keeping: psycopg.AsyncConnection
    run: UUID = field(default_factory=uuid4)


async def _carry(source: str, target: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        sessions = _Sessions(
            await stack.enter_async_context(open_session(source, "carrier delivering", LANE)),
            await stack.enter_async_context(open_session(source, "carrier asking", settings.UNATTENDED)),
            await stack.enter_async_context(
                open_session(target, "carrier receiving", LANE | receive.RECEIVING_SESSION)
            ),
            await stack.enter_async_context(open_session(target, "carrier keeping", KEEPER)),
        )
        await _Carrying(sessions).run()


class _Carrying:
    def __init__(self, sessions: _Sessions) -> None:
        self._at = sessions
        self._deliverer = Deliverer(sessions.delivering, SCHEMA, rows=ROWS)
        self._receiver = Receiver(sessions.receiving, SCHEMA)
        # Nothing is kept for longer than it must be, and a portion is not all there is.
        self._source_trim = Trim(SCHEMA, rows=ROWS - 1)
        self._target_trim = Trim(SCHEMA, receipts=3, beyond_s=0.0)

    async def run(self) -> None:
        """Go on until nothing was stamped and nothing received."""
        taken = (await self._deliverer.deliver()).taken  # first: before that nobody is let in after a crash
        link, origin = await self._hello()
        while True:
            received = await self._receive(link, origin)
            await self._trim()
            if not taken and not received:
                return
            taken = (await self._deliverer.deliver()).taken

    async def _hello(self) -> tuple[int, int]:
        asking, receiving = self._at.asking, self._at.receiving
        [origin] = await run_async(receiving, reading_origins(SCHEMA))
        party = await run_async(receiving, introducing(SCHEMA, origin))
        async with asking.transaction():
            greeted = await run_async(asking, greeting(SCHEMA, origin.name, party, origin.pinned, self._at.run))
        async with receiving.transaction():
            await run_async(receiving, pinning(SCHEMA, origin, greeted))
        topics = await run_async(receiving, wanted_topics(SCHEMA, origin.name))
        async with asking.transaction():
            await run_async(asking, asking_topics(SCHEMA, greeted.link, self._at.run, topics))
        return greeted.link, origin.number

    async def _receive(self, link: int, origin: int) -> int:
        asking, receiving = self._at.asking, self._at.receiving
        position = await run_async(receiving, reading_position(SCHEMA, origin))
        bounds = await run_async(asking, bounding(SCHEMA, link, position, rows=ROWS))
        if bounds.verdict != "agrees":
            if await run_async(receiving, reading_position(SCHEMA, origin)) != position:
                return await self._receive(link, origin)  # another carrier has received since
            raise RuntimeError(f"{bounds} at {position}: no fault of this matrix loses history")
        await run_async(asking, matching(SCHEMA, link, self._at.run))
        async with receiving.transaction():
            await run_async(receiving, opening(SCHEMA, origin))
        rows = 0
        if bounds.last is not None:
            batch = await run_async(asking, fetching(SCHEMA, link, after=position.seq, to=bounds.last))
            reception = await self._receiver.receive(origin, batch, position)
            if reception.outcome not in ("taken", "elsewhere"):
                raise RuntimeError(f"{reception} at {position}")
            rows = batch.rows
            if reception.position is None:
                position = await run_async(receiving, reading_position(SCHEMA, origin))
            else:
                position = reception.position
        await run_in_transaction(self._at.keeping, making_durable())
        if not await run_async(asking, acknowledging(SCHEMA, link, self._at.run, position.seq)):
            raise LinkTaken("another carrier has the link now")
        return rows

    async def _trim(self) -> None:
        for link in await run_async(self._at.delivering, self._source_trim.listing_links()):
            while await run_async(self._at.delivering, self._source_trim.trimming_rows(link)):
                pass
        for held in await run_async(self._at.receiving, self._target_trim.listing_origins()):
            while await run_async(self._at.receiving, self._target_trim.trimming_receipts(held)):
                pass
