"""Through Kafka and back: a bridge out to a topic, a bridge in from it, and what each of them has done."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from uuid import uuid4

from confluent_kafka import Consumer, Message, TopicPartition

from mailroom import subscribe
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Form
from mailroom.bridges.settings import InSettings, OnFailure, OutSettings
from mailroom.values import codec
from outbox import Outbox, Outgoing
from tests.support.node import Node

KEYS, MESSAGES = 7, 120


def bridged(
    node: Node, servers: str, topic: str, *, exactly_once: bool = False, on_failure: OnFailure = "stop",
    encode: str = "json", into: bool = True,
) -> None:  # fmt: skip
    """Make a bridge out to the topic, and one that takes in from it, for the inbox "orders" of the same node."""
    form = Form(topic, encode=encode)  # type: ignore[arg-type]  # the test's own texts
    out = OutSettings("kafka", servers, form, exactly_once, topic if exactly_once else None, on_failure)
    with node.connection.transaction():
        Bridges().out(node.connection, "out", out, topics="order.#", actor="test")
        if into:
            Bridges().into(node.connection, "in", InSettings("kafka", servers, (topic,)), actor="test")
    if into and not node.rows("SELECT FROM mailroom.inbox_registry WHERE name = 'orders'"):
        node.inbox("orders")
        with node.connection.transaction():
            subscribe(node.connection, "orders", "#", origin="in")


def send(node: Node, first: int = 0, count: int = MESSAGES) -> None:
    """Send messages of some keys and some without, numbered, and stamp them for the bridge."""
    with node.connection.transaction():
        Outbox().send_many(
            node.connection,
            [Outgoing("order.paid", n, key=f"k{n % KEYS}" if n % KEYS else None) for n in range(first, first + count)],
        )
    node.deliver_all()


def numbers(node: Node) -> dict[str, list[object]]:
    """Return what came in, by key, in order; what has none is sorted."""
    found: dict[str, list[object]] = defaultdict(list)
    for key, value in node.rows("SELECT key, value FROM mailroom.inbox ORDER BY clock"):
        found[key if key.startswith("k") else "k0"].append(codec.decode(value))
    found["k0"].sort(key=str)
    return found


def expected(count: int = MESSAGES) -> dict[str, list[object]]:
    """Return what is to come in."""
    found: dict[str, list[object]] = {f"k{key}": list(range(key, count, KEYS)) for key in range(KEYS)}
    found["k0"].sort(key=str)
    return found


def count(node: Node) -> int:
    """Return how many messages came in."""
    return int(node.value("SELECT count(*) FROM mailroom.inbox"))


def read_log(client: Mapping[str, object], topic: str) -> list[Message]:
    """Return what an independent consumer with read_committed finds in the log."""
    consumer = Consumer(
        {**client, "group.id": f"test-{uuid4()}", "enable.partition.eof": True, "auto.offset.reset": "earliest"}
    )
    try:
        parts = sorted(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, part, 0) for part in parts])
        found, ended = [], 0
        while ended < len(parts):
            message = consumer.poll(30)
            assert message is not None
            if message.error() is None:
                found.append(message)
            else:
                ended += 1
        return found
    finally:
        consumer.close()


def clocks(log: Sequence[Message]) -> list[tuple[int, int]]:
    """Return the partition and the clock of each record."""
    found = []
    for message in log:
        headers = dict(message.headers() or [])
        clock = headers["mailroom-clock"]
        assert isinstance(clock, bytes)
        found.append((message.partition() or 0, int(clock)))
    return found
