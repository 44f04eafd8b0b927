"""Handlers of a whole batch: one call, one transaction; what fails is found by lists of one."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest

from inbox import AsyncBatchHandler, AsyncWorker, BatchHandler, Message, Park, Worker
from inbox.handling.arguments import NotAwaited
from inbox.sessions.hold import ABORTED
from mailroom import carrying, testing
from mailroom.errors import ConfigurationError
from outbox import Outbox
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import eventually, eventually_async
from tests.support.working import (
    SHIPPING_WITH_LEDGER,
    deliver,
    failing_keys,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = SHIPPING_WITH_LEDGER

DSN = "postgresql://me@127.0.0.1/shop"
KEYS = [f"k{nth}" for nth in range(10)]


class Calls:
    """Writes each list to the ledger, and what it was called with; `fails` raises for a message."""

    def __init__(self, fails: Callable[[Message], Exception | None] = lambda _: None) -> None:
        self.keys: list[list[str]] = []
        self._fails = fails

    def __call__(self, messages: list[Message], connection: Any) -> None:
        self.keys.append([message.key for message in messages])
        for message in messages:
            write_ledger(message, connection)
        for message in messages:
            if error := self._fails(message):
                raise error


def is_empty(node: Node) -> bool:
    return node.value("SELECT count(*) FROM mailroom.inbox_shipping") == 0  # type: ignore[no-any-return]


def test_a_batch_is_one_call_in_clock_order_and_one_transaction(node: Node) -> None:
    node.inbox("shipping")
    deliver(node, *KEYS, *KEYS[:3])
    clocks = []

    def handle(messages: list[Message], connection: Any) -> None:
        clocks.append([message.clock for message in messages])
        Calls()(messages, connection)

    with working(Worker(node.dsn, "shipping", BatchHandler(handle), batch=8)):
        eventually(lambda: is_empty(node))
    assert [len(each) for each in clocks] == [8, 5]
    assert all(each == sorted(each) for each in clocks)
    assert sorted(ledger_keys(node)) == sorted([*KEYS, *KEYS[:3]])
    assert node.value("SELECT count(DISTINCT xact) FROM ledger") == 2


async def test_async_batch_is_one_call(node: Node) -> None:
    node.inbox("shipping")
    deliver(node, *KEYS)
    sizes = []

    @AsyncBatchHandler
    async def handle(messages: list[Message], connection: Any) -> None:
        sizes.append(len(messages))
        for message in messages:
            await write_ledger_async(message, connection)

    async with working_async(AsyncWorker(node.dsn, "shipping", handle, batch=8)):
        await eventually_async(lambda: is_empty(node))
    assert (sizes, ledger_keys(node)) == ([8, 2], KEYS)


def test_failure_in_a_list_of_many_counts_nothing_and_is_found_in_lists_of_one(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=2)
    deliver(node, *KEYS)
    calls = Calls(lambda message: ValueError() if message.key == "k4" else None)
    with working(Worker(node.dsn, "shipping", BatchHandler(calls), poll_interval_s=0.02)):
        eventually(lambda: len(ledger_keys(node)) == 9 and failing_keys(node) == [("k4", 2)])
    assert sorted(ledger_keys(node)) == sorted({*KEYS} - {"k4"})
    assert calls.keys[0] == KEYS
    assert sorted(calls.keys[1:]) == sorted([[key] for key in KEYS] + [["k4"]])
    assert node.value("SELECT count(*) FROM mailroom.attempt") == 2


def test_outcome_that_it_chooses_counts_for_a_list_of_one(node: Node) -> None:
    node.inbox("shipping", backoff_s=0)
    deliver(node, *KEYS[:3])
    calls = Calls(lambda message: Park("no") if message.key == "k1" else None)
    parked = "SELECT key FROM mailroom.key_state WHERE parked_at IS NOT NULL"
    with working(Worker(node.dsn, "shipping", BatchHandler(calls), poll_interval_s=0.02)):
        eventually(lambda: len(ledger_keys(node)) == 2 and node.rows(parked) == [("k1",)])
    assert [keys for keys in calls.keys if keys == ["k1"]] == [["k1"]]


@pytest.mark.parametrize("statement", ["ROLLBACK", "COMMIT"])
def test_end_of_its_transaction_is_a_failure_and_commits_nothing(node: Node, statement: str) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=1)
    deliver(node, *KEYS[:3])

    def handle(messages: list[Message], connection: psycopg.Connection[Any]) -> None:
        for message in messages:
            write_ledger(message, connection)
        if any(message.key == "k1" for message in messages):
            connection.execute(statement.encode())

    with working(Worker(node.dsn, "shipping", BatchHandler(handle), poll_interval_s=0.02)):
        eventually(lambda: sorted(ledger_keys(node)) == ["k0", "k2"] and failing_keys(node) == [("k1", 1)])


def test_error_that_it_swallows_is_said_in_clear_words(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=1)
    deliver(node, "a")
    said = []

    def handle(_messages: list[Message], connection: psycopg.Connection[Any]) -> None:
        with contextlib.suppress(psycopg.Error):
            connection.execute("SELECT 1 / 0")

    worker = Worker(node.dsn, "shipping", BatchHandler(handle), on_error=lambda _, error: said.append(str(error)))
    with working(worker):
        eventually(lambda: len(said) == 1)
    assert said == [ABORTED]


def test_conflict_on_a_connection_of_its_own_is_no_conflict_of_the_batch(node: Node, connect: Connect) -> None:
    """Forgiven, it would come back for ever."""
    node.inbox("shipping", backoff_s=0, max_attempts=1)
    deliver(node, *KEYS[:2])
    other = connect(autocommit=True)
    calls = []

    def handle(messages: list[Message], _connection: Any) -> None:
        calls.append(len(messages))
        if any(message.key == "k1" for message in messages):
            other.execute("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")

    with working(Worker(node.dsn, "shipping", BatchHandler(handle), poll_interval_s=0.02)):
        eventually(lambda: failing_keys(node) == [("k1", 1)] and calls.count(1) == 2)
    assert calls[0] == 2
    assert len(calls) == 3


def test_list_is_the_handler_s_own(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=1)
    deliver(node, *KEYS[:3])

    def handle(messages: list[Message], connection: Any) -> None:
        while messages:
            message = messages.pop()
            if message.key == "k1":
                raise ValueError
            write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", BatchHandler(handle), poll_interval_s=0.02)):
        eventually(lambda: sorted(ledger_keys(node)) == ["k0", "k2"] and failing_keys(node) == [("k1", 1)])


def test_what_it_sends_carries_nothing_of_a_message(node: Node) -> None:
    node.inbox("shipping")
    node.inbox("billing", "order.billed")
    with node.connection.transaction():
        for key in KEYS[:2]:
            Outbox().send(node.connection, "shipping", None, key=key, headers={"saga": key})
    node.deliver_all()

    @BatchHandler
    def handle(messages: list[Message], connection: Any) -> None:
        Outbox().send(connection, "order.billed", len(messages))
        with carrying(saga="all"):
            Outbox().send(connection, "order.billed", len(messages))

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: is_empty(node))
    assert node.rows("SELECT headers FROM mailroom.outbox ORDER BY position") == [(None,), ({"saga": "all"},)]


def test_test_kit_gives_it_lists_of_one(node: Node) -> None:
    node.inbox("shipping")
    calls = Calls(lambda message: ValueError("k1") if message.key == "k1" else None)
    with node.connection.transaction():
        for key in KEYS[:3]:
            Outbox().send(node.connection, "shipping", None, key=key, headers={"saga": key})
        worked = testing.work(node.connection, "shipping", BatchHandler(calls))
    assert [message.key for message in worked.handled] == ["k0", "k2"]
    assert [failure.message.key for failure in worked.failures] == ["k1"]
    assert calls.keys == [["k0"], ["k1"], ["k2"]]


# -- What is refused --------------------------------------------------------------------------------------------------


def whole(_messages: list[Message], _connection: Any) -> None: ...


async def whole_async(_messages: list[Message], _connection: Any) -> None: ...


def of_one(_messages: list[Message]) -> None: ...


def test_what_cannot_handle_a_batch_is_refused_when_it_is_made() -> None:
    refused: list[tuple[Callable[[Any], object], Any, str]] = [
        (BatchHandler, whole_async, "use AsyncBatchHandler"),
        (AsyncBatchHandler, whole, "use BatchHandler"),
        (BatchHandler, of_one, r"handler\(messages, connection\)"),
        (BatchHandler, None, "handler is None"),
        (AsyncBatchHandler, of_one, r"handler\(messages, connection\)"),
        (partial(Worker, DSN, "shipping"), AsyncBatchHandler(whole_async), "use AsyncWorker"),
        (partial(AsyncWorker, DSN, "shipping"), BatchHandler(whole), "use Worker"),
    ]
    for make, handler, why in refused:
        with pytest.raises(ConfigurationError, match=why):
            make(handler)


def test_awaitable_that_it_returns_ends_the_worker(node: Node) -> None:
    node.inbox("shipping")
    deliver(node, "a", "b")
    returns: Callable[[list[Message], Any], Any] = lambda messages, connection: whole_async(messages, connection)  # noqa: E731
    worker = Worker(node.dsn, "shipping", BatchHandler(returns))
    with pytest.raises(NotAwaited, match="use AsyncBatchHandler"):
        worker.run()
    assert node.value("SELECT count(*) FROM mailroom.inbox_shipping") == 2
