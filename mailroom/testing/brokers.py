"""A suite for a broker's clients: what the guarantees of a bridge rest on, under kills and lost answers.

It does with a `Publisher` and a `RecordSource` what a bridge does, but ends them at chosen moments: before they
publish, midway, and after the broker has taken the records and before anybody has noted that. What they then owe is
the same for every broker. What the descriptor says (the order, exactly once, a queue) decides how much more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count, pairwise
from typing import Any, TypeVar
from uuid import UUID, uuid4

from dispatcher.bridges.brokers import client_class
from mailroom.bridges.arrival import Arrived, Intake, digest, incoming
from mailroom.bridges.broker import Broker, broker_of
from mailroom.bridges.publisher import (
    BrokerTrouble,
    NotingPublisher,
    OutBridge,
    Partitioned,
    PublishAgain,
    Publisher,
)
from mailroom.bridges.record import Carried, Record, Sender, record_of
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.bridges.source import (
    BrokerPosition,
    BrokerWasAway,
    InBridge,
    PositionGone,
    RecordSource,
)
from mailroom.values import codec

T = TypeVar("T")

WITHIN_S = 60.0  # for what takes no time unless something is wrong
READ_S = 0.5
BATCH = 4
KEYS = ("k1", "k2", "köy 3")
# After how many turns of the event loop a publisher is ended midway.
TURNS = (0, 1, 3, 10, 40)
# How often one batch is tried again before the suite gives up.
TRIES = 200

_links = count(1)


class NotConforming(AssertionError):
    """A client does not do what a bridge relies on; the text says what."""


class BrokerCase:
    """A broker to try the suite on: a subclass says where it is, and makes topics there.

    `broker` is the name of its entry point, and `options` are those that the environment would give the clients. A
    broker that the test can kill has `kill` and `start` of its own, and says so by `can_be_killed`.
    """

    broker: str
    options: Mapping[str, str] = {}
    can_be_killed = False

    async def out(self) -> OutSettings:
        """Return settings for a topic of its own, which is new and empty, and has one partition."""
        raise NotImplementedError

    def into(self, out: OutSettings) -> InSettings:
        """Return the settings by which the same topic is taken in; for a broker that can do that."""
        raise NotImplementedError

    async def records(self, out: OutSettings, until: Collection[UUID]) -> Sequence[Arrived]:
        """Return all that the broker has for a reader, in its order, once these messages are among it.

        By default the broker's own source reads it. A broker that cannot be taken in from needs another reader.
        """
        source, _ = await _opened_source(self, self.into(out))
        try:
            return await _read(source, until, self.into(out), broker_of(self.broker))
        finally:
            await source.close()

    async def kill(self) -> None:
        """Kill the broker, so that it has no time to do anything."""

    async def start(self) -> None:
        """Start it again, with what it had kept."""


async def conform(case: BrokerCase) -> None:
    """Try all that the broker's descriptor says that it can do. Raises `NotConforming` with all that is wrong."""
    broker = broker_of(case.broker)
    wrong = []
    for check in _checks(broker):
        try:
            await asyncio.wait_for(check(case), 10 * WITHIN_S)
        except NotConforming as error:
            wrong.append(f"{check.__name__.strip('_').replace('_', ' ')}: {error}")
    if wrong:
        raise NotConforming(f"{broker.title} does not conform:\n" + "\n".join(wrong))


def _checks(broker: Broker) -> list[Callable[[BrokerCase], Coroutine[Any, Any, None]]]:
    found: list[Callable[[BrokerCase], Coroutine[Any, Any, None]]] = []
    if broker.publishes is not None:
        found += [_publishes_whatever_ends_it, _a_predecessor_does_no_harm, _a_closed_publisher_publishes_nothing]
        if broker.publishes.exactly_once == "option":
            found += [_publishes_exactly_once_on_request]
    if broker.publishes is not None and broker.takes_from is not None:
        found += [_gives_out_what_was_not_taken, _a_closed_source_ends]
        found += [] if broker.is_queue else [_goes_on_where_it_is_told]
    return found


# -- Out --------------------------------------------------------------------------------------------------------------


@dataclass
class _Out:
    """What the node knows of a bridge: its settings, what was noted last, and up to which clock anything was given."""

    case: BrokerCase
    settings: OutSettings
    link: int = field(default_factory=lambda: next(_links))
    node_id: UUID = field(default_factory=uuid4)
    clock: int = 0
    noted: str | None = None
    given: int = 0

    @property
    def broker(self) -> Broker:
        return broker_of(self.settings.broker)

    def records(self, number: int) -> list[Record]:
        """Return new records, of keys in turn, with headers that would tell the broker what to do."""
        names = [*self.broker.reserved, *(f"{prefix}x" for prefix in self.broker.reserved_prefixes)]
        headers = {"own": "ünicode", "odd name": "1"} | dict.fromkeys(names, "2")
        sender, made = Sender(self.node_id, "suite", self.link), []
        for _ in range(number):
            self.clock += 1
            now = datetime.now(UTC)
            message = Carried(
                self.clock, self.clock, now, uuid4(), "suite.topic", KEYS[self.clock % len(KEYS)], "M", "U", None,
                codec.encode({"n": self.clock}), None, headers, None, None, "suite", now,
            )  # fmt: skip
            made.append(record_of(message, self.settings.form, sender, self.broker.is_reserved))
        return made

    async def opened(self) -> tuple[Publisher, int]:
        """Return a new publisher, and the clock up to which the broker has everything."""
        bridge = OutBridge("suite", self.link, self.node_id, "suite", self.settings, self.case.options)
        publisher: Publisher = client_class(self.broker, self.broker.publishes)(bridge)
        try:
            if self.noted is not None and isinstance(publisher, NotingPublisher):
                publisher.remember(self.noted)
            mark = await _soon(publisher.open(), "open does not return")
            _must(mark <= self.given, f"open says that the broker has clock {mark}, and it was given {self.given}")
        except BaseException:
            await publisher.close()
            raise
        return publisher, mark

    async def publishing(self, publisher: Publisher, records: Sequence[Record]) -> "asyncio.Task[None]":
        """Begin to publish, as a bridge does."""
        if isinstance(publisher, Partitioned):
            parts = await publisher.parts({record.topic for record in records})
            records = [replace(record, parts=parts[record.topic]) for record in records]
        if isinstance(publisher, NotingPublisher):
            self.noted = publisher.plan(records)
        self.given = max(self.given, records[-1].clock)
        return asyncio.create_task(publisher.publish(records))


async def _publish(out: _Out, records: Sequence[Record], ends: Sequence[str] = ()) -> None:
    """Publish all, in batches; each end of `ends` befalls one try."""
    left, nth = [*ends], 0
    for _ in range(TRIES):
        if nth == len(records):
            return
        try:
            publisher, mark = await out.opened()
        except BrokerTrouble:
            await asyncio.sleep(0.05)  # it is away, or another one is not known to be gone
            continue
        try:
            while nth < len(records) and records[nth].clock <= mark:
                nth += 1
            if nth == len(records):
                return
            how = left.pop(0) if left else ""
            batch = records[nth : nth + BATCH]
            task = await out.publishing(publisher, batch)
            await _ended(out.case, publisher, task, how)
            if not how:
                nth += len(batch)
        except (BrokerTrouble, PublishAgain):
            continue
        finally:
            await _soon(publisher.close(), "close does not return")
    raise NotConforming(f"a batch was not published in {TRIES} tries")


async def _ended(case: BrokerCase, publisher: Publisher, task: "asyncio.Task[None]", how: str) -> None:
    """Wait for a batch, unless something befalls it."""
    match how.split():
        case ["midway", turns]:
            for _ in range(int(turns)):
                await asyncio.sleep(0)
            await _soon(publisher.close(), "close does not return while publish is under way")
            # What it says then is of no account: nobody hears it.
            await _soon(asyncio.wait([task]), "publish does not end when its publisher is closed")
            task.cancelled() or task.exception()
        case ["killed"]:
            await case.kill()
            await case.start()
            await _soon(task, "publish does not end after the broker was killed and has come back")
        case _:  # also for an answer that is lost: all of it is there, and nobody knows
            await _soon(task, "publish does not return")


ENDS = ("lost", *(f"midway {turns}" for turns in TURNS), "lost", "midway 2", "lost")


async def _publishes_whatever_ends_it(case: BrokerCase) -> None:
    settings = await case.out()
    await _publishes(case, settings, broker_of(case.broker).publishes is not None and _is_always(case))


async def _publishes_exactly_once_on_request(case: BrokerCase) -> None:
    settings = await case.out()
    once = replace(settings, exactly_once=True, mark_topic=settings.form.topic)
    await _publishes(case, once, True)


def _is_always(case: BrokerCase) -> bool:
    to = broker_of(case.broker).publishes
    return to is not None and to.exactly_once == "always"


async def _publishes(case: BrokerCase, settings: OutSettings, is_once: bool) -> None:
    out = _Out(case, settings)
    records = out.records(8 * BATCH)
    await _publish(out, records, ENDS + ("killed",) * case.can_be_killed)
    await _compare(out, records, is_once)


async def _compare(out: _Out, records: list[Record], is_once: bool) -> None:
    """Compare what a reader gets with what was published, with a last record of each key after it."""
    last = out.records(len(KEYS))
    await _publish(out, last)
    records = [*records, *last]
    found = await _soon(out.case.records(out.settings, {each.id for each in last}), "what was published is not read")
    messages = [incoming(each, Intake(), "suite", out.broker.is_reserved) for each in found]
    sent = {record.id: record for record in records}
    _must({each.message_id for each in messages} == sent.keys(), _lacking(sent, messages))
    for each in messages:
        record = sent[each.message_id]
        is_same = (each.key.encode(), each.clock, codec.decode(each.value)) == (
            record.key, record.clock, {"n": record.clock},
        )  # fmt: skip
        _must(is_same and each.headers == _headers(out), f"message {record.clock} has another key, value or headers")
    clocks = [each.clock or 0 for each in messages]
    first = [*dict.fromkeys(clocks)]
    if out.broker.publishes is not None and out.broker.publishes.order == "bridge":
        _must(first == sorted(first), f"the order is not that of the bridge: {first}")
    for key in KEYS:
        of_key = [each for each in first if KEYS[each % len(KEYS)] == key]
        _must(of_key == sorted(of_key), f"the order of a key is lost: {of_key}")
    _must(not is_once or first == clocks, f"it is not exactly once: {clocks}")


def _headers(out: _Out) -> dict[str, str]:
    names = [*out.broker.reserved, *(f"{prefix}x" for prefix in out.broker.reserved_prefixes)]
    return {"own": "ünicode", "odd name": "1"} | dict.fromkeys(names, "2")


def _lacking(sent: Mapping[UUID, Record], messages: Sequence[Any]) -> str:
    found = {each.message_id for each in messages}
    lost = sorted(record.clock for id_, record in sent.items() if id_ not in found)
    return f"{lost} of {len(sent)} messages are lost, and {len(found - sent.keys())} are there that must not be"


async def _a_predecessor_does_no_harm(case: BrokerCase) -> None:
    out = _Out(case, await case.out())
    records = out.records(3 * BATCH)
    old, _ = await out.opened()
    new: Publisher | None = None
    try:
        await _soon(await out.publishing(old, records[:BATCH]), "publish does not return")
        try:
            new, _ = await out.opened()
            await _soon(await out.publishing(new, records[BATCH : 2 * BATCH]), "publish does not return")
        except BrokerTrouble:  # it waits until the predecessor is gone
            await old.close()
        late = asyncio.create_task(old.publish(records[BATCH : 2 * BATCH]))
        await _soon(asyncio.wait([late]), "a predecessor's publish does not end")
        late.exception()
    finally:
        await old.close()
        if new is not None:
            await new.close()
    await _publish(out, records[BATCH:])
    await _compare(out, records, _is_always(case))


async def _a_closed_publisher_publishes_nothing(case: BrokerCase) -> None:
    out = _Out(case, await case.out())
    bridge = OutBridge("suite", out.link, out.node_id, "suite", out.settings, case.options)
    await client_class(out.broker, out.broker.publishes)(bridge).close()  # which was not opened
    publisher, _ = await out.opened()
    await _soon(publisher.close(), "close does not return")
    await _soon(publisher.close(), "close does not return the second time")
    task = asyncio.create_task(publisher.publish(out.records(1)))
    await _soon(asyncio.wait([task]), "publish does not end though its publisher is closed")
    _must(task.cancelled() or task.exception() is not None, "publish returns though its publisher is closed")
    await _compare(out, [], _is_always(case))  # nor does it come later


# -- In ---------------------------------------------------------------------------------------------------------------


async def _opened_source(
    case: BrokerCase, settings: InSettings, known: Sequence[BrokerPosition] = ()
) -> tuple[RecordSource, list[BrokerPosition]]:
    """Return a source that reads from these positions on, and from where it begins elsewhere."""
    broker = broker_of(case.broker)
    source: RecordSource = client_class(broker, broker.takes_from)(
        InBridge("suite", next(_links), uuid4(), settings, case.options)
    )
    try:
        await _soon(source.open(), "open of a source does not return")
        positions = await _begun(source, known)
    except BaseException:
        await source.close()
        raise
    return source, positions


async def _begun(source: RecordSource, known: Sequence[BrokerPosition]) -> list[BrokerPosition]:
    positions = [*known]
    while new := await _soon(source.begin(positions), "begin does not return"):
        _must(not {_place(each) for each in new} & {_place(each) for each in positions}, "begin tells a place twice")
        positions += new
    return positions


async def _read(
    source: RecordSource, until: Collection[UUID], settings: InSettings, broker: Broker
) -> list[Arrived]:  # fmt: skip
    """Read until these messages are there; return all records."""
    found: list[Arrived] = []
    missing = {*until}
    while missing:
        records = await _soon(source.read(READ_S), "read does not return")
        for record in records:
            if isinstance(record, Arrived):
                found.append(record)
                missing.discard(incoming(record, settings.intake, "suite", broker.is_reserved).message_id)
    return found


def _place(each: BrokerPosition | Arrived) -> tuple[str, int]:
    return each.topic, each.part


def _behind(record: Arrived) -> BrokerPosition:
    return BrokerPosition(record.topic, record.part, record.offset + 1, record.leader_epoch, record.log)


def _last_ids(records: Sequence[Record]) -> set[UUID]:
    """Return the ids of the last record of each key: once a reader has them, it has all."""
    return {record.id for record in records[-len(KEYS) :]}


async def _filled(case: BrokerCase) -> tuple[_Out, InSettings, list[Record]]:
    """Return a topic with records."""
    out = _Out(case, await case.out())
    records = out.records(2 * BATCH)
    await _publish(out, records)
    return out, case.into(out.settings), records


async def _read_from(
    case: BrokerCase, settings: InSettings, known: Sequence[BrokerPosition], until: Collection[UUID]
) -> tuple[list[Arrived], list[BrokerPosition], RecordSource]:
    source, positions = await _opened_source(case, settings, known)
    try:
        found = await _soon(_read(source, until, settings, broker_of(case.broker)), "records are missing")
    except BaseException:
        await source.close()
        raise
    return found, positions, source


async def _gives_out_what_was_not_taken(case: BrokerCase) -> None:
    out, settings, records = await _filled(case)
    is_queue = out.broker.is_queue
    ids = _last_ids(records)
    first, began, source = await _read_from(case, settings, (), ids)
    await source.close()  # killed: nothing of it is taken
    _must(len(first) >= len(records), f"of {len(records)} records {len(first)} are read")
    again, _, source = await _read_from(case, settings, began, ids)
    _must([digest(each) for each in first] == [digest(each) for each in again], "what was not taken is not read again")
    _must(all(each.is_queued is is_queue for each in again), "records do not say whether they lay in a queue")
    taken = [*{_place(each): _behind(each) for each in again}.values()]
    await _soon(source.taken(taken), "taken does not return")
    await source.close()
    [more] = out.records(1)
    await _publish(out, [more])
    rest, _, source = await _read_from(case, settings, taken, {more.id})
    await source.close()
    _must(len(rest) == 1, f"of {len(rest)} records that are read next, one was not taken")


async def _goes_on_where_it_is_told(case: BrokerCase) -> None:
    _, settings, records = await _filled(case)
    found, _, source = await _read_from(case, settings, (), _last_ids(records))
    await source.close()
    for before, after in pairwise(found):
        _must(_place(before) != _place(after) or before.offset < after.offset, "offsets do not rise in a partition")
    last = found[-1]
    until = {incoming(last, settings.intake, "suite", broker_of(case.broker).is_reserved).message_id}
    for nth in (0, len(found) // 2):
        rest, _, source = await _read_from(case, settings, [_behind(found[nth])], until)
        await source.close()
        _must([each.offset for each in rest] == [each.offset for each in found[nth + 1 :]], "it goes on elsewhere")
    beyond = replace(_behind(last), next=last.offset + 1_000)
    try:
        source, _ = await _opened_source(case, settings, [beyond])
        try:
            while not await _soon(source.read(READ_S), "read does not return"):
                pass
        except BrokerWasAway:
            pass
        finally:
            await source.close()
    except PositionGone:
        return
    raise NotConforming("a position that is beyond the end of the log is not told as PositionGone")


async def _a_closed_source_ends(case: BrokerCase) -> None:
    _, settings, _ = await _filled(case)
    source, _ = await _opened_source(case, settings)
    reading = asyncio.create_task(_on(source))
    await asyncio.sleep(0)
    await _soon(source.close(), "close of a source does not return")
    reading.cancel()
    await _soon(asyncio.wait([reading]), "read does not end when its source is closed")


async def _on(source: RecordSource) -> None:
    while True:
        await source.read(WITHIN_S)


async def _soon(work: Awaitable[T], fault: str) -> T:
    try:
        return await asyncio.wait_for(work, WITHIN_S)
    except TimeoutError:
        raise NotConforming(f"{fault} within {WITHIN_S:.0f} s") from None


def _must(holds: bool, fault: str) -> None:
    if not holds:
        raise NotConforming(fault)
