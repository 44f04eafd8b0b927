"""Through RabbitMQ, on a real server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import aiormq
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from dispatcher.bridges import tending
from dispatcher.bridges.rabbitmq.publisher import RabbitPublisher
from dispatcher.bridges.rabbitmq.source import RabbitSource
from mailroom import subscribe
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.publisher import BrokerTrouble, OutBridge, RecordRefused
from mailroom.bridges.record import Form, Record, record_of
from mailroom.bridges.settings import InSettings, OnFailure, OutSettings
from mailroom.bridges.source import BrokerPosition, InBridge
from mailroom.values import codec
from outbox import Outbox, Outgoing
from tests.bridges.messages import SENDER, message
from tests.bridges.tended import in_state, out_state, set_bridge, tended
from tests.support.command import error_of, mailroom
from tests.support.node import Node
from tests.support.proxy import Proxy
from tests.support.rabbitmq import MAX_MESSAGE_BYTES, RabbitMQ
from tests.support.waiting import WITHIN_S, eventually_async

# Slow, so that it runs where `make brokers` has been: the server alone takes several seconds to start.
pytestmark = pytest.mark.slow

KEYS, MESSAGES = 5, 100
ODD_KEY = "köy %41\r\n: all "
QUORUM: dict[str, Any] = {"x-queue-type": "quorum", "x-single-active-consumer": True}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note trouble at once, and try again soon."""
    for name, seconds in (("PATIENCE_S", 0.05), ("LONGEST_PAUSE_S", 0.1), ("LONGEST_STOP_S", 0.3), ("LEASE_S", 0.1)):
        monkeypatch.setattr(tending, name, seconds)
    monkeypatch.setattr("dispatcher.bridges.taking.WAIT_S", 0.04)
    for name in ("POLL_S", "NACK_S"):
        monkeypatch.setattr(f"dispatcher.bridges.rabbitmq.publisher.{name}", 0.05)


@asynccontextmanager
async def channel(rabbitmq: RabbitMQ) -> AsyncIterator[AbstractChannel]:
    """A channel of the test's own."""
    async with await aio_pika.connect(rabbitmq.url) as connection:
        yield await connection.channel(on_return_raises=True)


async def create(rabbitmq: RabbitMQ, queue: str, arguments: dict[str, Any] | None = None, *bound: str) -> None:
    """Make a queue, and an exchange of that name which it is bound to, by default for all topics."""
    async with channel(rabbitmq) as made:
        exchange = await made.declare_exchange(queue, aio_pika.ExchangeType.TOPIC, durable=True)
        declared = await made.declare_queue(queue, durable=True, arguments=arguments)
        for topic in bound or ("#",):
            await declared.bind(exchange, topic)


async def put(rabbitmq: RabbitMQ, queue: str, *messages: aio_pika.Message) -> None:
    """Put messages that no bridge has written into a queue."""
    async with channel(rabbitmq) as made:
        for message in messages:
            await made.default_exchange.publish(message, queue, timeout=WITHIN_S)


async def depth(rabbitmq: RabbitMQ, queue: str) -> int:
    """Return how many messages wait in a queue, without those that a consumer has."""
    async with channel(rabbitmq) as made:
        return (await made.declare_queue(queue, passive=True)).declaration_result.message_count or 0


async def drained(rabbitmq: RabbitMQ, queue: str) -> list[bytes]:
    """Take all that is in a queue."""
    found = []
    async with channel(rabbitmq) as made:
        declared = await made.get_queue(queue)
        while (message := await declared.get(no_ack=True, fail=False)) is not None:
            found.append(message.body)
    return found


def bridged(
    node: Node, rabbitmq: RabbitMQ, exchange: str, *, into: Sequence[str] = (), on_failure: OnFailure = "stop",
    topic: str = "", port: int | None = None,
) -> None:  # fmt: skip
    """Make a bridge out to the exchange, and one that takes in from queues, for the inbox "orders" of the same node."""
    address = f"127.0.0.1:{port or rabbitmq.port}"
    out = OutSettings("rabbitmq", address, Form(topic), on_failure=on_failure, own={"exchange": exchange})
    with node.connection.transaction():
        Bridges().out(node.connection, "out", out, topics="order.#", actor="test")
    if into:
        taken_in(node, rabbitmq, *into)


def taken_in(node: Node, rabbitmq: RabbitMQ, *queues: str) -> None:
    """Make a bridge that takes in from queues."""
    node.inbox("orders")
    with node.connection.transaction():
        settings = InSettings("rabbitmq", f"127.0.0.1:{rabbitmq.port}", queues)
        Bridges().into(node.connection, "in", settings, actor="test")
        subscribe(node.connection, "orders", "#", origin="in")


def send(node: Node, first: int, count: int, topic: str = "order.paid") -> None:
    """Send messages of some keys, numbered, and stamp them for the bridge."""
    with node.connection.transaction():
        Outbox().send_many(
            node.connection, [Outgoing(topic, n, key=f"k{n % KEYS}") for n in range(first, first + count)]
        )
    node.deliver_all()


def record(clock: int, value: object = None) -> Record:
    """Return a record with a key of its own."""
    made = message(clock if value is None else value, key=f"k{clock}", sent_clock=clock, message_id=UUID(int=clock))
    return record_of(made, Form(), SENDER)


async def ignore(message: AbstractIncomingMessage) -> None:
    """Have a message, and do nothing about it."""


def came(node: Node) -> list[object]:
    """Return the values that came in, in order."""
    return [codec.decode(value) for (value,) in node.rows("SELECT value FROM mailroom.inbox ORDER BY clock")]


async def test_messages_come_through_once_and_in_order_also_while_the_server_dies(
    node: Node, rabbitmq: RabbitMQ
) -> None:
    await create(rabbitmq, "through", QUORUM)
    await eventually_async(lambda: rabbitmq.keeps("through"))
    bridged(node, rabbitmq, "through", into=["through"])
    with node.connection.transaction():
        Outbox().send(node.connection, "order.paid", "odd", key=ODD_KEY, headers={"CC": "elsewhere", "x-death": "1"})
        Outbox().send(node.connection, "order.paid", "unordered")
    send(node, 0, MESSAGES)
    async with tended(node):
        await eventually_async(lambda: len(came(node)) == MESSAGES + 2)
        send(node, MESSAGES, 20)
        rabbitmq.kill()
        send(node, MESSAGES + 20, 80)
        await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"unreachable"})
        await asyncio.to_thread(rabbitmq.start)
        await eventually_async(lambda: len(came(node)) == 2 * MESSAGES + 2)
        await eventually_async(lambda: out_state(node).backlog == 0)
        await eventually_async(lambda: {out_state(node).state, in_state(node).state} == {"open"})
    for key in range(KEYS):
        values = [value for value in came(node)[2:] if isinstance(value, int) and value % KEYS == key]
        assert values == list(range(key, 2 * MESSAGES, KEYS))
    rows = node.rows("SELECT key, headers, message_id::text = key FROM mailroom.inbox ORDER BY clock LIMIT 2")
    assert rows[0] == (ODD_KEY, {"CC": "elsewhere", "x-death": "1"}, False)
    assert rows[1][2]
    assert await depth(rabbitmq, "through") == 0


async def test_what_was_confirmed_and_not_acknowledged_is_repeated_in_order_and_comes_in_once(
    node: Node, rabbitmq: RabbitMQ
) -> None:
    """The broker has it, and the confirms are lost on the way; then a dispatcher dies before it acknowledges."""
    await create(rabbitmq, "again")
    proxy = Proxy("127.0.0.1", rabbitmq.port)
    try:
        bridged(node, rabbitmq, "again", port=proxy.port)
        node.connection.execute("UPDATE mailroom.link SET keep_s = 3600")
        async with tended(node):
            await eventually_async(lambda: out_state(node).seen_at is not None)
            await eventually_async(lambda: out_state(node).state == "open")
            send(node, 0, 10)
            await eventually_async(lambda: out_state(node).acked == 10)
            proxy.hold_answers()
            send(node, 10, 10)
            await eventually_async(lambda: proxy.held > 0)
            await eventually_async(lambda: out_state(node).state == "unreachable")
            assert out_state(node).acked == 10
            proxy.cut()
            proxy.restore()
            await eventually_async(lambda: out_state(node).acked == 20)
        node.connection.execute("UPDATE mailroom.link SET acked = 15")
        async with tended(node):
            await eventually_async(lambda: out_state(node).acked == 20)
    finally:
        proxy.close()
    count = await depth(rabbitmq, "again")
    assert count > 25
    taken_in(node, rabbitmq, "again")
    async with tended(node):
        await eventually_async(lambda: in_state(node).positions == (BrokerPosition("again", 0, count),))
    assert came(node) == list(range(20))


async def test_message_that_no_queue_gets_is_never_overtaken_within_its_key(node: Node, rabbitmq: RabbitMQ) -> None:
    await create(rabbitmq, "routed", None, "order.bound")
    bridged(node, rabbitmq, "routed")
    with node.connection.transaction():
        Outbox().send_many(
            node.connection,
            [
                Outgoing("order.bound", 1, key="a"), Outgoing("order.lost", 2, key="b"),
                Outgoing("order.bound", 3, key="b"), Outgoing("order.bound", 4, key="a"),
            ],
        )  # fmt: skip
    node.deliver_all()
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        why = out_state(node).why or ""
        assert "exchange routed has no queue for order.lost" in why
        assert "Bind one" in why
        assert b"3" not in await drained(rabbitmq, "routed")
        set_bridge(node, "out", on_failure="skip")
        await lane.follow_until(lambda: out_state(node).acked == 4)
    assert [stage for _, stage, _ in node.dead()] == ["publish"]
    left = await drained(rabbitmq, "routed")
    assert left[left.index(b"3") :] in ([b"3", b"4"], [b"3"])
    set_bridge(node, "out", own={"exchange": ""}, topic="nowhere", on_failure="stop")
    told = Outgoing("order.bound", 5, key="a")
    with node.connection.transaction():
        Outbox().send_many(node.connection, [told])
    node.deliver_all()
    async with tended(node):
        await eventually_async(lambda: "there is no queue nowhere" in (out_state(node).why or ""))


async def test_queue_that_is_full_holds_up_and_its_order_is_kept(node: Node, rabbitmq: RabbitMQ) -> None:
    await create(rabbitmq, "full", {"x-max-length": 3, "x-overflow": "reject-publish"})
    bridged(node, rabbitmq, "full")
    with node.connection.transaction():
        Outbox().send_many(node.connection, [Outgoing("order.paid", n, key="k") for n in range(10)])
    node.deliver_all()
    found: list[bytes] = []
    async with tended(node):
        await eventually_async(lambda: "a queue is full" in (out_state(node).why or ""))
        assert out_state(node).state == "unreachable"
        while len(found) < 10:
            found += await drained(rabbitmq, "full")
            await asyncio.sleep(0)
        await eventually_async(lambda: out_state(node).acked == 10)
        await eventually_async(lambda: out_state(node).state == "open")
    assert found == [str(n).encode() for n in range(10)]


async def test_broker_short_of_memory_is_told_and_gets_everything_later(node: Node, rabbitmq: RabbitMQ) -> None:
    await create(rabbitmq, "blocked")
    bridged(node, rabbitmq, "blocked")
    alarm = "{resource_limit, memory, node()}"
    async with tended(node):
        await eventually_async(lambda: out_state(node).seen_at is not None)
        await asyncio.to_thread(rabbitmq.control, "eval", f"rabbit_alarm:set_alarm({{{alarm}, []}}).")
        send(node, 0, 10)
        await eventually_async(lambda: "short of memory or disk" in (out_state(node).why or ""))
        assert (out_state(node).state, out_state(node).acked) == ("unreachable", 0)
        idle = "state ^@ 'idle in transaction'"  # but for the moment in which trouble is noted
        await eventually_async(
            lambda: not (node.sessions("mailroom bridges", idle) + node.sessions("mailroom links", idle))
        )
        await asyncio.to_thread(rabbitmq.control, "eval", f"rabbit_alarm:clear_alarm({alarm}).")
        await eventually_async(lambda: out_state(node).acked == 10)
    assert await drained(rabbitmq, "blocked") == [str(n).encode() for n in range(10)]


async def test_channel_that_the_broker_closes_over_a_record_keeps_nothing_that_is_behind(rabbitmq: RabbitMQ) -> None:
    await create(rabbitmq, "closed")
    settings = OutSettings("rabbitmq", f"127.0.0.1:{rabbitmq.port}", own={"exchange": "closed"})
    publisher = RabbitPublisher(OutBridge("out", 1, SENDER.node_id, "paris", settings))
    given = [record(1), record(2), record(3, "x" * (MAX_MESSAGE_BYTES + 1)), record(4), record(5)]
    try:
        assert await publisher.open() == 0
        assert await publisher.published(0, given[0].at) == ()
        with pytest.raises(RecordRefused, match="larger than configured max size"):
            await publisher.publish(given)
        assert set(await drained(rabbitmq, "closed")) <= {b"1", b"2"}
        for part in (given[:2], given[3:]):
            await publisher.publish(part)
        with pytest.raises(RecordRefused, match="max_message_size is 1,000,000"):
            await publisher.publish(given[2:3])
    finally:
        await publisher.close()
    with pytest.raises(BrokerTrouble, match="given up"):
        await publisher.publish(given[:1])
    found = await drained(rabbitmq, "closed")
    assert found[-2:] == [b"4", b"5"]


async def test_record_that_is_too_large_is_left_out_and_no_other_one(node: Node, rabbitmq: RabbitMQ) -> None:
    """The broker closes the channel over it, with what comes after."""
    await create(rabbitmq, "large")
    bridged(node, rabbitmq, "large", on_failure="skip")
    with node.connection.transaction():
        values: list[object] = [1, 2, "x" * (MAX_MESSAGE_BYTES + 1), 4, 5]
        Outbox().send_many(
            node.connection, [Outgoing("order.paid", value, key=f"k{n}") for n, value in enumerate(values)]
        )
        Outbox().send(node.connection, "order.paid", 6, headers={"h" * 300: "x"})
        Outbox().send(node.connection, "order.paid", 7)
    node.deliver_all()
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 7)
    large, named = (reason for _, _, reason in node.dead())
    assert "larger than configured max size 1000000" in large
    assert "the name of one of its headers has more than 255 bytes" in named
    found = await drained(rabbitmq, "large")
    first = [found.index(text) for text in (b"1", b"2", b"4", b"5", b"7")]
    assert first == sorted(first)
    assert set(found) == {b"1", b"2", b"4", b"5", b"7"}


async def test_what_is_missing_or_forbidden_is_told_and_a_password_is_shown_nowhere(
    node: Node, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MAILROOM_BRIDGE_OUT_PASSWORD", "hunter2")
    monkeypatch.setattr("dispatcher.cli.bridge.TEST_S", 5.0)
    bridged(node, rabbitmq, "absent", into=["absent"])
    send(node, 0, 3)
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        assert "the broker refuses this client: ACCESS_REFUSED" in (out_state(node).why or "")
        result = await asyncio.to_thread(mailroom, "bridge", "test", "out", dsn=node.dsn)
        assert "the broker refuses this client" in error_of(result)
        assert "hunter2" not in caplog.text + result.output + str(out_state(node))
        monkeypatch.delenv("MAILROOM_BRIDGE_OUT_PASSWORD")
        await eventually_async(lambda: "there is no exchange absent" in (out_state(node).why or ""))
        await eventually_async(lambda: "there is no queue absent" in (in_state(node).why or ""))
        await create(rabbitmq, "absent")
        await lane.follow_until(lambda: len(came(node)) == 3)
        elsewhere = f"amqp://127.0.0.1:{rabbitmq.port}/none"
        set_bridge(node, "out", address=elsewhere)
        await lane.follow_until(lambda: "it has no virtual host none" in (out_state(node).why or ""))


async def test_message_whose_acknowledgement_is_lost_comes_again_and_is_known_by_its_id(
    node: Node, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(rabbitmq, "redelivered", QUORUM)
    id = str(uuid4())
    json: dict[str, Any] = {
        "content_type": "application/json",
        "headers": {"n": 1, "own": "yes", "nested": {"a": ["x", None]}},
    }
    await put(
        rabbitmq, "redelivered", aio_pika.Message(b'"named"', message_id=id, **json),
        aio_pika.Message(b'"nameless"', message_id="7"), aio_pika.Message(b"\xff", message_id=str(uuid4()), **json),
    )  # fmt: skip
    acknowledged, lost = RabbitSource.taken, 0

    async def losing(source: RabbitSource, positions: Sequence[BrokerPosition]) -> None:
        nonlocal lost
        lost += 1
        if lost <= 2:
            raise ConnectionResetError
        await acknowledged(source, positions)

    monkeypatch.setattr(RabbitSource, "taken", losing)
    taken_in(node, rabbitmq, "redelivered")
    async with tended(node):
        await eventually_async(lambda: lost >= 3)
        await eventually_async(lambda: in_state(node).state == "open")
    assert came(node) == ["named", "nameless", "nameless", "nameless"]
    assert in_state(node).positions == (BrokerPosition("redelivered", 0, 9),)
    [(stage, value)] = node.rows("SELECT stage, value FROM mailroom.dead_letter")
    assert (stage, codec.decode(value)) == ("take in", b"\xff")
    rows = node.rows(
        "SELECT message_id::text, topic, headers, key = message_id::text FROM mailroom.inbox ORDER BY clock"
    )
    assert rows[0] == (id, "redelivered", {"n": "1", "own": "yes", "nested": '{"a": ["x", null]}',
                                           "content-type": "application/json"}, True)  # fmt: skip
    assert len({row[0] for row in rows}) == 4
    assert await depth(rabbitmq, "redelivered") == 0
    assert node.value("SELECT count(*) FROM mailroom.outbox_jdbc_id") == 2


async def test_message_put_back_behind_later_ones_is_no_repeat(node: Node, rabbitmq: RabbitMQ) -> None:
    """An operator takes one of our records from a queue, and gives it back later: its clock is below the others'."""
    await create(rabbitmq, "shuffled")
    bridged(node, rabbitmq, "shuffled")
    send(node, 0, 3)
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 3)
    async with channel(rabbitmq) as made:
        message = await (await made.get_queue("shuffled")).get(no_ack=True)
        assert message is not None
        again = aio_pika.Message(message.body, headers=message.headers, message_id=message.message_id)
        for _ in range(2):
            await made.default_exchange.publish(again, "shuffled")
    taken_in(node, rabbitmq, "shuffled")
    async with tended(node):
        await eventually_async(lambda: in_state(node).positions == (BrokerPosition("shuffled", 0, 4),))
    assert came(node) == [1, 2, 0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", [None, QUORUM], ids=["classic", "quorum"])
async def test_bridge_takes_in_alone_and_begins_anew_when_its_queue_is_deleted(
    node: Node, rabbitmq: RabbitMQ, arguments: dict[str, Any] | None
) -> None:
    queue = "alone" if arguments is None else "alone-quorum"
    await create(rabbitmq, queue, arguments)
    taken_in(node, rabbitmq, queue)
    async with channel(rabbitmq) as made:
        tag = await (await made.get_queue(queue)).consume(ignore)
        async with tended(node):
            await eventually_async(lambda: f"queue {queue} has another consumer" in (in_state(node).why or ""))
            await (await made.get_queue(queue)).cancel(tag)
            await put(rabbitmq, queue, aio_pika.Message(b"1"))
            await eventually_async(lambda: came(node) == [1])
            async with tended(node):  # as the next leader does, while this one does not know it
                await put(rabbitmq, queue, *(aio_pika.Message(str(n).encode()) for n in range(2, 100)))
                await eventually_async(lambda: len(came(node)) == 99)
            await made.queue_delete(queue)
            await eventually_async(lambda: f"there is no queue {queue}" in (in_state(node).why or ""))
            await create(rabbitmq, queue, arguments)
            await put(rabbitmq, queue, aio_pika.Message(b"100"))
            await eventually_async(lambda: len(came(node)) == 100)
    assert came(node) == list(range(1, 101))


async def test_what_was_delivered_and_not_taken_in_comes_again_in_its_order(node: Node, rabbitmq: RabbitMQ) -> None:
    """The dispatcher dies with messages that it had read; what comes meanwhile is after them."""
    await create(rabbitmq, "order", QUORUM)
    taken_in(node, rabbitmq, "order")
    await put(rabbitmq, "order", *(aio_pika.Message(str(n).encode()) for n in range(60)))
    zombie = source(rabbitmq, "order")
    try:
        await zombie.open()
        assert await zombie.begin([]) == [BrokerPosition("order", 0, 0)]
        assert await zombie.begin([BrokerPosition("order", 0, 0)]) == []
        read = 0
        while read < 60:
            read += len(await zombie.read(1.0))
        await zombie.taken([BrokerPosition("order", 0, 20)])
        await put(rabbitmq, "order", *(aio_pika.Message(str(n).encode()) for n in range(60, 80)))
    finally:
        await zombie.close()
    async with tended(node):
        await eventually_async(lambda: len(came(node)) == 60)
    assert came(node) == list(range(20, 80))


async def test_client_that_is_closed_in_the_moment_it_is_connected_leaves_no_connection(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stay, and its heartbeats with it."""
    is_made = asyncio.Event()
    ready = aiormq.Connection.ready

    async def made(connection: aiormq.Connection) -> None:
        is_made.set()
        await asyncio.sleep(0)
        await ready(connection)

    monkeypatch.setattr(aiormq.Connection, "ready", made)
    given_up = source(rabbitmq, "given-up")
    opening = asyncio.create_task(given_up.open())
    await is_made.wait()
    await given_up.close()
    with pytest.raises(BrokerTrouble, match="given up"):
        await opening
    assert asyncio.all_tasks() == {asyncio.current_task()}


def source(rabbitmq: RabbitMQ, queue: str) -> RabbitSource:
    """Return a source of no node."""
    settings = InSettings("rabbitmq", f"127.0.0.1:{rabbitmq.port}", (queue,))
    return RabbitSource(InBridge("in", 1, UUID(int=1), settings))
