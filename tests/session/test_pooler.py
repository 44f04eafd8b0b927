"""Behind PgBouncer in transaction mode everything works but the listener, which says so and leaves polling."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import NullPool, create_engine

from dispatcher import Dispatcher, deliver_all
from inbox import AsyncInbox, AsyncWorker, Inbox, Worker
from inbox.sessions import unawaited
from inbox.sessions.unawaited import Unanswered, Unawaited
from inbox.worker import in_flight
from inbox.worker.in_flight import Entry, InFlight
from mailroom.errors import ConfigurationError
from mailroom.session import settings
from mailroom.session.home import reading_place
from mailroom.session.listener import Listener
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.pooler import is_pooled, refuses_options
from mailroom.sql.runner import run, run_async, run_in_transaction
from outbox import AsyncOutbox, Outbox, Outgoing
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import SCHEMA, Node
from tests.support.pgbouncer import pgbouncer
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

pytestmark = [pytest.mark.inbox("shipping", backoff_s=0), pytest.mark.node_sql(LEDGER)]

PATIENCE_S = unawaited.WITHIN_S


@pytest.fixture(autouse=True)
def as_patient_as_workers_are(_patient_entries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pooler has no session left for an entry, a worker goes on without it, and not after a minute."""
    for module in (unawaited, in_flight):
        monkeypatch.setattr(module, "WITHIN_S", PATIENCE_S)


POLL_S = 0.1


@pytest.fixture
def pooled(node: Node, server_home: Path) -> Iterator[str]:
    with pgbouncer(node.dsn, server_home) as url:
        yield url


def session_locks(node: Node) -> list[tuple[Any, ...]]:
    return node.rows(
        "SELECT classid FROM pg_locks WHERE locktype = 'advisory' "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )


# -- Telling a pooler -------------------------------------------------------------------------------------------------


def test_session_of_its_own_is_not_taken_for_pooled(dsn: str) -> None:
    with settings.connect(dsn, "test") as connection:
        assert not is_pooled(connection)
        assert connection.execute("SHOW jit").fetchone() == ("off",)


@pytest.mark.parametrize("ignore", ["", "options"], ids=["refuses options", "drops options"])
async def test_pooler_is_found_whether_it_refuses_options_or_drops_them(
    node: Node, server_home: Path, ignore: str
) -> None:
    with pgbouncer(node.dsn, server_home, ignore=ignore) as url:
        with settings.connect(url, "test", autocommit=True) as connection:
            assert is_pooled(connection)
            assert connection.prepare_threshold is None
        asynchronous = await settings.connect_async(url, "test")
        async with asynchronous:
            assert is_pooled(asynchronous)
            assert asynchronous.prepare_threshold is None
            assert connection.isolation_level == asynchronous.isolation_level == settings.READ_COMMITTED


def test_refusal_of_options_is_known_as_poolers_put_it() -> None:
    for refusal in (
        "FATAL:  unsupported startup parameter: options",
        "FATAL:  unsupported startup parameter in options: jit",
        "FATAL:  Feature not supported: RDS Proxy currently doesn't support command-line options.",
    ):
        assert refuses_options(psycopg.OperationalError(refusal)), refusal


async def test_settings_of_a_pooled_session_last_for_its_transactions_only(pooled: str) -> None:
    show = "SELECT current_setting('search_path'), current_setting('work_mem')"
    wanted = {"search_path": "pg_catalog,pg_temp", "work_mem": "123kB"}
    with settings.connect(pooled, "test", wanted, autocommit=True) as connection:
        before = connection.execute(show).fetchone()
        with connection.transaction(), connection.transaction():
            assert connection.execute(show).fetchone() == ("pg_catalog,pg_temp", "123kB")
        assert connection.execute(show).fetchone() == before
    async with await settings.connect_async(pooled, "test", wanted) as asynchronous:
        async with asynchronous.transaction(), asynchronous.transaction():
            assert await (await asynchronous.execute(show)).fetchone() == ("pg_catalog,pg_temp", "123kB")
        assert await (await asynchronous.execute(show)).fetchone() == before


# -- Sending, delivering, reaping -------------------------------------------------------------------------------------


async def test_settings_of_a_pooled_session_hold_in_a_transaction_of_its_own(pooled: str) -> None:
    def reading() -> Operation[Any]:
        return (yield Sql("SELECT current_setting('search_path')", columns=("text",)).at()())

    def reading_late() -> Operation[Any]:
        yield Sql("SELECT %(nth)s::bigint").at()(nth=1)
        return (yield from reading())

    async with await settings.connect_async(pooled, "test") as connection:
        assert await run_in_transaction(connection, reading()) == [("pg_catalog,pg_temp",)]
        assert await run_in_transaction(connection, reading_late()) == [("pg_catalog,pg_temp",)]
        assert await run_async(connection, reading()) != [("pg_catalog,pg_temp",)]


def test_operations_work_through_a_pooler(node: Node, pooled: str) -> None:
    outbox, shipping = Outbox(), Inbox("shipping")
    # Two connections that take turns, so that each statement finds the server connection that the other one used.
    with (
        psycopg.connect(pooled, prepare_threshold=None) as first,
        psycopg.connect(pooled, prepare_threshold=None) as second,
    ):
        for nth in range(6):
            for connection in (first, second):
                outbox.send(connection, "shipping", nth, key="k")
                connection.commit()
        outbox.send_many(first, [Outgoing("shipping", nth, key=f"many-{nth}") for nth in range(3)])
        first.commit()
        assert deliver_all(pooled).delivered == 15
        for connection in (first, second, first, second):
            assert [message.value for message in shipping.peek(connection, key="k", limit=1)] == [0]
            assert shipping.backlog(connection) == 15
            connection.rollback()
        assert [message.value for message in shipping.reap(first, key="k")] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert len(shipping.reap_any(second)) == 3
        first.rollback()
        second.commit()
        assert len(shipping.reap_any(second, per_key=100)) == 12
        second.commit()
    assert node.delivered() == []


async def test_async_operations_work_through_a_pooler(node: Node, pooled: str) -> None:
    outbox, shipping = AsyncOutbox(), AsyncInbox("shipping")
    async with (
        await psycopg.AsyncConnection.connect(pooled, prepare_threshold=None) as first,
        await psycopg.AsyncConnection.connect(pooled, prepare_threshold=None) as second,
    ):
        for connection in (first, second, first, second):
            await outbox.send(connection, "shipping", 1, key="k")
            await connection.commit()
        await outbox.send_many(first, [Outgoing("shipping", nth, key="many") for nth in range(3)])
        await first.commit()
        await asyncio.to_thread(deliver_all, pooled)
        assert len(await shipping.reap(first, key="k")) == 4
        assert len(await shipping.reap_any(second)) == 3
        await second.commit()
        await first.rollback()
        assert len(await shipping.reap_any(second)) == 4
    assert node.delivered() == []


def test_command_works_through_a_pooler(node: Node, pooled: str) -> None:
    done("migrate", dsn=pooled)
    done("outbox", "send", "shipping", "--key", "k", "--json", "1", dsn=pooled)
    assert json_of("dispatcher", "deliver-all", dsn=pooled)["delivered"] == 1
    [inbox] = json_of("status", dsn=pooled)["inboxes"]
    assert inbox["backlog"] == 1
    assert json_of("dispatcher", "status", dsn=pooled, exit_code=1) is None
    done("inbox", "reap", "shipping", "--any", dsn=pooled)
    done("inbox", "create", "billing", dsn=pooled)
    assert node.delivered() == []


# -- Workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_worker_works_through_a_pooler(node: Node, pooled: str) -> None:
    deliver(node, *"abc")
    with working(Worker(pooled, "shipping", write_ledger, poll_interval_s=POLL_S, batch=1, parallel=2)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b", "c"])
        deliver(node, "d")
        eventually(lambda: len(ledger_keys(node)) == 4)
        assert session_locks(node) == []


@pytest.mark.slow
async def test_async_worker_works_through_a_pooler(node: Node, pooled: str) -> None:
    deliver(node, *"abc")
    async with working_async(
        AsyncWorker(pooled, "shipping", write_ledger_async, poll_interval_s=POLL_S, batch=1, parallel=2)
    ):
        await eventually_async(lambda: sorted(ledger_keys(node)) == ["a", "b", "c"])


def test_worker_on_a_pool_of_the_user_s_works_through_a_pooler(node: Node, pooled: str) -> None:
    deliver(node, *"abc")
    with (
        ConnectionPool(pooled, kwargs={"prepare_threshold": None}, min_size=2, open=True) as pool,
        working(Worker(pool, "shipping", write_ledger, poll_interval_s=POLL_S, parallel=2)),
    ):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b", "c"])


async def test_async_worker_on_a_pool_of_the_user_s_works_through_a_pooler(node: Node, pooled: str) -> None:
    deliver(node, *"abc")
    pool = AsyncConnectionPool(pooled, kwargs={"prepare_threshold": None}, min_size=2, open=False)
    async with (
        pool,
        working_async(AsyncWorker(pool, "shipping", write_ledger_async, poll_interval_s=POLL_S, parallel=2)),
    ):
        await eventually_async(lambda: sorted(ledger_keys(node)) == ["a", "b", "c"])


@pytest.mark.slow
def test_two_workers_share_a_pooler_with_two_server_connections(node: Node, pooled: str) -> None:
    keys = [f"k{nth}" for nth in range(40)]
    deliver(node, *keys)
    with contextlib.ExitStack() as workers:
        for _ in range(2):
            workers.enter_context(working(Worker(pooled, "shipping", write_ledger, poll_interval_s=POLL_S, batch=2)))
        eventually(lambda: len(ledger_keys(node)) == len(keys))
    assert sorted(ledger_keys(node)) == sorted(keys)


@pytest.mark.slow
def test_worker_does_not_wait_for_the_connection_that_its_own_batch_holds(node: Node, server_home: Path) -> None:
    """The in-flight entry needs a second connection: if there is none left, the batch runs without an entry."""
    deliver(node, *"abc")
    with (
        pgbouncer(node.dsn, server_home, pool_size=1) as url,
        working(Worker(url, "shipping", write_ledger, poll_interval_s=POLL_S, batch=1)),
    ):
        eventually(lambda: ledger_keys(node) == ["a", "b", "c"])


@pytest.mark.slow
def test_entry_does_not_wait_to_hear_where_it_is(node: Node, server_home: Path) -> None:
    """The batches hold all connections, and wait for their entry to be sent."""
    with pgbouncer(node.dsn, server_home, pool_size=1) as url, psycopg.connect(url, prepare_threshold=None) as batch:
        here = run(batch, reading_place())
        sender = Unawaited(url, "sender", {})
        with sender.at(here), pytest.raises(Unanswered):
            sender.send(Sql("SELECT").at()())
        batch.rollback()
        with sender.at(here):
            sender.send(Sql("SELECT").at()())
        sender.close()


def test_batch_does_not_wait_for_who_looks_for_the_dead(node: Node, server_home: Path) -> None:
    """That one waits for the connection of the batch."""
    with pgbouncer(node.dsn, server_home, pool_size=1) as url, psycopg.connect(url, prepare_threshold=None) as batch:
        in_flight = InFlight(url, SCHEMA, "shipping")
        in_flight.begin()
        batch.execute("SELECT 1")
        looking = threading.Thread(target=in_flight.take_over)
        looking.start()
        eventually(lambda: in_flight._watcher._lock.locked())
        in_flight.add(Entry(), [])
        assert in_flight._apart._unanswered is not None  # it has gone, by a session of its own
        assert looking.is_alive()
        batch.rollback()
        looking.join()
        in_flight.close()


def test_failed_transactions_do_not_stay_in_the_pooler(node: Node, pooled: str) -> None:
    failures: list[str] = []

    def fails_at_first(message: Any, connection: Any) -> None:
        if len(failures) < 6:
            failures.append(message.key)
            connection.execute("SELECT 1 / 0")
        write_ledger(message, connection)

    deliver(node, *"abcd")
    node.connection.execute("UPDATE mailroom.inbox_registry SET max_attempts = 100")
    with working(Worker(pooled, "shipping", fails_at_first, poll_interval_s=POLL_S)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b", "c", "d"])
    with psycopg.connect(pooled, prepare_threshold=None) as first, psycopg.connect(pooled) as second:
        # Both server connections at once, and neither is in a transaction that failed.
        assert first.execute("SELECT 1").fetchone() == second.execute("SELECT 1").fetchone() == (1,)


# -- Listening --------------------------------------------------------------------------------------------------------


async def test_bell_behind_a_pooler_says_once_that_it_polls_and_leaves_nothing_behind(
    node: Node, pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(pooled, SCHEMA, "outbox", "test bell")
    ran = asyncio.create_task(listener.run())
    await eventually_async(lambda: "polling only" in caplog.text)
    channel = locks.channel("'mailroom.outbox'::regclass")
    node.connection.execute(f"SELECT pg_notify({channel}, '')".encode())
    done, _ = await asyncio.wait([ran], timeout=0.3)
    assert not done
    ran.cancel()
    await asyncio.wait([ran])
    assert [record.levelname for record in caplog.records if record.name == "mailroom.session.listener"] == ["WARNING"]
    async with await psycopg.AsyncConnection.connect(pooled, prepare_threshold=None) as connection:
        found = await connection.execute("SELECT count(*) FROM pg_listening_channels()")
        assert await found.fetchone() == (0,)


def test_worker_behind_a_pooler_takes_no_session_lock_and_says_how_to_be_woken(
    node: Node, pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "mailroom.session.listener")
    with working(Worker(pooled, "shipping", write_ledger, poll_interval_s=POLL_S)):
        for key in "abc":
            deliver(node, key)
            eventually(lambda key=key: key in ledger_keys(node))  # type: ignore[misc]
            assert session_locks(node) == []
    [line] = [record.getMessage() for record in caplog.records if record.name == "mailroom.session.listener"]
    assert "listen_dsn" in line


def test_worker_behind_a_pooler_is_woken_over_its_listen_dsn(node: Node, pooled: str) -> None:
    with working(Worker(pooled, "shipping", write_ledger, poll_interval_s=NEVER_S, listen_dsn=node.dsn)):
        eventually(lambda: (locks.ASLEEP,) in session_locks(node))
        deliver(node, "k")
        eventually(lambda: ledger_keys(node) == ["k"])


# -- What needs a session of its own ----------------------------------------------------------------------------------


def test_start_line_names_where_the_batches_go_and_the_way_of_the_worker_s_own_sessions(
    node: Node, pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mailroom.worker")
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(pooled, prepare_threshold=None), poolclass=NullPool
    )
    with working(Worker(engine, "shipping", write_ledger, listen_dsn=node.dsn)):
        eventually(lambda: "running in schema" in caplog.text)
    assert f"mailroom of {settings.place(pooled)} (own sessions by way of {settings.place(node.dsn)}): 1" in caplog.text


async def test_dispatcher_refuses_a_pooler_and_says_what_to_give(pooled: str) -> None:
    with pytest.raises(ConfigurationError, match=r"leads through a pooler.*--dsn"):
        await asyncio.wait_for(Dispatcher(pooled).run(), WITHIN_S)


def test_dispatcher_s_command_refuses_a_pooler(pooled: str) -> None:
    result = mailroom("dispatcher", "run", dsn=pooled)
    assert result.exit_code == 2
    assert "leads through a pooler" in error_of(result)


async def test_worker_that_dispatches_needs_a_listen_dsn_behind_a_pooler(node: Node, pooled: str) -> None:
    with pytest.raises(ConfigurationError, match="listen_dsn"):
        await AsyncWorker(pooled, "shipping", write_ledger_async, dispatch=True).run()
