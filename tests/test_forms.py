"""Sync and async forms of one operation: what they take, what they say of themselves, and that both do the same."""

import inspect
import pydoc
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
import pytest_asyncio

from dispatcher import AsyncRegistrations, Registrations
from inbox import AsyncParked, Parked
from mailroom import AsyncLinks, Links, schema
from mailroom.errors import InvalidName, SchemaError
from mailroom.node import status, trace
from mailroom.node.dead_letter import AsyncDeadLetters, DeadLetters
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql
from outbox import Outbox
from tests.support.node import Node

ANSWER = Sql("SELECT %(number)s::bigint", columns=("bigint",))


def answering(number: int, *, plus: int = 0) -> Operation[int]:
    """Return the number."""
    [(found,)] = yield ANSWER.at()(number=number + plus)
    return int(found)


answer, answer_async = on_connections("answer", answering)


@pytest_asyncio.fixture
async def connection(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as opened:
        yield opened


async def test_both_functions_do_what_the_operation_does(node: Node, connection: psycopg.AsyncConnection) -> None:
    assert answer(node.connection, 3) == answer(connection=node.connection, number=1, plus=2) == 3
    assert await answer_async(connection, 3) == await answer_async(number=1, connection=connection, plus=2) == 3


@pytest.mark.parametrize("name", ["answer", "answer_async"])
def test_function_says_of_itself_what_it_takes_and_returns(name: str) -> None:
    function: Any = globals()[name]
    assert (function.__name__, function.__qualname__, function.__module__) == (name, name, __name__)
    assert inspect.iscoroutinefunction(function) == (name == "answer_async")
    assert (function.__annotations__["number"], function.__annotations__["return"]) == (int, int)
    text = pydoc.plain(pydoc.render_doc(function))
    assert f"{name}(connection: " in text
    assert ", number: int, *, plus: int = 0) -> int" in text
    assert "Return the number." in text


@pytest.mark.parametrize("cls", [Parked, AsyncParked])
def test_method_says_of_itself_what_it_takes_and_returns(cls: type) -> None:
    method: Any = inspect.getattr_static(cls, "messages")
    assert method.__name__ == "messages"
    assert inspect.iscoroutinefunction(method) == (cls is AsyncParked)
    text = pydoc.plain(pydoc.render_doc(method))
    assert "messages(self, connection: " in text
    assert "limit: int = 10) -> list[mailroom.message.message.Message]" in text
    assert "Return the first messages that a parked key holds" in text


PAIRS: list[tuple[Any, Any, str]] = [
    (Parked("shipping"), AsyncParked("shipping"), "keys"),
    (DeadLetters(), AsyncDeadLetters(), "find"),
    (Links(), AsyncLinks(), "status"),
    (Registrations(), AsyncRegistrations(), "targets"),
]


async def test_methods_take_the_connection_by_keyword(node: Node, connection: psycopg.AsyncConnection) -> None:
    node.inbox("shipping")
    for sync, twin, method in PAIRS:
        assert await getattr(twin, method)(connection=connection) == getattr(sync, method)(connection=node.connection)


READS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "status": (status.status, status.status_async),
    "dispatcher": (status.dispatcher_status, status.dispatcher_status_async),
    "links": (status.links_status, status.links_status_async),
    "executor": (status.executor_status, status.executor_status_async),
    "outbox": (status.outbox_backlog, status.outbox_backlog_async),
    "executables": (status.executable_backlog, status.executable_backlog_async),
}


async def test_what_is_read_of_a_node_is_the_same_on_an_async_connection(
    node: Node, connection: psycopg.AsyncConnection
) -> None:
    for form, (sync, twin) in READS.items():
        assert await twin(connection) == sync(node.connection), form
        for elsewhere, error in (("nowhere", SchemaError), ("No Name", InvalidName)):
            with pytest.raises(error):
                await twin(connection, schema=elsewhere)


async def test_revision_of_a_node_is_the_same_on_an_async_connection(connection: psycopg.AsyncConnection) -> None:
    assert await schema.current_revision_async(connection) == schema.HEAD
    assert await schema.current_revision_async(connection, schema="nowhere") is None


async def test_a_message_is_traced_on_an_async_connection(node: Node, connection: psycopg.AsyncConnection) -> None:
    node.inbox("shop", "paid")
    node.inbox("mail", "reserved")
    paid = node.send("paid", key="k")
    node.deliver_all()
    with node.connection.transaction():
        reserved = Outbox().send(node.connection, "reserved", headers={"causation": str(paid)}, value=1)
    assert [place.inbox for place in await trace.trace_async(connection, paid)] == ["shop"]
    assert [place.id for place in await trace.causes_async(connection, reserved)] == [paid]
    assert [place.id for place in await trace.effects_async(connection, paid)] == [reserved]
    assert await trace.effects_async(connection, reserved, limit=1) == []
