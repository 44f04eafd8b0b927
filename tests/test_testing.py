"""The test kit: a message all the way on the test's own connection, and nothing left after a rollback."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from inbox import Inbox, Message
from mailroom import testing
from mailroom.errors import NotInTransaction
from outbox import AsyncOutbox, AsyncStore, Outbox, Store
from tests.databases import Connect
from tests.node import Node

OUTBOX = Outbox()


@pytest.fixture
def node(dsn: str, connect: Connect) -> Node:
    node = Node(dsn, connect(autocommit=True))
    node.inbox("shipping", "order.paid")
    node.inbox("billing")
    return node


@pytest.fixture
def connection(node: Node, connect: Connect) -> Iterator[psycopg.Connection[Any]]:
    """The test's own transaction, rolled back at its end."""
    with connect() as connection, connection.transaction(force_rollback=True):
        yield connection


def test_message_goes_all_the_way_and_a_rollback_leaves_nothing(node: Node, connect: Connect) -> None:
    with connect() as connection:
        OUTBOX.send(connection, "shipping", {"state": "paid"}, key="order-42")
        assert testing.deliver(connection) == 1
        [message] = Inbox("shipping").reap(connection, "order-42")
        assert message.value == {"state": "paid"}
        connection.rollback()
    assert node.waiting() == []
    assert node.delivered() == []
    assert node.value("SELECT clock_ceiling FROM mailroom.node") == 0


def test_clock_given_out_in_a_rolled_back_test_does_not_spoil_the_node(node: Node, connect: Connect) -> None:
    with connect() as connection:
        OUTBOX.send(connection, "shipping", 1)
        testing.deliver(connection)
        connection.rollback()
    node.send("shipping")
    assert node.drain().delivered == 1


def test_sent_tells_what_stands_in_the_outbox_in_the_order_sent(
    connection: psycopg.Connection[Any],
) -> None:
    later = datetime(2100, 1, 1, tzinfo=UTC)
    first = OUTBOX.send(connection, "shipping", [1], key="k", headers={"user": "u"}, deliver_at=later)
    OUTBOX.publish(connection, "order.paid", None, event_type="C")
    second = OUTBOX.command(connection, "shipping", 2, reply_to="answers", message_type="O")
    found = testing.sent(connection, "shipping")
    assert [(sent.id, sent.value, sent.kind) for sent in found] == [(first, [1], "M"), (second, 2, "C")]
    assert (found[0].key, found[0].headers, found[0].deliver_at) == ("k", {"user": "u"}, later)
    assert (found[1].headers, found[1].message_type) == ({"reply_to": "answers"}, "O")
    [event] = testing.sent(connection, "order.paid")
    assert (event.kind, event.event_type) == ("E", "C")


def test_sent_reads_a_value_written_as_json(connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', '{\"a\": [1]}')")
    [sent] = testing.sent(connection, "shipping")
    assert sent.value == {"a": [1]}


def test_what_was_delivered_is_not_sent_any_more(connection: psycopg.Connection[Any]) -> None:
    OUTBOX.send(connection, "shipping", 1)
    testing.deliver(connection)
    assert testing.sent(connection, "shipping") == []


def test_deliver_takes_everything_there_is(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json) SELECT 'shipping', to_jsonb(n) FROM generate_series(1, 2500) n"
    )
    assert testing.deliver(connection) == 2_500
    assert Inbox("shipping").backlog(connection) == 2_500


def test_deliver_decides_by_now_what_is_due_and_what_has_expired(connection: psycopg.Connection[Any]) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    later = soon + timedelta(hours=1)
    OUTBOX.send(connection, "shipping", 1, key="due", deliver_at=soon)
    OUTBOX.send(connection, "billing", 1, key="expired", deliver_at=soon, expires_at=later)
    testing.deliver(connection)
    assert Inbox("shipping").peek(connection) == []
    testing.deliver(connection, now=later)
    assert [message.key for message in Inbox("shipping").peek(connection)] == ["due"]
    assert Inbox("billing").peek(connection) == []


def test_execute_applies_all_there_is_and_a_rollback_leaves_nothing(node: Node, connect: Connect) -> None:
    store = Store()
    with connect() as connection:
        connection.execute(
            "INSERT INTO mailroom.outbox_executable (operation, key, amount) "
            "SELECT 'increment', 'k' || n % 10, 1 FROM generate_series(1, 2500) n"
        )
        store.delete_range(connection, "k0", "k5")
        store.increment(connection, "k0", 7, notify="shipping")
        Store(target="gone").delete(connection, "k9")
        assert testing.execute(connection) == 2_503
        assert testing.execute(connection) == 0
        assert [store.get(connection, key) for key in ("k0", "k4", "k5", "k9")] == [7, None, 250, 250]
        assert connection.execute("SELECT topic FROM mailroom.dead_letter").fetchall() == [("gone.delete",)]
        assert testing.deliver(connection) == 1
        [told] = Inbox("shipping").reap(connection, "k0")
        assert told.value["number"] == 7
        connection.rollback()
    assert node.rows("SELECT * FROM mailroom.store") == []
    assert node.value("SELECT count(*) FROM mailroom.outbox_executable") == 0


def test_drain_calls_the_handler_until_nothing_is_left_also_for_what_it_sends(
    connection: psycopg.Connection[Any],
) -> None:
    seen: list[object] = []

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        seen.append(message.value)
        if message.value == 1:
            OUTBOX.send(connection, "shipping", 2, key="k")
            OUTBOX.send(connection, "billing", 3)

    OUTBOX.send(connection, "shipping", 1, key="k")
    assert testing.drain(connection, "shipping", handle) == 2
    assert seen == [1, 2]
    assert Inbox("billing").backlog(connection) == 1


def test_drain_lets_the_handler_s_exception_out(connection: psycopg.Connection[Any]) -> None:
    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        raise ValueError("no such state")

    OUTBOX.send(connection, "shipping", 1)
    with pytest.raises(ValueError, match="no such state"):
        testing.drain(connection, "shipping", handle)


@pytest.mark.parametrize("call", [testing.deliver, testing.execute])
def test_kit_refuses_to_commit_by_itself(node: Node, call: Callable[..., int]) -> None:
    with pytest.raises(NotInTransaction):
        call(node.connection)


def test_kit_works_in_a_session_of_sqlalchemy(node: Node) -> None:
    engine = create_engine(node.dsn.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session:
        OUTBOX.send(session, "shipping", {"a": 1}, key="k")
        [sent] = testing.sent(session, "shipping")
        assert sent.value == {"a": 1}
        assert testing.deliver(session) == 1
        assert [message.value for message in Inbox("shipping").reap(session, "k")] == [{"a": 1}]
        Store().put(session, "k", b"v")
        Store(target="gone").delete(session, "k")
        assert testing.execute(session) == 2
        assert Store().get(session, "k") == b"v"
        session.rollback()
    engine.dispose()
    assert node.delivered() == []


async def test_kit_works_on_async_connections(node: Node) -> None:
    async with await psycopg.AsyncConnection.connect(node.dsn) as connection:
        await AsyncOutbox().send(connection, "shipping", {"a": 1}, key="k")
        [sent] = await testing.sent_async(connection, "shipping")
        assert sent.value == {"a": 1}
        assert await testing.deliver_async(connection) == 1
        await AsyncStore().increment(connection, "k")
        assert await testing.execute_async(connection) == 1
        assert await AsyncStore().get(connection, "k") == 1
        await connection.rollback()
    assert node.delivered() == []
