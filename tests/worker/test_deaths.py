"""Deaths: a message that kills its worker is counted and ended, and live workers are left alone."""

import asyncio
import contextlib
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from inbox import AsyncWorker, Inbox, Message, Skip, Unavailable, Worker
from inbox.by_key.claim import Share
from inbox.by_key.failure import failed, recording
from inbox.claims import Claims
from inbox.sessions.alive import Processes
from inbox.sessions.unawaited import Unawaited
from inbox.worker import in_flight, loop
from inbox.worker.in_flight import ADD, DIED, DIED_IN_BATCH, REMOVE, Entry, InFlight
from mailroom.session import backoff, listener
from mailroom.sql.operation import Execute, Operation, Sql
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    deliver,
    failing_keys,
    is_asleep,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = [pytest.mark.both_versions, *SHIPPING_WITH_LEDGER]

KILLER = """
import os, sys
import psycopg
from inbox import Worker
from inbox.sessions import alive, unawaited
from inbox.worker import in_flight

alive.DEAD_S = 0  # who has lost its lock is dead at once
unawaited.WITHIN_S = in_flight.WITHIN_S = 60
starts = psycopg.connect(sys.argv[1], autocommit=True)

def handle(message, connection):
    connection.execute("INSERT INTO ledger (key, clock) VALUES (%s, %s)", [message.key, message.clock])
    if message.key == "killer":
        starts.execute("INSERT INTO starts DEFAULT VALUES")
        os.kill(os.getpid(), 9)

Worker(sys.argv[1], "shipping", handle, batch_s=None, poll_interval_s=0.05).run()
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("processes", [8, 1])
def test_message_that_kills_its_workers_is_started_no_more_often_than_it_may_be_tried(
    node: Node, processes: int
) -> None:
    """Each worker is restarted when it dies, as by a supervisor."""
    node.inbox("shipping", backoff_s=0, max_attempts=3)
    node.connection.execute("CREATE TABLE starts ()")
    deliver(node, "a", "killer", "b", "killer", "c")
    deaths = 0

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", KILLER, node.dsn])

    running = [start() for _ in range(processes)]

    def is_parked() -> bool:
        nonlocal deaths
        for nth, process in enumerate(running):
            if process.poll() is not None:
                deaths += 1
                assert deaths <= 3
                running[nth] = start()
        return bool(node.rows("SELECT FROM mailroom.parked"))

    try:
        eventually(is_parked)
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b", "c"])
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert failing_keys(node) == [("killer", 3)]
    assert node.value("SELECT count(*) FROM starts") == 3
    errors = node.rows("SELECT key, error FROM mailroom.attempt ORDER BY attempt")
    assert errors == [("killer", DIED_IN_BATCH), ("killer", DIED), ("killer", DIED)]
    assert node.rows("SELECT key, clock FROM mailroom.parked") == [("killer", 2)]


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "rolled back"])
def test_entry_of_a_batch_exists_only_while_it_is_handled(
    node: Node, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", NEVER_S)  # a check would remove an entry left behind
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "k")
    keys: list[object] = []

    def handle(message: Message, connection: Any) -> None:
        # It was sent, but not waited for.
        keys.append(eventually(lambda: node.rows("SELECT keys FROM mailroom.worker")))
        if fails:
            raise ValueError

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: failing_keys(node) == ([("k", 1)] if fails else []) and keys)
        eventually(lambda: not node.rows("SELECT FROM mailroom.worker"))
    assert keys == [[(["k"],)]]


def test_worker_takes_its_keys_again_though_the_server_has_not_yet_removed_their_entry(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the answer, and a claim that found nothing would be followed by sleep."""
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", NEVER_S)
    late: list[Callable[[], None]] = []
    send = Unawaited.send

    def sending(session: Unawaited, step: Execute) -> None:
        removes = step.statement.sql == REMOVE.at(schema=SCHEMA, inbox="shipping").sql
        late.append(partial(send, session, step)) if removes and not late else send(session, step)

    monkeypatch.setattr(Unawaited, "send", sending)
    calls: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.key)
        if len(calls) == 1:
            raise Unavailable("down", after_s=0)
        late[0]()

    deliver(node, "k")
    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: not node.rows("SELECT FROM mailroom.inbox"))
    assert calls == ["k", "k"]
    assert node.rows("SELECT FROM mailroom.worker") == []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what was sent of entries so far."""
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", NEVER_S)
    sent: list[str] = []
    send = Unawaited.send

    def sending(session: Unawaited, step: Execute) -> None:
        sent.append(step.statement.sql.split()[0])
        send(session, step)

    monkeypatch.setattr(Unawaited, "send", sending)
    return sent


def reap(node: Node, *keys: str, stop_at: str = "") -> None:
    """Deliver a message of each key; handle them two by two, up to the batch with `stop_at`."""
    deliver(node, *keys)

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        if message.key in (stop_at, keys[-1]):
            worker.stop()

    worker = Worker(node.dsn, "shipping", handle, batch=2, poll_interval_s=NEVER_S)
    worker.run()
    assert node.rows("SELECT FROM mailroom.worker") == []


def test_entry_is_overwritten_and_not_removed_amid_a_backlog(node: Node, sent: list[str]) -> None:
    reap(node, *"abcdef")
    assert sent == ["INSERT", "INSERT", "INSERT", "UPDATE"]


def test_entry_of_a_batch_that_came_while_its_loop_slept_is_removed(node: Node, sent: list[str]) -> None:
    node.inbox("shipping")
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        for keys in ("a", "ab", "abc"):
            deliver(node, keys[-1])
            eventually(partial(lambda expected: ledger_keys(node) == expected, list(keys)))
            eventually(lambda: not node.rows("SELECT FROM mailroom.worker"))


def test_worker_that_stops_amid_a_backlog_leaves_no_entry(node: Node, sent: list[str]) -> None:
    reap(node, *"abcdef", stop_at="c")
    assert ledger_keys(node) == list("abcd")
    assert sent == ["INSERT", "INSERT", "UPDATE"]


def test_entry_without_a_number_is_removed_after_each_batch(
    node: Node, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a pooler nobody knows whether its process goes on."""
    monkeypatch.setattr(Processes, "mine", None)
    reap(node, *"abcdef")
    assert sent == ["INSERT", "UPDATE"] * 3


def test_entry_of_a_batch_that_was_rolled_back_is_gone_while_its_loop_pauses(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording a failure removes the entry; but a conflict is not recorded, and the loop may pause for long."""
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", NEVER_S)
    pauses = threading.Event()

    def pause_s(failures: int, longest_s: float) -> float:
        pauses.set()
        return NEVER_S

    monkeypatch.setattr(backoff, "pause_s", pause_s)
    deliver(node, "k")

    def handle(message: Message, connection: Any) -> None:
        eventually(lambda: node.rows("SELECT FROM mailroom.worker"))
        connection.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        assert pauses.wait(WITHIN_S)
        eventually(lambda: not node.rows("SELECT FROM mailroom.worker"))
    assert failing_keys(node) == []


async def test_entry_of_an_open_batch_is_not_taken_over(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    deliver(node, "a", "b")
    handling, go_on = asyncio.Event(), asyncio.Event()

    async def handle(message: Message, connection: Any) -> None:
        handling.set()
        await go_on.wait()
        await write_ledger_async(message, connection)

    async with working_async(AsyncWorker(node.dsn, "shipping", handle)):
        await asyncio.wait_for(handling.wait(), WITHIN_S)
        # Without a number, as behind a pooler: then only its locks tell.
        await eventually_async(lambda: node.rows("UPDATE mailroom.worker SET process_number = NULL RETURNING id"))
        others = InFlight(node.dsn, "mailroom", "shipping")
        await asyncio.to_thread(others.take_over)
        assert len(node.rows("SELECT FROM mailroom.worker")) == 1
        go_on.set()
        await eventually_async(lambda: ledger_keys(node) == ["a", "b"])
        await asyncio.to_thread(others.close)
    assert failing_keys(node) == node.rows("SELECT FROM mailroom.attempt") == []


def test_batches_ended_by_a_server_restart_are_no_message_s_fault(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    deliver(node, "k")
    node.connection.execute(
        "INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks) "
        "VALUES (gen_random_uuid(), 'shipping', 'h', 1, pg_postmaster_start_time() - interval '1 s', 1, '{k}', '{1}')"
    )
    others = InFlight(node.dsn, "mailroom", "shipping")
    others.take_over()
    others.close()
    assert failing_keys(node) == node.rows("SELECT FROM mailroom.worker") == []


def test_session_that_was_cut_off_within_a_transaction_is_not_used_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction would stay open, and no entry would be committed."""
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    mine = InFlight(node.dsn, "mailroom", "shipping")
    with monkeypatch.context() as patched:
        patched.setattr(InFlight, "_taking_over", failing)
        patched.setattr(psycopg.Transaction, "__exit__", leaving_it_open)
        with pytest.raises(ZeroDivisionError):
            mine.take_over()
    mine.take_over()
    with mine._watcher.session() as connection:
        assert connection.info.transaction_status is TransactionStatus.IDLE
    mine.close()


def failing(_: InFlight) -> Operation[int]:
    yield REMOVE.at(schema="mailroom")(id=uuid4())
    raise ZeroDivisionError


def leaving_it_open(*_: object) -> None:
    """End the transaction as an error in the middle of a statement would: not at all."""


def left(node: Node, key: str, clock: int, rest: dict[str, int] | None = None) -> None:
    """Leave the entry of a batch, as a worker that died does."""
    batch = {key: clock} | (rest or {})
    node.connection.execute(
        "INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks) "
        "VALUES (gen_random_uuid(), 'shipping', 'h', 1, clock_timestamp(), %s, %s, %s)",
        [len(batch), list(batch), list(batch.values())],
    )


@pytest.fixture
def another_in_flight(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[InFlight]:
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    others = InFlight(node.dsn, "mailroom", "shipping")
    yield others
    others.close()


def test_dead_worker_is_found_among_many_live_ones(node: Node, connect: Connect, another_in_flight: InFlight) -> None:
    deliver(node, *(f"k{n}" for n in range(30)), "killer")
    batch = connect()
    for message in Inbox("shipping").reap_any(batch, max_keys=30, per_key=1):
        left(node, message.key, message.clock)
    left(node, "killer", 31)
    another_in_flight.take_over()
    assert failing_keys(node) == [("killer", 1)]
    assert node.value("SELECT count(*) FROM mailroom.worker") == 30


def test_entry_of_a_committed_batch_is_deleted_and_blames_no_message(node: Node, another_in_flight: InFlight) -> None:
    left(node, "k", 1)
    another_in_flight.take_over()
    assert failing_keys(node) == node.rows("SELECT FROM mailroom.worker") == []


# -- Keys of the dead -------------------------------------------------------------------------------------------------


def claimed(node: Node, *mine: UUID, due: bool = False, most: int = 9) -> list[str]:
    """Return the keys that another worker's claim takes, or that of the worker with these entries; undo it."""
    shipping = Claims("mailroom", "shipping")
    share = Share(most, most, most, due_too=False, hold=True, mine=mine)
    claiming = shipping.claiming_due(hold=True, mine=mine) if due else shipping.claiming(share)
    with node.connection.transaction(force_rollback=True):
        keys = [message.key for message in run(node.connection, claiming).messages]
        node.connection.execute("CLOSE ALL")
    return keys


def dying(node: Node, connection: psycopg.Connection[Any], *, due: bool = False) -> tuple[InFlight, Entry]:
    """Claim what there is, and end the batch as if its worker had died: by a rollback that nobody records."""
    worker, entry, shipping = InFlight(node.dsn, "mailroom", "shipping"), Entry(), Claims("mailroom", "shipping")
    worker._processes.hold_lock(connection)
    claiming = shipping.claiming_due() if due else shipping.claiming(Share(9, 9, 9, due_too=False))
    worker.add(entry, run(connection, claiming).messages, due=due)
    worker._sender.settle()
    connection.rollback()
    return worker, entry


def test_no_worker_takes_a_key_of_a_dead_one_until_its_death_is_counted(
    node: Node, connect: Connect, another_in_flight: InFlight
) -> None:
    deliver(node, "killer", "x")
    dead = connect()
    worker, entry = dying(node, dead)
    deliver(node, "killer", "healthy")
    assert claimed(node) == ["healthy"]
    assert claimed(node, most=1) == ["healthy"]
    assert claimed(node, entry.id) == ["killer", "x", "killer", "healthy"]
    dead.close()
    eventually(lambda: another_in_flight.take_over())
    worker.close()
    assert claimed(node, due=True) == ["killer"]
    with connect() as by_hand:  # whose own affair it is
        assert len(Inbox("shipping").reap_any(by_hand)) == 4


def test_no_worker_takes_a_failing_key_of_a_dead_one_until_its_death_is_counted(
    node: Node, connect: Connect, another_in_flight: InFlight
) -> None:
    node.inbox("shipping", backoff_s=0)
    deliver(node, "killer", "x")
    with node.connection.transaction():
        for message in Inbox("shipping").peek(node.connection):
            run(node.connection, recording("mailroom", "shipping", failed(message, ValueError())))
    worker, entry = dying(node, connect(), due=True)
    assert claimed(node, due=True) == ["x"]
    assert claimed(node, entry.id, due=True) == ["killer"]
    worker.remove(entry)
    worker.close()
    assert claimed(node, due=True) == ["killer"]


def test_worker_that_lives_gives_up_the_keys_of_a_batch_that_it_has_lost(node: Node, connect: Connect) -> None:
    deliver(node, "k")
    worker, _ = dying(node, connect())
    assert claimed(node) == []
    worker.take_over()
    assert claimed(node) == ["k"]
    assert len(node.rows("SELECT FROM mailroom.worker")) == 1  # if it dies all the same, that counts
    worker.close()


@pytest.mark.parametrize("way", ["removed", "recorded"])
def test_worker_that_lives_gives_up_the_keys_of_an_entry_that_a_crash_of_the_server_brings_back(
    node: Node, connect: Connect, way: str
) -> None:
    """Its removal was not on disk yet. Its loop may never get another batch, which would overwrite it."""
    deliver(node, "k")
    worker, entry = dying(node, connect())
    node.connection.execute("CREATE TEMP TABLE on_disk AS TABLE mailroom.worker")
    worker.remove(entry) if way == "removed" else worker.replace(entry, recording_nothing())
    worker._watcher.settle()
    node.connection.execute("INSERT INTO mailroom.worker TABLE on_disk")
    node.end_sessions("mailroom worker in flight")
    assert claimed(node) == []
    worker.take_over()
    assert claimed(node) == ["k"]
    worker.close()


def recording_nothing() -> Operation[None]:
    yield Sql("SELECT").at()()


def test_keys_of_an_entry_whose_transaction_this_server_does_not_know_are_left_out(node: Node) -> None:
    """Such as that of a node that was moved. An error would stop all claims."""
    deliver(node, "a", "b", "healthy")
    for key, clock, xact in (("a", 1, 2**62 + 5), ("b", 2, 3)):
        left(node, key, clock)
        node.connection.execute("UPDATE mailroom.worker SET xact = %s WHERE keys = %s", [xact, [key]])
    connect_at = node.connection
    with connect_at.transaction(force_rollback=True):
        connect_at.execute("SELECT FROM mailroom.inbox_shipping FOR UPDATE")
    with connect_at.transaction():
        connect_at.execute("SELECT FROM mailroom.inbox_shipping FOR UPDATE")
    assert claimed(node) == ["healthy"]


@pytest.mark.parametrize(
    ("newest", "lower_half", "expected"),
    [(900, 899, 899), (2**32 + 5, 4, 2**32 + 4), (2**32 + 5, 2**32 - 1, 2**32 - 1), (3 * 2**32, 7, 2 * 2**32 + 7)],
)
def test_transaction_of_an_entry_is_a_full_one(node: Node, newest: int, lower_half: int, expected: int) -> None:
    [formula] = re.findall(r"greatest\(0, (n - .*?)\), 0\)", ADD.template)
    assert node.value(f"SELECT {formula} FROM (VALUES (%s::bigint, %s::bigint)) AS v (n, x)", newest, lower_half) == (
        expected
    )


def test_death_in_a_batch_counts_for_the_message_that_then_kills_its_worker_alone(
    node: Node, another_in_flight: InFlight
) -> None:
    deliver(node, "killer", "other")
    left(node, "killer", 1, rest={"other": 2})
    another_in_flight.take_over()
    assert failing_keys(node) == [("killer", 0), ("other", 0)]
    for attempts in (2, 3):
        left(node, "killer", 1)
        another_in_flight.take_over()
        assert failing_keys(node) == [("killer", attempts), ("other", 0)]


def test_young_entry_is_left_alone_as_its_batch_may_just_have_been_rolled_back(
    node: Node, another_in_flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "AGE_S", 60.0)
    deliver(node, "k")
    left(node, "k", 1)
    another_in_flight.take_over()
    assert failing_keys(node) == []
    assert node.value("SELECT count(*) FROM mailroom.worker") == 1


def test_entry_is_removed_by_its_worker_though_its_session_was_lost(node: Node) -> None:
    deliver(node, "k")
    mine, entry = InFlight(node.dsn, "mailroom", "shipping"), Entry()
    mine.add(entry, Inbox("shipping").peek(node.connection))
    eventually(lambda: node.rows("SELECT FROM mailroom.worker"))
    node.end_sessions("mailroom worker in flight")
    mine.remove(entry)
    mine.close()
    assert node.rows("SELECT FROM mailroom.worker") == []


def test_worker_whose_entries_the_database_refuses_ends_and_says_why(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No retry can fix it, and it is not a message's fault."""
    monkeypatch.setattr(InFlight, "take_over", lambda _: None)
    deliver(node, "a", "b", "c")
    node.connection.execute("DROP TABLE mailroom.worker CASCADE")
    with pytest.raises(psycopg.errors.UndefinedTable):
        Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S).run()
    assert failing_keys(node) == []


def test_message_that_kills_its_worker_is_found_though_the_first_of_its_batch_was_consumed(
    node: Node, another_in_flight: InFlight
) -> None:
    deliver(node, "first", "killer")
    left(node, "first", 1, rest={"killer": 2})
    with node.connection.transaction():
        Inbox("shipping").reap(node.connection, "first")
    another_in_flight.take_over()
    assert failing_keys(node) == [("killer", 0)]


def test_worker_does_not_take_over_its_own_batch(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection may be lost, and its messages free, while the handler is busy elsewhere."""
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    deliver(node, "k")
    mine, entry = InFlight(node.dsn, "mailroom", "shipping"), Entry()
    mine.add(entry, Inbox("shipping").peek(node.connection))
    eventually(lambda: node.rows("SELECT FROM mailroom.worker"))
    mine.take_over()
    assert failing_keys(node) == []
    mine.remove(entry)
    mine.close()


def test_entries_of_live_workers_are_not_locked_by_the_check_for_dead_ones(
    node: Node, connect: Connect, another_in_flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose entry is locked would run without it, or leave it there."""
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    deliver(node, "k")
    batch, mine, entry = connect(), InFlight(node.dsn, "mailroom", "shipping"), Entry()
    mine.add(entry, Inbox("shipping").reap_any(batch))
    eventually(lambda: node.rows("SELECT FROM mailroom.worker"))
    with another_in_flight._watcher.session() as looking, looking.transaction():
        run(looking, another_in_flight._taking_over())
        batch.rollback()
        mine.remove(entry)
        mine.close()
        assert node.rows("SELECT FROM mailroom.worker") == []


def test_failure_counts_also_when_the_entry_cannot_be_removed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise psycopg.OperationalError

    def handle(message: Message, connection: Any) -> None:
        raise Skip("too old")

    raised: list[type[Exception]] = []
    monkeypatch.setattr(InFlight, "remove", cannot)
    deliver(node, "k")
    worker = Worker(
        node.dsn, "shipping", handle, poll_interval_s=NEVER_S, on_error=lambda _, error: raised.append(type(error))
    )
    with working(worker):
        eventually(lambda: node.rows("SELECT FROM mailroom.dead_letter"))
    assert raised == [Skip]


def test_dead_worker_s_batch_is_taken_over_at_once(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits is woken by its own check: nothing else notifies it."""
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(in_flight, "AGE_S", 0.0)
    waits, wait = threading.Event(), listener.heard

    async def heard(ring: asyncio.Event, timeout_s: float) -> bool:
        if not ring.is_set():
            waits.set()
        return await wait(ring, timeout_s)

    monkeypatch.setattr(loop, "heard", heard)
    deliver(node, "k")
    dying = connect()
    Inbox("shipping").reap(dying, "k")
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        assert waits.wait(WITHIN_S)
        dying.rollback()
        left(node, "k", 1, rest={"other": 2})
        eventually(lambda: ledger_keys(node) == ["k"])


def test_worker_that_stops_amid_a_check_for_dead_workers_says_nothing(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", 0.05)
    amid, checked = threading.Event(), Processes.checking

    def checking(processes: Processes) -> Operation[bool]:
        if node.rows("TABLE ledger"):  # not the check before the first batch
            amid.set()
            with contextlib.suppress(AssertionError):  # as it must not come, this costs the time
                eventually(lambda: processes.mine is None, timeout_s=0.5)
        return (yield from checked(processes))

    monkeypatch.setattr(Processes, "checking", checking)
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        eventually(lambda: is_asleep(node))
        deliver(node, "k")
        assert amid.wait(WITHIN_S)
    eventually(lambda: not any("mailroom-watch" in thread.name for thread in threading.enumerate()))
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
