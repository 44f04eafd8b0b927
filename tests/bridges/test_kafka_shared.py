"""A topic that is not a bridge's alone: others leave transactions open, add partitions, read it and write to it too."""

import logging
from collections.abc import Mapping
from typing import Literal

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.cimpl import NewPartitions

from dispatcher.bridges.kafka import source as kafka_source
from mailroom import subscribe
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Form
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.values import codec
from tests.bridges.tended import in_state, out_state, tended
from tests.bridges.through_kafka import KEYS, MESSAGES, bridged, clocks, count, expected, numbers, read_log, send
from tests.support.kafka import Kafka
from tests.support.kafka_mock import MockKafka
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually_async

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often for new partitions, and for those that are held up."""
    monkeypatch.setattr(kafka_source, "LOOK_S", 0.2)


def into(node: Node, servers: str, topic: str, *names: str) -> None:
    """Make bridges in from the topic, and an inbox for each that is named like it."""
    for name in names:
        with node.connection.transaction():
            Bridges().into(node.connection, name, InSettings("kafka", servers, (topic,)), actor="test")
        node.inbox(name)
        with node.connection.transaction():
            subscribe(node.connection, name, "#", origin=name)


def put(client: Mapping[str, object], topic: str, part: int, *values: int) -> None:
    """Write records as somebody else does."""
    producer = Producer(dict(client))
    for value in values:
        producer.produce(topic, str(value).encode(), b"k", part)
    assert producer.flush(30) == 0


def taken(node: Node) -> list[object]:
    """Return the values that came in, in order."""
    return [codec.decode(value) for (value,) in node.rows("SELECT value FROM mailroom.inbox ORDER BY clock")]


def positions(node: Node) -> list[int]:
    """Return where the only bridge in goes on, by partition."""
    return [each.next for each in in_state(node).positions]


# -- A transaction that somebody leaves open --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ["commit", "abort", "time out"])
async def test_transaction_that_is_left_open_holds_up_its_partition_alone_and_the_log_says_so(
    node: Node, kafka: Kafka, caplog: pytest.LogCaptureFixture, end: Literal["commit", "abort", "time out"]
) -> None:
    topic = f"open-{end[:2]}"
    kafka.create(topic, 2)
    into(node, kafka.bootstrap, topic, "in")
    put(kafka.client, topic, 0, 1)
    lasts_ms = 2_000 if end == "time out" else 120_000
    other = Producer({**kafka.client, "transactional.id": topic, "transaction.timeout.ms": lasts_ms})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(topic, b"2", b"k", 0)
    assert other.flush(30) == 0
    put(kafka.client, topic, 0, 3, 4)
    with caplog.at_level(logging.INFO, "mailroom.dispatcher"):
        async with tended(node):
            await eventually_async(lambda: positions(node) == [1, 0])
            put(kafka.client, topic, 1, 5, 6)
            await eventually_async(lambda: taken(node) == [1, 5, 6])
            held = f"in waits in partition 0 of {topic} at offset 1, and the log ends at 4"
            if end != "time out":
                await eventually_async(lambda: held in caplog.text)
                put(kafka.client, topic, 0, 7)
                put(kafka.client, topic, 1, 8)
                await eventually_async(lambda: taken(node) == [1, 5, 6, 8])
                assert (in_state(node).state, in_state(node).why, positions(node)) == ("open", None, [1, 3])
                # What others see of the group: its offset, and how far the log reaches.
                assert lag(kafka, node, topic) == 4
                other.commit_transaction(30) if end == "commit" else other.abort_transaction(30)
            came = {"commit": [2, 3, 4, 7], "abort": [3, 4, 7], "time out": [3, 4]}[end]
            first = [1, 5, 6] if end == "time out" else [1, 5, 6, 8]
            await eventually_async(lambda: taken(node) == first + came, 2 * WITHIN_S)
            if end != "time out":
                await eventually_async(lambda: f"in goes on in partition 0 of {topic}" in caplog.text)
    assert caplog.text.count("somebody has left a transaction open") <= 1


def lag(kafka: Kafka, node: Node, topic: str) -> int:
    """Return how many records lie after the offset of the bridge's group in partition 0, as tools count them."""
    [(node_id, origin)] = node.rows("SELECT n.id, o.number FROM mailroom.node AS n, mailroom.origin AS o")
    client = {**kafka.client, "group.id": f"mailroom.{node_id}.in.{origin}", "isolation.level": "read_uncommitted"}
    consumer = Consumer(client)
    try:
        place = TopicPartition(topic, 0)
        [committed] = consumer.committed([place], timeout=30)
        return int(consumer.get_watermark_offsets(place, timeout=30)[1]) - int(committed.offset)
    finally:
        consumer.close()


# -- Partitions that are added ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("exactly_once", [False, True])
async def test_partitions_that_are_added_are_written_and_read_without_a_restart(
    node: Node, kafka: Kafka, monkeypatch: pytest.MonkeyPatch, exactly_once: bool
) -> None:
    monkeypatch.setattr("dispatcher.bridges.spreading.LOOK_S", 0.2)
    topic = f"grown-{exactly_once}"
    kafka.create(topic, 1)
    bridged(node, kafka.bootstrap, topic, exactly_once=exactly_once)
    send(node)
    async with tended(node) as lane:
        await eventually_async(lambda: count(node) == out_state(node).acked == MESSAGES)
        serving = dict(lane.beside._tended)
        [grown] = kafka.admin.create_partitions([NewPartitions(topic, 5)]).values()
        grown.result()
        sent = MESSAGES

        def is_used() -> bool:
            """Send on until the bridge out has heard of the new partitions."""
            nonlocal sent
            if count(node) == sent:
                if len([each for each in in_state(node).positions if each.next]) > 1:
                    return True
                send(node, sent, KEYS)
                sent += KEYS
            return False

        await eventually_async(is_used)
        send(node, sent, MESSAGES)
        sent += MESSAGES
        await eventually_async(lambda: count(node) == out_state(node).acked == sent)
        assert lane.beside._tended == serving
        assert not any(each.task.done() for each in serving.values())
        await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"open"})
    # Nothing waited and all was read when they were added: so the order of each key holds as well.
    assert numbers(node) == expected(sent)
    log = clocks(read_log(dict(kafka.client), topic))
    assert len(log) == len(set(log)) == sent


# -- Several bridges at one topic -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_two_bridges_in_from_one_topic_are_two_origins_with_the_same_ids(
    node: Node, mock_kafka: MockKafka
) -> None:
    mock_kafka.create("twice-read", 2)
    into(node, mock_kafka.bootstrap, "twice-read", "one", "two")
    node.inbox("both")
    with node.connection.transaction():
        for name in ("one", "two"):
            subscribe(node.connection, "both", "#", origin=name)
    client = {"bootstrap.servers": mock_kafka.bootstrap}
    async with tended(node):
        for first in (0, 10):  # records of nobody's, whose ids are made of where they lie
            put(client, "twice-read", 0, *range(first, first + 5))
            put(client, "twice-read", 1, *range(first + 5, first + 10))
            wanted = 4 * (first + 10)
            await eventually_async(lambda wanted=wanted: count(node) == wanted)  # type: ignore[misc]  # bound at once
    ids = {}
    for inbox in ("one", "two"):
        rows = node.rows("SELECT message_id, value FROM mailroom.inbox WHERE inbox = %s ORDER BY clock", inbox)
        values = [int(str(codec.decode(value))) for _, value in rows]
        assert sorted(values) == list(range(20))
        for part in (0, 1):
            of_the_part = [value for value in values if value // 5 % 2 == part]
            assert of_the_part == sorted(of_the_part)
        ids[inbox] = {id for id, _ in rows}
    assert ids["one"] == ids["two"]
    assert len(ids["one"]) == 20
    twice = node.rows("SELECT count(*) FROM mailroom.inbox WHERE inbox = 'both' GROUP BY message_id, value")
    assert twice == [(2,)] * 20


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
async def test_two_bridges_out_to_one_topic_keep_an_order_each_and_write_what_both_have_twice(
    node: Node, mock_kafka: MockKafka, exactly_once: bool
) -> None:
    topic = f"twice-written-{exactly_once}"
    mock_kafka.create(topic, 2)
    settings = OutSettings("kafka", mock_kafka.bootstrap, Form(topic), exactly_once, topic if exactly_once else None)
    with node.connection.transaction():
        for name, topics in (("all", "#"), ("orders", "order.#")):
            Bridges().out(node.connection, name, settings, topics=topics, actor="test")
    into(node, mock_kafka.bootstrap, topic, "in")
    async with tended(node):
        for first in (0, MESSAGES):
            send(node, first)
            node.send("stock", {"n": first}, key="stock")
            node.deliver_all()
            wanted = 2 * (first + MESSAGES) + first // MESSAGES + 1
            await eventually_async(lambda wanted=wanted: count(node) == wanted)  # type: ignore[misc]  # bound at once
    by_link: dict[bytes, list[tuple[int, int]]] = {}
    ids = []
    for message in read_log({"bootstrap.servers": mock_kafka.bootstrap}, topic):
        headers = dict(message.headers() or [])
        link, clock, id = (headers[name] for name in ("mailroom-link", "mailroom-clock", "ce_id"))
        assert isinstance(link, bytes)
        assert isinstance(clock, bytes)
        by_link.setdefault(link, []).append((message.partition() or 0, int(clock)))
        ids.append(id)
    assert sorted(map(len, by_link.values())) == [2 * MESSAGES, 2 * MESSAGES + 2]
    assert len(set(ids)) == 2 * MESSAGES + 2
    for written in by_link.values():
        for part in (0, 1):
            order = [clock for at, clock in written if at == part]
            assert order == sorted(set(order))
    copies = node.rows("SELECT topic, count(*) FROM mailroom.inbox GROUP BY topic, message_id")
    assert sorted(copies) == [("order.paid", 2)] * 2 * MESSAGES + [("stock", 1)] * 2
