"""The executor's lane: it executes with and without notifications, under a lease of its own, and stops."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from dispatcher import execute_all
from dispatcher.daemon import Dispatcher, Executor
from dispatcher.executor.execution import Execution
from dispatcher.lanes.lane import Lane
from mailroom.errors import ConnectionFailed
from outbox import Executable, Store
from tests.support.databases import Connect
from tests.support.executing import STORE, THINGS, dead_of, make_things, store_of, things_of
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async

NEVER_S = 3_600.0  # a poll that no test lives to see
EXECUTOR = "mailroom executor"


@contextlib.asynccontextmanager
async def running(lane: Lane) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(lane.run())
    try:
        yield task
    finally:
        lane.stop()
        await asyncio.wait_for(task, WITHIN_S)


@contextlib.contextmanager
def process(dsn: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a daemon with all its lanes in a process of its own; killed at the end if it still runs."""
    program = "import sys; from dispatcher.daemon import run; run(sys.argv[1], poll_interval_s=0.05)"
    with subprocess.Popen([sys.executable, "-c", program, dsn]) as started:
        try:
            yield started
        finally:
            started.kill()
            started.wait()


def increment(node: Node, key: str, by: int = 1, store: Store = STORE) -> None:
    with node.connection.transaction():
        store.increment(node.connection, key, by)


def counted(node: Node, key: str) -> int:
    return int(store_of(node.connection).get(key, 0))


def is_counted(node: Node, key: str, number: int) -> bool:
    return counted(node, key) == number


def leaders(node: Node) -> dict[str, int]:
    """Return the roles that are led, each with the epoch."""
    return dict(node.rows("SELECT role, epoch FROM mailroom.lease WHERE until > clock_timestamp()"))


def is_asleep(node: Node) -> bool:
    """Tell whether an executor leads and has let go of "awake"."""
    locks = node.value(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1835100524 "
        "AND objid = ('mailroom.outbox_executable'::regclass::oid::bigint - 2147483648)::integer::oid "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    listens = node.sessions("mailroom dispatcher listener") != []
    return "executor" in leaders(node) and locks == 0 and len(node.sessions(EXECUTOR)) >= 2 and listens


# -- Executing --------------------------------------------------------------------------------------------------------


async def test_executable_is_executed_when_its_bell_rings(node: Node) -> None:
    async with running(Executor(node.dsn, poll_interval_s=NEVER_S)):
        for nth in (1, 2, 3):
            await eventually_async(lambda: is_asleep(node))
            increment(node, "n")
            await eventually_async(partial(is_counted, node, "n", nth))


async def test_executable_whose_bell_was_off_is_executed_by_the_poll(node: Node) -> None:
    node.connection.execute("SET mailroom.notify = off")
    async with running(Executor(node.dsn, poll_interval_s=0.05)):
        for nth in (1, 2, 3):
            await eventually_async(lambda: is_asleep(node))
            increment(node, "n")
            await eventually_async(partial(is_counted, node, "n", nth))


async def test_what_was_sent_before_it_started_is_executed_in_batches(node: Node) -> None:
    with node.connection.transaction():
        STORE.send_many(node.connection, [Executable("increment", "n", amount=1) for _ in range(50)])
        STORE.delete_range(node.connection, "m")
        STORE.send_many(node.connection, [Executable("increment", "n", amount=1, notify="t") for _ in range(50)])
        Store(target="nowhere").delete(node.connection, "k")
    executor = Executor(node.dsn, poll_interval_s=NEVER_S, rows=7)
    async with running(executor):
        await eventually_async(lambda: executor.totals.taken == 102)
    assert (executor.totals.dead, executor.totals.replied) == (1, 50)
    assert counted(node, "n") == 50


def test_execute_does_all_there_is_and_tells_the_totals(node: Node) -> None:
    increment(node, "n")
    increment(node, "n", 2**63 - 1)
    seen: list[Execution] = []
    totals = execute_all(node.dsn, progress=seen.append)
    assert (totals.taken, totals.dead, totals.replied) == (2, 1, 0)
    assert sum(each.taken for each in seen) == 2
    with pytest.raises(ConnectionFailed):
        execute_all("postgresql://127.0.0.1:1/none?password=s3cret")


async def test_execute_works_beside_a_daemon(node: Node) -> None:
    async with running(Executor(node.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_asleep(node))
        node.connection.execute("SET mailroom.notify = off")
        # On its way to sleep it looks once more, and may take the first one.
        sent, taken = 0, 0
        while not taken and sent < 2:
            increment(node, "n")
            sent += 1
            taken = (await asyncio.to_thread(execute_all, node.dsn)).taken
        assert taken == 1
    assert counted(node, "n") == sent


# -- Leading ----------------------------------------------------------------------------------------------------------


async def test_only_one_of_two_executors_executes_and_the_other_takes_over(node: Node) -> None:
    first, second = Executor(node.dsn, poll_interval_s=0.05), Executor(node.dsn, poll_interval_s=0.05)
    async with running(first):
        await eventually_async(lambda: leaders(node) == {"executor": 1})
        async with running(second):
            await eventually_async(lambda: len(node.sessions(EXECUTOR)) == 4)
            for nth in (1, 2, 3):
                increment(node, "n")
                await eventually_async(partial(is_counted, node, "n", nth))
            await eventually_async(lambda: first.totals.taken == 3)  # counted once the COMMIT has answered
            assert second.totals.taken == 0
            first.stop()
            await eventually_async(lambda: leaders(node) == {"executor": 2})
            increment(node, "n")
            await eventually_async(lambda: second.totals.taken == 1)
    assert counted(node, "n") == 4


async def test_two_that_both_think_they_lead_execute_nothing_twice(node: Node) -> None:
    with node.connection.transaction():
        STORE.send_many(node.connection, [Executable("increment", "n", amount=1) for _ in range(300)])
    first, second = (Executor(node.dsn, poll_interval_s=0.05, rows=3) for _ in range(2))
    second._lease._role = "executor too"
    async with running(first), running(second):
        await eventually_async(lambda: first.totals.taken + second.totals.taken == 300)
    assert counted(node, "n") == 300


async def test_dispatcher_and_executor_lead_side_by_side_under_roles_of_their_own(node: Node) -> None:
    node.inbox("outcomes")
    async with (
        running(Dispatcher(node.dsn, poll_interval_s=0.05)),
        running(Executor(node.dsn, poll_interval_s=0.05)),
    ):
        await eventually_async(lambda: leaders(node) == {"dispatcher": 1, "executor": 1})
        with node.connection.transaction():
            STORE.increment(node.connection, "n", notify="outcomes")
        await eventually_async(lambda: node.delivered("key") == [("n",)])


@pytest.mark.slow
async def test_executor_connects_again_when_all_its_sessions_are_terminated(node: Node) -> None:
    async with running(Executor(node.dsn, poll_interval_s=NEVER_S)):
        for nth in (1, 2):
            await eventually_async(lambda: is_asleep(node))
            for pid in node.sessions(EXECUTOR):
                node.connection.execute("SELECT pg_terminate_backend(%s)", [pid])
            increment(node, "n")
            await eventually_async(partial(is_counted, node, "n", nth))


# -- Trouble ----------------------------------------------------------------------------------------------------------


async def test_rows_of_a_target_that_somebody_locks_do_not_end_it(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Executor, "_session", {**Executor._session, "lock_timeout": "50ms"})
    make_things(node.connection)
    increment(node, "1", store=THINGS)
    async with running(Executor(node.dsn, poll_interval_s=0.05)) as task:
        await eventually_async(lambda: things_of(node.connection) == {1: [None, 1]})
        before = set(node.sessions(EXECUTOR))
        other = connect()
        other.execute("SELECT FROM app.thing FOR UPDATE")
        increment(node, "n")
        increment(node, "1", store=THINGS)
        for _ in range(2):
            await eventually_async(lambda: waits(node))
            await eventually_async(lambda: not waits(node))
        assert not task.done()
        assert set(node.sessions(EXECUTOR)) == before
        other.rollback()
        await eventually_async(lambda: things_of(node.connection) == {1: [None, 2]})
        await eventually_async(lambda: counted(node, "n") == 1)
    assert dead_of(node.connection) == []


def waits(node: Node) -> bool:
    return any(node.value("SELECT cardinality(pg_blocking_pids(%s)) > 0", pid) for pid in node.sessions(EXECUTOR))


@pytest.mark.slow
async def test_function_that_runs_long_does_not_hold_up_the_end(node: Node, connect: Connect) -> None:
    node.connection.execute(
        "CREATE FUNCTION public.slow(jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(300); END $$"
    )
    node.connection.execute("INSERT INTO mailroom.executable_function VALUES ('slow', 'public', 'slow', 300)")
    executor = Executor(node.dsn, poll_interval_s=0.05)
    async with running(executor):
        increment(node, "n")
        with node.connection.transaction():
            STORE.call(node.connection, "slow")
        await eventually_async(lambda: node.sessions(EXECUTOR, "wait_event = 'PgSleep'"))
    # Cut off in the middle of it, and nothing is lost.
    await eventually_async(lambda: node.sessions(EXECUTOR) == [])
    assert node.rows("SELECT operation FROM mailroom.outbox_executable WHERE operation = 'call'") == [("call",)]
    assert dead_of(node.connection) == []


# -- Ending -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_ends_a_daemon_with_all_lanes_and_gives_their_leases_up(node: Node) -> None:
    node.inbox("outcomes")
    with process(node.dsn) as started:
        eventually(lambda: set(leaders(node)) == {"dispatcher", "executor", "links"})
        with node.connection.transaction():
            STORE.increment(node.connection, "n", notify="outcomes")
        eventually(lambda: node.delivered("key") == [("n",)])
        started.send_signal(signal.SIGTERM)
        assert started.wait(WITHIN_S) == 0
    assert leaders(node) == {}
    assert node.rows("SELECT DISTINCT state FROM mailroom.lease") == [("stopped",)]


@pytest.mark.slow
def test_sigterm_ends_it_while_it_waits_for_a_row(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    increment(node, "1", store=THINGS)
    execute_all(node.dsn)
    other = connect()
    other.execute("SELECT FROM app.thing FOR UPDATE")
    with process(node.dsn) as started:
        increment(node, "1", store=THINGS)
        eventually(lambda: waits(node))
        started.send_signal(signal.SIGTERM)
        assert started.wait(WITHIN_S) == 0
    other.rollback()
    execute_all(node.dsn)
    assert things_of(node.connection) == {1: [None, 2]}


async def test_stop_before_run_and_twice_is_harmless(node: Node) -> None:
    executor = Executor(node.dsn)
    executor.stop()
    executor.stop()
    await asyncio.wait_for(executor.run(), WITHIN_S)
