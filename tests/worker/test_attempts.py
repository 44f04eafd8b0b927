"""Attempts: with several processes and loops, no message is tried too often, too early, or by two at once."""

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from inbox import AsyncWorker, Inbox, Message, Park, Parked, Retry, Skip, Worker
from inbox.by_key import claim, due
from inbox.by_key.due import healing, reaping_due
from inbox.by_key.failure import failed, recording, suspecting
from inbox.handling import frames
from inbox.worker.in_flight import InFlight
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node, failing
from tests.support.waiting import WITHIN_S, eventually, eventually_async, wait_until_blocked
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
)

pytestmark = [pytest.mark.sample(1), *SHIPPING_WITH_LEDGER]

MAX_ATTEMPTS = 3
BACKOFF_S = 0.2

CALLS = "CREATE TABLE calls (nth bigserial, clock bigint, at timestamptz DEFAULT clock_timestamp(), failed timestamptz)"

# A message's value says how often it fails. Each thread logs its calls on a session of its own, so that they outlive a
# rollback of the batch; handled messages are logged in the batch's transaction.
CLIENT = """
import sys, threading
import psycopg
from inbox import Worker

own = threading.local()

def handle(message, connection):
    if not hasattr(own, "ledger"):
        own.ledger = psycopg.connect(sys.argv[1], autocommit=True)
    nth, before = own.ledger.execute(
        "INSERT INTO calls (clock) VALUES (%(clock)s) "
        "RETURNING nth, (SELECT count(*) FROM calls WHERE clock = %(clock)s AND failed IS NOT NULL)",
        {"clock": message.clock},
    ).fetchone()
    if before < message.value:
        own.ledger.execute("UPDATE calls SET failed = clock_timestamp() WHERE nth = %s", [nth])
        raise ValueError
    connection.execute("INSERT INTO ledger (key, clock) VALUES (%s, %s)", [message.key, message.clock])

Worker(sys.argv[1], "shipping", handle, parallel=3, batch=15, poll_interval_s=0.05).run()
"""


@contextlib.contextmanager
def clients(dsn: str, number: int) -> Iterator[None]:
    """Run this number of workers, each in a process of its own."""
    with contextlib.ExitStack() as ending:
        for _ in range(number):
            process = ending.enter_context(subprocess.Popen([sys.executable, "-c", CLIENT, dsn]))
            ending.callback(process.terminate)
        yield


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("on_failure", ["park", "skip"])
def test_no_message_is_tried_too_often_or_too_early_by_several_processes(node: Node, on_failure: str) -> None:
    dice = random.Random(1)
    node.inbox("shipping", backoff_s=BACKOFF_S, max_attempts=MAX_ATTEMPTS, on_failure=on_failure)
    node.connection.execute(CALLS)
    with node.connection.transaction():
        for nth in range(160):
            key = f"k{dice.randrange(40)}" if nth % 2 else f"alone{nth}"
            node.send("shipping", dice.choice([0, 0, 0, 1, 2, 9]), key=key)
    node.deliver_all()

    def is_done() -> bool:
        parked = "SELECT FROM mailroom.key_state AS k WHERE k.key = i.key AND k.parked_at IS NOT NULL"
        return not node.rows(f"SELECT FROM mailroom.inbox AS i WHERE NOT EXISTS ({parked}) LIMIT 1")

    with clients(node.dsn, 2):
        eventually(is_done)
        # Between a failure and the next call lies at least the shortest backoff of that failure.
        often = "SELECT clock, count(failed), count(*) - count(failed) FROM calls GROUP BY clock"
        assert [row for row in node.rows(often) if row[1] > MAX_ATTEMPTS or row[2] > 2] == []
        early = """
            SELECT clock, failure, wait FROM (
                SELECT clock, failed, lead(at) OVER (PARTITION BY clock ORDER BY nth) - failed AS wait,
                       row_number() OVER (PARTITION BY clock, failed IS NULL ORDER BY nth) AS failure FROM calls) AS c
            WHERE failed IS NOT NULL AND wait < interval '1 s' * (0.5 * %s * 2 ^ (failure - 1))"""
        assert node.rows(early, BACKOFF_S) == []
        # The history agrees, and messages ended at their last attempt.
        recorded = "SELECT clock, count(*) FROM mailroom.attempt GROUP BY clock"
        happened = "SELECT clock, count(*) FROM calls WHERE failed IS NOT NULL GROUP BY clock"
        assert sorted(node.rows(recorded)) == sorted(node.rows(happened))
    ended = {"park": "mailroom.key_state WHERE parked_at IS NOT NULL", "skip": "mailroom.dead_letter"}[on_failure]
    assert {attempts for (attempts,) in node.rows(f"SELECT attempts FROM {ended}")} == {MAX_ATTEMPTS}
    assert node.rows("SELECT key, clock FROM ledger GROUP BY key, clock HAVING count(*) > 1") == []


# -- Recorded while the batch locks its messages ----------------------------------------------------------------------


def test_attempt_is_recorded_before_the_batch_is_rolled_back(
    node: Node, source: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")
    seen: list[Any] = []
    replace = InFlight.replace

    def replacing(self: InFlight, *arguments: Any) -> Any:
        recorded = replace(self, *arguments)
        seen.append((failing_keys(node), Inbox("shipping").reap_any(connect())))
        return recorded

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise ValueError
        write_ledger(message, connection)

    monkeypatch.setattr(InFlight, "replace", replacing)
    with working(Worker(source, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: ledger_keys(node) == ["a"])
    assert seen == [([("bad", 1)], [])]


def test_claim_that_began_before_the_record_leaves_the_key_out(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the key's lock after the rollback, and its own snapshot does not see the record."""
    deliver(node, "bad", "a")
    failing_batch, late, observer = connect(), connect(), connect(autocommit=True)
    [message, _] = Inbox("shipping").reap_any(failing_batch)
    gate = "CASE WHEN (SELECT has_failing FROM bound)"
    slow = claim.REAP_PLAIN.template.replace(gate, f"pg_advisory_xact_lock(7) IS NOT NULL AND {gate}")
    assert slow != claim.REAP_PLAIN.template
    monkeypatch.setattr(claim, "REAP_PLAIN", Sql(slow, claim.REAP_PLAIN.columns))
    observer.execute("SELECT pg_advisory_lock(7)")
    with ThreadPoolExecutor(1) as thread:
        claimed = thread.submit(Inbox("shipping").reap_any, late)
        wait_until_blocked(observer, late.info.backend_pid)
        with node.connection.transaction():
            run(node.connection, recording(SCHEMA, "shipping", failed(message, Retry(after_s=3_600))))
        failing_batch.rollback()
        observer.execute("SELECT pg_advisory_unlock(7)")
        assert [each.key for each in claimed.result(WITHIN_S)] == ["a"]


def test_due_claim_that_began_before_the_record_skips_the_key(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(node, "bad")
    trying, late, observer = connect(), connect(), connect(autocommit=True)
    run(node.connection, suspecting(SCHEMA, "shipping", ["bad"], [1], "died"))
    [message] = run(trying, reaping_due(SCHEMA, "shipping")).messages
    slow = due.LOCK_HEAD.template.replace("retry_at <=", "pg_advisory_xact_lock(7) IS NOT NULL AND retry_at <=", 1)
    assert slow != due.LOCK_HEAD.template
    monkeypatch.setattr(due, "LOCK_HEAD", Sql(slow, due.LOCK_HEAD.columns))
    observer.execute("SELECT pg_advisory_lock(7)")
    with ThreadPoolExecutor(1) as thread:
        claimed = thread.submit(run, late, reaping_due(SCHEMA, "shipping"))
        wait_until_blocked(observer, late.info.backend_pid)
        run(node.connection, recording(SCHEMA, "shipping", failed(message, Retry(after_s=3_600))))
        trying.rollback()
        observer.execute("SELECT pg_advisory_unlock(7)")
        assert claimed.result(WITHIN_S).messages == []


def test_attempt_that_cannot_be_recorded_before_the_roll_back_is_recorded_after_it(
    node: Node, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: InFlight, *arguments: Any) -> Any:
        raise psycopg.OperationalError("the session is lost")

    def handle(message: Message, connection: Any) -> None:
        raise ValueError

    monkeypatch.setattr(InFlight, "replace", lost)
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad")
    with working(Worker(source, "shipping", handle)):
        eventually(lambda: failing_keys(node) == [("bad", 1)])


def test_what_was_handled_before_the_failure_is_repeated_once_and_alone(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "a", "b", "bad", "c", "worse", "d")
    batches: dict[str, list[str]] = {}

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        [(transaction,)] = connection.execute("SELECT pg_current_xact_id()::text").fetchall()
        batches.setdefault(transaction, []).append(message.key)
        if message.key in ("bad", "worse"):
            raise ValueError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b", "c", "d"])
        eventually(lambda: is_asleep(node))
    assert [batch for batch in batches.values() if len(batch) > 1] == [["a", "b", "bad"], ["c", "worse"]]
    assert sorted(batch for [batch, *more] in batches.values() if not more) == ["a", "b", "c", "d"]
    assert failing_keys(node) == [("bad", 1), ("worse", 1)]


# -- Counted per message ----------------------------------------------------------------------------------------------


def send_to_one_key(node: Node, *values: object) -> None:
    with node.connection.transaction():
        for value in values:
            node.send("shipping", value, key="k")
    node.deliver_all()


@pytest.mark.parametrize("error", [Park("no"), Skip("no"), KeyError("no"), ValueError("no")])
def test_message_that_ends_behind_others_of_its_key_is_not_tried_again(node: Node, error: Exception) -> None:
    node.inbox("shipping", backoff_s=3_600, max_attempts=1)
    send_to_one_key(node, "good", "bad", "later")
    calls: list[object] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.value)
        if message.value == "bad":
            raise error
        write_ledger(message, connection)

    table = "dead_letter" if isinstance(error, Skip) else "parked"
    with working(Worker(node.dsn, "shipping", handle, fatal=(KeyError,), poll_interval_s=NEVER_S)):
        eventually(lambda: node.rows(f"SELECT FROM mailroom.{table}"))
        if isinstance(error, Skip):
            eventually(lambda: len(ledger_keys(node)) == 2)
    assert calls[:3] == ["good", "bad", "good"]
    assert calls.count("bad") == 1
    assert [clock for (clock,) in node.rows(f"SELECT clock FROM mailroom.{table}")] == [2]


def test_count_of_a_message_outlives_a_failure_of_one_before_it(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=2)
    send_to_one_key(node, "first", "second")
    calls: list[object] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.value)
        if calls in (["first", "second"], ["first", "second", "first"]) or message.value == "second":
            raise ValueError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: node.rows("SELECT FROM mailroom.parked"))
    assert calls == ["first", "second", "first", "first", "second"]
    assert failing_keys(node) == [("k", 2)]


def test_message_that_failed_behind_another_waits_for_its_own_time(node: Node, connect: Connect) -> None:
    """Also if one before it has failed since: the key continues when that is handled, and this one when it is due."""
    send_to_one_key(node, "first", "second")
    first, second = Inbox("shipping").peek(node.connection, "k")
    run(node.connection, recording(SCHEMA, "shipping", failed(second, Retry(after_s=3_600))))
    run(node.connection, recording(SCHEMA, "shipping", failed(first, Retry(after_s=0))))
    with node.connection.transaction():
        [message] = run(node.connection, reaping_due(SCHEMA, "shipping")).messages
        run(node.connection, healing(SCHEMA, "shipping", message))
    assert message.clock == first.clock
    assert node.value("SELECT retry_at > now() + interval '3500 s' FROM mailroom.key_state")
    with node.connection.transaction():
        assert run(node.connection, reaping_due(SCHEMA, "shipping")).messages == []
        assert Inbox("shipping").reap_any(node.connection) == []


def test_message_whose_end_is_recorded_is_ended_by_the_next_claim(node: Node) -> None:
    """The worker may die between the record and the move."""
    deliver(node, "bad", "a")
    [bad] = Inbox("shipping").peek(node.connection, "bad")
    run(node.connection, recording(SCHEMA, "shipping", failed(bad, Park("no"))))
    with working(Worker(node.dsn, "shipping", write_ledger)):
        eventually(lambda: node.rows("SELECT FROM mailroom.parked"))
        eventually(lambda: ledger_keys(node) == ["a"])
    assert node.rows("SELECT attempts, last_error, retry_at = 'infinity' FROM mailroom.key_state") == [(1, "no", True)]


def test_attempts_count_from_one_after_a_replay(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=2)
    deliver(node, "bad")
    with node.connection.transaction():
        for outcome in ("retry", "park"):
            [bad] = Inbox("shipping").peek(node.connection, "bad")
            assert run(node.connection, failing("shipping", bad, ValueError("no"))).outcome == outcome
    with node.connection.transaction():
        Parked("shipping").replay(node.connection, "bad", actor="ada", why="mended")
    [bad] = Inbox("shipping").peek(node.connection, "bad")
    assert run(node.connection, recording(SCHEMA, "shipping", failed(bad, ValueError("no")))).attempt == 1
    history = "SELECT attempt, outcome, error FROM mailroom.attempt ORDER BY id"
    assert node.rows(history) == [
        (1, "retry", "ValueError: no"), (2, "park", "ValueError: no"), (0, "replay", "mended"),
        (1, "retry", "ValueError: no"),
    ]  # fmt: skip


@pytest.mark.slow
def test_failing_keys_take_turns_with_full_batches(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=1_000_000)
    deliver(node, "bad")
    calls: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.key)
        if message.key == "bad":
            raise ValueError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, batch=1, poll_interval_s=NEVER_S)):
        eventually(lambda: len(calls) > 10)
        deliver(node, *"abcdefgh")
        eventually(lambda: len(ledger_keys(node)) == 8)
    good = [nth for nth, key in enumerate(calls) if key != "bad"]
    assert {second - first for first, second in pairwise(good)} <= {1, 2}


# -- Told ---------------------------------------------------------------------------------------------------------


def fetch_price(article: str) -> None:
    raise LookupError(f"no price of {article}")


def test_log_shows_where_a_handler_failed_and_no_value(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.inbox("shipping", backoff_s=3_600)
    node.send("shipping", "secret", key="k")
    node.deliver_all()

    def handle(message: Message, connection: Any) -> None:
        try:
            fetch_price(message.value)
        except LookupError as error:
            raise ValueError(message.value) from error

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: "failed, attempt 1 of 16: ValueError; retry" in caplog.text)
    lines = [line.strip() for line in caplog.text.splitlines()]
    assert "raise ValueError(message.value) from error" in lines
    assert "caused by LookupError" in lines
    assert any(line.endswith("in fetch_price") for line in lines)
    assert not any("concurrent/futures" in line or str(Path(frames.__file__).parents[1]) in line for line in lines)
    assert "secret" not in caplog.text


def test_modules_that_call_handlers_are_where_the_log_looks_for_them() -> None:
    assert [place for place in frames.OURS if not Path(place).is_file()] == []


def test_on_error_gets_the_message_and_the_error(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=2)
    deliver(node, "bad", "a")
    errors: list[tuple[Any, Exception]] = []

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise ValueError("no such state")
        write_ledger(message, connection)

    def report(message: Message | None, error: Exception) -> None:
        errors.append((message and message.key, error))
        raise KeyError("of the report's own")

    with working(Worker(node.dsn, "shipping", handle, on_error=report)):
        eventually(lambda: ledger_keys(node) == ["a"] and len(errors) == 2)
    assert [(key, str(error)) for key, error in errors] == [("bad", "no such state")] * 2
    assert "on_error failed: KeyError" in caplog.text


async def test_async_on_error_is_awaited(node: Node, async_source: Any) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad")
    errors: list[tuple[Any, Exception]] = []

    async def handle(message: Message, connection: Any) -> None:
        raise ValueError("no such state")

    async def report(message: Message | None, error: Exception) -> None:
        errors.append((message and message.key, error))

    async with working_async(AsyncWorker(async_source, "shipping", handle, on_error=report)):
        await eventually_async(lambda: errors)
    assert [(key, str(error)) for key, error in errors] == [("bad", "no such state")]


def test_error_whose_text_cannot_be_made_is_its_message_s_failure(node: Node) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise Mute
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["a"] and failing_keys(node) == [("bad", 1)])
    assert node.value("SELECT last_error FROM mailroom.key_state") == "Mute (its text raised RuntimeError)"
