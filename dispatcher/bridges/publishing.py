"""Publishes what one link has for a broker: reads the rows behind `acked`, and acknowledges what the broker has.

No transaction is open while the broker is asked. What was published and not acknowledged here, since either side died
in between, is published again, in order; a broker that keeps a mark tells which of it it has.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID, uuid4

from dispatcher.bridges.ahead import Ahead
from dispatcher.bridges.lasting import BEHIND, Lasting
from dispatcher.bridges.spreading import Spreading
from dispatcher.bridges.tending import LONGEST_PAUSE_S, OPEN_S, BridgeStopped, Tending, Trouble, kind_of
from dispatcher.delivery.dead import tell_of_dead
from dispatcher.delivery.portion import Portion
from dispatcher.lanes.leading import open_session
from dispatcher.links.at_source.acknowledge import acknowledging
from dispatcher.links.at_source.bounds import bounding_ahead
from dispatcher.links.at_source.fetch import fetching
from dispatcher.links.at_source.source import SOURCE_SESSION, Source
from dispatcher.links.receiving import Receiving
from mailroom import events
from mailroom.bridges.broker import described
from mailroom.bridges.lasts import reading_loss
from mailroom.bridges.out import (
    OutRow,
    OutStart,
    advancing,
    knowing_done,
    knowing_published,
    making_published,
    noting_mark,
    noting_marked,
    noting_published,
    noting_tried,
    noting_trouble,
    reading_marked,
    settling_doubt,
    skipping,
    taking_link,
)
from mailroom.bridges.publisher import (
    Answered,
    BrokerRefused,
    BrokerTrouble,
    NotingPublisher,
    Numbering,
    Partitioned,
    PublishAgain,
    Publisher,
    RecordRefused,
)
from mailroom.bridges.record import Carried, Record, Sender, Unencodable, carried, record_of
from mailroom.errors import Coded, coded
from mailroom.links.handshake.hello import LinkTaken
from mailroom.session.home import Home
from mailroom.session.listener import heard
from mailroom.sql.operation import Operation

log = logging.getLogger("mailroom.dispatcher")

ROWS = 2_000  # at once; a broker's transaction each, if it has them
MAX_BYTES = 4 * 1024 * 1024
FETCH_S = 30.0
SLACK = timedelta(minutes=1)  # by which the broker's clock may be behind this node's
MARK_EVERY = timedelta(days=1)  # brokers forget marks that are not set for a week
AROUND_S = 1.0  # how often to look how those are that wait while others are published
TAKEN = "another dispatcher has the link now"
LOST = (
    "the broker has the messages of this bridge up to clock {mark} by its mark, and had acknowledged them up to clock "
    "{marked}: it was put back, or has lost what it had last. What it lost is not published again, and its readers "
    "lack it. To go on with what waits: mailroom bridge resume {name}"
)
# While a broker is away for long this session idles, outside of any transaction.
# D-bridges-3: No transaction is open while a broker is asked.
READING = SOURCE_SESSION | {"idle_session_timeout": "0"}


class Publishing(Tending):
    """Publishes one bridge; see `Tending`. `make` makes its publishers, and `home` is where this node is."""

    verb = "published"

    def __init__(
        self, row: OutRow, make: Callable[[], Publisher], home: str | Home, schema: str, receiving: Receiving,
        poll_interval_s: float,
    ) -> None:  # fmt: skip
        super().__init__(row.name, schema, receiving)
        self.row = row
        self._make = make
        self._home = home
        self._poll_interval_s = poll_interval_s
        self._sender = Sender(row.node_id, row.node, row.link)
        self._is_reserved = described(row.settings.broker).is_reserved
        self._portion = Portion()
        self._marked_at = row.marked_at
        self._is_known = False
        self._ahead = Ahead(None)
        self._ahead_to = 0  # behind the position, rows up to this one may be done
        self._waits_since: float | None = None

    def _noting(self, trouble: Trouble | None, why: str, for_s: float) -> Operation[object]:
        return noting_trouble(self._schema, self.row.link, trouble, why, for_s)

    def _noting_well(self) -> Operation[object]:
        return noting_published(self._schema, self.row.link)

    async def _serve(self) -> None:
        """Publish for as long as one session here and one publisher last."""
        async with open_session(self._home, "bridges", READING) as connection:
            source, run = Source(connection, self._schema), uuid4()
            if not await self._is_started(source.ask):
                return
            lost = await source.ask(reading_loss(self._schema, self.row.link))
            if lost is not None:
                raise BridgeStopped(lost, code=BEHIND)
            start = await source.transaction(taking_link(self._schema, self.row.link, run))
            if start is None:
                await heard(self._stopping, LONGEST_PAUSE_S)  # cut: the lane ends it
                return
            position, self._is_known, self._ahead_to = start.acked, start.is_known, start.ahead_to
            publisher = self._make()
            self._ahead = Ahead(publisher)
            if start.tried is not None and isinstance(publisher, NotingPublisher):
                publisher.remember(start.tried)
            try:
                mark = await self._waiting(publisher, publisher.open(), OPEN_S)
                self._check_reach(mark, start)
                marked = await source.ask(reading_marked(self._schema, self.row.link))
                if 0 < mark < marked:
                    raise BridgeStopped(LOST.format(mark=mark, marked=marked, name=self.row.name), code=BEHIND)
                lasting = Lasting(source, self._schema, self.row.name, self.row.link, run)
                await lasting.read()
                await self._compare(publisher, lasting)
                if start.in_doubt:
                    await self._settle(source, publisher, run, start)
                if not mark and position and self.row.settings.exactly_once:
                    log.warning(
                        "bridges: the mark of %s is gone at the broker: going on behind row %d, which it had "
                        "acknowledged; what it got since comes twice", self.row.name, position,
                    )  # fmt: skip
                await source.listen(self.row.link)
                spreading = Spreading(source, self._schema, self.row.link, run)
                while not self._stopping.is_set():
                    step = await self._step(source, publisher, spreading, lasting, run, position, mark)
                    if step is None:  # somebody has said meanwhile that history was lost: begin in the new one
                        return
                    position = step
            finally:
                await publisher.close()

    async def _compare(self, publisher: Publisher, lasting: Lasting) -> None:
        """Raise `BridgeStopped` if the broker's logs end before what it has acknowledged."""
        if isinstance(publisher, Numbering):
            await lasting.published(publisher.numbered())
            if lasting.places:
                await lasting.looked(await self._waiting(publisher, publisher.ends(lasting.places)))

    def _check_reach(self, clock: int, start: OutStart) -> None:
        """Raise `BridgeStopped` if the broker has a clock that this node may give out again, to another message."""
        if clock > start.reach:
            raise BridgeStopped(
                f"the broker has messages of this node with clocks up to {clock}, and this node has not counted that "
                f"far: it was put back in time, and nobody has told it. Let it go on behind them: mailroom node "
                f"advance {clock}",
                code="MR-bridge-clock-ahead",
            )

    async def _settle(self, source: Source, publisher: Publisher, run: UUID, start: OutStart) -> None:
        """Find out what was published in a history that this node has lost: it may stamp it again."""
        published = await self._waiting(publisher, publisher.published(start.clock, start.since - SLACK))
        self._check_reach(max((clock for clock, _ in published), default=0), start)
        lost = await source.transaction(settling_doubt(self._schema, self.row.link, run, published))
        if lost:
            self._is_known = True
            log.warning(
                "bridges: this node has lost history: %d messages that %s had published are not published again",
                lost, self.row.name,
            )  # fmt: skip

    async def _step(
        self, source: Source, publisher: Publisher, spreading: Spreading, lasting: Lasting, run: UUID, position: int,
        mark: int,
    ) -> int | None:  # fmt: skip
        """Publish the next rows behind `position`, or sleep until there are some.

        Returns the new position, or None if this node has begun another history.
        """
        look = bounding_ahead(
            self._schema, self.row.link, position,
            rows=self._portion.of(ROWS), max_bytes=self._portion.of(MAX_BYTES),
        )  # fmt: skip
        bounds = await source.ask(look)
        if bounds is None or bounds.last is None:
            if self._ahead.waiting:
                await self._publish(source, publisher, spreading, run, position, [])
            await self._reached(source, run, position)
            await self._keep_mark(source, publisher, mark)
            await self._sleep(source)
            return position
        if bounds.more:
            await source.wake_up()
        making = await self._making(source, position, bounds.last, mark)
        part = await source.transaction(self._made_ready(publisher, run, making))
        if part is None:
            return None
        if part.records:
            try:
                with self._portion.tried():
                    await self._publish(source, publisher, spreading, run, position, part.records)
                if isinstance(publisher, Numbering):
                    await lasting.published(publisher.numbered())
                if self.row.settings.exactly_once:
                    await source.ask(noting_mark(self._schema, self.row.link, run, part.records[-1].clock))
            except PublishAgain:
                await self._compare(publisher, lasting)
                return position
            except RecordRefused as error:
                spreading.forget()
                if len(part.records) > 1:
                    return position  # again, with fewer of them each time, down to the one that is refused
                return await self._refuse(source, run, part.records[0].seq, error)
        elif part.unfit is not None and part.last == position:
            return await self._refuse(source, run, *part.unfit)
        await self._reached(source, run, part.last)
        lasting.check()  # what was published since is acknowledged
        return part.last

    async def _sleep(self, source: Source) -> None:
        """Sleep until something rings; the first time only fall asleep, to look once more."""
        if not source.is_asleep:
            await source.fall_asleep()
            return
        at_most_s = min(AROUND_S, self._poll_interval_s) if self._ahead.waiting else self._poll_interval_s
        await source.wait(self._rung, at_most_s)

    async def _making(self, source: Source, position: int, last: int, mark: int) -> Callable[[datetime], "_Part"]:
        """Read the rows after `position` up to `last`; return what makes a part of them at a given time."""
        batch = await source.ask(fetching(self._schema, self.row.link, after=position, to=last, decoded=True), FETCH_S)
        messages = carried(cast(Mapping[str, Sequence[Any]], batch.columns))
        known: frozenset[UUID] = frozenset()
        if self._is_known:
            ids = [message.message_id for message in messages]
            known = await source.ask(knowing_published(self._schema, self.row.link, ids))
        done: frozenset[int] = frozenset()
        if position < self._ahead_to:
            done = await source.ask(knowing_done(self._schema, self.row.link, position, last))
        return lambda now: self._part(messages, position, mark, now, known, done)

    def _made_ready(
        self, publisher: Publisher, run: UUID, making: Callable[[datetime], "_Part"]
    ) -> Operation["_Part | None"]:
        """Make the records at the database's time, and durable what they are made of; None in another history."""
        now, is_settled = yield from making_published(self._schema, self.row.link, run)
        if is_settled is None:
            raise LinkTaken(TAKEN)
        if not is_settled:
            return None
        part = making(now)
        if part.records and isinstance(publisher, NotingPublisher):
            tried = publisher.plan(part.records)
            if not (yield from noting_tried(self._schema, self.row.link, run, tried)):
                raise LinkTaken(TAKEN)
        return part

    def _part(
        self, messages: Sequence[Carried], position: int, mark: int, now: datetime, known: Collection[UUID],
        done: Collection[int],
    ) -> "_Part":  # fmt: skip
        """Make the records, up to the first message that its form cannot hold."""
        records = []
        for message in messages:
            is_expired = message.expires_at is not None and message.expires_at <= now
            is_published = message.sent_clock <= mark or message.message_id in known or message.seq in done
            if not (message.is_mark or is_published or is_expired):
                try:
                    records.append(record_of(message, self.row.settings.form, self._sender, self._is_reserved))
                except Unencodable as error:
                    return _Part(position, records, (message.seq, error))
            position = message.seq
        return _Part(position, records)

    async def _publish(
        self, source: Source, publisher: Publisher, spreading: Spreading, run: UUID, position: int,
        records: Sequence[Record],
    ) -> None:  # fmt: skip
        if isinstance(publisher, Partitioned) and (topics := spreading.due(records)):
            found = await self._waiting(publisher, publisher.parts(topics))
            if not await spreading.looked(found):
                raise LinkTaken(TAKEN)
        spreading.spread(records)
        began = time.monotonic()
        self._ahead.give(record.seq for record in records)
        try:
            await self._waiting(publisher, publisher.publish(records))
        except (BrokerRefused, BrokerTrouble):
            if self._ahead.waiting:  # what is published beside them is not published again by each try
                await self._acknowledge(source, run, position)
            raise
        self._marked_at = datetime.now(UTC)
        if records and events.heard(events.MessagesPublished):
            took_s = time.monotonic() - began
            events.emit(events.MessagesPublished(self._schema, self.row.name, len(records), took_s))

    async def _reached(self, source: Source, run: UUID, position: int) -> None:
        """Acknowledge what is done up to `position`, and tell what waits."""
        if self.row.settings.on_failure == "skip":
            for row, each in list(self._ahead.waiting.items()):
                if each is not None and each.error is not None:
                    await self._skip(source, run, row, each.error)
                    self._ahead.leave_out(row)
        await self._acknowledge(source, run, position)
        if (why := self._waits_for()) is None:
            self._waits_since = None
            await self._goes_well()
            return
        self._failures = 0
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        await self._note(kind_of(why), why, time.monotonic() - self._waits_since)

    def _waits_for(self) -> str | None:
        for row, each in self._ahead.waiting.items():
            if each is not None:
                text = (
                    f"row {row} waits, and what is behind it in its key: {each.why}. To leave it out: mailroom bridge "
                    f"skip {self.row.name} --row {row}"
                )
                return Answered(text) if isinstance(each.why, Answered) else text
        return None

    async def _acknowledge(self, source: Source, run: UUID, position: int) -> None:
        acked, done = self._ahead.reached(position)
        if done or self._ahead_to:
            self._ahead_to = max(self._ahead_to, *done, 0)
            is_ours = await source.ask(advancing(self._schema, self.row.link, run, acked, done))
            if acked >= self._ahead_to:
                self._ahead_to = 0
        else:
            is_ours = await source.ask(acknowledging(self._schema, self.row.link, run, acked))
        if not is_ours:
            raise LinkTaken(TAKEN)

    async def _refuse(self, source: Source, run: UUID, seq: int, error: Coded) -> int:
        """Do with a message that cannot be published what the bridge says; return the new position."""
        if self.row.settings.on_failure == "stop":
            raise BridgeStopped(
                f"row {seq} cannot be published: {error} To leave it out: mailroom bridge skip {self.row.name} --row "
                f"{seq}. To leave all such messages out: mailroom bridge set {self.row.name} --on-failure skip",
                code=error.code,
            )
        await self._skip(source, run, seq, error)
        await self._acknowledge(source, run, seq)
        return seq

    async def _skip(self, source: Source, run: UUID, seq: int, error: Coded) -> None:
        self._ahead_to = max(self._ahead_to, seq)
        why = f"bridge {self.row.name}: {coded(str(error), error)}"
        await source.transaction(skipping(self._schema, self.row.link, run, seq, why))
        await tell_of_dead(source.connection, self._schema, ["publish"], 1)

    async def _keep_mark(self, source: Source, publisher: Publisher, mark: int) -> None:
        """Set the mark of an idle bridge anew, daily: from what is acknowledged it is known what it was."""
        if not self.row.settings.exactly_once or self._marked_at is None:
            return
        if datetime.now(UTC) - self._marked_at < MARK_EVERY:
            return
        await self._waiting(publisher, publisher.keep())
        await source.ask(noting_marked(self._schema, self.row.link))
        self._marked_at = datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class _Part:
    """The records of a batch; behind them everything up to `last` needs no publishing.

    `unfit` is the seq behind that, of a message that has no record, with the error that says why.
    """

    last: int
    records: list[Record]
    unfit: tuple[int, Unencodable] | None = None
