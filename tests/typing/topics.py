"""Typed topics as a checker sees them: what is wrong on purpose is marked, and a mark on a right line is an error."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, assert_type
from uuid import UUID

import psycopg

from inbox import Inbox, Message, Worker
from mailroom import Topic, create_inbox, subscribe, unsubscribe
from outbox import AsyncOutbox, Outbox, Outgoing


@dataclass
class Reserve:
    item: str
    amount: int


@dataclass
class Reserved:
    shelf: int


reserved = Topic("shop.reserved", Reserved)
reserve = Topic("stock.reserve", Reserve, replies=Reserved)
counts = Topic("counts", dict[str, int])
perhaps: Topic[int | None] = Topic("perhaps", int | None)
outbox = Outbox()

assert_type(reserved, Topic[Reserved, Any])
assert_type(reserve, Topic[Reserve, Reserved])
assert_type(counts, Topic[dict[str, int]])

Topic("stock.reserve", Reserve(item="teapot", amount=1))  # type: ignore[arg-type]
Topic("stock.reserve", Reserve, read=lambda plain: Reserved(plain))  # type: ignore[arg-type, return-value]


@reserve.upcast(1)
def with_amount(plain: dict[str, Any]) -> dict[str, Any]:
    return {**plain, "amount": 1}


assert_type(with_amount({}), dict[str, Any])


def send(connection: psycopg.Connection, either: Topic[Reserve, Reserved] | str) -> None:
    assert_type(outbox.send(connection, reserve, Reserve("teapot", 1), key="order-42"), UUID)
    outbox.publish(connection, reserve, Reserve("teapot", 1))
    outbox.command(connection, reserve, Reserve("teapot", 1), reply_to=reserved)
    outbox.command(connection, reserve, Reserve("teapot", 1), reply_to="shop")
    outbox.command(connection, "stock.reserve", {"item": "teapot"}, reply_to=reserved)
    outbox.command(connection, reserved, Reserved(1), reply_to=counts)
    outbox.send(connection, either, Reserve("teapot", 1))
    outbox.send(connection, "anything", {"item": "teapot"})
    outbox.send(connection, perhaps, None)
    outbox.send_many(connection, [Outgoing(reserve, Reserve("teapot", 1)), Outgoing("anything", 5, key=1)])

    outbox.send(connection, reserve, Reserved(1))  # type: ignore[misc]
    outbox.send(connection, reserve, {"item": "teapot", "amount": 1})  # type: ignore[misc]
    outbox.send(connection, counts, {"teapots": "1"})  # type: ignore[misc]
    outbox.send(connection, perhaps, "1")  # type: ignore[misc]
    outbox.publish(connection, reserve, Reserved(1))  # type: ignore[misc]
    outbox.command(connection, reserve, Reserved(1))  # type: ignore[misc]
    outbox.command(connection, reserve, Reserve("teapot", 1), reply_to=counts)  # type: ignore[misc]
    outbox.send_many(connection, [Outgoing(reserve, Reserved(1))])  # type: ignore[misc]
    Outgoing(reserve, Reserved(1), key="order-42")  # type: ignore[misc]


def receive(connection: psycopg.Connection) -> None:
    create_inbox(connection, "stock", reserve)
    create_inbox(connection, "shop", [reserved, "order.*"])
    subscribe(connection, "shop", counts)
    unsubscribe(connection, "shop", (counts, perhaps, "order.*"))

    subscribe(connection, "shop", Reserve)  # type: ignore[arg-type]
    unsubscribe(connection, "shop", [Reserved(1)])  # type: ignore[list-item]


async def send_async(connection: psycopg.AsyncConnection, outbox: AsyncOutbox) -> None:
    assert_type(await outbox.send(connection, reserve, Reserve("teapot", 1)), UUID)
    await outbox.publish(connection, reserve, Reserve("teapot", 1))
    await outbox.command(connection, reserve, Reserve("teapot", 1), reply_to=reserved)

    await outbox.send(connection, reserve, Reserved(1))  # type: ignore[misc]
    await outbox.publish(connection, reserve, Reserved(1))  # type: ignore[misc]
    await outbox.command(connection, reserve, Reserved(1))  # type: ignore[misc]
    await outbox.command(connection, reserve, Reserve("teapot", 1), reply_to=counts)  # type: ignore[misc]


def read(message: Message, connection: psycopg.Connection) -> None:
    assert_type(message, Message[Any])
    assert_type(message.value, Any)
    assert_type(reserve.read(message), Reserve)
    assert_type(reserve.typed(message), Message[Reserve])
    assert_type(reserve.typed(message).value, Reserve)
    assert_type(reserve.read_answer(message), Reserved)
    assert_type(reserved.read_answer(message), Any)
    outbox.reply(connection, message, reserve.write_answer(Reserved(1)))

    number: int = reserve.read(message)  # type: ignore[assignment]
    text: str = reserve.typed(message).value  # type: ignore[assignment]
    reserve.write_answer(Reserve("teapot", number))  # type: ignore[arg-type]
    number = reserve.typed(message).value.shelf  # type: ignore[attr-defined]
    takes_reserved(reserve.typed(message))  # type: ignore[arg-type]
    assert text


def takes_reserved(message: Message[Reserved]) -> None: ...


def takes_any(messages: Iterable[Message]) -> None: ...


def handle(message: Message[Reserve], connection: psycopg.Connection) -> None: ...


def bare(topic: Topic, connection: psycopg.Connection) -> None:
    assert_type(topic, Topic[Any, Any])
    outbox.send(connection, topic, 5)
    takes_any(Inbox("shop").reap_any(connection))
    takes_any([reserve.typed(message) for message in Inbox("shop").reap_any(connection)])
    Worker("postgresql://localhost/shop", "shop", handle)
