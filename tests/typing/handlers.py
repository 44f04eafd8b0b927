"""Handlers as a checker sees them. Each line that is wrong on purpose is marked; a mark anywhere else is an error."""

from typing import Any, assert_type

import psycopg

from inbox import AsyncHandlers, AsyncWorker, Handlers, Message, Worker
from mailroom.testing import handle_all
from tests.typing.topics import Reserve, Reserved, reserve, reserved

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

stock, shop = Handlers(), AsyncHandlers()


@stock.on(reserve)
def take(message: Message[Reserve], conn: Connection) -> Reserved:
    assert_type(message.value, Reserve)
    return Reserved(message.value.amount)


@stock.on(reserve, reply=False)
def take_later(message: Message[Reserve], conn: Connection) -> None: ...


@stock.on(reserved)
def go_on(message: Message[Reserved], conn: Connection) -> None: ...


@stock.on_error_reply(reserved)
def give_up(message: Message, conn: Connection) -> None:
    assert_type(message.value, Any)


@stock.on("order.#")
def anything(message: Message, conn: Connection) -> dict[str, int]:
    return {"shelf": 7}


@stock.on(reserve)
def untyped(message: Message, conn: Any) -> Reserved:
    return Reserved(1)


@stock.on(reserve)  # type: ignore[arg-type]
def of_another_topic(message: Message[Reserved], conn: Connection) -> Reserved:
    return Reserved(1)


@stock.on(reserve)  # type: ignore[arg-type]
def answers_another(message: Message[Reserve], conn: Connection) -> Reserve:
    return message.value


@stock.on(reserve)  # type: ignore[arg-type]
def answers_nothing(message: Message[Reserve], conn: Connection) -> None: ...


@stock.on(reserve)  # type: ignore[arg-type]
async def is_async(message: Message[Reserve], conn: AsyncConnection) -> Reserved:
    return Reserved(1)


@stock.on(reserve)  # type: ignore[arg-type]
def takes_no_connection(message: Message[Reserve]) -> Reserved:
    return Reserved(1)


@shop.on(reserve)
async def take_async(message: Message[Reserve], conn: AsyncConnection) -> Reserved:
    return Reserved(message.value.amount)


@shop.on_error_reply("shop.reserved")
async def give_up_async(message: Message, conn: AsyncConnection) -> None: ...


@shop.on(reserve)  # type: ignore[arg-type]
async def answers_another_async(message: Message[Reserve], conn: AsyncConnection) -> int:
    return 1


@shop.on(reserve)  # type: ignore[arg-type]
def is_not_async(message: Message[Reserve], conn: Connection) -> Reserved:
    return Reserved(1)


def run(conn: Connection, message: Message[Reserve]) -> None:
    assert_type(take(message, conn), Reserved)
    handle_all(conn, "stock", stock)
    Worker("", "stock", stock)
    AsyncWorker("", "shop", shop)
    Worker("", "stock", shop)  # type: ignore[arg-type]
    AsyncWorker("", "shop", stock)  # type: ignore[arg-type]
