"""What a bridge to RabbitMQ rests on, rule by rule, with a channel that answers as it is told: no server is needed."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused, DeliveryError, PublishError
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from dispatcher.bridges.kit import hiding, known_options, tls_context
from dispatcher.bridges.rabbitmq import client
from dispatcher.bridges.rabbitmq.address import AmqpServer, amqp_servers
from dispatcher.bridges.rabbitmq.broker import RABBITMQ
from dispatcher.bridges.rabbitmq.headers import headers_in, id_in, properties_of
from dispatcher.bridges.rabbitmq.options import prefetch
from dispatcher.bridges.rabbitmq.publisher import RabbitPublisher
from dispatcher.bridges.rabbitmq.source import RabbitSource
from dispatcher.bridges.taking import TakingIn
from mailroom.bridges.arrival import Arrived, Intake, incoming
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.into import InRow, reading_ins
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, OutBridge, RecordRefused
from mailroom.bridges.record import Form, Record, record_of
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.bridges.source import InBridge
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from mailroom.values import codec
from tests.bridges.messages import SENDER, message
from tests.bridges.tasks import receiving, tended
from tests.support.listed import listed
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually_async

Answer = Callable[[], BaseException | None]


def returned() -> BaseException:
    """What the client says of a message that no queue has got."""
    frame = Basic.Return(312, "NO_ROUTE", "", "order.paid")
    return PublishError(DeliveredMessage(frame, ContentHeader(), b"", None), frame)  # type: ignore[arg-type]


def rejected() -> BaseException:
    """What the client says of a message that the broker does not take."""
    return DeliveryError(None, Basic.Nack(1))


class Fake:
    """A channel. Of each record it notes the clock; `answers` say what becomes of it, by clock and in turn."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.answers: dict[int, list[BaseException | None]] = {}
        self.may_confirm = asyncio.Event()
        self.consumers: dict[str, Any] = {}
        self.acknowledged: list[int] = []
        self.at_acknowledgement: Callable[[], None] = lambda: None
        self.is_closed = False

    async def basic_publish(
        self, body: bytes, *, properties: Basic.Properties, mandatory: bool = False, **others: object
    ) -> None:
        clock = UUID(properties.message_id).int
        self.sent.append(clock)
        await self.may_confirm.wait()
        answer = next(iter(self.answers.get(clock, [])), None)
        if self.answers.get(clock):
            self.answers[clock].pop(0)
        if answer is not None and (mandatory or not isinstance(answer, PublishError)):
            raise answer

    async def basic_qos(self, **_: object) -> None:
        """Take any."""

    async def basic_consume(
        self, queue: str, callback: Callable[[DeliveredMessage], Awaitable[None]], **_: object
    ) -> Basic.ConsumeOk:
        self.consumers["tag"] = callback
        return Basic.ConsumeOk("tag")

    async def basic_ack(self, tag: int, *, multiple: bool, wait: bool) -> None:
        self.acknowledged.append(tag)
        self.at_acknowledgement()

    async def deliver(self, tag: int, body: bytes, message_id: str | None, **headers: Any) -> None:
        """Deliver a message to the consumer."""
        header = ContentHeader(properties=Basic.Properties(message_id=message_id, headers=headers))
        delivery = Basic.Deliver("tag", tag, False, "", "stock")
        await self.consumers["tag"](DeliveredMessage(delivery, header, body, None))  # type: ignore[arg-type]


def record(clock: int, key: str = "k", **others: Any) -> Record:
    """Return a record whose id is its clock."""
    given = message(clock, key=key, sent_clock=clock, message_id=UUID(int=clock), **others)
    return record_of(given, Form(), SENDER, RABBITMQ.is_reserved)


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def publisher(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> RabbitPublisher:
    monkeypatch.setattr("dispatcher.bridges.rabbitmq.publisher.NACK_S", 0.0)
    found = RabbitPublisher(
        OutBridge("out", 1, SENDER.node_id, "paris", OutSettings("rabbitmq", "h:1", own={"exchange": "e"}))
    )

    async def opened() -> Fake:
        return fake

    monkeypatch.setattr(found, "_opened", opened)
    return found


async def settled(condition: Callable[[], bool]) -> None:
    """Let tasks run until this is so, and then until nothing more happens."""
    await eventually_async(condition)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_records_are_published_once_each_is_confirmed(fake: Fake, publisher: RabbitPublisher) -> None:
    task = asyncio.create_task(publisher.publish([record(1, "a"), record(2, "b"), record(3, "c")]))
    await settled(lambda: fake.sent == [1, 2, 3])  # without a wait for each
    assert not task.done()
    fake.may_confirm.set()
    await task


async def test_record_waits_for_the_one_of_its_key_and_is_not_sent_if_that_came_back(
    fake: Fake, publisher: RabbitPublisher
) -> None:
    fake.answers[2] = [returned()]
    given = [record(1, "a"), record(2, "b"), record(3, "a"), record(4, "b"), record(5, "c")]
    task = asyncio.create_task(publisher.publish(given))
    await settled(lambda: len(fake.sent) >= 2)
    assert fake.sent == [1, 2]
    fake.may_confirm.set()
    with pytest.raises(RecordRefused, match=r"exchange e has no queue for order\.paid"):
        await task
    assert not {4, 5} & set(fake.sent)
    fake.sent.clear()
    await publisher.publish(given)
    assert fake.sent[0] == 2  # what was confirmed is not sent again
    assert fake.sent[-2:] == [4, 5]
    await publisher.publish(given[:1])
    assert fake.sent[-1] == 1  # acknowledged here long ago: whoever gives it again wants it again


async def test_record_that_is_rejected_is_sent_again_before_what_is_behind_it(
    fake: Fake, publisher: RabbitPublisher
) -> None:
    fake.answers[1] = [rejected(), rejected()]
    fake.may_confirm.set()
    await publisher.publish([record(1), record(2), record(3)])
    assert fake.sent == [1, 1, 1, 2, 3]
    assert publisher.trouble is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ACCESS_REFUSED - write access to exchange 'e' in vhost '/' refused for user 'u'", BrokerRefused),
        ("ACCESS_REFUSED - write access to topic 'order.paid' in exchange 'e' refused", RecordRefused),
    ],
)
async def test_who_may_not_write_there_is_told_from_a_topic_that_is_not_allowed(
    fake: Fake, publisher: RabbitPublisher, text: str, error: type[Exception]
) -> None:
    fake.answers[1] = [ChannelAccessRefused(text)]
    fake.may_confirm.set()
    with pytest.raises(error, match="ACCESS_REFUSED"):
        await publisher.publish([record(1)])


async def test_record_that_rabbitmq_cannot_hold_is_refused_before_anything_is_sent(
    fake: Fake, publisher: RabbitPublisher
) -> None:
    for unfit in (record(2, topic="t" * 256), record(2, headers={"h" * 256: "x"})):
        with pytest.raises(RecordRefused, match="more than 255 bytes"):
            await publisher.publish([record(1), unfit])
    assert fake.sent == []


# -- In ---------------------------------------------------------------------------------------------------------------


class FakeSource(RabbitSource):
    """A source over a channel without a server."""

    fake: Fake

    async def open(self) -> str:
        return "cluster"

    async def _count(self, name: str) -> int:
        return 0

    async def _new_channel(self) -> Any:
        return None, self.fake


@pytest.fixture
def into(node: Node) -> InRow:
    with node.connection.transaction():
        Bridges().into(node.connection, "in", InSettings("rabbitmq", "h:1", ("stock",)), actor="tests")
    node.inbox("orders", "#", origin="in")
    node.allow_clocks()
    return run(node.connection, reading_ins(SCHEMA, "in"))[0]


def came(node: Node) -> list[object]:
    return [codec.decode(value) for (value,) in node.rows("SELECT value FROM mailroom.inbox ORDER BY clock")]


async def test_message_is_acknowledged_once_it_is_committed_and_known_by_its_id_when_it_comes_again(
    node: Node, into: InRow, fake: Fake
) -> None:
    source = FakeSource(InBridge("in", into.origin, into.node_id, into.settings))
    source.fake = fake
    committed: list[int] = []
    fake.at_acknowledgement = lambda: committed.append(len(came(node)) + len(node.dead()))
    id = str(UUID(int=7))
    async with receiving(node) as receives, tended(TakingIn(into, lambda: source, SCHEMA, receives, lambda _: None)):
        await eventually_async(lambda: bool(fake.consumers))
        await fake.deliver(1, b"1", id)
        await fake.deliver(2, b"2", "no UUID")
        await fake.deliver(3, b"\xff", str(UUID(int=8)), **{"content-type": "application/json"})
        await eventually_async(lambda: fake.acknowledged[-1:] == [3])
        for tag, count in zip(fake.acknowledged, committed, strict=True):
            assert count >= tag
        await fake.deliver(4, b"1", id)
        await fake.deliver(5, b"2", "no UUID")
        await fake.deliver(6, b"\xff", str(UUID(int=8)), **{"content-type": "application/json"})
        await fake.deliver(7, b"3", str(UUID(int=9)))
        await fake.deliver(8, b"3", str(UUID(int=9)))
        await eventually_async(lambda: fake.acknowledged[-1:] == [8])
    assert came(node) == [1, 2, 2, 3]
    assert len(node.dead()) == 1
    assert node.value("SELECT next FROM mailroom.bridge_position") == 8


def test_id_of_a_message_is_its_own_or_a_new_one_each_time() -> None:
    def id_of(given: UUID | None, **headers: bytes) -> tuple[UUID, bool]:
        named = [(name.replace("_", "-", 1), value) for name, value in headers.items()]
        found = incoming(Arrived("q", 0, 0, None, b"1", named, None, id=given, is_queued=True), Intake(), "place")
        return found.message_id, found.is_named

    seven, eight = UUID(int=7), UUID(int=8)
    assert id_of(seven) == (seven, True)
    assert id_of(seven, mailroom_id=str(eight).encode()) == (eight, True)
    (first, is_named), (second, _) = id_of(None), id_of(None)
    assert first != second
    assert not is_named


# -- Forms ------------------------------------------------------------------------------------------------------------


def test_headers_of_others_are_text_and_keep_their_parts() -> None:
    at = datetime(2026, 8, 2, tzinfo=UTC)
    given: dict[str, Any] = {
        "text": "ä",
        "raw": b"\xff",
        "n": 7,
        "yes": True,
        "no": None,
        "at": at,
        "list": [1, {"b": b"x"}],
    }
    properties = Basic.Properties(content_type="text/plain", headers=given, message_id="12")
    assert headers_in(properties) == [
        ("text", "ä".encode()), ("raw", b"\xff"), ("n", b"7"), ("yes", b"true"), ("no", None),
        ("at", b"2026-08-02T00:00:00+00:00"), ("list", b'[1, {"b": "x"}]'), ("content-type", b"text/plain"),
    ]  # fmt: skip
    assert id_in(properties) is id_in(Basic.Properties()) is None
    assert id_in(Basic.Properties(message_id=UUID(int=7).hex)) == UUID(int=7)


def test_record_is_persistent_and_tells_the_broker_nothing_by_its_headers() -> None:
    found = properties_of(record(1, "köy", headers={"CC": "q", "BCC": "q", "x-death": "1", "X-Delay": "1", "own": "x"}))
    assert (found.delivery_mode, found.message_id, found.content_type) == (2, str(UUID(int=1)), "application/json")
    assert found.headers is not None
    assert {"mailroom-key": "köy", "own": "x"}.items() <= found.headers.items()
    assert not {"cc", "bcc", "x-death", "x-delay", "content-type"} & {str(name).lower() for name in found.headers}


@listed(
    ("address", "servers"),
    [
        ("h", [AmqpServer("amqp", "h", 5672, "/")]),
        ("h:1/shop", [AmqpServer("amqp", "h", 1, "shop")]),
        ("amqps://h/%2Fa,amqp://[::1]:2/", [AmqpServer("amqps", "h", 5671, "/a"), AmqpServer("amqp", "::1", 2, "/")]),
    ],
)
def test_address_names_servers_and_virtual_hosts(address: str, servers: Collection[AmqpServer]) -> None:
    assert amqp_servers(address) == servers


@listed("address", ["", "h:0", "h:70000", "http://h", "u:hunter2@h", "h/v?password=hunter2", "h/v/w", "h,"])
def test_address_that_is_none_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(ConfigurationError, match="address is HOST:PORT") as refused:
        amqp_servers(address)
    assert "hunter2" not in str(refused.value)


def test_options_are_checked_and_what_is_secret_is_hidden() -> None:
    given = {"user": "me", "password": "hunter2", "prefetch": "10"}
    assert known_options("x", RABBITMQ, given) == given
    assert (prefetch("x", given), prefetch("x", {})) == (10, 500)
    assert hiding(given, "login hunter2 of me") == "login *** of me"
    with pytest.raises(ConfigurationError, match="pasword cannot be set"):
        known_options("x", RABBITMQ, {"pasword": "hunter2"})
    for wrong in ("0", "70000", "many"):
        with pytest.raises(ConfigurationError, match="1 to 65,535"):
            prefetch("x", {"prefetch": wrong})
    with pytest.raises(ConfigurationError, match="files of TLS"):
        tls_context("x", {"tls_ca": "/nowhere/ca.pem"})


async def test_server_that_is_not_there_is_told_and_the_next_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def refused(self: object, server: AmqpServer) -> None:
        tried.append(server.host)
        raise ConnectionRefusedError(f"{server.host} does not answer hunter2")

    monkeypatch.setattr(client.RabbitClient, "_connect_to", refused)
    settings, secret = OutSettings("rabbitmq", "one:1,two:2"), {"password": "hunter2"}
    publisher = RabbitPublisher(OutBridge("out", 1, SENDER.node_id, "paris", settings, secret))
    with pytest.raises(BrokerTrouble, match=r"two does not answer \*\*\*"):
        await publisher.open()
    assert tried == ["one", "two"]
