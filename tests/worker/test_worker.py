"""Workers: a batch is one transaction, several run at once, and SIGTERM lets them finish their batches."""

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
import subprocess
import sys
import threading
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from dispatcher import Dispatcher
from dispatcher.lanes import lease
from inbox import AsyncWorker, Message, Worker
from inbox.inbox import Inbox
from inbox.sessions.transactions import async_transactions
from inbox.sessions.wakeup import InboxListener
from inbox.worker import tasks
from inbox.worker import worker as workers
from mailroom.errors import ConfigurationError, UnknownInbox
from tests.support.databases import Connect
from tests.support.node import Node, send
from tests.support.waiting import WITHIN_S, eventually, eventually_async, wait_until_blocked
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    Handler,
    deliver,
    failing_keys,
    is_asleep,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = [pytest.mark.sample(1), *SHIPPING_WITH_LEDGER]

# -- Where its transactions come from ---------------------------------------------------------------------------------


def test_batch_and_what_the_handler_does_are_one_transaction(node: Node, source: Any) -> None:
    deliver(node, "a", "b", "a")
    with working(Worker(source, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        eventually(lambda: len(ledger_keys(node)) == 3)
        assert node.value("SELECT count(DISTINCT xact) FROM ledger") == 1
        assert node.delivered() == []
        assert node.rows("SELECT clock FROM ledger ORDER BY nth") == node.rows("SELECT clock FROM ledger ORDER BY 1")


def test_a_value_is_let_go_of_once_its_handler_has_returned(node: Node) -> None:
    kept: list[tuple[Message, Any]] = []
    for key in "ab":
        node.send("shipping", {"of": key}, key=key)
    node.deliver_all()
    with working(Worker(node.dsn, "shipping", lambda message, _: kept.append((message, message.value)))):
        eventually(lambda: node.delivered() == [])
    assert [message.value for message, _ in kept] == [value for _, value in kept]
    assert [message._value is value for message, value in kept] == [False, False]


async def test_async_batch_and_what_the_handler_does_are_one_transaction(node: Node, async_source: Any) -> None:
    deliver(node, "a", "b", "a")
    async with working_async(AsyncWorker(async_source, "shipping", write_ledger_async, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: len(ledger_keys(node)) == 3)
        assert node.value("SELECT count(DISTINCT xact) FROM ledger") == 1
        assert node.delivered() == []


@pytest.mark.sample(4)
def test_handler_gets_a_connection_of_its_source_s_kind(node: Node, source: Any) -> None:
    kinds: list[Any] = []
    expected = {
        str: psycopg.Connection,
        ConnectionPool: psycopg.Connection,
        sqlalchemy.Engine: sqlalchemy.Connection,
        sessionmaker: Session,
    }
    deliver(node, "a")
    with working(Worker(source, "shipping", lambda _, connection: kinds.append(connection))):
        eventually(lambda: kinds)
    [kind] = [given for of, given in expected.items() if isinstance(source, of)]
    assert isinstance(kinds[0], kind)


def test_async_engine_is_no_source_of_the_sync_worker(node: Node) -> None:
    engine: AsyncEngine = create_async_engine(node.dsn.replace("postgresql:", "postgresql+psycopg:"))
    with pytest.raises(ConfigurationError, match="AsyncEngine"):
        Worker(engine, "shipping", write_ledger).run()  # type: ignore[arg-type]


def test_unknown_inbox_is_an_error_at_once(node: Node) -> None:
    with pytest.raises(UnknownInbox, match="mailroom inbox create"):
        Worker(node.dsn, "nowhere", write_ledger).run()


# -- Several at once --------------------------------------------------------------------------------------------------


def test_loops_work_at_once_and_never_two_of_them_on_one_key(node: Node) -> None:
    with node.connection.transaction():
        for nth in range(60):
            send(node.connection, "shipping", nth, key=f"k{nth % 5}")
    node.deliver_all()
    at_once = threading.Barrier(2)
    met = threading.Event()
    working_on: dict[str, str] = {}
    doubled: list[str] = []

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        write_ledger(message, connection)
        [(transaction,)] = connection.execute("SELECT pg_current_xact_id()::text").fetchall()
        before = working_on.get(message.key, transaction)
        if before != transaction and is_open(before):
            doubled.append(message.key)
        working_on[message.key] = transaction
        if not met.is_set():
            with contextlib.suppress(threading.BrokenBarrierError):
                at_once.wait(WITHIN_S)
                met.set()

    lock = threading.Lock()

    def is_open(transaction: str) -> bool:
        with lock:
            return bool(node.value("SELECT pg_xact_status(%s::xid8) = 'in progress'", transaction))

    with working(Worker(node.dsn, "shipping", handle, parallel=4, batch=6, poll_interval_s=0.05)):
        eventually(lambda: node.delivered() == [])
    assert met.is_set()
    assert doubled == []
    for nth in range(5):
        clocks = [clock for (clock,) in node.rows("SELECT clock FROM ledger WHERE key = %s ORDER BY nth", f"k{nth}")]
        assert clocks == sorted(clocks)
        assert len(set(clocks)) == 12


def test_two_workers_share_an_inbox(node: Node) -> None:
    handled: dict[str, list[str]] = {"first": [], "second": []}
    both = threading.Barrier(2)

    def handler(name: str) -> Handler:
        def handle(message: Message, connection: Any) -> None:
            if not handled[name]:
                both.wait(WITHIN_S)  # both have a batch
            handled[name].append(message.key)

        return handle

    deliver(node, *(f"k{nth}" for nth in range(8)))
    first = Worker(node.dsn, "shipping", handler("first"), batch=4)
    second = Worker(node.dsn, "shipping", handler("second"), batch=4)
    with working(first), working(second):
        eventually(lambda: node.delivered() == [])
    assert sorted(handled["first"] + handled["second"]) == [f"k{nth}" for nth in range(8)]


# -- Delivering by itself ---------------------------------------------------------------------------------------------


def test_worker_that_dispatches_needs_no_daemon(node: Node) -> None:
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.1, dispatch=True)):
        node.send("shipping", key="k")
        eventually(lambda: ledger_keys(node) == ["k"])


async def test_worker_that_dispatches_stands_by_while_another_leads(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", WITHIN_S)
    daemon = Dispatcher(node.dsn, poll_interval_s=0.1)
    task = asyncio.create_task(daemon.run())
    await eventually_async(lambda: node.rows("SELECT FROM mailroom.lease WHERE role = 'dispatcher'"))
    holder = node.value("SELECT holder FROM mailroom.lease WHERE role = 'dispatcher'")
    async with working_async(AsyncWorker(node.dsn, "shipping", write_ledger_async, poll_interval_s=0.1, dispatch=True)):
        for key in "abc":
            node.send("shipping", key=key)
        await eventually_async(lambda: ledger_keys(node) == ["a", "b", "c"])
        assert daemon.totals.taken == 3
        assert node.value("SELECT holder FROM mailroom.lease WHERE role = 'dispatcher'") == holder
    daemon.stop()
    await asyncio.wait_for(task, WITHIN_S)


# -- Ending -----------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from inbox import Worker

def handle(message, connection):
    connection.execute("INSERT INTO ledger (key, clock) VALUES (%s, %s)", [message.key, message.clock])
    connection.execute("SELECT pg_advisory_xact_lock(1)")

Worker(sys.argv[1], "shipping", handle, batch_s=None).run()
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_sigterm_finishes_the_batch(node: Node, connect: Connect) -> None:
    deliver(node, "a", "b")
    gate = connect(autocommit=True)
    gate.execute("SELECT pg_advisory_lock(1)")
    with subprocess.Popen([sys.executable, "-c", PROGRAM, node.dsn]) as process:
        try:
            waits = (
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 1 "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            [(pid,)] = eventually(lambda: node.rows(waits))
            assert wait_until_blocked(node.connection, pid) == [gate.info.backend_pid]
            process.send_signal(signal.SIGTERM)
            assert ledger_keys(node) == []
            gate.execute("SELECT pg_advisory_unlock(1)")
            assert process.wait(WITHIN_S) == 0
        finally:
            process.kill()
    assert ledger_keys(node) == ["a", "b"]
    assert node.delivered() == []


def test_stop_before_run_and_twice_is_harmless(node: Node) -> None:
    worker = Worker(node.dsn, "shipping", write_ledger)
    worker.stop()
    worker.run()
    worker.stop()


def test_error_that_no_retry_can_fix_ends_the_worker(node: Node) -> None:
    worker = Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.01)
    with contextlib.ExitStack() as running:
        thread = running.enter_context(working(worker))
        eventually(lambda: is_asleep(node))
        node.connection.execute("ALTER VIEW mailroom.my_key_state RENAME TO away")
        thread.join(WITHIN_S)
        with pytest.raises(psycopg.errors.UndefinedTable):
            running.close()


async def test_worker_ends_though_a_cancellation_is_swallowed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.11's wait_for does when it coincides with its result."""
    swallowed: list[object] = []

    async def run(listener: InboxListener) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed.append(listener)
                if len(swallowed) > 1:
                    raise

    monkeypatch.setattr(InboxListener, "run", run)
    monkeypatch.setattr(tasks, "CANCELLED_S", 0.01)
    async with working_async(AsyncWorker(node.dsn, "shipping", write_ledger_async, poll_interval_s=0.01)):
        await eventually_async(lambda: node.sessions("mailroom worker shipping"))
    assert len(swallowed) == 2


class Held:
    """A handler that is busy until released, and then logs its message."""

    def __init__(self) -> None:
        self.busy, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, message: Message, connection: Any) -> None:
        self.busy.set()
        await self.go_on.wait()
        await write_ledger_async(message, connection)


async def test_cancelled_async_worker_finishes_its_batch_and_is_cancelled(node: Node) -> None:
    deliver(node, "a", "b")
    handle = Held()
    worker = AsyncWorker(node.dsn, "shipping", handle)
    task = asyncio.create_task(worker.run())
    await asyncio.wait_for(handle.busy.wait(), WITHIN_S)
    task.cancel()
    await asyncio.wait_for(worker._stopping.wait(), WITHIN_S)
    handle.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WITHIN_S)
    assert ledger_keys(node) == ["a", "b"]
    assert node.rows("SELECT FROM mailroom.worker") == node.delivered() == []


async def test_async_worker_cancelled_again_leaves_no_task_and_gives_its_batch_back(node: Node) -> None:
    deliver(node, "a")
    handle = Held()
    worker = AsyncWorker(node.dsn, "shipping", handle)
    task = asyncio.create_task(worker.run())
    await asyncio.wait_for(handle.busy.wait(), WITHIN_S)
    task.cancel()
    await asyncio.wait_for(worker._stopping.wait(), WITHIN_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WITHIN_S)
    with node.connection.transaction():
        assert [message.key for message in Inbox("shipping").reap_any(node.connection)] == ["a"]
    # No other worker takes it over.
    assert node.rows("SELECT FROM mailroom.worker") == []


async def test_cancellation_that_a_pool_swallows_ends_the_worker_all_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.11's wait_for does when it coincides with its result, for example a connection."""
    opening = asyncio.Event()

    async def swallowing(*arguments: Any) -> Any:
        opening.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await async_transactions(*arguments)

    monkeypatch.setattr(workers, "async_transactions", swallowing)
    deliver(node, "a")
    task = asyncio.create_task(AsyncWorker(node.dsn, "shipping", write_ledger_async).run())
    await opening.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WITHIN_S)
    assert ledger_keys(node) == []


async def test_async_worker_that_is_cancelled_while_it_connects_leaves_no_pool_open(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_pool = [], AsyncConnectionPool.open

    async def opening(pool: AsyncConnectionPool[Any], *arguments: Any) -> None:
        await open_pool(pool, *arguments)
        opened.append(pool)
        if len(opened) == 2:
            await asyncio.Event().wait()

    monkeypatch.setattr(AsyncConnectionPool, "open", opening)
    task = asyncio.create_task(AsyncWorker(node.dsn, "shipping", write_ledger_async).run())
    await eventually_async(lambda: len(opened) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WITHIN_S)
    closed = [pool.closed for pool in opened]
    for pool in opened:
        await pool.close()
    assert closed == [True, True]


def test_stopped_worker_does_not_wait_for_its_poll_though_nothing_notifies(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It polls because it has no connection to listen on."""
    waits, asleep = threading.Event(), InboxListener.asleep

    async def without_a_connection(_: InboxListener) -> None:
        await asyncio.Event().wait()

    async def falling_asleep(listener: InboxListener, lane: object, timeout_s: float) -> bool:
        asyncio.get_running_loop().call_soon(waits.set)
        return await asleep(listener, lane, timeout_s)

    monkeypatch.setattr(InboxListener, "run", without_a_connection)
    monkeypatch.setattr(InboxListener, "asleep", falling_asleep)
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        assert waits.wait(WITHIN_S)


def test_worker_logs_what_it_reaps(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mailroom.worker")
    with working(Worker(node.dsn, "shipping", write_ledger, parallel=2, batch=7)):
        eventually(lambda: "running in schema" in caplog.text)
    [line] = [record.getMessage() for record in caplog.records if "running in schema" in record.getMessage()]
    known = node.connection.info
    place = f"{known.host}:{known.port}/{known.dbname}"
    assert line == f"shipping: running in schema mailroom of {place}: 2 at once, batches of up to 7"


# -- What handlers raise that means something to the machinery around them --------------------------------------------

MEANT = [StopIteration, StopAsyncIteration, concurrent.futures.CancelledError, psycopg.Rollback]


FAILED = [(str(nth), 1) for nth in range(len(MEANT))]


def test_exception_with_another_meaning_elsewhere_is_a_failed_attempt(node: Node, source: Any) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, *(key for key, _ in FAILED), "a")

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        if message.key != "a":
            raise MEANT[int(message.key)]

    with working(Worker(source, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["a"] and failing_keys(node) == FAILED)


async def test_exception_of_an_async_handler_with_another_meaning_elsewhere_is_a_failed_attempt(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, *(key for key, _ in FAILED), "a")

    async def handle(message: Message, connection: Any) -> None:
        await write_ledger_async(message, connection)
        if message.key != "a":
            raise MEANT[int(message.key)]

    async with working_async(AsyncWorker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: ledger_keys(node) == ["a"] and failing_keys(node) == FAILED)
