"""Takes in what a broker has: reads it from where the database says, and receives it with its new position.

One transaction moves the position, by compare-and-set, sets the marks and receives the messages. So what was read
twice, by two dispatchers or after a crash, is received once. Records of bridges of ours come with a clock that rises
along their link. What is not above the mark of that link has come already: a sender that repeats itself does no harm.
In a queue whatever was delivered may come again, also behind what is later. There the ids say what has come.

Before a log is read on, its last record that was taken in is read once more: one that was cut back and written anew has
another one there, however far it reaches by now. What is lost at the broker stops the bridge until somebody resumes it.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from uuid import UUID

from dispatcher.bridges.tending import OPEN_S, BridgeStopped, Tending, Trouble
from dispatcher.links.at_source.bounds import Position, reading_position
from dispatcher.links.at_source.fetch import FetchedBatch
from dispatcher.links.receive import Reception
from dispatcher.links.receiver import LinkStopped, Taking
from dispatcher.links.receiving import Receiving
from mailroom import events
from mailroom.bridges.arrival import Arrived, Incoming, Undecodable, digest, incoming, undecoded
from mailroom.bridges.broker import described
from mailroom.bridges.into import (
    InRow,
    Last,
    Mark,
    Overtaken,
    Place,
    beginning,
    id_taken_in,
    knowing_taken,
    lacking,
    moving_position,
    noting_loss,
    noting_read,
    reading_lasts,
    reading_loss,
    reading_marks,
    reading_positions,
    taking_from_queue,
)
from mailroom.bridges.source import BrokerPosition, BrokerWasAway, PartsChanged, PositionGone, RecordSource
from mailroom.links.handshake.target import failing, stopping
from mailroom.links.handshake.wire import WIRE_COLUMNS
from mailroom.message.headers import as_json
from mailroom.sql.arrays import array
from mailroom.sql.operation import Operation

log = logging.getLogger("mailroom.dispatcher")

WAIT_S = 1.0
GONE = "MR-bridge-position-gone"
CUT_BACK = "there is a record at {} now, where none was: the log was cut back and written anew"


# D-bridges-15: The last record that was taken in is read again before a log is read on.
class TakingIn(Tending):
    """Takes in by one bridge; see `Tending`. `make` makes its sources; `on_received` is called with each reception."""

    verb = "taken in"

    def __init__(
        self, row: InRow, make: Callable[[], RecordSource], schema: str, receiving: Receiving,
        on_received: Callable[[Reception], None],
    ) -> None:  # fmt: skip
        super().__init__(row.name, schema, receiving)
        self.row = row
        self._make = make
        self._is_reserved = described(row.settings.broker).is_reserved
        self._on_received = on_received
        self._place = ""
        self._positions: dict[tuple[str, int], BrokerPosition] = {}
        self._marks: dict[Mark, int] = {}
        self._position = Position(0, None, None, 0)
        self._told_positions: dict[tuple[str, int], BrokerPosition] = {}
        self._read_at = time.monotonic()
        self._refused: dict[tuple[str, int, int], str] = {}
        self._lasts: dict[Place, Last] = {}  # records that are to be compared
        self._empty_from: dict[Place, int] = {}  # from here up to the position nothing was to be read
        self._deleted: set[Place] = set()  # where the broker has deleted that record since
        self._is_queue = False
        self._is_open = False  # since it has begun, something was received: no trouble from before is recorded

    def _noting(self, trouble: Trouble | None, why: str, for_s: float) -> Operation[object]:
        if trouble is None:
            return stopping(self._schema, self.row.origin, why, for_s)
        return failing(self._schema, self.row.origin, "failing" if trouble == "refused" else trouble, why, for_s)

    def _noting_well(self) -> Operation[object]:
        return self._noting_read()

    def _noting_read(self) -> Operation[None]:
        return noting_read(self._schema, self.row.origin)

    async def _serve(self) -> None:
        """Take in for as long as one client of the broker lasts."""
        # The positions are this database's, but a queue gives each record to one only, and deletes what is taken.
        if not await self._is_started(self._receiving.run):
            return
        lost = await self._receiving.run(reading_loss(self._schema, self.row.origin))
        if lost is not None:
            raise BridgeStopped(lost, code=GONE)
        source = self._make()
        try:
            self._place = await self._waiting(source, source.open(), OPEN_S)
            while not self._stopping.is_set():
                try:
                    await self._begin(source)
                    while not self._stopping.is_set():
                        await self._step(source)
                except PartsChanged:
                    log.info("bridges: %s has new partitions", self._name)
                except BrokerWasAway:
                    pass
                except PositionGone as gone:
                    await self._is_gone(gone)
        finally:
            await source.close()

    async def _begin(self, source: RecordSource) -> None:
        """Learn from the database where to go on, and tell the source."""
        origin = self.row.origin
        self._lasts.clear()
        while True:
            known = await self._receiving.run(reading_positions(self._schema, origin))
            new = await self._waiting(source, source.begin(known))
            if not new:
                break
            await self._receiving.transaction(beginning(self._schema, origin, new))
        self._positions = {(each.topic, each.part): each for each in known}
        self._told_positions.clear()
        lasts = await self._receiving.run(reading_lasts(self._schema, origin))
        self._lasts = {place: last for place, last in lasts.items() if place not in self._deleted}
        self._empty_from = {place: last[0] + 1 for place, last in lasts.items()}
        if self._lasts:
            await self._waiting(source, source.begin([self._again(each) for each in known]))
        if await self._receiving.run(lacking(self._schema, origin)):
            log.warning(
                "bridges: this node was put back in time, or moved, and may lack what %s had taken from queues: "
                "mailroom bridge status", self._name,
            )  # fmt: skip
        self._refused.clear()  # in a queue another record may have this offset now
        self._marks = await self._receiving.run(reading_marks(self._schema, origin))
        self._position = await self._receiving.run(reading_position(self._schema, origin))
        self._is_open = False

    def _again(self, position: BrokerPosition) -> BrokerPosition:
        """Return the position of the last record that was taken in, where it can be compared."""
        last = self._lasts.get((position.topic, position.part))
        return position if last is None else replace(position, next=last[0])

    async def _is_gone(self, gone: PositionGone) -> None:
        """Stop, until somebody resumes the bridge; unless only what was taken in already is deleted."""
        place = gone.position.topic, gone.position.part
        last = self._lasts.get(place)
        why = str(gone)
        if last is not None and gone.first > last[0]:
            self._deleted.add(place)
            return
        if last is not None:
            why = f"the record at {last[0]} is not the one that was taken in: the log was cut back, or made anew"
        text = (
            f"partition {place[1]} of {place[0]}: {why}. To go on without what is missing: mailroom bridge resume "
            f"{self._name} --at {place[0]}/{place[1]}={gone.first}"
        )
        await self._receiving.transaction(noting_loss(self._schema, self.row, text))
        raise BridgeStopped(text, code=GONE)

    def _unread(self, records: Sequence[Arrived | BrokerPosition]) -> list[Arrived | BrokerPosition]:
        """Return the records that were not taken in yet. Raises `PositionGone` if the last one that was is another."""
        found: list[Arrived | BrokerPosition] = []
        for record in records:
            place = record.topic, record.part
            if isinstance(record, BrokerPosition):
                if record.next > self._positions[place].next:
                    found.append(record)
                continue
            if not record.is_queued:
                last = self._lasts.get(place)
                if last is not None and record.offset == last[0] and digest(record) != last[1]:
                    raise PositionGone(self._positions[place], record.offset, "it is another one")
                self._lasts.pop(place, None)
                if record.offset < (position := self._positions[place]).next:
                    # The position stands behind the end of a transaction, which leaves no record.
                    if record.offset >= self._empty_from.get(place, position.next):
                        raise PositionGone(position, record.offset, CUT_BACK.format(record.offset))
                    continue
            found.append(record)
        return found

    async def _step(self, source: RecordSource) -> None:
        records = await self._waiting(source, source.read(WAIT_S))
        if not records and source.trouble is not None:
            await self._note("unreachable", source.trouble, time.monotonic() - self._read_at)
            return
        self._read_at = time.monotonic()
        records = self._unread(records)
        while records:
            records = records[await self._take(records) :]
        if self._positions != self._told_positions:
            await self._waiting(source, source.taken(list(self._positions.values())))
            self._told_positions = dict(self._positions)
        await self._goes_well()

    async def _take(self, records: Sequence[Arrived | BrokerPosition]) -> int:
        """Receive the first of these records, and move behind them; return how many."""
        if not self._is_queue and any(isinstance(each, Arrived) and each.is_queued for each in records):
            await self._receiving.run(taking_from_queue(self._schema, self.row.origin))
            self._is_queue = True
        fates, stop = self._fates(records)
        if stop is not None and not fates:
            raise stop
        fates = await self._only_new(fates)
        rows = [each.message for each in fates if each.message is not None]
        ends = [nth for nth, each in enumerate(fates) if each.message is not None]
        sources = [each for each in (records[nth] for nth in ends) if isinstance(each, Arrived)]

        def covered(taken: int) -> int:
            """Return how many records are done with so many messages: up to the next message."""
            return ends[taken] if taken < len(ends) else len(fates)

        def moving(taken: int) -> Operation[None]:
            done = covered(taken)
            moves = [(self._positions[place], after) for place, after in _after(records[:done]).items()]
            ids = [each.known_as for each in fates[:done] if each.known_as is not None]
            lasts = _lasts(records[:done])
            marks = _marks(fates[:done])
            return moving_position(self._schema, self.row.origin, moves, lasts, marks, ids, is_queue=self._is_queue)

        taken = 0
        if not rows:
            await self._receiving.transaction(moving(0))
        else:
            reasons = [each.reason for each in fates if each.message is not None]
            opening = None if self._is_open else self._noting_read
            taking = Taking([each.sender for each in rows], reasons, moving, opening)
            try:
                taken = await self._receive(rows, [each.at for each in sources], taking)
            except LinkStopped as stopped:
                if stopped.code != "MR-link-clock-too-high":
                    raise
                # Whoever may write there may say so; it must not hold up the others.
                # D-bridges-21: A clock that a broker tells is believed up to `wire.FURTHEST`.
                first = sources[0]
                self._refused[first.topic, first.part, first.offset] = "its clock is beyond what a node may have"
                return 0
        done = covered(taken)
        self._positions |= (after := _after(records[:done]))
        self._deleted -= after.keys()
        self._marks |= _marks(fates[:done])
        return done

    async def _receive(self, rows: Sequence[Incoming], times: Sequence[datetime | None], taking: Taking) -> int:
        """Receive some of the messages in a transaction; return how many."""
        began = time.monotonic()
        batch = self._batch(rows, times)
        reception = await self._receiving.receive(self.row.origin, batch, self._position, taking)
        if reception.position is None:
            raise Overtaken(f"what was read is not received ({reception.outcome})")
        self._position, self._is_open = reception.position, True
        self._on_received(reception)
        if events.heard(events.MessagesReceived):
            counts = {name: getattr(reception, name) for name in events.MessagesReceived._fields[3:-1]}
            took_s = time.monotonic() - began
            events.emit(events.MessagesReceived(self._schema, self._name, reception.rows, **counts, seconds=took_s))
        return reception.rows

    def _fates(self, records: Sequence[Arrived | BrokerPosition]) -> tuple[list["_Fate"], BridgeStopped | None]:
        """Find what each record comes to, up to one that holds the bridge up; return that error, too."""
        fates: list[_Fate] = []
        marks = dict(self._marks)
        origins = {(sender, link) for _, _, sender, link in marks}
        for record in records:
            if isinstance(record, BrokerPosition):
                fates.append(_Fate())
                continue
            try:
                message = self._incoming(record, origins)
            except Undecodable as error:
                if self.row.settings.on_failure == "stop":
                    return fates, BridgeStopped(
                        f"{error} To keep such records as dead letters: mailroom bridge set {self._name} "
                        "--on-failure skip",
                        code=error.code,
                    )
                kept = undecoded(record, self._place)
                fates.append(_Fate(kept, str(error), known_as=self._known_as(record, kept)))
                continue
            if record.is_queued:
                # Not by its clock: what is behind in the queue may be earlier, and new.
                fates.append(_Fate(message, known_as=self._known_as(record, message)))
                continue
            if message.sender is None or message.link is None or message.clock is None:
                fates.append(_Fate(message))
                continue
            mark = (record.topic, record.part, message.sender, message.link)
            origins.add((message.sender, message.link))
            is_repeat = message.clock <= marks.get(mark, 0)
            marks[mark] = max(message.clock, marks.get(mark, 0))
            fates.append(_Fate() if is_repeat else _Fate(message, None, (mark, message.clock)))
        return fates, None

    def _known_as(self, record: Arrived, message: Incoming) -> UUID | None:
        is_known = record.is_queued and message.is_named
        return id_taken_in(self.row.origin, message.message_id) if is_known else None

    async def _only_new(self, fates: list["_Fate"]) -> list["_Fate"]:
        """Put repeats into the place of what has come from a queue already."""
        ids = {each.known_as for each in fates if each.known_as is not None}
        if not ids:
            return fates
        known = await self._receiving.run(knowing_taken(self._schema, ids))
        found = []
        for each in fates:
            found.append(_Fate() if each.known_as in known else each)
            if each.known_as is not None:
                known.add(each.known_as)
        return found

    def _incoming(self, record: Arrived, origins: Collection[tuple[UUID, int]]) -> Incoming:
        if (why := self._refused.get((record.topic, record.part, record.offset))) is not None:
            raise self._refusal(record, why)
        message = incoming(record, self.row.settings.intake, self._place, self._is_reserved)
        most = self.row.settings.max_origins
        # Each has a mark that nothing may forget: its repeats would be taken for new.
        is_new = message.sender is not None and (message.sender, message.link) not in origins
        if is_new and len(origins) >= most and not record.is_queued:
            raise self._refusal(
                record,
                f"it says that it is of one more origin than the {most:,} that the bridge may know. If you trust who "
                f"writes there, raise that: mailroom bridge set {self._name} --max-origins",
            )
        return message

    def _refusal(self, record: Arrived, why: str) -> Undecodable:
        at = f"{record.topic}[{record.part}]@{record.offset}"
        return Undecodable(f"The record at {at} of {self._place} is refused: {why}.")

    def _batch(self, rows: Sequence[Incoming], times: Sequence[datetime | None]) -> FetchedBatch:
        now, first = datetime.now(UTC), self._position.seq + 1
        of_the_wire: dict[str, Sequence[object]] = {
            "seq": range(first, first + len(rows)),
            "sent_clock": [row.clock or seq for seq, row in enumerate(rows, first)],
            "stamped_at": [at or now for at in times],
            "sent_at": [row.sent_at or now for row in rows],
            "headers": [None if row.headers is None else as_json(row.headers) for row in rows],
            "value_json": [None] * len(rows),
            "after_clock": [None] * len(rows),
        }
        own = {name: [*map(attrgetter(name), rows)] for name in WIRE_COLUMNS.keys() - of_the_wire.keys()}
        columns: dict[str, object] = {
            name: array(WIRE_COLUMNS[name][0], items) for name, items in (of_the_wire | own).items()
        }
        return FetchedBatch(len(rows), columns)


@dataclass(slots=True)
class _Fate:
    """What a record comes to: a `message`, None for a repeat; its `reason` if it is dead; the `mark` that it sets.

    If it lay in a queue, it is `known_as` that from then on.
    """

    message: Incoming | None = None
    reason: str | None = None
    mark: tuple[Mark, int] | None = None
    known_as: UUID | None = None


def _marks(fates: Sequence[_Fate]) -> dict[Mark, int]:
    """Return the marks behind these records."""
    return dict(each.mark for each in fates if each.mark is not None)


def _lasts(records: Sequence[Arrived | BrokerPosition]) -> dict[Place, Last]:
    """Return the last record of each partition, by which its log is known again. A queue has none."""
    last = {(each.topic, each.part): each for each in records if isinstance(each, Arrived) and not each.is_queued}
    return {place: (each.offset, digest(each)) for place, each in last.items()}


def _after(records: Sequence[Arrived | BrokerPosition]) -> dict[tuple[str, int], BrokerPosition]:
    """Return the positions behind these records."""
    last = {(each.topic, each.part): each for each in records}
    return {
        place: each if isinstance(each, BrokerPosition)
        else BrokerPosition(each.topic, each.part, each.offset + 1, each.leader_epoch, each.log)
        for place, each in last.items()
    }  # fmt: skip
