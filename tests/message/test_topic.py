"""Typed topics: they send plain values and their version, and read each version that they have upcasters for."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, get_type_hints
from uuid import UUID

import attrs
import psycopg
import pytest

from inbox import Inbox, Message, Worker
from mailroom import Topic, create_inbox
from mailroom.errors import ConfigurationError, DecodeError, EncodeError, InvalidMessage
from mailroom.testing import deliver, handle_all, sent, work
from outbox import AsyncOutbox, Outbox, Outgoing
from tests.support.databases import Connect
from tests.support.listed import listed
from tests.support.node import Node
from tests.support.waiting import eventually
from tests.support.working import working

SECRET = "SECRET"
OUTBOX = Outbox()


@dataclass(frozen=True)
class Reserve:
    item: str
    amount: int
    price: Decimal = Decimal(0)


@dataclass(frozen=True)
class Reserved:
    shelf: int


@attrs.frozen
class Point:
    x: int = attrs.field(converter=int)


reserve = Topic("stock.reserve", Reserve, replies=Reserved, version=3)
reserved = Topic("shop.reserved", Reserved)
points = Topic("point", Point, read=lambda plain: Point(*plain), write=lambda point: [point.x])


@reserve.upcast(1)
def with_amount(plain: dict[str, Any]) -> dict[str, Any]:
    plain["amount"] = 1  # in place, as people do
    return plain


@reserve.upcast(2)
def item_named(plain: dict[str, Any]) -> dict[str, Any]:
    return {"item": plain.pop("name"), **plain}


TEAPOTS = Reserve("teapot", 2, Decimal("1.50"))


def received(connection: psycopg.Connection[Any], topic: str, value: object, **fields: Any) -> Message:
    """Send a value as text says, and return the message that an inbox gets; afterwards nothing is left of it."""
    OUTBOX.send(connection, topic, value, **fields)
    message = arrived(connection, topic)
    connection.rollback()
    return message


def arrived(connection: psycopg.Connection[Any], topic: str) -> Message:
    create_inbox(connection, "shop", [topic])
    deliver(connection)
    [message] = Inbox("shop").reap_any(connection)
    return message


def test_every_method_sends_a_topic_as_its_name_its_version_and_a_plain_value(connect: Connect) -> None:
    connection = connect()
    OUTBOX.send(connection, reserve, TEAPOTS, key="k", headers={"user": "ada"})
    OUTBOX.publish(connection, reserve, TEAPOTS, key="k", headers={"user": "ada"})
    OUTBOX.command(connection, reserve, TEAPOTS, reply_to=reserved, key="k", headers={"user": "ada"})
    OUTBOX.send_many(connection, [Outgoing(reserve, TEAPOTS, key="k", headers={"user": "ada"})])
    messages = sent(connection, "stock.reserve")
    assert [message.kind for message in messages] == ["M", "E", "C", "M"]
    for message in messages:
        assert message.value == {"item": "teapot", "amount": 2, "price": Decimal("1.50")}
        to = {"reply_to": "shop.reserved"} if message.kind == "C" else {}
        assert message.headers == {"user": "ada", "schema": "3", **to}


async def test_so_do_the_async_ones(dsn: str, connect: Connect) -> None:
    outbox = AsyncOutbox()
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await outbox.send(connection, reserve, TEAPOTS)
        await outbox.publish(connection, reserve, TEAPOTS)
        await outbox.command(connection, reserve, TEAPOTS, reply_to=reserved)
        await outbox.send_many(connection, [Outgoing(reserve, TEAPOTS)])
    messages = sent(connect(), "stock.reserve")
    assert [message.kind for message in messages] == ["M", "E", "C", "M"]
    assert {message.headers["schema"] for message in messages} == {"3"}
    assert messages[2].headers["reply_to"] == "shop.reserved"


def test_the_first_version_needs_no_header_and_a_given_one_does_not_stand_against_the_topic(connect: Connect) -> None:
    connection = connect()
    OUTBOX.send(connection, reserved, Reserved(1))
    OUTBOX.send(connection, reserved, Reserved(1), headers={"schema": "7", "user": "ada"})
    OUTBOX.send(connection, reserve, TEAPOTS, headers={"schema": "7"})
    assert [message.headers for message in sent(connection, "shop.reserved")] == [{}, {"schema": "1", "user": "ada"}]
    assert [message.headers for message in sent(connection, "stock.reserve")] == [{"schema": "3"}]


@listed("topic", [reserve, reserved])
@listed("headers", [5, [("a", "b")], {"a": 1}])
def test_headers_that_are_none_are_refused_with_a_topic_as_with_text(
    connect: Connect, topic: Topic, headers: Any
) -> None:
    value = TEAPOTS if topic is reserve else Reserved(1)
    with pytest.raises(InvalidMessage, match="text to text"):
        OUTBOX.send(connect(), topic, value, headers=headers)


def test_value_that_does_not_fit_is_not_sent(connect: Connect) -> None:
    connection = connect()
    wrong = Reserve("teapot", SECRET)  # type: ignore[arg-type]  # who checks no types sends such
    for send in (OUTBOX.send, OUTBOX.publish, OUTBOX.command):
        with pytest.raises(EncodeError, match=r"it is not a valid Reserve, value\.amount does not fit\.") as caught:
            send(connection, reserve, wrong)
        assert SECRET not in str(caught.value)
    with pytest.raises(EncodeError, match=r"value\.amount"):
        OUTBOX.send_many(connection, (Outgoing(reserve, value) for value in (TEAPOTS, wrong)))
    assert sent(connection, "stock.reserve") == []


def test_outgoing_of_a_topic_is_that_of_its_name_and_plain_value() -> None:
    plain = {"item": "teapot", "amount": 2, "price": Decimal("1.50")}
    assert Outgoing(reserve, TEAPOTS) == Outgoing("stock.reserve", plain, headers={"schema": "3"})
    assert Outgoing(reserved, Reserved(1)) == Outgoing("shop.reserved", {"shelf": 1})
    assert Outgoing("shop.reserved", Reserved(1)).value == Reserved(1)  # of text the codec decides


def test_dataclass_that_inherits_from_outgoing_takes_a_topic_apart_too() -> None:
    @dataclass(frozen=True)
    class Traced(Outgoing):
        trace: str = "none"

    traced: Any = Traced(reserve, TEAPOTS, headers={"user": "ada"}, trace="t1")  # type: ignore[arg-type]  # a str, says the field
    plain = Outgoing(reserve, TEAPOTS, headers={"user": "ada"})
    assert (traced.topic, traced.value, traced.headers) == (plain.topic, plain.value, plain.headers)
    assert (traced.trace, traced.kind) == ("t1", "M")


def test_a_message_is_read_as_often_as_one_likes(connect: Connect) -> None:
    connection = connect()
    OUTBOX.send(connection, reserve, TEAPOTS, key="k", headers={"user": "ada"})
    message = arrived(connection, "stock.reserve")
    typed = reserve.typed(message)
    assert (reserve.read(message), reserve.read(typed), typed.value) == (TEAPOTS, TEAPOTS, TEAPOTS)
    assert message.value == {"item": "teapot", "amount": 2, "price": Decimal("1.50")}
    for name in ("id", "key", "clock", "topic", "kind", "raw", "headers", "sent_at", "delivered_at", "expires_at"):
        assert getattr(typed, name) == getattr(message, name)
    assert repr(typed) == repr(message)


def test_json_of_any_language_is_read_too(connect: Connect) -> None:
    connection = connect()
    times = Topic("times", dict[UUID, datetime])
    connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json) VALUES "
        """('times', '{"00000000-0000-0000-0000-000000000007": "2026-07-01T14:00:00+02:00"}')"""
    )
    assert times.read(arrived(connection, "times")) == {UUID(int=7): datetime(2026, 7, 1, 12, tzinfo=UTC)}


@listed(
    ("headers", "plain"),
    [
        (None, {"name": "teapot"}),
        ({"schema": "1"}, {"name": "teapot"}),
        ({"schema": "2"}, {"name": "teapot", "amount": 1}),
        ({"schema": "3"}, {"item": "teapot", "amount": 1}),
    ],
)
def test_older_versions_go_through_the_upcasters_from_theirs(
    connect: Connect, headers: dict[str, str] | None, plain: dict[str, Any]
) -> None:
    message = received(connect(), "stock.reserve", plain, headers=headers)
    assert message.value == plain
    assert reserve.read(message) == reserve.read(message) == Reserve("teapot", 1)
    assert message.value == plain  # what upcasters change in place is their own copy


@listed(
    ("schema", "said"),
    [
        ("4", "of version 4 of stock.reserve, and this program reads up to 3: deploy one that reads it, then replay"),
        ("999999", "of version 999999"),
        *(
            (bad, "The header schema is not a version")
            for bad in ("", "0", "-1", "01", "1.0", "3\n", "³", "٣", "9" * 400)
        ),
    ],
)
def test_what_no_upcaster_can_help_is_a_decode_error(connect: Connect, schema: str, said: str) -> None:
    message = received(connect(), "stock.reserve", {"item": "teapot", "amount": 1}, headers={"schema": schema})
    with pytest.raises(DecodeError, match=said):
        reserve.read(message)


def test_missing_and_failing_upcasters_are_decode_errors_without_content(connect: Connect) -> None:
    topic = Topic("order", Reserve, version=3)

    @topic.upcast(2)
    def failing(plain: Any) -> Any:
        raise RuntimeError(plain)

    connection = connect()
    create_inbox(connection, "shop", ["order"])
    OUTBOX.send(connection, "order", SECRET, headers={"schema": "1"})
    OUTBOX.send(connection, "order", SECRET, headers={"schema": "2"})
    deliver(connection)
    first, second = Inbox("shop").reap_any(connection)
    with pytest.raises(DecodeError, match="upcaster of order from version 2 raised RuntimeError: mend it") as caught:
        topic.read(second)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__
    with pytest.raises(DecodeError, match=r"of version 1 of order, .* register one by upcast\(1\), then replay"):
        topic.read(first)


@listed("version", [0, 3, 4, True, "1", 1.0, None])
def test_upcaster_from_no_older_version_is_refused(version: Any) -> None:
    told = r"must be an int from 1 to|give a version below the topic\'s, which is 3"
    with pytest.raises(ConfigurationError, match=told):
        reserve.upcast(version)


def test_second_upcaster_from_a_version_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has an upcaster from version 1 already"):
        reserve.upcast(1)(with_amount)


@listed(
    ("make", "said"),
    [
        (lambda: Topic("order", Reserve, version=0), "version must be an int from 1 to .*, not 0"),
        (lambda: Topic("order", Reserve, version=True), "version must be .*, not bool"),
        (lambda: Topic("order", Reserve, version=1_000_000), "version must be .*, not 1000000"),
        (lambda: Topic("order", Reserve, version="2"), "version must be .*, not str"),  # type: ignore[arg-type]
        (lambda: Topic("order", Point), r"Point is not a dataclass\. So give read= and write=\."),
        (lambda: Topic("order", Point, read=lambda plain: Point(plain)), "give read= and write="),
        (lambda: Topic("order", Reserve, replies=Point), r"Point is not a dataclass\. So make a dataclass of it\."),
        (lambda: Topic("order", Reserve, read=5), "read is 5"),  # type: ignore[arg-type]
    ],
)
def test_topic_that_could_not_work_is_refused_when_it_is_made(make: Callable[[], Topic], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


@listed("name", ["", "order paid", 5, "order.*"])
def test_name_that_is_no_topic_is_refused(name: Any) -> None:
    with pytest.raises(InvalidMessage, match="is not valid"):
        Topic(name, Reserve)


def test_read_and_write_convert_any_other_type(connect: Connect) -> None:
    connection = connect()
    OUTBOX.send(connection, points, Point(3))
    message = arrived(connection, "point")
    assert (message.value, points.read(message)) == ([3], Point(3))


def test_read_alone_takes_the_place_of_the_types_own_reading(connect: Connect) -> None:
    lenient = Topic("shop.reserved", Reserved, read=lambda plain: Reserved(int(plain["shelf"])))
    message = received(connect(), "shop.reserved", {"shelf": "7"})
    assert lenient.read(message) == Reserved(7)
    assert lenient.write(Reserved(7)) == {"shelf": 7}
    with pytest.raises(DecodeError):
        reserved.read(message)


@listed("error", [ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, AssertionError])
def test_what_a_read_says_of_a_value_is_a_decode_error_without_its_text(
    connect: Connect, error: type[Exception]
) -> None:
    def failing(plain: Any) -> Point:
        raise error(plain)

    topic = Topic("point", Point, read=failing, write=lambda point: point.x)
    with pytest.raises(DecodeError, match=f"its topic's read raised {error.__name__}") as caught:
        topic.read(received(connect(), "point", SECRET))
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_service_that_a_read_needs_may_be_down(connect: Connect) -> None:
    def failing(plain: Any) -> Point:
        raise ConnectionError("the store of claims does not answer")

    topic = Topic("point", Point, read=failing, write=lambda point: point.x)
    create_inbox(connection := connect(), "shop", ["point"])
    OUTBOX.send(connection, topic, Point(1))
    [failure] = work(connection, "shop", lambda message, _: topic.read(message)).failures
    assert failure.outcome == "retry"


def test_answers_have_a_type_of_their_own(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "stock", ["stock.reserve"])
    create_inbox(connection, "shop", ["shop.reserved"])
    OUTBOX.command(connection, reserve, TEAPOTS, reply_to=reserved)

    def answer(message: Message, connection: Any) -> None:
        OUTBOX.reply(connection, message, reserve.write_answer(Reserved(7)))

    assert handle_all(connection, "stock", answer) == 1
    deliver(connection)
    [message] = Inbox("shop").reap_any(connection)
    assert reserve.read_answer(message) == reserved.read(message) == Reserved(7)
    with pytest.raises(EncodeError, match=r"value\.shelf does not fit"):
        reserve.write_answer(Reserved("7"))  # type: ignore[arg-type]
    assert reserved.write_answer({"any": 1}) == {"any": 1}


def test_a_value_that_does_not_fit_fails_at_once_and_alone(dsn: str, connect: Connect) -> None:
    node = Node(dsn, connect(autocommit=True))
    node.inbox("stock", "stock.reserve", backoff_s=3_600)
    for key, value in (("a", {"item": "a", "amount": 1}), ("b", {"item": SECRET}), ("c", {"item": "c", "amount": 1})):
        node.send("stock.reserve", value, key=key, headers={"schema": "3"})
    node.deliver_all()
    node.connection.execute("CREATE TABLE ledger (item text)")

    def handle(message: Message, connection: psycopg.Connection) -> None:
        connection.execute("INSERT INTO ledger VALUES (%s)", [reserve.read(message).item])

    with working(Worker(dsn, "stock", handle)):
        eventually(lambda: node.rows("SELECT item FROM ledger ORDER BY item") == [("a",), ("c",)])
        eventually(lambda: node.rows("SELECT key FROM mailroom.parked") == [("b",)])
    error = node.value("SELECT last_error FROM mailroom.key_state")
    assert error.startswith(
        "DecodeError [MR-received-value-does-not-fit]: The value is not a valid Reserve: value.amount is missing."
    )
    assert SECRET not in error


def test_annotations_of_topics_and_messages_can_be_evaluated() -> None:
    def handle(message: "Message[Reserve]", topic: "Topic[Reserve]", other: "Topic[Reserve, Reserved]") -> None: ...

    assert set(get_type_hints(handle)) == {"message", "topic", "other", "return"}
