"""Who is alive: a busy worker is not taken for dead, whatever happens to its connections; a paused one is."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from inbox import AsyncWorker, Inbox, Message, Worker
from inbox.sessions import alive
from inbox.sessions.alive import DEAD_S, PAUSED_S
from inbox.worker import in_flight
from inbox.worker.in_flight import Entry, InFlight
from mailroom.sql import locks
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    deliver,
    failing_keys,
    ledger_keys,
    working,
    write_ledger,
)

pytestmark = SHIPPING_WITH_LEDGER

WATCH = "mailroom worker in flight"
HOLDS_LOCK = "SELECT process_number FROM mailroom.worker WHERE process_number IS NOT NULL"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def others(node: Node, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[InFlight]:
    """Another worker's entries, by a clock of the test's own."""
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    others = InFlight(node.dsn, "mailroom", "shipping", clock)
    yield others
    others.close()


@pytest.fixture
def mine(node: Node) -> Iterator[InFlight]:
    """A worker's entries; it holds its lock."""
    mine = InFlight(node.dsn, "mailroom", "shipping")
    mine.take_over()
    yield mine
    mine.close()


def write(node: Node, mine: InFlight, messages: list[Message]) -> None:
    mine.add(Entry(), messages)
    eventually(lambda: node.rows(HOLDS_LOCK))


def check_for(others: InFlight, clock: Clock, seconds: float) -> None:
    """Check as often in this time as a worker does."""
    for _ in range(round(seconds)):
        others.take_over()
        clock.now += 1
    others.take_over()


def fall_silent(node: Node, mine: InFlight) -> None:
    with mine._watcher.session() as connection:
        node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [connection.info.backend_pid])


@pytest.mark.slow
def test_live_worker_whose_connection_was_lost_while_its_handler_is_busy_is_not_taken_for_dead(
    node: Node, others: InFlight, clock: Clock
) -> None:
    deliver(node, "k")
    busy, go_on = threading.Event(), threading.Event()

    def handle(message: Message, connection: Any) -> None:
        busy.set()
        assert go_on.wait(WITHIN_S)
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.05)):
        assert busy.wait(WITHIN_S)
        eventually(lambda: node.rows(HOLDS_LOCK))
        node.end_sessions("mailroom worker shipping")
        check_for(others, clock, DEAD_S + PAUSED_S)
        assert failing_keys(node) == []
        assert len(node.rows("SELECT FROM mailroom.worker")) == 1
        go_on.set()
        eventually(lambda: ledger_keys(node) == ["k"])
    assert failing_keys(node) == node.rows("SELECT FROM mailroom.attempt") == []


def test_worker_that_lost_all_its_connections_for_a_moment_is_not_taken_for_dead(
    node: Node, mine: InFlight, others: InFlight, clock: Clock
) -> None:
    deliver(node, "k")
    write(node, mine, Inbox("shipping").peek(node.connection))
    for _ in range(3):
        fall_silent(node, mine)
        others.take_over()
        clock.now += DEAD_S * 0.9
        others.take_over()
        mine.take_over()
        others.take_over()
        clock.now += DEAD_S * 0.9
    assert failing_keys(node) == []
    fall_silent(node, mine)
    others.take_over()
    assert failing_keys(node) == []
    clock.now += DEAD_S
    others.take_over()
    assert failing_keys(node) == [("k", 1)]


def test_silence_counts_only_while_somebody_checked(node: Node, mine: InFlight, others: InFlight, clock: Clock) -> None:
    """As after a network outage: the first worker to come back has not checked the others meanwhile."""
    deliver(node, "k")
    write(node, mine, Inbox("shipping").peek(node.connection))
    fall_silent(node, mine)
    others.take_over()
    clock.now += DEAD_S + PAUSED_S
    others.take_over()
    assert failing_keys(node) == []


def test_number_is_in_entries_only_while_its_lock_is_held(node: Node, mine: InFlight) -> None:
    """A process that could never take the lock would look paused."""
    deliver(node, "k")
    fall_silent(node, mine)
    lock = [locks.ALIVE, mine._processes.number]
    node.connection.execute("SELECT pg_advisory_lock(%s, %s)", lock)
    mine.take_over()
    mine.add(Entry(), Inbox("shipping").peek(node.connection))
    assert eventually(lambda: node.rows("SELECT process_number FROM mailroom.worker")) == [(None,)]
    node.connection.execute("SELECT pg_advisory_unlock(%s, %s)", lock)
    mine.take_over()
    write(node, mine, Inbox("shipping").peek(node.connection))


def test_first_batch_does_not_wait_until_it_is_certain_who_is_dead(
    node: Node, connect: Connect, mine: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "DEAD_S", NEVER_S)
    node.inbox("shipping", backoff_s=0)
    deliver(node, "killing")
    with contextlib.closing(connect()) as batch:
        write(node, mine, Inbox("shipping").reap_any(batch))
    fall_silent(node, mine)
    deliver(node, "healthy", "killing")
    tried: dict[str, list[tuple[Any, ...]]] = {}

    def handle(message: Message, connection: Any) -> None:
        tried.setdefault(message.key, failing_keys(node))

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: tried)
        monkeypatch.setattr(alive, "DEAD_S", 0)
        eventually(lambda: "killing" in tried)
    assert tried == {"healthy": [], "killing": [("killing", 1)]}


def test_batch_of_several_is_taken_over_as_soon_as_its_worker_is_silent(
    node: Node, mine: InFlight, others: InFlight
) -> None:
    """It blames none of them, and may be of one that lives: each is tried alone."""
    deliver(node, "a", "b", "alone")
    a, b, alone = Inbox("shipping").peek(node.connection)
    write(node, mine, [a, b])
    write(node, mine, [alone])
    fall_silent(node, mine)
    others.take_over()
    assert failing_keys(node) == [("a", 0), ("b", 0)]
    assert node.rows("SELECT keys FROM mailroom.worker") == [(["alone"],)]


def test_message_that_others_have_meanwhile_is_left_to_them_when_its_first_worker_is_paused(
    node: Node, connect: Connect, mine: InFlight, others: InFlight, clock: Clock
) -> None:
    deliver(node, "k")
    first, second = connect(), connect()
    write(node, mine, Inbox("shipping").reap_any(first))
    first.rollback()
    assert Inbox("shipping").reap_any(second)
    fall_silent(node, mine)
    check_for(others, clock, DEAD_S + PAUSED_S)
    second.commit()
    assert node.delivered() == failing_keys(node) == []


def test_paused_worker_of_another_role_is_left_alone_and_logged_once(
    node: Node, connect: Connect, mine: InFlight, monkeypatch: pytest.MonkeyPatch, clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    deliver(node, "k")
    batch = connect()
    write(node, mine, Inbox("shipping").reap_any(batch))
    fall_silent(node, mine)
    role = f"mailroom_test_{token_hex(8)}"
    node.connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'weak'")
    try:
        node.connection.execute(f"GRANT USAGE ON SCHEMA mailroom TO {role}")
        node.connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO {role}")
        parts = urlsplit(node.dsn)
        others = InFlight(
            urlunsplit(parts._replace(netloc=f"{role}:weak@{parts.hostname}:{parts.port}")),
            "mailroom", "shipping", clock,
        )  # fmt: skip
        check_for(others, clock, DEAD_S + PAUSED_S)
        others.close()
        eventually(lambda: node.rows("SELECT FROM pg_stat_activity WHERE usename = %s", role) == [])
    finally:
        node.connection.execute(f"DROP OWNED BY {role}")
        node.connection.execute(f"DROP ROLE {role}")
    batch.commit()
    assert node.delivered() == failing_keys(node) == []
    [line] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "blocks its keys" in line.getMessage()


def test_paused_worker_is_ended_by_one_whose_login_acts_as_another_role(
    node: Node, mine: InFlight, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    deliver(node, "k")
    owner, app = (f"mailroom_test_{token_hex(8)}" for _ in range(2))
    node.connection.execute(
        f"CREATE ROLE {owner}; CREATE ROLE {app} LOGIN NOINHERIT PASSWORD 'weak' IN ROLE {owner}; "
        f"ALTER ROLE {app} SET role = {owner}; GRANT USAGE ON SCHEMA mailroom TO {owner}; "
        f"GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO {owner}"
    )
    parts = urlsplit(node.dsn)
    dsn = urlunsplit(parts._replace(netloc=f"{app}:weak@{parts.hostname}:{parts.port}"))
    try:
        with contextlib.closing(psycopg.connect(dsn)) as batch:
            write(node, mine, Inbox("shipping").reap_any(batch))
            fall_silent(node, mine)
            others = InFlight(dsn, "mailroom", "shipping", clock)
            check_for(others, clock, DEAD_S + PAUSED_S)
            eventually(lambda: not node.rows("SELECT FROM pg_stat_activity WHERE pid = %s", batch.info.backend_pid))
            others.take_over()
            others.close()
        eventually(lambda: node.rows("SELECT FROM pg_stat_activity WHERE usename = %s", app) == [])
    finally:
        node.connection.execute(f"DROP ROLE {app}; DROP OWNED BY {owner}; DROP ROLE {owner}")
    assert failing_keys(node) == [("k", 1)]


# -- Processes --------------------------------------------------------------------------------------------------------

# The server ends its session after half a second without a statement.
PROGRAM = """
import os, sys
from inbox import Worker
from inbox.sessions import alive, unawaited; from inbox.worker import in_flight

alive.WATCH_SESSION["idle_session_timeout"] = "500ms"
in_flight.WATCH_INTERVAL_S = 0.05
unawaited.WITHIN_S = in_flight.WITHIN_S = 60

def handle(message, connection):
    sys.stdin.readline()
    connection.execute("INSERT INTO ledger (key, clock) VALUES (%s, %s)", [message.key, message.clock])

Worker(os.environ["MAILROOM_DSN"], "shipping", handle, poll_interval_s=0.05).run()
"""


@pytest.fixture
def process(node: Node) -> Iterator[subprocess.Popen[str]]:
    """A process whose handler has a message and waits for a line."""
    deliver(node, "k")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"MAILROOM_DSN": node.dsn}, text=True, stdin=subprocess.PIPE
    )
    eventually(lambda: node.rows(HOLDS_LOCK))
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_keys_of_a_paused_worker_go_on_and_waking_up_it_does_no_harm(
    node: Node, process: subprocess.Popen[str], others: InFlight, clock: Clock
) -> None:
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: node.sessions(WATCH) == [])
    check_for(others, clock, PAUSED_S - 1)
    # It may only have lost a connection, so its batch is left alone for a while.
    assert node.sessions("mailroom worker shipping", "state = 'idle in transaction'")
    assert failing_keys(node) == []
    check_for(others, clock, 1)
    eventually(lambda: node.sessions("mailroom worker shipping", "state = 'idle in transaction'") == [])
    others.take_over()
    assert failing_keys(node) == [("k", 1)]
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.05)):
        eventually(lambda: ledger_keys(node) == ["k"])
    process.send_signal(signal.SIGCONT)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    eventually(lambda: not node.rows("SELECT FROM mailroom.worker"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(WITHIN_S) == 0
    assert ledger_keys(node) == ["k"]
    assert len(node.rows("SELECT FROM mailroom.attempt")) == 1
    assert failing_keys(node) == []


def test_worker_whose_handler_blocks_its_event_loop_keeps_its_lock(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its own goes on checking, so the server does not end the session that holds the lock."""
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", 0.01)
    deliver(node, "k")
    busy, go_on = threading.Event(), threading.Event()

    async def handle(message: Message, connection: Any) -> None:
        busy.set()
        assert go_on.wait(WITHIN_S)

    worker = AsyncWorker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)
    thread = threading.Thread(target=lambda: asyncio.run(worker.run()))
    thread.start()
    try:
        assert busy.wait(WITHIN_S)
        speaks = "SELECT FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE classid = %s AND query_start > %s"
        for _ in range(3):
            now = node.value("SELECT clock_timestamp()")
            eventually(lambda now=now: node.rows(speaks, locks.ALIVE, now))  # type: ignore[misc]
    finally:
        go_on.set()
        worker.stop()
        thread.join(WITHIN_S)


# -- Handlers that end the process ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_handler_that_ends_the_process_leaves_its_entry_and_other_loops_keep_theirs_until_they_are_done(
    node: Node, monkeypatch: pytest.MonkeyPatch, others: InFlight, clock: Clock, error: BaseException
) -> None:
    both, go_on = threading.Barrier(2), threading.Event()

    def handle(message: Message, connection: Any) -> None:
        both.wait(WITHIN_S)
        if message.key == "ends":
            raise error
        assert go_on.wait(WITHIN_S)
        write_ledger(message, connection)

    deliver(node, "ends", "busy")
    worker = Worker(node.dsn, "shipping", handle, parallel=2, batch=1, poll_interval_s=NEVER_S)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            worker.run()
        except BaseException as caught:
            raised.append(caught)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        eventually(worker._stopping.is_set)
        assert worker._loop is not None
        settle = worker._in_flight._sender.settle  # nobody has waited yet for the answer to the last entry
        for _ in range(10):  # lets its event loop and threads do whatever follows from that
            asyncio.run_coroutine_threadsafe(worker._in_flight.run_in_thread(settle), worker._loop).result(WITHIN_S)
        assert sorted(node.rows("SELECT keys FROM mailroom.worker")) == [(["busy"],), (["ends"],)]
    finally:
        go_on.set()
        thread.join(WITHIN_S)
    assert raised == [error]
    assert ledger_keys(node) == ["busy"]
    assert node.rows("SELECT keys FROM mailroom.worker") == [(["ends"],)]
    others.take_over()
    clock.now += DEAD_S
    others.take_over()
    assert failing_keys(node) == [("ends", 1)]
