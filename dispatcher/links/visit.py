"""A visit to a source: hello, and then batch by batch what comes after our own position, until we must say hello again.

No transaction at either end waits for the other end: what is received was fetched before, and what the source is told
is durable here before.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

import psycopg

from dispatcher.delivery.portion import Portion
from dispatcher.lanes.leading import open_session
from dispatcher.links.at_source.acknowledge import acknowledging
from dispatcher.links.at_source.bounds import FETCHED_ROWS, Bounds, Position, bounding, bounding_ahead, reading_position
from dispatcher.links.at_source.fetch import FetchedBatch, fetching
from dispatcher.links.at_source.source import Source, SourceFailed
from dispatcher.links.receive import RECEIVING_SESSION, Reception
from dispatcher.links.receiving import Receiving, Room
from dispatcher.links.reconcile import reconcile
from mailroom import events
from mailroom.errors import Coded
from mailroom.links.handshake.diverged import checking_claim, claiming
from mailroom.links.handshake.hello import Greeting, LinkTaken, asking_topics, checking_sight, greeting, matching
from mailroom.links.handshake.target import (
    Origin,
    admitting,
    forgetting,
    introducing,
    pinning,
    telling,
    wanted_subscriptions,
)
from mailroom.links.marks import asking_mark
from mailroom.session import settings
from mailroom.session.home import Home
from mailroom.session.listener import heard
from mailroom.sql.sqlstate import is_held_up

log = logging.getLogger("mailroom.dispatcher")

# D-links-18: A visit ends with each hello.
FETCH_S = 45.0  # how long the source may take for a batch,
COMPARE_S = 600.0  # and for telling what it has lost
MATCH_S = 5.0  # between two looks whether the source has begun a new life, and which topics it allows
CLAIM_PAUSE_S = 1.0  # until the source's dispatcher has looked at a claim
# D-links-19: What a look finds wrong counts only after the newest receipt is read again.
AGAIN_PAUSE_S = 0.5  # after something that another session's doing explains


class Stopped(Coded):
    """Nothing can be read before an operator has acted. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Received:
    """On that visit, everything up to `seq` was received."""

    visit: "Visit"
    seq: int


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The batch after row `after`, fetched while the rows up to there were received."""

    after: int
    bounds: Bounds
    batch: FetchedBatch


@dataclass(slots=True)
class Notes:
    """What the lane and the reading of one origin tell each other.

    From the lane, each with a ring: the `subscriptions` of the node to the source, by id with their topics, the
    `wanted_clock` that a mark is to show, what is `durable`, and `stopping`. From the reading: what it has `received`,
    whether it `is_behind`, having more to fetch, and whether it `is_asleep`. `run` is this daemon's name at the source.
    """

    subscriptions: Mapping[UUID, str] = field(default_factory=dict)
    wanted_clock: int = 0
    durable: Received | None = None
    stopping: bool = False
    received: Received | None = None
    is_behind: bool = False
    is_asleep: bool = False
    rung: asyncio.Event = field(default_factory=asyncio.Event)
    run: UUID = field(default_factory=uuid4)
    portion: Portion = field(default_factory=Portion)

    def want_mark(self, clock: int) -> None:
        """Ask the source for a mark with this clock, 0 for none; not while there are rows, which show clocks too."""
        wanted = 0 if self.is_behind else clock
        if wanted != self.wanted_clock:
            self.wanted_clock = wanted
            self.rung.set()

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until it is rung."""
        if not self.stopping:
            await heard(self.rung, seconds)
        self.rung.clear()


@dataclass(frozen=True, slots=True)
class VisitTarget:
    """The node that reads: where it is, and what all its origins share. `on_received` is called with each reception."""

    dsn: str | Home
    schema: str
    receiving: Receiving
    room: Room
    poll_interval_s: float
    on_received: Callable[[Reception], None]


class Visit:
    """One hello to a source, and what is read after it.

    `on_read` is called whenever rows could be read, and `on_held_up` when something else held it up.
    """

    def __init__(
        self, source: Source, target: VisitTarget, origin: Origin, notes: Notes, on_read: Callable[[], Awaitable[None]],
        on_held_up: Callable[[Exception], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._source = source
        self._target = target
        self._origin = origin
        self._notes = notes
        self._on_read = on_read
        self._on_held_up = on_held_up
        self._link = 0
        self._acked = 0
        self._asked: Mapping[UUID, str] | None = None
        self._asked_at = float("-inf")
        self._matched_at = float("-inf")
        self._ahead: _Ahead | None = None

    async def run(self, *, claims: bool) -> bool:
        """Read until told to stop, or until the source is to be greeted again; return whether it has diverged.

        `claims`: it had diverged at the previous visit; if it still has, tell the source what was received from it.
        Raises `SourceFailed`, and if nothing can be read `LinkRefused`, `LinkStopped`, `LinkTaken` or `Stopped`;
        whatever else it raises happened at the target.
        """
        receiving, schema = self._target.receiving, self._target.schema
        party = await receiving.run(introducing(schema, self._origin))
        hello = greeting(self._source.schema, self._origin.name, party, self._origin.pinned, self._notes.run)
        greeted = await self._source.transaction(hello)
        while await receiving.transaction(forgetting(schema, self._origin, greeted.link)):
            pass
        self._origin = await receiving.transaction(pinning(schema, self._origin, greeted))
        # Read after the hello: the last holder of the link may have told the source of later ones than the lane knows.
        self._notes.subscriptions = await receiving.run(wanted_subscriptions(schema, self._origin.name))
        self._link, self._acked = greeted.link, greeted.acked
        if self._origin.incarnation is not None and greeted.incarnation > self._origin.incarnation:
            await self._reconcile(greeted)
            return False
        position = await self._position()
        if claims:
            await self._claim(greeted, position)
        await self._source.listen(self._link)
        if position.seq != self._acked:
            self._notes.received = Received(self, position.seq)
        return await self._read(position)

    async def _read(self, position: Position) -> bool:
        failures = 0
        while not self._notes.stopping:
            try:
                await self._tell()
                bounds, position = await self._look(position)
                if bounds.verdict == "diverged":
                    return True
                self._notes.is_behind = bounds.more
                if bounds.last is not None:
                    async with self._target.room.taken(bounds.size):
                        after = await self._bring(position, bounds, bounds.last)
                    if after is None:
                        await self._notes.pause(AGAIN_PAUSE_S)
                        return False
                    # It rings for everything since the look, so no other look is needed.
                    sleeps = self._source.is_asleep and not bounds.more and after.seq == bounds.last
                    position = after
                else:
                    await self._ask_for_mark(position)
                    sleeps = self._source.is_asleep
                    if not sleeps:
                        await self._source.fall_asleep()
                failures = 0
                await self._on_read()
                if sleeps:
                    await self._sleep()
                elif bounds.more:
                    await self._source.wake_up()
            except (SourceFailed, psycopg.Error) as failed:
                error = failed.error if isinstance(failed, SourceFailed) else failed
                if self._source.is_lost or not is_held_up(error):
                    raise
                failures += 1
                if failures == 1:
                    log.warning(
                        "links: reading %s was held up by a lock or cancelled (%s), trying again",
                        self._origin.name, type(error).__name__,
                    )  # fmt: skip
                await self._on_held_up(error)
                await self._notes.pause(AGAIN_PAUSE_S)
        return False

    async def _tell(self) -> None:
        """Tell the source what is new here: the topics that are wanted, and what it need not keep any longer."""
        wanted, durable, run = self._notes.subscriptions, self._notes.durable, self._notes.run
        if wanted != self._asked or time.monotonic() - self._asked_at >= MATCH_S:
            asking = asking_topics(self._source.schema, self._link, run, frozenset(wanted.values()))
            there = await self._source.transaction(asking)
            told = [id for id, topic in wanted.items() if topic in there]
            refused = [id for id, topic in wanted.items() if topic not in there]
            noting = telling(self._target.schema, self._origin.number, told, refused)
            await self._target.receiving.transaction(noting)
            self._asked, self._asked_at = wanted, time.monotonic()
        if durable is not None and durable.visit is self and durable.seq != self._acked:
            if not await self._source.ask(acknowledging(self._source.schema, self._link, run, durable.seq)):
                raise LinkTaken("another daemon has said hello to the source since, and has the link now")
            self._acked = durable.seq

    async def _position(self) -> Position:
        return await self._target.receiving.run(reading_position(self._target.schema, self._origin.number))

    async def _ask_for_mark(self, position: Position) -> None:
        clock = self._notes.wanted_clock
        if clock > position.sent_clock:
            await self._source.ask(asking_mark(self._source.schema, self._link, self._notes.run, clock))

    async def _look(self, position: Position) -> tuple[Bounds, Position]:
        """Find the next batch, and check that both sides share one history; also return the row before it."""
        bounds = await self._bounds(position)
        while bounds.verdict != "agrees" and (newest := await self._position()) != position:
            position = newest  # another daemon has received since, and what it acknowledged may be trimmed
            bounds = await self._bounds(position)
        is_due = time.monotonic() - self._matched_at >= MATCH_S
        if bounds.verdict != "agrees" or is_due:
            is_odd = bounds.verdict != "agrees"
            await self._source.ask(
                checking_sight(self._source.schema, self._origin.name, self._link, position.seq, is_odd=is_odd)
            )
        if bounds.verdict == "gap":
            raise Stopped(_gap(self._origin.name, position.seq, bounds.missing), code="MR-link-rows-missing")
        if bounds.verdict == "agrees" and is_due:
            await self._source.ask(matching(self._source.schema, self._link, self._notes.run))
            if self._origin.state == "stopped":
                await self._target.receiving.transaction(admitting(self._target.schema, self._origin.number))
                self._origin = replace(self._origin, state="open")
            self._matched_at = time.monotonic()
        return bounds, position

    async def _bounds(self, position: Position) -> Bounds:
        if self._ahead is not None and self._ahead.after != position.seq:
            self._ahead = None
        rows, max_bytes = self._most()
        if self._ahead is not None:
            rows = 0  # they are here; the source must be asked whether it still has the history after them
        look = bounding(self._source.schema, self._link, position, rows=rows, max_bytes=max_bytes)
        bounds = await self._source.ask(look)
        if self._ahead is not None and bounds.verdict == "agrees":
            return self._ahead.bounds
        self._ahead = None
        return bounds

    def _most(self) -> tuple[int, int]:
        """Return how many rows and bytes a batch may have."""
        return self._notes.portion.of(FETCHED_ROWS), self._notes.portion.of(self._target.room.share)

    async def _bring(self, position: Position, bounds: Bounds, last: int) -> Position | None:
        """Bring over the rows up to `last`; return the new position, None if the origin is not open any more."""
        ahead, self._ahead = self._ahead, None
        async with contextlib.AsyncExitStack() as beside:
            with self._notes.portion.tried():
                batch = await self._fetch(position.seq, last) if ahead is None else ahead.batch
                if bounds.more:
                    await beside.enter_async_context(self._looking_ahead(last))
                began = time.monotonic()
                reception = await self._target.receiving.receive(self._origin.number, batch, position)
            if reception.outcome == "closed":
                return None
            if reception.position is None:  # another daemon has received since
                return await self._position()
            self._notes.received = Received(self, reception.position.seq)
            self._target.on_received(reception)
            if reception.rows and events.heard(events.MessagesReceived):
                took_s = time.monotonic() - began
                counts = {name: getattr(reception, name) for name in events.MessagesReceived._fields[3:-1]}
                origin, rows = self._origin.name, reception.rows
                events.emit(events.MessagesReceived(self._target.schema, origin, rows, **counts, seconds=took_s))
            return reception.position

    async def _fetch(self, after: int, last: int) -> FetchedBatch:
        fetch = fetching(self._source.schema, self._link, after=after, to=last)
        return await self._source.ask(fetch, FETCH_S)

    @contextlib.asynccontextmanager
    async def _looking_ahead(self, after: int) -> AsyncIterator[None]:
        """Fetch the next batch while this block receives the rows up to `after`: the two servers work at once.

        Nothing else in the block may use the source's session; after it the session is free again.
        """
        looking = asyncio.create_task(self._look_ahead(after))
        try:
            yield
            await looking
        finally:
            if not looking.done():
                looking.cancel()
                await asyncio.wait([looking])

    async def _look_ahead(self, after: int) -> None:
        rows, max_bytes = self._most()
        looking = bounding_ahead(self._source.schema, self._link, after, rows=rows, max_bytes=max_bytes)
        # An error here comes again at the next step over this session, and is handled there.
        with contextlib.suppress(SourceFailed):
            bounds = await self._source.ask(looking)
            # A message larger than the share takes its turn in the room (`Room`), and so is not fetched ahead.
            if bounds is not None and bounds.last is not None and bounds.size <= self._target.room.share:
                self._ahead = _Ahead(after, bounds, await self._fetch(after, bounds.last))

    async def _sleep(self) -> None:
        self._notes.is_asleep = True
        try:
            await self._source.wait(self._notes.rung, self._target.poll_interval_s)
        finally:
            self._notes.is_asleep = False

    async def _claim(self, greeted: Greeting, position: Position) -> None:
        await self._source.ask(checking_claim(self._source.schema, self._origin.name, position.sent_clock))
        claim = claiming(self._source.schema, self._link, self._notes.run, position.seq, position.sent_clock)
        await self._source.ask(claim)
        if not greeted.in_doubt:
            raise Stopped(_not_in_doubt(self._origin.name, position.seq), code="MR-link-source-unaware")
        await self._notes.pause(CLAIM_PAUSE_S)

    async def _reconcile(self, greeted: Greeting) -> None:
        """Find out what the source has lost. Over a session of its own here: it waits for both ends in turns."""
        target = self._target
        async with open_session(target.dsn, "links reconcile", settings.UNATTENDED | RECEIVING_SESSION) as session:
            comparing = reconcile(
                session, target.schema, self._origin.number, self._source.connection, self._source.schema,
                self._link, greeted.incarnation,
            )  # fmt: skip
            found = await self._source.answer(comparing, COMPARE_S)
        if found is None:
            await self._notes.pause(AGAIN_PAUSE_S)
        elif found.why is not None:
            raise Stopped(found.why, code="MR-link-history-unknown")
        else:
            log.warning(
                "links: %s has lost history: reading on after row %d; %d messages are here only: "
                "mailroom link report %s", self._origin.name, found.last, found.known, self._origin.name,
            )  # fmt: skip


def _gap(name: str, seq: int, missing: int) -> str:
    return (
        f"{name} no longer keeps {missing} rows after row {seq}, the last one received; to go on without them: "
        f"mailroom link resume {name} --at {seq + missing}"
    )


def _not_in_doubt(name: str, seq: int) -> str:
    return (
        f"{name} no longer has row {seq}, which we received from it. It was restored from a backup while running, or "
        f"changed by hand; at {name}: mailroom node restored"
    )
