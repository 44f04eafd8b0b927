"""The lane that reads other nodes: a reading per origin, and one session that receives for all of them.

A node without origins holds the lease, and looks now and then whether it has some. It has the two connections of what
leads (`dispatcher.lanes.leading`); with origins one more, to make durable what was received, and one at each source.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Protocol
from uuid import UUID

import psycopg

from dispatcher.lanes.lane import POLL_INTERVAL_S
from dispatcher.lanes.leading import LANE, Duty, Leading, open_session
from dispatcher.lanes.lease import RENEW_S
from dispatcher.links.at_source.acknowledge import making_durable
from dispatcher.links.reading import Reading
from dispatcher.links.receive import RECEIVING_SESSION, Reception
from dispatcher.links.receiving import Receiving, Room
from dispatcher.links.visit import Notes, VisitTarget
from mailroom.links.handshake.target import Origin, reading_origins, wanted_subscriptions
from mailroom.links.marks import wanting_marks
from mailroom.order.total import having_bounds
from mailroom.session import settings
from mailroom.session.home import Home
from mailroom.session.listener import heard
from mailroom.sql.runner import run_in_transaction
from mailroom.values.names import DEFAULT_SCHEMA

FOLLOW_S = 2.0  # between two looks at the origins and at what this node subscribes to
MARKS_S = 0.2  # between two looks what total inboxes wait for; a node without one does not look
ACKNOWLEDGE_S = 1.0  # between two acknowledgements
# When stopping: for the steps under way, and then for those that are cancelled. Less than `leading.FINISH_WITHIN_S`.
FINISH_S = 1.5
CANCEL_S = 0.5
CANCELS = 2  # psycopg gives a connection up at the second one


@dataclass(slots=True)
class Receipts:
    """Totals: rows received from other nodes, and their outcomes.

    `delivered` counts the copies in inboxes, `known` the messages that had been received from a history that their node
    has lost, `marks` the rows that are no messages.
    """

    received: int = 0
    delivered: int = 0
    expired: int = 0
    unrouted: int = 0
    dead: int = 0
    known: int = 0
    marks: int = 0

    def add(self, reception: Reception) -> None:
        """Count one reception."""
        self.received += reception.rows
        self.delivered += reception.delivered
        self.expired += reception.expired
        self.unrouted += reception.unrouted
        self.dead += reception.dead
        self.known += reception.known
        self.marks += reception.marks


@dataclass(frozen=True, slots=True)
class _Running:
    origin: Origin
    reading: Reading
    task: "asyncio.Task[None]"

    def fits(self, origin: Origin | None) -> bool:
        """Return whether the source is to be read, and is still reached in the same way as when this began."""
        was = self.origin
        return origin is not None and (was.name, was.service, was.schema, was.reader) == (
            origin.name, origin.service, origin.schema, origin.reader,
        )  # fmt: skip


class Beside(Protocol):
    """What the lane does beside reading other nodes, while it leads: the bridges to brokers."""

    async def follow(self, receiving: Receiving) -> None:
        """Look what there is to do, over the lane's session."""
        ...

    def look(self) -> None:
        """Look for messages at once."""
        ...

    async def end(self) -> None:
        """End what was begun."""
        ...


class LinksLane(Leading):
    """The lane that receives what other nodes have stamped for this one; see `Leading`.

    `poll_interval_s` is the longest a message waits at its source if every notification is lost. `on_filled` is called
    with the inboxes that got messages. `beside` makes what goes on while the lane leads, of the node's home and of what
    is called with each reception.
    """

    _role = "links"
    session = LANE | RECEIVING_SESSION
    totals: Receipts

    def __init__(
        self,
        dsn: str,
        schema: str = DEFAULT_SCHEMA,
        *,
        poll_interval_s: float = POLL_INTERVAL_S,
        room: Room | None = None,
        on_filled: Callable[[list[str]], None] | None = None,
        beside: Callable[[Home, Callable[[Reception], None]], Beside] | None = None,
    ) -> None:
        super().__init__(dsn, schema)
        self._beside = None if beside is None else beside(self._home, self._received)
        self._on_filled = on_filled
        self._poll_interval_s = poll_interval_s
        self._room = room or Room()
        self._running: dict[int, _Running] = {}
        self._looks = asyncio.Event()
        self._followed_at = float("-inf")
        self._has_bounds = False
        self.totals = Receipts()

    def look(self) -> None:
        """Look at once at the origins, at the subscriptions and at each source, without waiting for the next poll."""
        self._follow_now()
        for each in self._running.values():
            each.reading.notes.rung.set()
        if self._beside is not None:
            self._beside.look()

    def _counts(self) -> dict[str, object]:
        states = {each.origin.name: each.reading.state for each in self._running.values()}
        return asdict(self.totals) | {"origins": states}

    def _on_duty(self, connection: psycopg.AsyncConnection) -> Duty:
        return Duty(
            self._serve(connection),
            [self._make_durable()],
            lambda: any(not each.reading.notes.is_asleep for each in self._running.values()),
            self._looks.set,
            lambda: None,  # it listens at the sources only
        )

    def _lead(self, leads: bool) -> None:
        super()._lead(leads)
        if not leads:
            self._looks.set()  # another daemon leads: read no longer

    def _received(self, reception: Reception) -> None:
        self.totals.add(reception)
        if self._on_filled is not None:
            self._on_filled(reception.inboxes)
        if reception.marks:
            self._follow_now()  # an inbox that has joined may want its topics now
        elif self._has_bounds:
            self._looks.set()

    def _follow_now(self) -> None:
        self._followed_at = float("-inf")
        self._looks.set()

    async def _serve(self, connection: psycopg.AsyncConnection) -> None:
        target = VisitTarget(
            self._home, self._schema, Receiving(connection, self._schema), self._room, self._poll_interval_s,
            self._received,
        )  # fmt: skip
        self._followed_at = float("-inf")
        try:
            while not self._stopping.is_set():
                if not self._leading.is_set():
                    await self._end_all()
                    await self._pause(RENEW_S / 4)
                    continue
                self._looks.clear()
                try:
                    await self._look_around(target)
                except psycopg.Error as error:
                    if not self._is_held_up(error, "looking at the origins"):
                        raise
                self._has_begun = True
                await heard(self._looks, MARKS_S if self._has_bounds and self._running else FOLLOW_S)
        finally:
            await self._end_all()

    async def _look_around(self, target: VisitTarget) -> None:
        if time.monotonic() - self._followed_at >= FOLLOW_S:
            self._followed_at = time.monotonic()
            self._has_bounds = await target.receiving.run(having_bounds(self._schema))
            await self._follow(target)
            if self._beside is not None:
                await self._beside.follow(target.receiving)
        if self._has_bounds and self._running:
            wanted = dict(await target.receiving.run(wanting_marks(self._schema)))
            for number, each in self._running.items():
                each.reading.notes.want_mark(wanted.get(number, 0))

    async def _follow(self, target: VisitTarget) -> None:
        """Find the origins that are to be read now, and tell each reading what is wanted from it."""
        receiving = target.receiving
        found = await receiving.run(reading_origins(self._schema))
        origins = {origin.number: origin for origin in found if origin.state != "excluded"}
        self._room.origins = len(origins)
        for number, running in list(self._running.items()):
            if running.task.done():
                del self._running[number]
                await running.task  # it ended by an error only if the target's session is lost
            elif not running.fits(origins.get(number)):
                running.reading.stop()
        for number, origin in origins.items():
            wanted = await receiving.run(wanted_subscriptions(self._schema, origin.name))
            if number not in self._running:
                self._running[number] = self._begin(origin, target, wanted)
                continue
            running = self._running[number]
            if running.origin != origin or running.reading.notes.subscriptions != wanted:
                self._running[number] = replace(running, origin=origin)
                running.reading.notes.subscriptions = wanted
                running.reading.notes.rung.set()

    def _begin(self, origin: Origin, target: VisitTarget, wanted: dict[UUID, str]) -> _Running:
        reading = Reading(origin, target, Notes(wanted), self._log)
        task = asyncio.create_task(reading.run())
        task.add_done_callback(lambda _: self._follow_now())
        return _Running(origin, reading, task)

    async def _make_durable(self) -> None:
        """Make durable what was received, about once a second and for all origins, so that the sources can be told.

        This has a session of its own: a slow disk or standby delays no receiving.
        """
        async with contextlib.AsyncExitStack() as stack:
            session: psycopg.AsyncConnection | None = None
            while True:
                await asyncio.sleep(ACKNOWLEDGE_S)
                notes = [each.reading.notes for each in self._running.values()]
                received = [(each, each.received) for each in notes if each.received not in (None, each.durable)]
                if not received:
                    continue
                if session is None:
                    opening = open_session(self._home, "links receipts", settings.UNATTENDED | RECEIVING_SESSION)
                    session = await stack.enter_async_context(opening)
                await run_in_transaction(session, making_durable())
                for each, what in received:
                    each.durable = what
                    each.rung.set()

    async def _end_all(self) -> None:
        """End all readings: those that do not end by themselves are cancelled, which cuts them off from the source."""
        tasks = [each.task for each in self._running.values()]
        for each in self._running.values():
            each.reading.stop()
        self._running = {}
        if self._beside is not None:
            tasks.append(asyncio.create_task(self._beside.end()))
        try:
            await _ended(tasks, FINISH_S)
        finally:
            pending = tasks
            for _ in range(CANCELS):
                for task in pending:
                    task.cancel()
                pending = await _ended(pending, CANCEL_S)


async def _ended(tasks: Collection["asyncio.Task[None]"], within_s: float) -> list["asyncio.Task[None]"]:
    """Wait until the tasks have ended, at most so long; return those that have not."""
    if not tasks:
        return []
    done, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in done:
        if not task.cancelled():
            task.exception()  # taken: it concerns the session that is given up
    return list(pending)
