"""A user's program: what a type checker says about it, with the types that the installed packages bring.

Whatever is wrong on purpose is marked, and a mark on a line that is right is an error too.
"""

from collections.abc import Sequence
from typing import Any, assert_type
from uuid import UUID

import psycopg
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import mailroom
from dispatcher import Dispatcher, deliver_all
from inbox import AsyncInbox, AsyncWorker, Inbox, Message, Park, Worker
from mailroom import create_inbox
from mailroom.schema import migrate
from mailroom.testing import deliver
from outbox import AsyncOutbox, Outbox, Outgoing, Store
from spark_jobs.node import Node

DSN = "postgresql://localhost/shop"


def ship(message: Message, connection: psycopg.Connection) -> None:
    connection.execute("INSERT INTO shipments VALUES (%s)", [message.value["order"]])


def ship_in_session(message: Message, session: Session) -> None:
    if message.key == "order-13":
        raise Park("not today")


async def ship_async(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute("INSERT INTO shipments VALUES (%s)", [message.value["order"]])


class Shipping:
    def handle(self, message: Message, connection: psycopg.Connection) -> None: ...

    async def handle_async(self, message: Message, connection: Any) -> None: ...


def takes_one(message: Message) -> None: ...


engine = create_engine(DSN)
async_engine = create_async_engine(DSN)

Worker(DSN, "shipping", ship).run()
Worker(engine, "shipping", lambda message, connection: None, parallel=2, batch=10, poll_interval_s=1, dispatch=True)
Worker(sessionmaker(engine), "shipping", ship_in_session, fatal=(ValueError,), listen_dsn=DSN)
Worker(DSN, "shipping", Shipping().handle, schema="tenant_a")
AsyncWorker(DSN, "shipping", ship_async)
AsyncWorker(async_engine, "shipping", Shipping().handle_async)

Worker(DSN, "shipping", ship_async)  # type: ignore[arg-type]
Worker(DSN, "shipping", Shipping().handle_async)  # type: ignore[arg-type]
Worker(DSN, "shipping", takes_one)  # type: ignore[arg-type]
Worker(DSN, "shipping", None)  # type: ignore[arg-type]
Worker(None, "shipping", ship)  # type: ignore[arg-type]
Worker(async_engine, "shipping", ship)  # type: ignore[arg-type]
Worker(DSN, "shipping", ship, parallel="2")  # type: ignore[arg-type]
Worker(DSN, "shipping", ship, batch=1.5)  # type: ignore[arg-type]
Worker(DSN, "shipping", ship, poll_interval_s="1")  # type: ignore[arg-type]
Worker(DSN, "shipping", ship, schema=None)  # type: ignore[arg-type]
Worker(DSN, "shipping", ship, fatal=ValueError)  # type: ignore[arg-type]
Worker(DSN, "shipping", ship, listen_dsn=5)  # type: ignore[arg-type]
AsyncWorker(DSN, "shipping", ship)  # type: ignore[arg-type]
AsyncWorker(engine, "shipping", ship_async)  # type: ignore[arg-type]

outbox = Outbox()
paid = mailroom.Topic("order.paid", dict[str, int], replies=bool)


def write(connection: psycopg.Connection | Connection | Session) -> None:
    assert_type(outbox.send(connection, "order.paid", {"order": 42}, key="order-42"), UUID)
    assert_type(outbox.send_many(connection, [Outgoing("order.paid", {"order": 42})]), int)
    Store().increment(connection, "stats/paid", by=1)
    outbox.command(connection, paid, {"order": 42}, reply_to=mailroom.Topic("paid", bool))
    outbox.publish(connection, paid, "order-42")  # type: ignore[misc]
    outbox.send(connection, 5, {})  # type: ignore[arg-type]
    outbox.send(connection, "order.paid", {}, key=1.5)  # type: ignore[arg-type]
    outbox.send(DSN, "order.paid", {})  # type: ignore[arg-type]


def read(connection: psycopg.Connection) -> Sequence[Message]:
    create_inbox(connection, "shipping", ["order.paid"])
    deliver(connection)
    [message] = assert_type(Inbox("shipping").reap(connection, key="order-42"), list[Message])
    assert_type(message.clock, int)
    assert_type(paid.typed(message), Message[dict[str, int]])
    return Inbox("shipping").reap_any(connection, max_keys=10)


async def both(connection: psycopg.AsyncConnection) -> None:
    assert_type(await AsyncOutbox().send(connection, "order.paid", {}), UUID)
    assert_type(await AsyncInbox("shipping").reap(connection, key=42), list[Message])
    await AsyncOutbox().send(psycopg.connect(DSN), "order.paid", {})  # type: ignore[arg-type]
    await Dispatcher(DSN).run()


def commit() -> None:
    assert_type(mailroom.atomically(lambda: psycopg.connect(DSN), read), Sequence[Message])
    with engine.begin() as connection:
        migrate(connection)
    deliver_all(DSN)
    Node(None)  # type: ignore[arg-type]
