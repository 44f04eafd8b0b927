"""What a source reads from Kafka, record by record: nothing is left out, and what cannot be read is told as such."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import uuid4

import pytest
from confluent_kafka import Producer, cimpl

from dispatcher.bridges.kafka import client as kafka_client
from dispatcher.bridges.kafka import source as kafka_source
from dispatcher.bridges.kafka.client import KafkaClient
from dispatcher.bridges.kafka.held_up import LOOKS
from dispatcher.bridges.kafka.source import KafkaSource
from mailroom.bridges.arrival import Arrived, Intake, Undecodable, incoming
from mailroom.bridges.broker import Start
from mailroom.bridges.settings import InSettings
from mailroom.bridges.source import BrokerPosition, BrokerWasAway, InBridge, PositionGone
from tests.support.kafka_mock import MockKafka
from tests.support.waiting import WITHIN_S, eventually_async


def put(mock_kafka: MockKafka, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": mock_kafka.bootstrap})
    for nth in range(count):
        producer.produce(topic, str(nth).encode(), b"k")
    assert producer.flush(30) == 0


def source_of(mock_kafka: MockKafka, *topics: str, start: Start = "earliest") -> KafkaSource:
    return KafkaSource(InBridge("in", 1, uuid4(), InSettings("kafka", mock_kafka.bootstrap, topics, start=start), {}))


@asynccontextmanager
async def reading(mock_kafka: MockKafka, topic: str) -> AsyncIterator[KafkaSource]:
    source = source_of(mock_kafka, topic)
    try:
        await source.open()
        assert await source.begin(await source.begin([])) == []
        yield source
    finally:
        await source.close()


async def read(source: KafkaSource, count: int) -> Sequence[Arrived]:
    found: list[Arrived] = []
    async with asyncio.timeout(WITHIN_S):
        while len(found) < count:
            found += [each for each in await source.read(1.0) if isinstance(each, Arrived)]
    return found


async def test_record_that_comes_while_the_broker_is_asked_for_partitions_is_kept(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has it already, and asks a broker in vain, again and again."""
    monkeypatch.setattr(kafka_source, "ROWS", 2)
    monkeypatch.setattr(kafka_client, "POLL_S", 0.01)
    monkeypatch.setattr(KafkaSource, "_note", KafkaClient._note)  # it would look whether the log is the same, too
    mock_kafka.create("asked", 1)
    put(mock_kafka, "asked", 20)
    async with reading(mock_kafka, "asked") as source:
        found = list(await read(source, 2))
        mock_kafka.down()
        try:
            with monkeypatch.context() as patched:
                patched.setattr(kafka_source, "STEP_S", 0.1)
                patched.setattr(kafka_source, "LOOK_S", 0.0)
                task = asyncio.create_task(source.read(1.0))
                await eventually_async(lambda: source.trouble is not None and source._left)
        finally:
            mock_kafka.up()
        found += [each for each in await task if isinstance(each, Arrived)]
        found += await read(source, 20 - len(found))
    assert [record.offset for record in found] == list(range(20))


async def test_log_is_looked_at_before_it_is_read_on_by_who_had_lost_the_broker(mock_kafka: MockKafka) -> None:
    mock_kafka.create("lost", 1)
    put(mock_kafka, "lost", 3)
    async with reading(mock_kafka, "lost") as source:
        await read(source, 3)
        mock_kafka.down()
        try:
            async with asyncio.timeout(WITHIN_S):
                while source.trouble is None:
                    assert not await source.read(0.1)
        finally:
            mock_kafka.up()
        put(mock_kafka, "lost", 1)
        with pytest.raises(BrokerWasAway):
            await read(source, 1)
        assert await source.begin([BrokerPosition("lost", 0, 2)]) == []
        assert [each.offset for each in await read(source, 2)] == [2, 3]


class Told:
    """A cluster that says this topic's id; the mock cluster has none."""

    def __init__(self, ids: dict[str, str]) -> None:
        self._ids = ids

    def ask(self) -> None:
        pass

    def told(self, _wait_s: float = 0.0) -> dict[str, str]:
        return self._ids


@pytest.mark.slow
async def test_topic_that_is_another_one_is_not_read_on(mock_kafka: MockKafka) -> None:
    mock_kafka.create("told", 1)
    put(mock_kafka, "told", 4)
    ids: dict[str, str] = {}  # nothing in time
    async with reading(mock_kafka, "told") as source:
        source._topic_ids = Told(ids)  # type: ignore[assignment]
        place = BrokerPosition("told", 0, 2, log="old")
        assert await source.begin([place]) == []
        assert [each.log for each in await read(source, 2)] == [None, None]
        ids["told"] = "new"
        with pytest.raises(PositionGone, match="made anew since it was read up to 2") as gone:
            await source.begin([place])
        assert gone.value.first == 0
        assert await source.begin([replace(place, log=None)]) == []  # somebody has set it there
        assert [each.log for each in await read(source, 2)] == ["new", "new"]
        await source.taken([replace(place, next=4, log="new")])
        ids["told"] = "newer"
        put(mock_kafka, "told", 1)
        with pytest.raises(PositionGone, match="made anew since it was read up to 4"):
            await read(source, 1)  # between two looks
        with pytest.raises(PositionGone, match="made anew since it was read up to 4"):
            await source._in_thread(source._look)


@pytest.mark.slow
async def test_partition_that_is_added_is_read_from_its_first_record_and_a_topic_from_where_the_bridge_says(
    mock_kafka: MockKafka,
) -> None:
    """The position of partition 0 is known; partition 1 came later, and the other topic is new to the bridge."""
    mock_kafka.create("grown", 2)
    mock_kafka.create("other", 1)
    for topic in ("grown", "other"):
        producer = Producer({"bootstrap.servers": mock_kafka.bootstrap})
        for part in range(2 if topic == "grown" else 1):
            producer.produce(topic, b"1", b"k", part)
        assert producer.flush(30) == 0
    found = {}
    starts: tuple[Start, Start] = ("latest", "earliest")
    for start in starts:
        source = source_of(mock_kafka, "grown", "other", start=start)
        try:
            await source.open()
            first = [(each.topic, each.part, each.next) for each in await source.begin([])]
            later = await source.begin([BrokerPosition("grown", 0, 1)])
            found[start] = first, [(each.topic, each.part, each.next) for each in later]
        finally:
            await source.close()
    assert found["latest"] == ([("grown", 0, 1), ("grown", 1, 1), ("other", 0, 1)], [("grown", 1, 0), ("other", 0, 1)])
    assert found["earliest"] == (
        [("grown", 0, 0), ("grown", 1, 0), ("other", 0, 0)],
        [("grown", 1, 0), ("other", 0, 0)],
    )


@pytest.mark.slow
async def test_partition_that_grows_while_nothing_of_it_may_be_read_is_told_once_and_when_it_goes_on(
    mock_kafka: MockKafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a transaction that is open, which the mock cluster does not hold up: only the log's end says so."""
    mock_kafka.create("held", 1)
    put(mock_kafka, "held", 4)
    log_end = 4
    caplog.set_level("INFO", "mailroom.dispatcher")

    async def looked(source: KafkaSource, times: int) -> list[str]:
        """Let it look so often; return what it has told."""
        caplog.clear()
        for _ in range(times):
            await source._in_thread(source._look)
        assert source._left == []
        return [each.getMessage() for each in caplog.records if each.name == "mailroom.dispatcher"]

    async with reading(mock_kafka, "held") as source:
        monkeypatch.setattr(source, "_parts", lambda: [("held", 0)])
        monkeypatch.setattr(source, "_log_end", lambda topic, part: log_end)
        await read(source, 4)
        await source.taken([BrokerPosition("held", 0, 4)])
        while not source._ends_seen:
            assert not await source.read(0.1)
        assert await looked(source, 3 * LOOKS) == []  # all is read
        log_end = 9
        assert await looked(source, LOOKS - 1) == []  # each transaction does that for a short time
        log_end = 4
        assert await looked(source, 1) == []
        log_end = 9
        [told] = await looked(source, 3 * LOOKS)
        assert told.startswith(
            "bridges: in waits in partition 0 of held at offset 4, and the log ends at 9: somebody has"
        )
        assert "--topic held --partition 0" in told
        put(mock_kafka, "held", 1)
        await read(source, 1)
        await source.taken([BrokerPosition("held", 0, 5)])
        log_end = 5
        while source._ends_seen["held", 0] < 5:
            assert not await source.read(0.1)
        assert await looked(source, 1) == ["bridges: in goes on in partition 0 of held"]


def put_raw(bootstrap: str, topic: str, header: bytes) -> None:
    """Write a record with a header whose name is these bytes, which no function of the Python client takes."""
    library = ctypes.CDLL(cimpl.__file__)
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
    settings, why = ctypes.c_void_p(library.rd_kafka_conf_new()), ctypes.create_string_buffer(500)
    size = ctypes.c_size_t(len(why))
    assert library.rd_kafka_conf_set(settings, b"bootstrap.servers", bootstrap.encode(), why, size) == 0
    producer = ctypes.c_void_p(library.rd_kafka_new(0, settings, why, size))
    # The kinds of arguments: 1 topic, 4 value, 7 flags (2: copy it), 9 header, 0 the end.
    kind = ctypes.c_int
    assert not library.rd_kafka_producev(
        producer, kind(1), topic.encode(), kind(4), b"1", ctypes.c_size_t(1), kind(7), kind(2),
        kind(9), header, b"v", ctypes.c_ssize_t(1), kind(0),
    )  # fmt: skip
    assert library.rd_kafka_flush(producer, kind(30_000)) == 0
    library.rd_kafka_destroy(producer)


async def test_record_with_a_header_whose_name_is_no_text_is_no_message_and_holds_nothing_up(
    mock_kafka: MockKafka,
) -> None:
    mock_kafka.create("names", 1)
    put(mock_kafka, "names", 50)  # by then Python has specialized the call, and would not notice
    for name in (b"good", b"bad\xff", b"good"):
        put_raw(mock_kafka.bootstrap, "names", name)
    async with reading(mock_kafka, "names") as source:
        first, bad, last = (await read(source, 53))[50:]
    for each in (first, last):
        assert (each.headers, each.fault) == ([("good", b"v")], None)
    with pytest.raises(
        Undecodable, match=r"names\[0\]@51 of here is not a message: the name of one of its headers is not"
    ):
        incoming(bad, Intake(), "here")
