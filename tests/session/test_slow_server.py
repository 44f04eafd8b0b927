"""A server that is slow: what runs out of its time is not tried the same way for ever, and takes nothing else along.

No test is slow. What would take too long is refused by what takes it: a batch by its size, a lock by who holds it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import psycopg_pool
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dispatcher import Dispatcher, Executor
from dispatcher.delivery.portion import Portion
from dispatcher.lanes.lane import Lane
from dispatcher.lanes.leading import LANE
from dispatcher.lanes.lease import Lease, reading_backend
from inbox import AsyncWorker, Worker
from inbox.sessions import transactions
from inbox.sessions.alive import Processes
from inbox.sessions.unawaited import Unanswered, Unawaited
from mailroom.errors import ConnectionFailed
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.session import backoff, settings
from mailroom.session.connect_times import ConnectTimes
from mailroom.sql.operation import Execute
from mailroom.sql.runner import run
from outbox import Store
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.proxy import proxied
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    LEDGER,
    NEVER_S,
    deliver,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = pytest.mark.inbox("shipping")

MANY, FEW = 1_000, 100

# The statement that takes more than this many out of an outbox fails as one does that takes too long, or that a new
# leader cuts off because its lease ran out.
TOO_LONG = {
    "cancelled": "RAISE SQLSTATE '57014'",
    "cut off": "PERFORM pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())",
}
LIMIT = """
CREATE FUNCTION public.limited() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT pg_catalog.count(*) FROM taken) > %d THEN %s; END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER limited AFTER DELETE ON mailroom.%s REFERENCING OLD TABLE AS taken
FOR EACH STATEMENT EXECUTE FUNCTION public.limited()
"""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "pause_s", lambda failures, longest_s: 0.01)


@contextlib.asynccontextmanager
async def running(lane: Lane) -> AsyncIterator[None]:
    task = asyncio.create_task(lane.run())
    try:
        yield
    finally:
        lane.stop()
        await asyncio.wait_for(task, WITHIN_S)


def held_up(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(f"{what} was held up" in record.getMessage() for record in caplog.records)


def lanes_session(node: Node) -> int:
    """Return the backend that the leader's lane works over, as the lease tells."""
    backend = node.value("SELECT max(backend_pid) FROM mailroom.lease WHERE role = 'dispatcher'")
    return int(backend or 0)


# -- What takes too long ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut off", pytest.param("cancelled", marks=pytest.mark.nightly)])
async def test_messages_of_which_a_full_batch_takes_too_long_are_delivered(node: Node, how: str) -> None:
    with node.connection.transaction():
        for nth in range(MANY):
            node.send("shipping", key=f"k{nth:04}")
    node.connection.execute((LIMIT % (FEW, TOO_LONG[how], "outbox")).encode())
    async with running(Dispatcher(node.dsn)):
        await eventually_async(lambda: not node.waiting())
    assert [key for (key,) in node.delivered("key")] == [f"k{nth:04}" for nth in range(MANY)]
    assert node.dead() == []


@pytest.mark.slow
async def test_scheduled_messages_that_take_too_long_all_at_once_are_delivered(node: Node) -> None:
    with node.connection.transaction():
        for nth in range(MANY):
            node.send("shipping", key=f"k{nth:04}", deliver_at=datetime.now(UTC) + timedelta(days=1))
    node.deliver_all()
    node.connection.execute("UPDATE mailroom.scheduled SET deliver_at = deliver_at - interval '2 days'")
    node.connection.execute((LIMIT % (FEW, TOO_LONG["cancelled"], "scheduled")).encode())
    async with running(Dispatcher(node.dsn)):
        await eventually_async(lambda: len(node.delivered("key")) == MANY)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut off", pytest.param("cancelled", marks=pytest.mark.nightly)])
async def test_executables_of_which_a_full_batch_takes_too_long_are_executed(node: Node, how: str) -> None:
    with node.connection.transaction():
        for _ in range(MANY):
            Store().increment(node.connection, "k", 1)
    node.connection.execute((LIMIT % (FEW, TOO_LONG[how], "outbox_executable")).encode())
    async with running(Executor(node.dsn)):
        await eventually_async(lambda: not node.rows("SELECT FROM mailroom.outbox_executable LIMIT 1"))
    assert node.rows("SELECT key, number FROM mailroom.store") == [("k", MANY)]
    assert node.dead() == []


def test_portion_is_halved_down_to_one_and_grows_back_to_all() -> None:
    portion = Portion()
    tried = []
    for _ in range(30):
        with contextlib.suppress(asyncio.CancelledError), portion.tried():
            tried.append(portion.of(10))
            raise asyncio.CancelledError
    assert tried[:5] == [10, 5, 2, 1, 1]
    assert set(tried[5:]) == {1}
    for _ in range(30):
        with portion.tried():
            tried.append(portion.of(10))
    assert tried[-1] == 10


# -- What is held up --------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_lease_that_cannot_be_renewed_now_takes_no_batch_along(
    node: Node, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has its row, such as a stand-by that looks whether it may take it, on a server that is slow."""
    async with running(Dispatcher(node.dsn)):
        before = await eventually_async(lambda: lanes_session(node))
        stranger = connect()
        stranger.execute("SELECT FROM mailroom.lease WHERE role = 'dispatcher' FOR UPDATE")
        await eventually_async(lambda: held_up(caplog, "the lease") > 1)
        node.send("shipping", key="k")
        await eventually_async(lambda: node.delivered("key") == [("k",)])
        stranger.rollback()
        renewed = "SELECT until > clock_timestamp() FROM mailroom.lease WHERE role = 'dispatcher'"
        await eventually_async(lambda: node.value(renewed))
        assert lanes_session(node) == before
    assert "lost the database" not in caplog.text


@pytest.mark.slow
async def test_delivery_that_another_holds_up_is_waited_for_over_the_same_session(
    node: Node, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dispatcher, "_session", LANE | {"lock_timeout": "50ms"})
    async with running(Dispatcher(node.dsn)):
        before = await eventually_async(lambda: lanes_session(node))
        stranger = connect()
        stranger.execute(DISPATCH_LOCK.at(schema=SCHEMA).sql.encode())
        node.send("shipping", key="k")
        await eventually_async(lambda: held_up(caplog, "a batch") > 1)
        stranger.rollback()
        await eventually_async(lambda: node.delivered("key") == [("k",)])
        assert lanes_session(node) == before
    assert "lost the database" not in caplog.text


# -- What is left behind ----------------------------------------------------------------------------------------------


def test_leader_ends_its_own_session_of_before(node: Node, connect: Connect) -> None:
    """One whose client has given it up may be busy with a batch for long, and have the dispatch lock."""
    left, now, lease = connect(autocommit=True), connect(autocommit=True), Lease(SCHEMA)
    assert run(left, lease.taking(run(left, reading_backend()), "awake", {}))
    backend = run(now, reading_backend())
    for _ in range(2):  # renewed, it ends nobody
        assert run(now, lease.taking(backend, "awake", {}))
    eventually(lambda: not _is_there(node, left.info.backend_pid))
    assert _is_there(node, backend.pid)
    assert lease.epoch == 1


def _is_there(node: Node, pid: int) -> Any:
    return node.rows("SELECT FROM pg_stat_activity WHERE pid = %s", pid)


# -- Connecting -------------------------------------------------------------------------------------------------------


class Server:
    """Lets in only those who wait for this many seconds, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, needed_s: int) -> None:
        self.needed_s = needed_s
        self.now_s = 0.0
        self._connect = psycopg.AsyncConnection.connect
        monkeypatch.setattr(settings, "CONNECT_TIMES", ConnectTimes(lambda: self.now_s))
        monkeypatch.setattr(psycopg.AsyncConnection, "connect", self._let_in)

    async def _let_in(self, conninfo: str, **options: Any) -> psycopg.AsyncConnection:
        waits_s = int(conninfo_to_dict(conninfo)["connect_timeout"] or 0)
        self.now_s += min(waits_s, self.needed_s)
        if waits_s < self.needed_s:
            raise psycopg.errors.ConnectionTimeout("connection timeout expired")
        return await self._connect(conninfo, **options)


async def test_server_that_takes_long_to_let_anybody_in_is_waited_for_longer_each_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch, 1)
    async with running(Dispatcher(node.dsn)):
        await eventually_async(lambda: lanes_session(node))
        server.needed_s = 35
        node.end_sessions("mailroom")
        node.send("shipping", key="k")
        await eventually_async(lambda: node.delivered("key") == [("k",)])


async def test_connection_string_that_says_how_long_connecting_may_take_is_followed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch, 5)
    dsn = make_conninfo(node.dsn, connect_timeout=3)
    for _ in range(5):
        with pytest.raises(ConnectionFailed, match="timeout"):
            await settings.connect_async(dsn, "test")
    assert server.now_s == 5 * 3


def test_time_to_connect_grows_while_it_is_too_short_and_goes_down_to_what_is_needed() -> None:
    now_s = 0.0
    times = ConnectTimes(lambda: now_s)
    allowed = []
    for _ in range(6):
        allowed.append(times.allowed_s("a"))
        with contextlib.suppress(psycopg.OperationalError), times.measured("a"):
            raise psycopg.errors.ConnectionTimeout
    assert allowed == [10, 20, 40, 80, 80, 80]
    for took_s, then_s in ((50, 80), (30, 60), (12, 24), (1, 10)):
        with times.measured("a"):
            now_s += took_s
        assert times.allowed_s("a") == then_s
    with contextlib.suppress(psycopg.OperationalError), times.measured("a"):
        raise psycopg.OperationalError("nobody is there")
    assert (times.allowed_s("a"), times.allowed_s("b")) == (10, 10)


@pytest.mark.slow
def test_worker_connects_soon_after_an_outage_however_long_that_was(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.connection.execute(LEDGER)
    # What the pauses of a pool have grown to after minutes.
    monkeypatch.setattr(psycopg_pool.base.AttemptWithBackoff, "INITIAL_DELAY", NEVER_S)
    monkeypatch.setattr(transactions, "RECONNECT_S", 0.1)
    with (
        proxied(node.dsn) as (network, dsn),
        working(Worker(dsn, "shipping", write_ledger, poll_interval_s=0.1)) as worker,
    ):
        deliver(node, "a")
        eventually(lambda: ledger_keys(node) == ["a"])
        network.cut()
        eventually(lambda: "error connecting in" in caplog.text)
        deliver(node, "b")
        network.restore()
        eventually(lambda: ledger_keys(node) == ["a", "b"])
        assert worker.is_alive()


# -- What a worker records of its batches in flight --------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["sync", "async"])
async def test_note_that_the_server_is_too_slow_to_take_away_keeps_no_worker_from_the_next_batch(
    node: Node, monkeypatch: pytest.MonkeyPatch, flavour: str
) -> None:
    def too_slow(_sender: Unawaited, step: Execute) -> None:
        raise Unanswered("the server does not answer")

    monkeypatch.setattr(Unawaited, "send", too_slow)
    monkeypatch.setattr(Processes, "mine", None)  # then it is taken away after each batch
    monkeypatch.setattr(backoff, "pause_s", lambda failures, longest_s: NEVER_S)
    node.connection.execute(LEDGER)
    deliver(node, *"abc")
    async with contextlib.AsyncExitStack() as stack:
        if flavour == "sync":
            stack.enter_context(working(Worker(node.dsn, "shipping", write_ledger, batch=1)))
        else:
            await stack.enter_async_context(
                working_async(AsyncWorker(node.dsn, "shipping", write_ledger_async, batch=1))
            )
        await eventually_async(lambda: ledger_keys(node) == ["a", "b", "c"])
