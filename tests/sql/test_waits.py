"""Who is in the way: whatever waits for a lock for long is named in the log and in `status`, with who has the lock."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import psycopg
import pytest

from dispatcher import Dispatcher, deliver_all
from dispatcher.daemon import Executor
from mailroom.node import status
from mailroom.sql.runner import run
from mailroom.sql.waits import GONE_S, LONG_S, Blocker, NotedWait, Wait, reading_waits
from outbox import Store
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("a"), pytest.mark.inbox("b")]


@pytest.fixture
def blocker(connect: Connect) -> psycopg.Connection[tuple[object, ...]]:
    return connect(application_name="CREATE INDEX by hand")


@contextlib.asynccontextmanager
async def running(lane: Dispatcher | Executor) -> AsyncIterator[None]:
    task = asyncio.create_task(lane.run())
    try:
        yield
    finally:
        lane.stop()
        await asyncio.wait_for(task, WITHIN_S)


def told(caplog: pytest.LogCaptureFixture, pid: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if f"blocked by pid {pid} " in each.getMessage()]


@pytest.mark.slow
async def test_delivery_that_waits_for_a_lock_on_an_inbox_names_who_has_it(
    node: Node, blocker: psycopg.Connection[tuple[object, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    pid = blocker.info.backend_pid
    async with running(Dispatcher(node.dsn)):
        blocker.execute("LOCK TABLE mailroom.inbox_a IN SHARE MODE")
        node.send("a", key="k")
        await eventually_async(lambda: told(caplog, pid), WITHIN_S)
        [wait] = await eventually_async(lambda: status.status(node.connection).waits, WITHIN_S)
        blocker.rollback()
        await eventually_async(lambda: node.delivered("inbox") == [("a",)], WITHIN_S)
    [line] = told(caplog, pid)
    assert line.startswith("mailroom dispatcher (pid ")
    assert "waits for RowExclusiveLock on mailroom.inbox_a" in line
    assert "'CREATE INDEX by hand'" not in line
    assert "CREATE INDEX by hand, role " in line
    assert "idle in transaction for " in line
    assert line.endswith("has ShareLock)")
    assert wait.what == "RowExclusiveLock on mailroom.inbox_a"
    assert [(each.pid, each.holds) for each in wait.blockers] == [(pid, "ShareLock")]


@pytest.mark.slow
async def test_wait_shorter_than_its_timeout_counts_on_over_the_tries(
    node: Node, blocker: psycopg.Connection[tuple[object, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """The executor gives up after 2 s each time, so no single wait of its is long."""
    pid = blocker.info.backend_pid
    async with running(Executor(node.dsn)):
        blocker.execute("LOCK TABLE mailroom.store IN EXCLUSIVE MODE")
        with psycopg.connect(node.dsn) as connection:
            Store().put(connection, "k", b"v")
        await eventually_async(lambda: told(caplog, pid), WITHIN_S)
        blocker.rollback()
        await eventually_async(lambda: node.rows("SELECT FROM mailroom.store"), WITHIN_S)
    assert "mailroom executor (pid " in told(caplog, pid)[0]


@pytest.mark.slow
async def test_wait_of_others_than_the_daemon_is_named_too(
    node: Node, connect: Connect, blocker: psycopg.Connection[tuple[object, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    pid = blocker.info.backend_pid
    blocker.execute("LOCK TABLE mailroom.key_state IN EXCLUSIVE MODE")
    recording = await psycopg.AsyncConnection.connect(node.dsn, application_name="mailroom worker in flight a")
    async with running(Dispatcher(node.dsn)):
        waiting = asyncio.create_task(recording.execute("LOCK TABLE mailroom.key_state IN EXCLUSIVE MODE"))
        await eventually_async(lambda: told(caplog, pid), WITHIN_S)
        blocker.rollback()
        await waiting
    await recording.close()
    assert "mailroom worker in flight a (pid " in told(caplog, pid)[0]


@pytest.mark.slow
def test_drain_that_waits_names_who_has_the_lock(
    node: Node, blocker: psycopg.Connection[tuple[object, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    pid = blocker.info.backend_pid
    blocker.execute("LOCK TABLE mailroom.inbox_a")
    node.send("a", key="k")

    class Freeing(logging.Handler):
        """Lets go when the wait is told."""

        def emit(self, record: logging.LogRecord) -> None:
            if f"blocked by pid {pid} " in record.getMessage():
                blocker.rollback()

    logger, freeing = logging.getLogger("mailroom.dispatcher"), Freeing()
    logger.addHandler(freeing)
    try:
        assert deliver_all(node.dsn).delivered == 1
    finally:
        logger.removeHandler(freeing)
    assert len(told(caplog, pid)) == 1


def test_prepared_transaction_is_named_as_one(node: Node, connect: Connect) -> None:
    preparing = connect()
    preparing.tpc_begin(preparing.xid(1, "mailroom-wait", "b"))
    preparing.execute("LOCK TABLE mailroom.inbox_a")
    preparing.tpc_prepare()
    waiting = connect(application_name="mailroom dispatcher", options="-c lock_timeout=60s")
    waiting.pgconn.send_query(b"BEGIN; LOCK TABLE mailroom.inbox_a IN ROW EXCLUSIVE MODE")
    try:
        [wait] = eventually(lambda: run(node.connection, reading_waits()))
    finally:
        preparing.tpc_rollback()
    assert str(wait).endswith("blocked by a prepared transaction (see pg_prepared_xacts)")


def test_each_wait_is_told_once_when_it_is_long() -> None:
    now = 0.0
    noted = NotedWait(lambda: now)
    blocker = Blocker(7, "psql", "ada", "idle in transaction", 3.0, "ShareLock")

    def wait(seconds: float, *blockers: Blocker) -> Wait:
        return Wait(1, "mailroom dispatcher", "RowExclusiveLock on x", seconds, blockers)

    assert noted.long([wait(0.5, blocker)]) == []
    now = LONG_S - 1
    assert noted.long([wait(0.4, blocker)]) == []  # another try, after a time-out
    now = LONG_S
    assert noted.long([wait(0.1, blocker)]) == [wait(0.1, blocker)]
    now += 1
    assert noted.long([wait(1, blocker)]) == []
    other = Blocker(8, "", "ada", "", None, "")
    assert noted.long([wait(LONG_S, other)]) == [wait(LONG_S, other)]  # somebody else
    now += GONE_S
    assert noted.long([wait(0.5, blocker)]) == []  # it had ended
