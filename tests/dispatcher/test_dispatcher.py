"""The daemon: it delivers with and without notifications, hands over to a standby, reconnects, and stops."""

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial

import psycopg
import pytest
from psycopg.types.json import Jsonb

from dispatcher import Dispatcher, Executor, deliver_all
from dispatcher.daemon import run_until_signalled
from dispatcher.housekeeping.janitor import Janitor
from dispatcher.lanes.lease import Lease, reading_backend
from mailroom.errors import ConnectionFailed, SchemaError
from mailroom.session import listener as listening
from mailroom.sql.runner import run
from tests.support.databases import Connect, Databases
from tests.support.lanes import EXPIRE, LISTENER, PATIENT, asleep, be_patient, daemon, is_replaced, leaders, running
from tests.support.node import SCHEMA, Node
from tests.support.proxy import Proxy, proxied
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import NEVER_S

pytestmark = pytest.mark.inbox("shipping")


@pytest.fixture
def proxy(node: Node) -> Iterator[tuple[Proxy, str]]:
    with proxied(node.dsn) as (proxy, dsn):
        yield proxy, dsn


def is_delivered(node: Node, key: str) -> bool:
    return (key,) in node.delivered("key")


def is_asleep(node: Node) -> bool:
    """Tell whether a dispatcher leads and sleeps, and all of its sessions are there."""
    return asleep(node, "dispatcher") and len(node.sessions()) == 4


# -- Delivering -------------------------------------------------------------------------------------------------------


async def test_message_is_delivered_when_the_bell_rings(node: Node) -> None:
    async with running(Dispatcher(node.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_asleep(node))
        for key in ("a", "b", "c"):
            node.send("shipping", key=key)
            await eventually_async(partial(is_delivered, node, key))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [b"BEGIN", b"COMMIT"])
async def test_dispatcher_whose_session_ended_right_behind_a_command_goes_on(
    node: Node, proxy: tuple[Proxy, str], command: bytes
) -> None:
    network, dsn = proxy
    async with running(Dispatcher(dsn, poll_interval_s=0.05)):
        await eventually_async(lambda: is_asleep(node))
        network.end_behind(command, 3, only=b"mailroom dispatcher\0")
        for key in ("a", "b", "c"):
            node.send("shipping", key=key)
            await eventually_async(partial(is_delivered, node, key))
        await eventually_async(lambda: not network.endings)
    assert node.delivered("key") == [("a",), ("b",), ("c",)]


async def test_what_was_sent_before_it_started_is_delivered(node: Node) -> None:
    node.send("shipping", key="k")
    async with running(Dispatcher(node.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_delivered(node, "k"))


async def test_message_whose_bell_was_off_is_delivered_by_the_poll(node: Node) -> None:
    node.connection.execute("SET mailroom.notify = off")
    async with running(Dispatcher(node.dsn, poll_interval_s=0.05)):
        # The first may still be found on the way to sleep.
        for key in ("a", "b", "c"):
            await eventually_async(lambda: is_asleep(node))
            node.send("shipping", key=key)
            await eventually_async(partial(is_delivered, node, key))


@pytest.mark.slow
async def test_message_is_delivered_by_the_poll_while_the_bell_s_connection_is_a_black_hole(
    node: Node, proxy: tuple[Proxy, str]
) -> None:
    network, dsn = proxy
    async with running(Dispatcher(dsn, poll_interval_s=0.05)):
        await eventually_async(lambda: is_asleep(node))
        network.black_hole(only=b"dispatcher listener")
        for key in ("a", "b", "c"):
            node.send("shipping", key=key)
            await eventually_async(partial(is_delivered, node, key))


@pytest.mark.slow
async def test_bell_whose_connection_is_a_black_hole_listens_again_on_another(
    node: Node, proxy: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dsn = proxy
    monkeypatch.setattr(listening, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(listening, "ANSWER_S", 1.0)
    async with running(Dispatcher(dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_asleep(node))
        network.black_hole(only=b"dispatcher listener")
        await eventually_async(lambda: network.swallowed)
        network.forward()
        node.send("shipping", key="k")
        await eventually_async(lambda: is_delivered(node, "k"))


async def test_scheduled_message_is_delivered_when_it_is_due(node: Node) -> None:
    async with running(Dispatcher(node.dsn, poll_interval_s=NEVER_S)):
        node.connection.execute(
            "INSERT INTO mailroom.outbox (topic, key, value_json, deliver_at) "
            "VALUES ('shipping', 'k', '1', clock_timestamp() + interval '300 ms')"
        )
        await eventually_async(lambda: is_delivered(node, "k"))


async def test_totals_count_what_was_done(node: Node) -> None:
    dispatcher = Dispatcher(node.dsn)
    node.send("shipping", key="k")
    node.send("nowhere")
    node.send("nowhere", kind="E")
    async with running(dispatcher):
        await eventually_async(lambda: dispatcher.totals.taken == 3)
    assert (dispatcher.totals.delivered, dispatcher.totals.dead, dispatcher.totals.unrouted) == (1, 1, 1)


async def test_drain_works_beside_a_daemon(node: Node) -> None:
    """The daemon may still take it on its way to sleep; it is delivered when the drain has ended."""
    async with running(Dispatcher(node.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_asleep(node))
        node.connection.execute("SET mailroom.notify = off")
        for keys in ([("a",)], [("a",), ("b",)]):
            node.send("shipping", key=keys[-1][0])
            await asyncio.to_thread(deliver_all, node.dsn)
            assert node.delivered("key") == keys


# -- Leading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_standby_delivers_nothing_and_takes_over_at_once_from_a_leader_that_stops(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    first, second = Dispatcher(node.dsn), Dispatcher(node.dsn)
    async with running(first):
        await eventually_async(lambda: first.health().state == "asleep")
        async with running(second):
            await eventually_async(lambda: second.health().state == "standing by")
            for key in "abc":
                node.send("shipping", key=key)
                await eventually_async(partial(is_delivered, node, key))
            assert second.totals.taken == 0
            first.stop()
            node.send("shipping", key="d")
            await eventually_async(partial(is_delivered, node, "d"))
            await eventually_async(lambda: second.health().state == "asleep")
            await eventually_async(lambda: first.totals.taken + second.totals.taken == 4)
            assert node.value("SELECT epoch FROM mailroom.lease WHERE role = 'dispatcher'") == 2


@pytest.mark.slow
async def test_standby_takes_over_from_a_killed_leader(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mailroom.dispatcher")
    with daemon(node.dsn, PATIENT) as first:
        await eventually_async(lambda: leaders(node).get("dispatcher") == first.pid)
        standby = Dispatcher(node.dsn)
        async with running(standby):
            await eventually_async(lambda: standby.health().state == "standing by")
            assert caplog.messages == ["dispatcher standing by for schema mailroom"]
            first.kill()
            await eventually_async(lambda: is_replaced(node, first.pid, os.getpid()))
            node.send("shipping", key="k")
            await eventually_async(lambda: is_delivered(node, "k"))
            assert node.rows("SELECT pid, epoch FROM mailroom.lease WHERE role = 'dispatcher'") == [(os.getpid(), 2)]


@pytest.mark.slow
async def test_new_leader_ends_the_session_of_one_that_hangs(node: Node) -> None:
    with daemon(node.dsn, PATIENT) as first:
        await eventually_async(lambda: "dispatcher" in leaders(node))
        [(backend,)] = node.rows("SELECT backend_pid FROM mailroom.lease WHERE role = 'dispatcher'")
        first.send_signal(signal.SIGSTOP)
        async with running(Dispatcher(node.dsn)):
            await eventually_async(lambda: is_replaced(node, first.pid, os.getpid()))
            await eventually_async(lambda: backend not in node.sessions())
            node.send("shipping", key="k")
            await eventually_async(lambda: is_delivered(node, "k"))


def test_lease_that_is_held_is_not_taken_and_keeps_its_epoch_when_renewed(node: Node) -> None:
    backend = run(node.connection, reading_backend())
    first, second = Lease(SCHEMA), Lease(SCHEMA)
    assert run(node.connection, first.taking(backend, "awake", {}))
    assert not run(node.connection, second.taking(backend, "awake", {}))
    assert run(node.connection, first.taking(backend, "awake", {}))
    assert (first.epoch, second.epoch) == (1, None)
    run(node.connection, second.giving_up())
    assert not run(node.connection, second.taking(backend, "awake", {}))


def test_lease_that_ran_out_is_taken_with_a_new_epoch(node: Node, connect: Connect) -> None:
    gone = connect(autocommit=True)
    first, second = Lease(SCHEMA), Lease(SCHEMA)
    run(node.connection, first.taking(run(gone, reading_backend()), "awake", {}))
    node.connection.execute(EXPIRE)
    assert run(node.connection, second.taking(run(node.connection, reading_backend()), "awake", {}))
    assert second.epoch == 2
    assert not run(node.connection, first.taking(run(node.connection, reading_backend()), "awake", {}))
    with pytest.raises(psycopg.OperationalError):
        gone.execute("SELECT 1")


@pytest.mark.slow
async def test_lease_is_renewed_however_long_housekeeping_takes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = asyncio.Event()

    async def hang(_janitor: Janitor, connection: psycopg.AsyncConnection) -> int:
        hangs.set()
        await connection.execute("SELECT pg_sleep(3600)")
        return 0

    monkeypatch.setattr(Janitor, "run_once", hang)
    async with running(Dispatcher(node.dsn)):
        await asyncio.wait_for(hangs.wait(), WITHIN_S)
        for _ in range(2):  # the first may have been under way
            [(until,)] = node.rows("SELECT until FROM mailroom.lease")
            await eventually_async(partial(node.value, "SELECT until > %s FROM mailroom.lease", until))


def test_new_leader_of_a_copy_leaves_the_original_s_session_alone(
    node: Node, connect: Connect, databases: Databases
) -> None:
    original = connect(autocommit=True)
    run(original, Lease(SCHEMA).taking(run(original, reading_backend()), "awake", {}))
    lease = node.rows("SELECT * FROM mailroom.lease")[0]
    copy = databases.create(migrated=True)
    try:
        with psycopg.connect(copy, autocommit=True) as restored:
            values = ", ".join(["%s"] * len(lease))
            restored.execute(
                f"INSERT INTO mailroom.lease VALUES ({values})".encode(),
                [Jsonb(value) if isinstance(value, dict) else value for value in lease],
            )
            restored.execute(EXPIRE)
            leader_of_copy = Lease(SCHEMA)
            assert run(restored, leader_of_copy.taking(run(restored, reading_backend()), "awake", {}))
            assert leader_of_copy.epoch == 2
        original.execute("SELECT 1")
    finally:
        databases.drop(copy)


# -- Going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ["as documented", "detached first", "dropped first"])
async def test_removing_inboxes_ends_nothing(node: Node, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    unlist = "; ".join(
        f"DELETE FROM mailroom.{table} = 'gone'" for table in ("subscription WHERE inbox", "inbox_registry WHERE name")
    )
    detach = "ALTER TABLE mailroom.inbox DETACH PARTITION mailroom.inbox_gone"
    drop = "DROP TABLE mailroom.inbox_gone"
    steps = {
        "as documented": (unlist, detach, drop), "detached first": (detach, unlist, drop),
        "dropped first": (drop, unlist),
    }[order]  # fmt: skip
    turns: list[int] = []
    run_once = Janitor.run_once

    async def counted(janitor: Janitor, connection: psycopg.AsyncConnection) -> int:
        janitor._swept = float("-inf")
        turns.append(await run_once(janitor, connection))
        return 1

    monkeypatch.setattr(Janitor, "run_once", counted)
    async with running(Dispatcher(node.dsn, poll_interval_s=0.05)):
        for turn in range(2):
            node.inbox("gone", "news")
            node.send("news", key=f"{turn}", kind="E")
            await eventually_async(partial(is_delivered, node, f"{turn}"))
            for nth, step in enumerate(steps):
                node.connection.execute(step.encode())
                turns.clear()
                await eventually_async(lambda: len(turns) >= 2)  # one of them began since
                node.send("shipping", key=f"{turn}{nth}")
                await eventually_async(partial(is_delivered, node, f"{turn}{nth}"))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("table", ["outbox", "lease", "inbox_registry"])
async def test_error_of_any_kind_is_passing_once_it_has_begun(
    node: Node, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    async with running(Dispatcher(node.dsn, poll_interval_s=0.05)):
        node.send("shipping", key="a")
        await eventually_async(partial(is_delivered, node, "a"))
        node.connection.execute(f"ALTER TABLE mailroom.{table} RENAME TO away".encode())
        await eventually_async(lambda: "UndefinedTable 42P01" in caplog.text)
        node.connection.execute(f"ALTER TABLE mailroom.away RENAME TO {table}".encode())
        node.send("shipping", key="b")
        await eventually_async(partial(is_delivered, node, "b"))


@pytest.mark.slow
async def test_schema_that_is_not_the_right_one_when_it_comes_back_is_waited_for(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(Dispatcher(node.dsn, poll_interval_s=0.05)):
        node.send("shipping", key="a")
        await eventually_async(partial(is_delivered, node, "a"))
        [(revision,)] = node.rows("SELECT version_num FROM mailroom.alembic_version")
        node.connection.execute("UPDATE mailroom.alembic_version SET version_num = '9901'")
        node.end_sessions("mailroom dispatcher")
        await eventually_async(lambda: "is too new for this program" in caplog.text)
        node.connection.execute("UPDATE mailroom.alembic_version SET version_num = %s", [revision])
        node.send("shipping", key="b")
        await eventually_async(partial(is_delivered, node, "b"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("table", ["outbox", "lease"])
async def test_error_at_the_start_ends_it(node: Node, table: str) -> None:
    node.connection.execute(f"ALTER TABLE mailroom.{table} RENAME TO away".encode())
    with pytest.raises(psycopg.errors.UndefinedTable):
        await Dispatcher(node.dsn).run()
    gc.collect()  # the error's traceback, a cycle, holds the bell's connection if that was still being made


# -- Losing the database and coming back ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_dispatcher_connects_again_when_all_its_sessions_are_terminated(node: Node) -> None:
    async with running(Dispatcher(node.dsn, poll_interval_s=NEVER_S)):
        for key in "ab":
            await eventually_async(lambda: is_asleep(node))
            for pid in node.sessions():
                node.connection.execute("SELECT pg_terminate_backend(%s)", [pid])
            node.send("shipping", key=key)
            await eventually_async(partial(is_delivered, node, key))


async def test_message_sent_while_the_bell_had_no_connection_is_found_when_it_has_one(node: Node) -> None:
    async with running(Dispatcher(node.dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_asleep(node))
        node.end_sessions(LISTENER)
        node.send("shipping", key="k")
        await eventually_async(lambda: is_delivered(node, "k"))


async def test_dispatcher_comes_back_when_the_network_does(node: Node, proxy: tuple[Proxy, str]) -> None:
    network, dsn = proxy
    async with running(Dispatcher(dsn, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: is_asleep(node))
        network.cut()
        node.send("shipping", key="k")
        await eventually_async(lambda: not node.sessions())
        network.restore()
        await eventually_async(lambda: is_delivered(node, "k"))


async def test_first_connection_that_fails_says_why_and_no_password(node: Node, proxy: tuple[Proxy, str]) -> None:
    network, dsn = proxy
    network.cut()
    secret = f"{dsn}?password=s3cret"
    with pytest.raises(ConnectionFailed) as caught:
        await Dispatcher(secret).run()
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(ConnectionFailed) as caught:
        await asyncio.to_thread(deliver_all, secret)
    assert "s3cret" not in str(caught.value)


async def test_schema_that_is_not_there_is_said_at_once(empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match="mailroom migrate"):
        await Dispatcher(empty_dsn).run()


# -- Ending -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", ["black hole", "cut"])
def test_sigterm_ends_it_while_the_server_is_unreachable(node: Node, proxy: tuple[Proxy, str], fault: str) -> None:
    network, dsn = proxy
    with daemon(dsn) as started:
        eventually(lambda: asleep(node, "dispatcher", "executor", "links"))
        network.black_hole() if fault == "black hole" else network.cut()
        started.send_signal(signal.SIGTERM)
        assert started.wait(WITHIN_S) == 0


async def test_stop_while_the_first_connection_is_made_is_no_failure(node: Node, proxy: tuple[Proxy, str]) -> None:
    network, dsn = proxy
    network.black_hole()
    dispatcher = Dispatcher(dsn)
    task = asyncio.create_task(dispatcher.run())
    await eventually_async(lambda: network.swallowed > 0)
    dispatcher.stop()
    await asyncio.to_thread(network.cut)
    await asyncio.wait_for(task, WITHIN_S)


async def test_stop_before_run_and_twice_is_harmless(node: Node) -> None:
    dispatcher = Dispatcher(node.dsn)
    dispatcher.stop()
    await asyncio.wait_for(dispatcher.run(), WITHIN_S)
    dispatcher.stop()
    assert leaders(node) == {}


async def test_stop_from_another_thread_ends_it(node: Node) -> None:
    dispatcher = Dispatcher(node.dsn, poll_interval_s=NEVER_S)
    task = asyncio.create_task(dispatcher.run())
    await eventually_async(lambda: is_asleep(node))
    await asyncio.to_thread(dispatcher.stop)
    await asyncio.wait_for(task, WITHIN_S)


@pytest.mark.slow
async def test_bell_in_a_black_hole_does_not_outlive_the_dispatcher(
    node: Node, proxy: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, dsn = proxy
    monkeypatch.setattr(listening, "HEARTBEAT_S", 0.1)
    async with running(Dispatcher(dsn, poll_interval_s=0.05)):
        await eventually_async(lambda: is_asleep(node))
        network.black_hole(only=b"dispatcher listener")
        await eventually_async(lambda: network.swallowed)


async def test_daemon_ends_as_a_whole_when_one_lane_does(node: Node) -> None:
    """Going on with the other lane it would look well, and deliver nothing."""
    lane: asyncio.Task[None] | None = None

    class Noted(Dispatcher):
        async def run(self) -> None:
            nonlocal lane
            lane = asyncio.current_task()
            await super().run()

    daemon = asyncio.create_task(run_until_signalled([Noted(node.dsn), Executor(node.dsn)]))
    await eventually_async(lambda: node.value("SELECT count(*) FROM mailroom.lease") == 2)
    assert lane is not None
    lane.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(daemon, WITHIN_S)
    await eventually_async(lambda: node.sessions("mailroom executor") == [])


async def test_daemon_both_of_whose_lanes_fail_raises_the_error_and_logs_none(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Dispatcher):
        async def run(self) -> None:
            raise SchemaError("There is no schema.", code="MR-no-schema")

    with pytest.raises(SchemaError):
        await run_until_signalled([Failing(node.dsn), Failing(node.dsn)])
    gc.collect()
    assert [record.message for record in caplog.records] == []


async def test_what_one_lane_looks_up_in_vain_holds_up_no_other_one() -> None:
    """More of them than asyncio has threads; nor does the daemon wait for them when it ends."""
    freed, found = threading.Event(), list[str]()

    class Looking(Dispatcher):
        async def run(self) -> None:
            for _ in range(40):
                asyncio.get_running_loop().run_in_executor(None, freed.wait)
            found.append(await asyncio.to_thread(str, "found"))

    try:
        await asyncio.wait_for(run_until_signalled([Looking("dbname=none")]), WITHIN_S)
    finally:
        freed.set()
    assert found == ["found"]


async def test_cancelled_dispatcher_leaves_no_task_and_no_session(node: Node) -> None:
    task = asyncio.create_task(Dispatcher(node.dsn).run())
    await eventually_async(lambda: is_asleep(node))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually_async(lambda: not node.sessions())
