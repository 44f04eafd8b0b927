"""The executor's lane: it executes with and without notifications, under a lease of its own, and stops."""

import asyncio
import signal
from functools import partial

import pytest

from dispatcher import execute_all
from dispatcher.daemon import Dispatcher, Executor
from dispatcher.executor.execution import Execution
from dispatcher.lanes import leading
from mailroom.errors import ConnectionFailed
from outbox import Executable, Store
from tests.support.databases import Connect
from tests.support.executing import STORE, THINGS, dead_of, function, make_things, store_of, things_of
from tests.support.lanes import PATIENT, asleep, be_patient, daemon, leaders, running
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import NEVER_S

EXECUTOR = "mailroom executor"


def increment(node: Node, key: str, by: int = 1, store: Store = STORE) -> None:
    with node.connection.transaction():
        store.increment(node.connection, key, by)


def counted(node: Node, key: str) -> int:
    return int(store_of(node.connection).get(key, 0))


def is_counted(node: Node, key: str, number: int) -> bool:
    return counted(node, key) == number


# -- Executing --------------------------------------------------------------------------------------------------------


async def test_executable_is_executed_when_its_bell_rings(node: Node) -> None:
    async with running(Executor(node.dsn, poll_interval_s=NEVER_S)):
        for nth in (1, 2, 3):
            await eventually_async(lambda: asleep(node, "executor"))
            increment(node, "n")
            await eventually_async(partial(is_counted, node, "n", nth))


async def test_executable_whose_bell_was_off_is_executed_by_the_poll(node: Node) -> None:
    node.connection.execute("SET mailroom.notify = off")
    async with running(Executor(node.dsn, poll_interval_s=0.05)):
        for nth in (1, 2, 3):
            await eventually_async(lambda: asleep(node, "executor"))
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
    """The daemon may still take it on its way to sleep; it is executed when `execute_all` has ended."""
    async with running(Executor(node.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: asleep(node, "executor"))
        node.connection.execute("SET mailroom.notify = off")
        for nth in (1, 2):
            increment(node, "n")
            await asyncio.to_thread(execute_all, node.dsn)
            assert counted(node, "n") == nth


# -- Leading ----------------------------------------------------------------------------------------------------------


async def test_only_one_of_two_executors_executes_and_the_other_takes_over(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    first, second = Executor(node.dsn, poll_interval_s=0.05), Executor(node.dsn, poll_interval_s=0.05)
    async with running(first):
        await eventually_async(lambda: "executor" in leaders(node))
        async with running(second):
            await eventually_async(lambda: second.health().state == "standing by")
            for nth in (1, 2, 3):
                increment(node, "n")
                await eventually_async(partial(is_counted, node, "n", nth))
            await eventually_async(lambda: first.totals.taken == 3)  # counted once the COMMIT has answered
            assert second.totals.taken == 0
            first.stop()
            await eventually_async(lambda: second.health().state == "asleep")
            increment(node, "n")
            await eventually_async(lambda: second.totals.taken == 1)
    assert counted(node, "n") == 4


async def test_two_that_both_think_they_lead_execute_nothing_twice(node: Node) -> None:
    with node.connection.transaction():
        STORE.send_many(node.connection, [Executable("increment", "n", amount=1) for _ in range(90)])
    first, second = (Executor(node.dsn, poll_interval_s=0.05, rows=3) for _ in range(2))
    second._lease._role = "executor too"
    async with running(first), running(second):
        await eventually_async(lambda: first.totals.taken + second.totals.taken == 90)
    assert counted(node, "n") == 90


async def test_dispatcher_and_executor_lead_side_by_side_under_roles_of_their_own(node: Node) -> None:
    node.inbox("outcomes")
    async with (
        running(Dispatcher(node.dsn, poll_interval_s=0.05)),
        running(Executor(node.dsn, poll_interval_s=0.05)),
    ):
        await eventually_async(lambda: leaders(node).keys() == {"dispatcher", "executor"})
        with node.connection.transaction():
            STORE.increment(node.connection, "n", notify="outcomes")
        await eventually_async(lambda: node.delivered("key") == [("n",)])


@pytest.mark.slow
async def test_executor_connects_again_when_all_its_sessions_are_terminated(node: Node) -> None:
    async with running(Executor(node.dsn, poll_interval_s=NEVER_S)):
        for nth in (1, 2):
            await eventually_async(lambda: asleep(node, "executor"))
            for pid in node.sessions(EXECUTOR):
                node.connection.execute("SELECT pg_terminate_backend(%s)", [pid])
            increment(node, "n")
            await eventually_async(partial(is_counted, node, "n", nth))


# -- Trouble ----------------------------------------------------------------------------------------------------------


async def test_rows_of_a_target_that_somebody_locks_do_not_end_it(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Executor, "_session", {**Executor._session, "lock_timeout": "50ms"})
    make_things(node.connection)
    increment(node, "1", store=THINGS)
    async with running(Executor(node.dsn, poll_interval_s=0.05)) as [task]:
        await eventually_async(lambda: things_of(node.connection) == {1: [None, 1]})
        before = set(node.sessions(EXECUTOR))
        other = connect()
        other.execute("SELECT FROM app.thing FOR UPDATE")
        increment(node, "n")
        increment(node, "1", store=THINGS)
        await eventually_async(lambda: caplog.text.count("a batch was held up") >= 2)
        assert not task.done()
        assert set(node.sessions(EXECUTOR)) == before
        other.rollback()
        await eventually_async(lambda: things_of(node.connection) == {1: [None, 2]})
        await eventually_async(lambda: counted(node, "n") == 1)
    assert dead_of(node.connection) == []


def waits(node: Node) -> bool:
    return any(node.value("SELECT cardinality(pg_blocking_pids(%s)) > 0", pid) for pid in node.sessions(EXECUTOR))


async def test_function_that_runs_long_does_not_hold_up_the_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    monkeypatch.setattr(leading, "FINISH_WITHIN_S", 0.1)
    function(node, "slow", "BEGIN PERFORM pg_sleep(3600); END", "void", timeout_s=300)
    async with running(Executor(node.dsn, poll_interval_s=0.05)):
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
    with daemon(node.dsn, PATIENT) as started:
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
    with daemon(node.dsn) as started:
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
