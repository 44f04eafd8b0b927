"""Nothing is lost, repeated or reordered on the way through a broker: what that rests on, rule by rule.

`make bridges-soak` breaks all of it at once, between two nodes with a real Kafka.
"""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from dispatcher.bridges.kafka import call_thread
from dispatcher.bridges.kafka.left_open import LeftOpen, ask_ends
from dispatcher.bridges.kafka.publisher import KafkaPublisher, own_id
from dispatcher.bridges.kafka.source import KafkaSource, own_group
from dispatcher.bridges.publishing import Publishing
from dispatcher.bridges.taking import TakingIn
from mailroom.bridges.arrival import Arrived
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.into import InRow, reading_ins, resuming_in
from mailroom.bridges.out import OutRow, finding_out
from mailroom.bridges.publisher import BrokerTrouble, OutBridge
from mailroom.bridges.record import Form, Record, Sender, record_of
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.bridges.source import BrokerPosition, InBridge
from mailroom.sql.runner import run
from tests.bridges.messages import message
from tests.bridges.tasks import receiving, tended
from tests.bridges.through_kafka import clocks, read_log
from tests.faults.bridges.segments import Partition
from tests.support.kafka import Kafka
from tests.support.kafka_mock import MockKafka
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually_async

PRODUCE, REQUEST_TIMED_OUT = 0, 7
NODE_ID = UUID(int=7)
SENDER = Sender(NODE_ID, "paris", 1)
TOPIC = "order.paid"
POLL_S = 60.0  # nothing here waits for it
NEXT = "SELECT next FROM mailroom.bridge_position"
OPTIONS = {"retry_backoff_ms": "50", "retry_backoff_max_ms": "50"}


def records(*clocks: int, topic: str) -> list[Record]:
    return [
        record_of(message(seq=clock, sent_clock=clock, message_id=UUID(int=clock)), Form(topic), SENDER)
        for clock in clocks
    ]


# -- Kafka ------------------------------------------------------------------------------------------------------------


def publisher(kafka: MockKafka | Kafka, topic: str, *, exactly_once: bool = False) -> KafkaPublisher:
    settings = OutSettings("kafka", kafka.bootstrap, Form(topic), exactly_once, topic if exactly_once else None)
    return KafkaPublisher(OutBridge(topic, 1, NODE_ID, "paris", settings, OPTIONS))


def ids_in(kafka: MockKafka, topic: str, number: int) -> list[int]:
    """Return the ids of the first records of a topic with one partition."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "test", "log_level": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[int] = []
    while len(found) < number:
        [read] = consumer.consume(1, WITHIN_S)
        headers = dict(cast("list[tuple[str, bytes]]", read.headers()))
        found.append(UUID(headers["ce_id"].decode()).int)
    consumer.close()
    return found


@pytest.mark.slow
async def test_records_are_not_given_up_while_the_broker_does_not_take_them(mock_kafka: MockKafka) -> None:
    """A run that gave up the first ones would leave a gap, and then overtake within a key."""
    mock_kafka.create("kept", 1)
    publishing = publisher(mock_kafka, "kept")
    try:
        await publishing.open()
        await publishing.publish(records(1, topic="kept"))
        mock_kafka.errors(PRODUCE, *[REQUEST_TIMED_OUT] * 20)
        await publishing.publish(records(2, 3, 4, topic="kept"))
    finally:
        await publishing.close()
    assert ids_in(mock_kafka, "kept", 4) == [1, 2, 3, 4]


class Keeping(Producer):
    """Does at the end of a transaction what a broker does with its offsets, and the mock cluster does not."""

    def __init__(self, options: dict[str, Any], **others: Any) -> None:
        super().__init__(options, **others)
        self._options = {name: options[name] for name in ("bootstrap.servers", "log_level")}
        self._group = options["transactional.id"]
        self._offsets: list[TopicPartition] = []

    def send_offsets_to_transaction(self, positions: list[TopicPartition], *others: Any) -> None:
        super().send_offsets_to_transaction(positions, *others)
        self._offsets += positions

    def commit_transaction(self, *timeout: float) -> None:
        super().commit_transaction(*timeout)
        if self._offsets:
            group = Consumer(self._options | {"group.id": self._group})
            group.commit(offsets=self._offsets, asynchronous=False)
            group.close()


async def test_mark_is_where_the_last_transaction_ended(mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Producer", Keeping)
    mock_kafka.create("marked", 1)
    first, second = (publisher(mock_kafka, "marked", exactly_once=True) for _ in range(2))
    try:
        assert await first.open() == 0
        await first.publish(records(3, 5, topic="marked"))
        await first.publish(records(8, topic="marked"))
        assert await second.open() == 8
    finally:
        await first.close()
        await second.close()


async def test_broker_that_was_away_is_asked_for_the_mark_before_more_is_published(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been put back, and it would go on with the producer that it knew."""
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Producer", Keeping)
    mock_kafka.create("returned", 1)
    publishing = publisher(mock_kafka, "returned", exactly_once=True)
    try:
        await publishing.open()
        await publishing.publish(records(3, 5, topic="returned"))
        publishing._note(KafkaError(KafkaError._TRANSPORT))
        await publishing.publish(records(6, topic="returned"))  # nothing was lost
        group = Consumer({"bootstrap.servers": mock_kafka.bootstrap, "group.id": own_id(publishing._bridge)})
        group.commit(offsets=[TopicPartition("returned", 0, 3)], asynchronous=False)
        group.close()
        publishing._note(KafkaError(KafkaError._TRANSPORT))
        with pytest.raises(BrokerTrouble, match="its mark is 3 and was 6 before it was away"):
            await publishing.publish(records(8, topic="returned"))
    finally:
        await publishing.close()
    assert ids_in(mock_kafka, "returned", 3) == [3, 5, 6]


class Stuck(Keeping):
    """Waits for a group's coordinator that it no longer knows, however often it is asked."""

    def send_offsets_to_transaction(self, *_: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))


async def test_client_that_never_ends_its_transaction_is_given_up(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Producer", Stuck)
    mock_kafka.create("stuck", 1)
    stuck, other = (publisher(mock_kafka, "stuck", exactly_once=True) for _ in range(2))
    try:
        await stuck.open()
        with monkeypatch.context() as patched:
            patched.setattr("dispatcher.bridges.kafka.publisher.TRANSACTION_S", 0.2)
            with pytest.raises(BrokerTrouble):
                await asyncio.wait_for(stuck.publish(records(1, 2, topic="stuck")), WITHIN_S)
        monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Producer", Keeping)
        assert await other.open() == 0
        await other.publish(records(1, 2, topic="stuck"))
    finally:
        await stuck.close()
        await other.close()


class Hanging(Keeping):
    """Does not return from a call, whatever time-out it is given."""

    returns = threading.Event()
    begun = threading.Event()

    def send_offsets_to_transaction(self, *_: Any) -> None:
        self.begun.set()
        self.returns.wait()


@contextmanager
def hung_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take a call for one that hangs after a third of a second."""
    with monkeypatch.context() as patched:
        patched.setattr(call_thread, "HUNG_S", 0.3)
        patched.setattr(call_thread, "LOOK_S", 0.1)
        yield


class Uncommitted(Producer):
    """Does not commit what it has published with its mark."""

    def commit_transaction(self, *_: float) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))


class Forgetful:
    """A real Kafka that loses ends of transactions, and those who publish there to a topic with one partition."""

    def __init__(self, kafka: Kafka, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kafka = kafka
        self._topic = topic
        self._monkeypatch = monkeypatch
        kafka.create(topic, 1)

    async def mark(self, *then: int) -> int:
        """Begin anew, by which Kafka ends what is under way, and publish; return the mark before."""
        publishing = publisher(self._kafka, self._topic, exactly_once=True)
        try:
            mark = await publishing.open()
            if then:
                await publishing.publish(records(*then, topic=self._topic))
            return mark
        finally:
            await publishing.close()

    async def lose_end(self, topic: str | None = None) -> None:
        """Have it end what is under way, and lose that end, as by a power cut."""
        await self.mark()
        await asyncio.to_thread(self._cut, topic or self._topic)

    def _cut(self, topic: str) -> None:
        self._kafka.kill()
        last = Partition(self._kafka.log.with_name("data") / f"{topic}-0").batches[-1]
        assert last.is_end
        os.truncate(last.file, last.place)
        self._kafka.start()

    async def give_up(self, how: type[Producer], *clocks: int) -> None:
        """Publish, and die before the end."""
        with self._monkeypatch.context() as patched:
            patched.setattr("dispatcher.bridges.kafka.publisher.Producer", how)
            patched.setattr("dispatcher.bridges.kafka.publisher.TRANSACTION_S", 0.2)
            with pytest.raises(BrokerTrouble):
                await self.mark(*clocks)

    def committed(self) -> list[int]:
        """Return the clocks of committed records."""
        return [clock for _, clock in clocks(read_log(dict(self._kafka.client), self._topic))]


@pytest.mark.slow
async def test_commit_does_not_commit_what_was_given_up_before_though_kafka_has_not_ended_that(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it abort what was committed before. The end of either transaction may be missing in the log."""
    monkeypatch.setattr("dispatcher.bridges.kafka.left_open.SETTLES_S", 0.2)
    log = Forgetful(kafka, "left", monkeypatch)
    await log.mark(1, 2)
    await log.give_up(Stuck, 3, 4)
    await log.lose_end()
    await log.mark(3, 4)
    await log.lose_end()
    await log.mark(5, 6)
    other = Producer({**kafka.client, "transactional.id": "other", "log_level": 0})
    other.init_transactions(WITHIN_S)
    other.begin_transaction()
    other.produce("left", b"of somebody else, and open all the while")
    assert other.flush(WITHIN_S) == 0
    await log.give_up(Stuck, 7)
    await log.lose_end()
    await log.mark(7)
    other.abort_transaction(WITHIN_S)
    assert log.committed() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
async def test_mark_whose_transaction_kafka_has_not_ended_is_found_in_the_log(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.STABLE_S", 0.2)
    monkeypatch.setattr("dispatcher.bridges.kafka.own_records.BACK", 1)
    log = Forgetful(kafka, "unmarked", monkeypatch)
    await log.mark(1, 2)
    await log.give_up(Uncommitted, 3)
    await log.lose_end("__consumer_offsets")
    assert await log.mark(3) == 2
    await log.lose_end("__consumer_offsets")
    assert await log.mark(4) == 3
    assert log.committed() == [1, 2, 3, 4]


def test_end_that_the_client_does_not_know_is_no_end() -> None:
    """It stopped a bridge: the log ended before record -1001, so it had to be cut back."""
    asked = [{0: 7, 1: -1001}, {1: 9}]

    def list_offsets(places: dict[TopicPartition, Any], **_: Any) -> dict[TopicPartition, Future[Any]]:
        told = {place: Future[Any]() for place in places}
        offsets = asked.pop(0)
        assert {place.partition for place in places} == offsets.keys()
        for place, future in told.items():
            future.set_result(SimpleNamespace(offset=offsets[place.partition]))
        return told

    admin, found = cast("AdminClient", SimpleNamespace(list_offsets=list_offsets)), dict[tuple[str, int], int]()
    with pytest.raises(KafkaException) as failed:
        ask_ends(admin, [("t", 0), ("t", 1)], found)
    assert failed.value.args[0].retriable()
    ask_ends(admin, [("t", 0), ("t", 1)], found)
    assert found == {("t", 0): 7, ("t", 1): 9}


def test_what_stands_open_is_aborted_only_where_nothing_is_lost_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    look = LeftOpen("b", "g", {}, {}, lambda call: call(), lambda: None)
    mark, first = 5, 10

    def is_given_up(*own: tuple[int, float], has_ended: bool = False) -> bool:
        monkeypatch.setattr(look, "_own", lambda *_: iter(own))
        return look.is_given_up(("t", 0), first, 20, mark, has_ended=has_ended)

    assert is_given_up((10, 6))
    assert is_given_up((10, inf))  # without a clock
    assert not is_given_up((10, 5), (11, 5))  # committed, and only its end is missing
    assert not is_given_up((10, 5), (12, 6))  # rather twice than lost
    assert is_given_up((11, 5), (12, 6))  # behind a transaction of somebody else
    assert not is_given_up((11, 5), (12, 6), has_ended=True)
    assert not is_given_up((11, 5))
    assert not is_given_up()
    with pytest.raises(BrokerTrouble, match="stays open in partition 0 of t at offset 10"):
        is_given_up((10, 6), has_ended=True)


@pytest.mark.slow
async def test_client_whose_call_never_returns_is_left_and_another_one_goes_on(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Producer", Hanging)
    monkeypatch.setattr(Hanging, "returns", threading.Event())
    mock_kafka.create("hanging", 1)
    hanging, other = (publisher(mock_kafka, "hanging", exactly_once=True) for _ in range(2))
    try:
        await hanging.open()
        with hung_soon(monkeypatch), pytest.raises(BrokerTrouble, match="a call has not returned"):
            async with asyncio.timeout(WITHIN_S):
                await hanging.publish(records(1, topic="hanging"))
        monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Producer", Keeping)
        assert await other.open() == 0
        await other.publish(records(1, topic="hanging"))
        assert await other.open() == 1
    finally:
        Hanging.returns.set()
        await hanging.close()
        await other.close()


async def test_client_whose_call_never_returns_can_be_closed(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Producer", Hanging)
    monkeypatch.setattr(Hanging, "returns", threading.Event())
    monkeypatch.setattr(Hanging, "begun", threading.Event())
    mock_kafka.create("closing", 1)
    hanging = publisher(mock_kafka, "closing", exactly_once=True)
    await hanging.open()
    publishing = asyncio.create_task(hanging.publish(records(1, topic="closing")))
    await eventually_async(Hanging.begun.is_set)
    with hung_soon(monkeypatch):
        try:
            async with asyncio.timeout(WITHIN_S):
                await hanging.close()
            with pytest.raises(BrokerTrouble):
                await publishing
        finally:
            Hanging.returns.set()


async def test_client_that_gets_nothing_acknowledged_is_given_up(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock_kafka.create("silent", 1)
    publishing = publisher(mock_kafka, "silent")
    try:
        await publishing.open()
        await publishing.publish(records(1, topic="silent"))
        mock_kafka.down()
        try:
            with monkeypatch.context() as patched:
                patched.setattr("dispatcher.bridges.kafka.publisher.SILENT_S", 0.5)
                with pytest.raises(BrokerTrouble):
                    await asyncio.wait_for(publishing.publish(records(2, 3, topic="silent")), WITHIN_S)
        finally:
            mock_kafka.up()
        await publishing.publish(records(2, 3, topic="silent"))
    finally:
        await publishing.close()
    assert ids_in(mock_kafka, "silent", 3) == [1, 2, 3]


async def test_source_reads_from_where_it_is_told_and_not_from_where_kafka_would(mock_kafka: MockKafka) -> None:
    mock_kafka.create("told", 1)
    producer = Producer({"bootstrap.servers": mock_kafka.bootstrap, "log_level": 0})
    for nth in range(6):
        producer.produce("told", str(nth).encode())
    producer.flush(WITHIN_S)
    bridge = InBridge("told", 1, NODE_ID, InSettings("kafka", mock_kafka.bootstrap, ("told",)), OPTIONS)
    others = Consumer({"bootstrap.servers": mock_kafka.bootstrap, "group.id": own_group(bridge), "log_level": 0})
    others.commit(offsets=[TopicPartition("told", 0, 4)], asynchronous=False)
    others.close()
    source = KafkaSource(bridge)
    try:
        await source.open()
        assert await source.begin([BrokerPosition("told", 0, 2)]) == []
        found: list[int] = []
        while len(found) < 4:
            found += [each.offset for each in await source.read(1) if isinstance(each, Arrived)]
        assert found == [2, 3, 4, 5]
    finally:
        await source.close()


@dataclass
class Read:
    """What a consumer gives: a record of the bridge with this clock, or the end of the partition."""

    part: int
    clock: int | None = None

    def topic(self) -> str:
        return "kept"

    def partition(self) -> int:
        return self.part

    def error(self) -> KafkaError | None:
        return KafkaError(KafkaError._PARTITION_EOF) if self.clock is None else None

    def headers(self) -> list[tuple[str, bytes]]:
        return list(records(self.clock or 0, topic="kept")[0].headers)


class Written:
    """A consumer of two partitions, to one of which others write."""

    def __init__(self, options: dict[str, Any], **others: Any) -> None:
        self._given = [[Read(0), Read(0), Read(0)], [Read(1, 7)], [Read(0), Read(1)]]

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics={"kept": SimpleNamespace(partitions={0: None, 1: None})})

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 0) for each in places]

    def assign(self, places: list[TopicPartition]) -> None:
        assert len(places) == 2

    def consume(self, number: int, timeout: float) -> list[Read]:
        return self._given.pop(0)

    def close(self) -> None:
        pass


async def test_log_is_read_to_the_end_of_each_partition_also_while_others_write_to_one(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end comes again and again. Who counted ends lacked what stands in others, or never came to an end."""
    monkeypatch.setattr("dispatcher.bridges.kafka.publisher.Consumer", Written)
    publishing = publisher(mock_kafka, "kept")
    try:
        assert await publishing.published(0, datetime.now(UTC)) == [(7, UUID(int=7))]
    finally:
        await publishing.close()


# -- Publishing ------------------------------------------------------------------------------------------------------


class Broker:
    """A publisher that notes what it is given, and takes it once it may."""

    trouble: str | None = None

    def __init__(self, node: Node, *, takes: bool = True, mark: int = 0) -> None:
        self.given: list[UUID] = []
        self.durable: list[bool] = []  # whether all that was written before was on disk then
        self.written = "0/0"  # up to where that is
        self._node = node
        self._takes = takes
        self._mark = mark

    async def open(self) -> int:
        return self._mark

    async def published(self, after: int, since: datetime) -> list[tuple[int, UUID]]:
        raise AssertionError

    async def publish(self, records: Sequence[Record]) -> None:
        self.given += [record.id for record in records]
        self.durable.append(self._node.value("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", self.written))
        if not self._takes:
            raise BrokerTrouble("not now")

    async def keep(self) -> None:
        raise AssertionError

    async def close(self) -> None:
        pass


@pytest.fixture
def out(node: Node) -> OutRow:
    with node.connection.transaction():
        Bridges().out(node.connection, "kafka", OutSettings("kafka", "localhost:9092"), topics=[TOPIC], actor="tests")
    node.allow_clocks()
    return run(node.connection, finding_out(SCHEMA, "kafka"))


def put(node: Node, out: OutRow, seq: int) -> UUID:
    """Put a message into transit, as a delivery does whose commit nothing has made durable."""
    message_id = uuid4()
    node.connection.execute(
        "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, "
        "value, sent_at) VALUES (%s, %s, %s, now(), %s, %s, 'k', 'M', 'U', '\\xf6', now())",
        [out.link, seq, seq, message_id, TOPIC],
    )
    return message_id


async def test_rows_are_acknowledged_once_the_broker_has_them_and_not_before(node: Node, out: OutRow) -> None:
    message_id = put(node, out, 1)
    acked = "SELECT acked FROM mailroom.link"
    broker = Broker(node, takes=False)
    async with receiving(node) as receives:
        async with tended(Publishing(out, lambda: broker, node.dsn, SCHEMA, receives, POLL_S)):
            await eventually_async(lambda: len(broker.durable) >= 2)  # once more, since it had failed
            assert node.value(acked) == 0
        assert set(broker.given) == {message_id}
        broker = Broker(node)
        async with tended(Publishing(out, lambda: broker, node.dsn, SCHEMA, receives, POLL_S)):
            await eventually_async(lambda: node.value(acked) == 1)
    assert broker.given == [message_id]


async def test_what_the_broker_has_by_its_mark_is_not_published_again(node: Node, out: OutRow) -> None:
    """A daemon died between the broker's commit and `acked`."""
    ids = [put(node, out, seq) for seq in (1, 2, 3)]
    broker = Broker(node, mark=2)
    acked = "SELECT acked FROM mailroom.link"
    async with receiving(node) as receives, tended(Publishing(out, lambda: broker, node.dsn, SCHEMA, receives, POLL_S)):
        await eventually_async(lambda: node.value(acked) == 3)
    assert broker.given == ids[2:]


@pytest.mark.slow
async def test_rows_are_durable_before_they_are_published(node: Node, out: OutRow) -> None:
    node.connection.execute("SET synchronous_commit = off")
    broker = Broker(node)
    async with receiving(node) as receives:
        for seq in range(1, 7):  # several, since PostgreSQL itself makes all durable five times a second
            put(node, out, seq)
            broker.written = node.value("SELECT pg_current_wal_insert_lsn()::text")
            async with tended(Publishing(out, lambda: broker, node.dsn, SCHEMA, receives, POLL_S)):
                await eventually_async(lambda: node.value("SELECT acked FROM mailroom.link") == seq)  # noqa: B023 - awaited at once
    assert all(broker.durable)


# -- Taking in -------------------------------------------------------------------------------------------------------


class Log:
    """A source with one partition. `at_read` is called before its records are given out."""

    trouble: str | None = None

    def __init__(self, arrived: Sequence[Arrived]) -> None:
        self.begun: list[int] = []
        self.read_by = asyncio.Event()
        self.may_give = asyncio.Event()
        self._arrived = arrived
        self._next = 0

    async def open(self) -> str:
        return "cluster"

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        if not known:
            return [BrokerPosition("log", 0, 0)]
        self._next = known[0].next
        self.begun.append(self._next)
        return []

    async def read(self, wait_s: float) -> Sequence[Arrived]:
        found, self._next = self._arrived[self._next :], len(self._arrived)
        self.read_by.set()
        if found:
            await self.may_give.wait()
        else:
            await asyncio.sleep(0.01)
        return found

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        pass

    async def close(self) -> None:
        self.may_give.set()


def lying(given: Sequence[Record]) -> list[Arrived]:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    return [Arrived("log", 0, offset, each.key, each.value, each.headers, at) for offset, each in enumerate(given)]


@pytest.fixture
def into(node: Node) -> InRow:
    with node.connection.transaction():
        Bridges().into(node.connection, "kafka", InSettings("kafka", "localhost:9092", ("log",)), actor="tests")
    node.inbox("billing", TOPIC, origin="kafka")
    node.allow_clocks()
    return run(node.connection, reading_ins(SCHEMA, "kafka"))[0]


async def test_who_reads_from_another_place_than_the_database_says_takes_nothing_in(
    node: Node, into: InRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatcher.bridges.tending.LEASE_S", 0.05)  # how long it waits then
    log = Log(lying(records(*range(1, 7), topic=TOPIC)))
    async with receiving(node) as receives, tended(TakingIn(into, lambda: log, SCHEMA, receives, lambda _: None)):
        await log.read_by.wait()  # and what was read is not received yet
        with node.connection.transaction():
            run(node.connection, resuming_in(SCHEMA, into, BrokerPosition("log", 0, 4), actor="tests", why=None))
        log.may_give.set()
        await eventually_async(lambda: node.rows(NEXT) == [(6,)])
    assert log.begun == [0, 4]
    assert [id.int for (id,) in node.delivered("message_id")] == [5, 6]


async def taken_in(node: Node, into: InRow, log: Log, end: int) -> None:
    log.may_give.set()
    async with receiving(node) as receives, tended(TakingIn(into, lambda: log, SCHEMA, receives, lambda _: None)):
        await eventually_async(lambda: node.rows(NEXT) == [(end,)])


async def test_what_a_bridge_repeats_is_taken_in_once_also_by_the_next_daemon(node: Node, into: InRow) -> None:
    given = lying(records(1, 2, 3, 2, 3, 4, topic=TOPIC))
    for end in (4, 6):
        await taken_in(node, into, Log(given[:end]), end)
    assert [id.int for (id,) in node.delivered("message_id")] == [1, 2, 3, 4]
