"""Workers: a batch is one transaction, a failure holds its own key, and nothing is missed on the way to sleep."""

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from dispatcher import Dispatcher
from inbox import AsyncWorker, Message, Worker
from inbox import worker as workers
from inbox.inbox import Inbox
from inbox.sleeping import InboxBell
from mailroom import locks
from mailroom.errors import ConfigurationError, ConnectionFailed, DecodeError, UnknownInbox
from tests.databases import Connect
from tests.node import Node, send
from tests.waiting import eventually, eventually_async, wait_until_blocked

NEVER_S = 3_600.0  # a poll that no test lives to see
STOP_S = 10.0
WITHIN_S = 20.0

Handler = Callable[[Message, Any], None]


@pytest.fixture
def node(dsn: str, connect: Connect) -> Node:
    node = Node(dsn, connect(autocommit=True))
    node.inbox("shipping", backoff_s=0)
    node.connection.execute(
        "CREATE TABLE ledger (nth bigserial, key text, clock bigint, xact xid8 DEFAULT pg_current_xact_id())"
    )
    return node


INSERT = "INSERT INTO ledger (key, clock) VALUES ({}, {})"


def note(message: Message, connection: Any) -> None:
    """Handle a message: note it in the batch's transaction, whatever kind of connection that has."""
    if isinstance(connection, psycopg.Connection):
        connection.execute(INSERT.format("%s", "%s"), [message.key, message.clock])
    else:
        connection.execute(text(INSERT.format(":key", ":clock")), {"key": message.key, "clock": message.clock})


async def note_async(message: Message, connection: Any) -> None:
    if isinstance(connection, psycopg.AsyncConnection):
        await connection.execute(INSERT.format("%s", "%s"), [message.key, message.clock])
    else:
        await connection.execute(text(INSERT.format(":key", ":clock")), {"key": message.key, "clock": message.clock})


def noted(node: Node) -> list[str]:
    return [key for (key,) in node.rows("SELECT key FROM ledger ORDER BY nth")]


def deliver(node: Node, *keys: str) -> None:
    """Send messages to `shipping` and deliver them."""
    for key in keys:
        node.send("shipping", key=key)
    node.drain()


def trouble(node: Node) -> list[tuple[Any, ...]]:
    return node.rows("SELECT key, attempts FROM mailroom.key_state ORDER BY key")


def is_asleep(node: Node) -> bool:
    """Tell whether a worker sleeps and listens."""
    return bool(
        node.value(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted "
            "AND classid = %s AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            locks.ASLEEP,
        )
    )


@contextlib.contextmanager
def working(worker: Worker) -> Iterator[threading.Thread]:
    """Run the worker in a thread; afterwards stop it, and raise what it raised."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            worker.run()
        except BaseException as error:
            errors.append(error)
            logging.getLogger("mailroom.worker").exception("the worker ended")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(STOP_S)
        alive = thread.is_alive()
    if errors:
        raise errors[0]
    assert not alive


@contextlib.asynccontextmanager
async def working_async(worker: AsyncWorker) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await asyncio.wait_for(task, STOP_S)


# -- Where its transactions come from ---------------------------------------------------------------------------------


@pytest.fixture(params=["dsn", "pool", "engine", "sessionmaker"])
def source(request: pytest.FixtureRequest, dsn: str) -> Iterator[Any]:
    with contextlib.ExitStack() as closing:
        if request.param == "dsn":
            yield dsn
        elif request.param == "pool":
            yield closing.enter_context(ConnectionPool(dsn, min_size=1, max_size=2, open=True))
        else:
            engine = create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
            closing.callback(engine.dispose)
            yield engine if request.param == "engine" else sessionmaker(engine)


@pytest.fixture(params=["dsn", "pool", "engine", "sessionmaker", "asyncpg"])
async def async_source(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as closing:
        if request.param == "dsn":
            yield dsn
        elif request.param == "pool":
            yield await closing.enter_async_context(AsyncConnectionPool(dsn, min_size=1, max_size=2, open=False))
        else:
            driver = "asyncpg" if request.param == "asyncpg" else "psycopg"
            engine = create_async_engine(dsn.replace("postgresql:", f"postgresql+{driver}:"), poolclass=NullPool)
            closing.push_async_callback(engine.dispose)
            yield async_sessionmaker(engine) if request.param == "sessionmaker" else engine


def test_batch_and_what_the_handler_does_are_one_transaction(node: Node, source: Any) -> None:
    deliver(node, "a", "b", "a")
    with working(Worker(source, "shipping", note, poll_interval_s=NEVER_S)):
        eventually(lambda: len(noted(node)) == 3)
        assert node.value("SELECT count(DISTINCT xact) FROM ledger") == 1
        assert node.delivered() == []
        assert node.rows("SELECT clock FROM ledger ORDER BY nth") == node.rows("SELECT clock FROM ledger ORDER BY 1")


async def test_async_batch_and_what_the_handler_does_are_one_transaction(node: Node, async_source: Any) -> None:
    deliver(node, "a", "b", "a")
    async with working_async(AsyncWorker(async_source, "shipping", note_async, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: len(noted(node)) == 3)
        assert node.value("SELECT count(DISTINCT xact) FROM ledger") == 1
        assert node.delivered() == []


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
        Worker(engine, "shipping", note).run()  # type: ignore[arg-type]


def test_pool_that_makes_its_connection_string_at_run_time_needs_a_listen_dsn(node: Node) -> None:
    deliver(node, "a")
    with ConnectionPool(lambda: node.dsn, min_size=1, open=True) as pool:
        with pytest.raises(ConfigurationError, match="listen_dsn"):
            Worker(pool, "shipping", note).run()
        with working(Worker(pool, "shipping", note, listen_dsn=node.dsn)):
            eventually(lambda: noted(node) == ["a"])


def test_source_that_is_none_is_refused(node: Node) -> None:
    with pytest.raises(ConfigurationError, match="int"):
        Worker(5, "shipping", note).run()  # type: ignore[arg-type]


async def test_async_source_that_is_none_is_refused(node: Node) -> None:
    with pytest.raises(ConfigurationError, match="AsyncEngine"):
        await AsyncWorker(5, "shipping", note_async).run()  # type: ignore[arg-type]


def test_inbox_that_is_not_there_is_said_at_once(node: Node) -> None:
    with pytest.raises(UnknownInbox, match="mailroom inbox create"):
        Worker(node.dsn, "nowhere", note).run()


def test_first_connection_that_fails_says_why_and_no_password(node: Node) -> None:
    with pytest.raises(ConnectionFailed) as caught:
        Worker("postgresql://nobody:s3cret@127.0.0.1:1/none", "shipping", note).run()
    assert "s3cret" not in str(caught.value)


def test_async_handler_is_refused_by_the_sync_worker(node: Node) -> None:
    with pytest.raises(ConfigurationError, match="AsyncWorker"):
        Worker(node.dsn, "shipping", note_async)


@pytest.mark.parametrize("bad", [{"parallel": 0}, {"batch": 0}, {"batch": True}, {"poll_interval_s": 0}])
def test_setting_out_of_its_range_is_refused(node: Node, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        Worker(node.dsn, "shipping", note, **bad)


# -- Failures ---------------------------------------------------------------------------------------------------------


def test_exception_rolls_the_whole_batch_back_and_counts_one_attempt(node: Node, source: Any) -> None:
    deliver(node, "a", "bad", "b")
    seen: list[list[tuple[Any, ...]]] = []

    def handle(message: Message, connection: Any) -> None:
        note(message, connection)
        if message.key == "bad":
            seen.append(trouble(node))
            if len(seen) < 3:
                raise ValueError("no such state")

    with working(Worker(source, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: len(noted(node)) == 3, WITHIN_S)
    assert seen == [[], [("bad", 1)], [("bad", 2)]]
    assert sorted(noted(node)) == ["a", "b", "bad"]
    assert trouble(node) == []
    assert node.delivered() == []


async def test_async_exception_counts_one_attempt(node: Node, async_source: Any) -> None:
    deliver(node, "a", "bad", "b")
    seen: list[list[tuple[Any, ...]]] = []

    async def handle(message: Message, connection: Any) -> None:
        await note_async(message, connection)
        if message.key == "bad":
            seen.append(trouble(node))
            if len(seen) < 3:
                raise ValueError("no such state")

    async with working_async(AsyncWorker(async_source, "shipping", handle, poll_interval_s=0.01)):
        await eventually_async(lambda: len(noted(node)) == 3, WITHIN_S)
    assert seen == [[], [("bad", 1)], [("bad", 2)]]
    assert trouble(node) == []


def test_key_that_failed_waits_with_all_its_messages_while_others_go_on(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise ValueError("secret")
        note(message, connection)

    deliver(node, "bad", "a", "bad")
    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: noted(node) == ["a"])
        deliver(node, "b", "bad")
        eventually(lambda: noted(node) == ["a", "b"])
    assert [key for _, key, _ in node.delivered()] == ["bad"] * 3
    [(attempts, waits, error)] = node.rows(
        "SELECT attempts, retry_at > now() + interval '1000 s', last_error FROM mailroom.key_state"
    )
    assert (attempts, waits, error) == (1, True, "ValueError: secret")


def test_log_of_a_failure_names_the_message_and_not_what_it_holds(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.inbox("shipping", backoff_s=3_600)
    message_id = node.send("shipping", "secret", key="k")
    node.drain()

    def handle(message: Message, connection: Any) -> None:
        raise ValueError(message.value)

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: trouble(node))
    eventually(lambda: str(message_id) in caplog.text)
    assert "secret" not in caplog.text


def test_value_that_cannot_be_decoded_fails_only_its_own_message(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)
    node.connection.execute("INSERT INTO mailroom.outbox (topic, key, value) VALUES ('shipping', 'bad', '\\xff')")
    deliver(node, "a", "b")
    values: list[object] = []

    def handle(message: Message, connection: Any) -> None:
        values.append(message.value)
        note(message, connection)

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: sorted(noted(node)) == ["a", "b"])
    assert trouble(node) == [("bad", 1)]
    assert node.value("SELECT last_error FROM mailroom.key_state").startswith(DecodeError.__name__)


def test_lost_connection_is_no_attempt_and_the_batch_comes_again(node: Node, source: Any) -> None:
    deliver(node, "a", "b")
    lost = 0
    seen: list[list[tuple[Any, ...]]] = []

    def handle(message: Message, connection: Any) -> None:
        nonlocal lost
        seen.append(trouble(node))
        if lost < 2 and message.key == "b":
            lost += 1
            node.rows(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND state ~ 'in transaction'"
            )
        note(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: sorted(noted(node)) == ["a", "b"], WITHIN_S)
    assert lost == 2
    assert seen == [[]] * len(seen)


def test_connection_of_the_handler_s_own_that_is_lost_is_an_attempt(node: Node, source: Any) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise psycopg.OperationalError("another database is away")
        note(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: noted(node) == ["a"], WITHIN_S)
    assert trouble(node) == [("bad", 1)]


def test_worker_goes_on_when_an_attempt_could_not_be_recorded(
    node: Node, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(node, "a")
    failures = iter(range(2))
    lost = psycopg.OperationalError("the connection is lost")
    if not isinstance(source, str | ConnectionPool):
        lost = sqlalchemy.exc.OperationalError("SELECT", {}, lost, connection_invalidated=True)  # type: ignore[assignment]

    async def record(self: Any, message: Message, error: Exception) -> int:
        raise lost

    def handle(message: Message, connection: Any) -> None:
        if next(failures, None) is not None:
            raise ValueError
        note(message, connection)

    monkeypatch.setattr(Worker, "_record", record)
    with working(Worker(source, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: noted(node) == ["a"], WITHIN_S)


def test_commit_that_fails_is_found_by_going_one_by_one(node: Node) -> None:
    node.connection.execute("CREATE TABLE once (key text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    node.connection.execute("INSERT INTO once VALUES ('bad')")
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "a", "bad", "b")

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO once VALUES (%s)", [message.key])
        note(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: sorted(noted(node)) == ["a", "b"], WITHIN_S)
        eventually(lambda: trouble(node) == [("bad", 1)], WITHIN_S)


# -- Several at once --------------------------------------------------------------------------------------------------


def test_lanes_work_at_once_and_never_two_of_them_on_one_key(node: Node) -> None:
    with node.connection.transaction():
        for nth in range(60):
            send(node.connection, "shipping", nth, key=f"k{nth % 5}")
    node.drain()
    at_once = threading.Barrier(2)
    met = threading.Event()
    working_on: dict[str, str] = {}
    doubled: list[str] = []

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        note(message, connection)
        [(transaction,)] = connection.execute("SELECT pg_current_xact_id()::text").fetchall()
        before = working_on.get(message.key, transaction)
        if before != transaction and is_open(before):
            doubled.append(message.key)
        working_on[message.key] = transaction
        if not met.is_set():
            with contextlib.suppress(threading.BrokenBarrierError):
                at_once.wait(10)
                met.set()

    lock = threading.Lock()

    def is_open(transaction: str) -> bool:
        with lock:
            return bool(node.value("SELECT pg_xact_status(%s::xid8) = 'in progress'", transaction))

    with working(Worker(node.dsn, "shipping", handle, parallel=4, batch=6, poll_interval_s=0.05)):
        eventually(lambda: node.delivered() == [], WITHIN_S)
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
                both.wait(10)  # both have a batch
            handled[name].append(message.key)

        return handle

    deliver(node, *(f"k{nth}" for nth in range(8)))
    first = Worker(node.dsn, "shipping", handler("first"), batch=4)
    second = Worker(node.dsn, "shipping", handler("second"), batch=4)
    with working(first), working(second):
        eventually(lambda: node.delivered() == [], WITHIN_S)
    assert sorted(handled["first"] + handled["second"]) == [f"k{nth}" for nth in range(8)]


# -- Delivering by itself ---------------------------------------------------------------------------------------------


def test_worker_that_dispatches_needs_no_daemon(node: Node) -> None:
    with working(Worker(node.dsn, "shipping", note, poll_interval_s=0.1, dispatch=True)):
        node.send("shipping", key="k")
        eventually(lambda: noted(node) == ["k"], WITHIN_S)


async def test_worker_that_dispatches_stands_by_while_another_leads(node: Node) -> None:
    daemon = Dispatcher(node.dsn, poll_interval_s=0.1)
    task = asyncio.create_task(daemon.run())
    await eventually_async(lambda: node.rows("SELECT FROM mailroom.lease"))
    holder = node.value("SELECT holder FROM mailroom.lease")
    async with working_async(AsyncWorker(node.dsn, "shipping", note_async, poll_interval_s=0.1, dispatch=True)):
        for key in "abc":
            node.send("shipping", key=key)
        await eventually_async(lambda: noted(node) == ["a", "b", "c"], WITHIN_S)
        assert daemon.totals.taken == 3
        assert node.value("SELECT holder FROM mailroom.lease") == holder
    daemon.stop()
    await asyncio.wait_for(task, STOP_S)


# -- Ending -----------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from inbox import Worker

def handle(message, connection):
    connection.execute("INSERT INTO ledger (key, clock) VALUES (%s, %s)", [message.key, message.clock])
    connection.execute("SELECT pg_advisory_xact_lock(1)")

Worker(sys.argv[1], "shipping", handle).run()
"""


def test_sigterm_finishes_the_batch(node: Node, connect: Connect) -> None:
    deliver(node, "a", "b")
    gate = connect(autocommit=True)
    gate.execute("SELECT pg_advisory_lock(1)")
    with subprocess.Popen([sys.executable, "-c", PROGRAM, node.dsn]) as process:
        try:
            waits = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 1"
            [(pid,)] = eventually(lambda: node.rows(waits), WITHIN_S)
            assert wait_until_blocked(node.connection, pid) == [gate.info.backend_pid]
            process.send_signal(signal.SIGTERM)
            assert noted(node) == []
            gate.execute("SELECT pg_advisory_unlock(1)")
            assert process.wait(STOP_S) == 0
        finally:
            process.kill()
    assert noted(node) == ["a", "b"]
    assert node.delivered() == []


def test_stop_before_run_and_twice_is_harmless(node: Node) -> None:
    worker = Worker(node.dsn, "shipping", note)
    worker.stop()
    worker.run()
    worker.stop()


def test_error_that_no_retry_mends_ends_the_worker(node: Node) -> None:
    worker = Worker(node.dsn, "shipping", note, poll_interval_s=0.01)
    with contextlib.ExitStack() as running:
        thread = running.enter_context(working(worker))
        eventually(lambda: is_asleep(node))
        node.connection.execute("ALTER TABLE mailroom.key_state RENAME TO away")
        thread.join(WITHIN_S)
        with pytest.raises(psycopg.errors.UndefinedTable):
            running.close()


async def test_cancelled_async_worker_leaves_no_task_and_gives_its_batch_back(node: Node) -> None:
    deliver(node, "a")
    handling = asyncio.Event()

    async def handle(message: Message, connection: Any) -> None:
        handling.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(AsyncWorker(node.dsn, "shipping", handle).run())
    await asyncio.wait_for(handling.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with node.connection.transaction():
        assert [message.key for message in Inbox("shipping").reap_any(node.connection)] == ["a"]


# -- Sleeping ---------------------------------------------------------------------------------------------------------


class Watched(AsyncWorker):
    """A worker that says where it is: before and after each scan, and when it waits for the bell."""

    def __init__(self, node: Node, act: Callable[[str], None], listens: asyncio.Event) -> None:
        super().__init__(node.dsn, "shipping", note_async, poll_interval_s=NEVER_S)
        self._act = act
        self._listens = listens

    async def _work(self, attempt: Any, size: int) -> int:
        await self._listens.wait()  # it rings when it begins to listen, which would wake a worker by luck
        self._act("before scan")
        taken = await super()._work(attempt, size)
        self._act("after scan")
        return taken


POINTS = ["before scan", "after scan", "before scan", "after scan", "waits"]


@pytest.mark.parametrize("delivered_at", range(len(POINTS)), ids=[f"{nth} {name}" for nth, name in enumerate(POINTS)])
async def test_delivery_is_found_without_the_poll_wherever_the_worker_is(
    node: Node, monkeypatch: pytest.MonkeyPatch, delivered_at: int
) -> None:
    """The poll never comes: either the scan after lying down sees the delivery, or the bell rings for it."""
    passed: list[str] = []

    def act(point: str) -> None:
        passed.append(point)
        if len(passed) == delivered_at + 1:
            node.send("shipping", key="k")
            assert node.deliver().taken == 1

    async def heard(ring: asyncio.Event, timeout_s: float) -> bool:
        act("waits")
        await ring.wait()
        return True

    async def attend(bell: InboxBell, connection: psycopg.AsyncConnection) -> None:
        listens.set()
        await attend_as_ever(bell, connection)

    listens, attend_as_ever = asyncio.Event(), InboxBell.attend
    monkeypatch.setattr(InboxBell, "attend", attend)
    monkeypatch.setattr(workers, "heard", heard)
    node.allow_clocks()
    async with working_async(Watched(node, act, listens)):
        await eventually_async(lambda: noted(node) == ["k"])
        assert passed[: delivered_at + 1] == POINTS[: delivered_at + 1]


async def test_delivery_that_saw_nobody_asleep_is_waited_for_before_the_last_scan(node: Node, connect: Connect) -> None:
    """An open delivery holds the lock that tells it whether to ring: a worker about to sleep stands in line for it."""
    node.allow_clocks()
    delivering = Node(node.dsn, connect(autocommit=True))
    node.send("shipping", key="k")
    async with contextlib.AsyncExitStack() as running:
        with delivering.connection.transaction():
            delivery = delivering.deliver()
            assert (delivery.taken, delivery.woken) == (1, 0)
            worker = AsyncWorker(node.dsn, "shipping", note_async, poll_interval_s=NEVER_S)
            await running.enter_async_context(working_async(worker))
            waits = (
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            await eventually_async(lambda: node.rows(waits))
        await eventually_async(lambda: noted(node) == ["k"])


def test_delivery_rings_only_for_an_inbox_whose_worker_sleeps(node: Node) -> None:
    node.inbox("billing")
    node.allow_clocks()
    node.send("shipping")
    assert node.deliver().woken == 0
    with working(Worker(node.dsn, "shipping", note, poll_interval_s=NEVER_S)):
        eventually(lambda: len(noted(node)) == 1)
        eventually(lambda: is_asleep(node))
        node.send("billing")
        assert node.deliver().woken == 0
        node.send("shipping")
        assert node.deliver().woken == 1
        eventually(lambda: len(noted(node)) == 2)
