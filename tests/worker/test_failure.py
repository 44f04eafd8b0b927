"""Failures: an attempt is counted once and for the message at fault, its key waits, and other keys go on."""

import asyncio
import contextlib
import os
import platform
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg_pool import ConnectionPool
from sqlalchemy import text

from inbox import AsyncWorker, Inbox, Message, Park, Retry, Skip, Worker
from inbox.by_key.failure import failed, recording, suspecting
from inbox.claims import Claims
from inbox.handling.batch import Batch
from inbox.handling.blame import FORGIVEN
from inbox.worker.in_flight import InFlight
from mailroom import __version__
from mailroom.errors import DecodeError
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import Node, send
from tests.support.proxy import proxied
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

pytestmark = [pytest.mark.sample(1), *SHIPPING_WITH_LEDGER]


def test_exception_rolls_the_whole_batch_back_and_counts_one_attempt(node: Node, source: Any) -> None:
    deliver(node, "a", "bad", "b")
    seen: list[list[tuple[Any, ...]]] = []

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        if message.key == "bad":
            seen.append(failing_keys(node))
            if len(seen) < 3:
                raise ValueError("no such state")

    with working(Worker(source, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: len(ledger_keys(node)) == 3)
    assert seen == [[], [("bad", 1)], [("bad", 2)]]
    assert sorted(ledger_keys(node)) == ["a", "b", "bad"]
    assert failing_keys(node) == []
    assert node.delivered() == []


async def test_async_exception_counts_one_attempt(node: Node, async_source: Any) -> None:
    deliver(node, "a", "bad", "b")
    seen: list[list[tuple[Any, ...]]] = []

    async def handle(message: Message, connection: Any) -> None:
        await write_ledger_async(message, connection)
        if message.key == "bad":
            seen.append(failing_keys(node))
            if len(seen) < 3:
                raise ValueError("no such state")

    async with working_async(AsyncWorker(async_source, "shipping", handle, poll_interval_s=0.01)):
        await eventually_async(lambda: len(ledger_keys(node)) == 3)
    assert seen == [[], [("bad", 1)], [("bad", 2)]]
    assert failing_keys(node) == []


def test_key_that_failed_waits_with_all_its_messages_while_others_go_on(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise ValueError("secret")
        write_ledger(message, connection)

    deliver(node, "bad", "a", "bad")
    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: ledger_keys(node) == ["a"])
        deliver(node, "b", "bad")
        eventually(lambda: ledger_keys(node) == ["a", "b"])
    assert [key for _, key, _ in node.delivered()] == ["bad"] * 3
    [(attempts, waits, error)] = node.rows(
        "SELECT attempts, retry_at > now() + interval '1000 s', last_error FROM mailroom.key_state"
    )
    assert (attempts, waits, error) == (1, True, "ValueError: secret")


def test_log_of_a_failure_names_the_message_and_not_what_it_holds(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.inbox("shipping", backoff_s=3_600)
    message_id = node.send("shipping", "secret", key="k")
    node.deliver_all()

    def handle(message: Message, connection: Any) -> None:
        raise ValueError(message.value)

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: failing_keys(node))
    eventually(lambda: str(message_id) in caplog.text)
    assert "secret" not in caplog.text


@pytest.mark.parametrize("chosen", [Park("the account is closed"), Skip("too old to matter")], ids=["Park", "Skip"])
def test_end_that_the_handler_has_chosen_is_no_error_in_the_log(
    node: Node, caplog: pytest.LogCaptureFixture, chosen: Exception
) -> None:
    node.inbox("shipping")
    node.send("shipping", 1, key="k")
    node.deliver_all()

    def handle(message: Message, connection: Any) -> None:
        raise chosen

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: ". See: mailroom " in caplog.text)
    [record] = [each for each in caplog.records if ". See: mailroom " in each.getMessage()]
    assert (record.levelname, "raise chosen" in record.getMessage()) == ("WARNING", False)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (StopIteration("secret"), "the handler raised StopIteration"),
        (psycopg.Rollback(), "the handler raised psycopg.Rollback"),
        (None, "leave COMMIT and ROLLBACK to the worker"),
    ],
    ids=["StopIteration", "Rollback", "commit"],
)
def test_log_says_what_a_handler_must_not_do(
    node: Node, caplog: pytest.LogCaptureFixture, raised: BaseException | None, said: str
) -> None:
    def handle(_: Message, connection: psycopg.Connection[Any]) -> None:
        if raised is not None:
            raise raised
        connection.execute("COMMIT")

    deliver(node, "k")
    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: said in caplog.text)
    assert "secret" not in caplog.text


def test_value_that_cannot_be_decoded_fails_only_its_own_message(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)
    node.connection.execute("INSERT INTO mailroom.outbox (topic, key, value) VALUES ('shipping', 'bad', '\\xff')")
    deliver(node, "a", "b")
    values: list[object] = []

    def handle(message: Message, connection: Any) -> None:
        values.append(message.value)
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b"])
    # Another attempt would fail too, so the key is parked at once.
    assert failing_keys(node) == [("bad", 1)]
    assert node.value("SELECT last_error FROM mailroom.key_state").startswith(DecodeError.__name__)
    assert [key for (key,) in node.rows("SELECT key FROM mailroom.parked")] == ["bad"]


def test_lost_connection_is_no_attempt_and_the_batch_comes_again(node: Node, source: Any) -> None:
    deliver(node, "a", "b")
    lost = 0
    seen: list[list[tuple[Any, ...]]] = []

    def handle(message: Message, connection: Any) -> None:
        nonlocal lost
        seen.append(failing_keys(node))
        if lost < 2 and message.key == "b":
            lost += 1
            node.rows(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND state ~ 'in transaction'"
            )
        write_ledger(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b"])
    assert lost == 2
    assert seen == [[]] * len(seen)


def test_connection_of_the_handler_s_own_that_is_lost_is_an_attempt(node: Node, source: Any) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise psycopg.OperationalError("another database is away")
        write_ledger(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: ledger_keys(node) == ["a"])
    assert failing_keys(node) == [("bad", 1)]


def test_worker_goes_on_when_an_attempt_could_not_be_recorded(
    node: Node, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(node, "a")
    failures = iter(range(2))
    lost = psycopg.OperationalError("the connection is lost")
    if not isinstance(source, str | ConnectionPool):
        lost = sqlalchemy.exc.OperationalError("SELECT", {}, lost, connection_invalidated=True)  # type: ignore[assignment]

    async def within(self: Any, operation: object) -> object:
        raise lost

    def handle(message: Message, connection: Any) -> None:
        if next(failures, None) is not None:
            raise ValueError
        write_ledger(message, connection)

    monkeypatch.setattr(Worker, "_within", within)
    with working(Worker(source, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: ledger_keys(node) == ["a"])


def test_message_that_fails_behind_others_of_its_key_is_counted_once_they_are_through(node: Node) -> None:
    """It is not the head of its key: earlier messages are consumed at once, and it waits like any other."""
    node.inbox("shipping", backoff_s=3_600)
    calls: list[object] = []
    with node.connection.transaction():
        for nth in range(4):
            send(node.connection, "shipping", nth, key="k")
    node.deliver_all()

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.value)
        if message.value == 2:
            raise ValueError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["k", "k"])
        eventually(lambda: is_asleep(node))
    assert calls == [0, 1, 2, 0, 1]
    assert failing_keys(node) == [("k", 1)]
    assert len(node.delivered()) == 2
    assert node.value("SELECT retry_at > now() + interval '1000 s' FROM mailroom.key_state")


def test_message_is_tried_so_often_and_then_its_key_is_parked(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=3)
    deliver(node, "bad", "bad", "a")
    calls: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.key)
        if message.key == "bad":
            raise ValueError("no such state")
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: node.rows("SELECT FROM mailroom.parked"))
        # Exactly the head; the others wait in order after it.
        assert node.rows("SELECT inbox, key, clock FROM mailroom.parked") == [("shipping", "bad", 1)]
        assert "bad" in [key for (key,) in node.delivered("key")]
        deliver(node, "b", "bad")
        eventually(lambda: ledger_keys(node) == ["a", "b"])
    assert calls.count("bad") == 3
    assert node.rows("SELECT key, clock, attempts, retry_at = 'infinity', last_error FROM mailroom.key_state") == [
        ("bad", 1, 3, True, "ValueError: no such state")
    ]
    assert node.delivered("key") == []
    history = "SELECT key, clock, attempt, outcome, error FROM mailroom.attempt ORDER BY id"
    assert node.rows(history) == [
        ("bad", 1, nth, "park" if nth == 3 else "retry", "ValueError: no such state") for nth in (1, 2, 3)
    ]
    recorder = f"mailroom worker {__version__} {os.getpid()}@{platform.node()}"
    assert node.rows("SELECT DISTINCT worker FROM mailroom.attempt") == [(recorder,)]


def test_message_that_is_skipped_goes_alone_to_the_dead_letters(node: Node) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=2, on_failure="skip")
    with node.connection.transaction():
        bad = send(node.connection, "shipping", "bad", key="k", headers={"user": "ada"})
        send(node.connection, "shipping", "good", key="k")
        send(node.connection, "shipping", "bad", key="nothing else")
    node.deliver_all()

    def handle(message: Message, connection: Any) -> None:
        if message.value == "bad":
            raise ValueError("no such state")
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["k"] and not node.delivered())
    assert failing_keys(node) == []
    assert node.rows(
        "SELECT message_id, stage, reason, inbox, key, clock, attempts, headers ->> 'user' FROM mailroom.dead_letter "
        "ORDER BY clock LIMIT 1"
    ) == [(bad, "reap", "ValueError: no such state", "shipping", "k", 1, 2, "ada")]


CHOSEN: dict[str, tuple[Exception, str, str]] = {
    "Park": (Park("the account is closed"), "park", "the account is closed"),
    "Retry": (Retry(after_s=3_600, reason="the bank sleeps"), "retry", "the bank sleeps"),
    "Skip": (Skip("too old to matter"), "skip", "too old to matter"),
    "fatal": (KeyError("price"), "park", "KeyError: 'price'"),
}


def test_handler_chooses_the_outcome_of_its_message(node: Node, source: Any) -> None:
    deliver(node, "a", *CHOSEN, "b")

    def handle(message: Message, connection: Any) -> None:
        if message.key in CHOSEN:
            raise CHOSEN[message.key][0]
        write_ledger(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=NEVER_S, fatal=(LookupError,))):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b"])
        held = "SELECT (SELECT count(*) FROM mailroom.parked), (SELECT count(*) FROM mailroom.dead_letter)"
        eventually(lambda: node.rows(held) == [(2, 1)])
    attempts = "SELECT key, outcome, attempt, error FROM mailroom.attempt"
    assert sorted(node.rows(attempts)) == [(key, outcome, 1, error) for key, (_, outcome, error) in CHOSEN.items()]
    waits = "retry_at BETWEEN now() + interval '3000 s' AND now() + interval '3700 s'"
    held = f"SELECT key, {waits} FROM mailroom.key_state"
    assert sorted(node.rows(held)) == [("Park", False), ("Retry", True), ("fatal", False)]


def test_retry_is_an_attempt_too(node: Node) -> None:
    node.inbox("shipping", max_attempts=2)
    deliver(node, "k")

    def handle(message: Message, connection: Any) -> None:
        raise Retry(after_s=0)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: node.rows("SELECT FROM mailroom.parked"))
    assert failing_keys(node) == [("k", 2)]


def test_failing_key_is_tried_alone_when_it_is_due_without_any_poll(node: Node) -> None:
    """Alone, so that it does not roll back the batches of others."""
    node.inbox("shipping", backoff_s=0.05, max_attempts=1_000)
    deliver(node, "bad", "a", "b")
    batches: dict[str, list[str]] = {}
    failures = iter(range(3))

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        [(transaction,)] = connection.execute("SELECT pg_current_xact_id()::text").fetchall()
        batches.setdefault(transaction, []).append(message.key)
        if message.key == "bad" and next(failures, None) is not None:
            raise ValueError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b", "bad"])
    # The first time in a batch with others; then, as a failing key, always alone.
    tries = [batch for batch in batches.values() if "bad" in batch]
    assert tries == [tries[0], ["bad"], ["bad"], ["bad"]]
    assert failing_keys(node) == []


def test_error_that_a_handler_swallows_is_its_own_and_nothing_is_committed(
    node: Node, source: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """COMMIT of a transaction in which a statement failed rolls back and reports success."""
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "a", "b", "bad")  # no message after it, which would run into the error

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            with contextlib.suppress(psycopg.Error, sqlalchemy.exc.SQLAlchemyError):
                connection.execute("SELECT 1/0" if isinstance(connection, psycopg.Connection) else text("SELECT 1/0"))
        else:
            write_ledger(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b"])
        eventually(lambda: failing_keys(node) == [("bad", 1)])
    assert "one at a time" not in caplog.text  # it was known at once


async def test_error_that_an_async_handler_swallows_is_its_own(node: Node, async_source: Any) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "a", "bad", "b")

    async def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            with contextlib.suppress(psycopg.Error, sqlalchemy.exc.SQLAlchemyError):
                is_psycopg = isinstance(connection, psycopg.AsyncConnection)
                await connection.execute("SELECT 1/0" if is_psycopg else text("SELECT 1/0"))
        else:
            await write_ledger_async(message, connection)

    async with working_async(AsyncWorker(async_source, "shipping", handle, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: sorted(ledger_keys(node)) == ["a", "b"])
        await eventually_async(lambda: failing_keys(node) == [("bad", 1)])


def test_commit_that_fails_is_found_by_going_one_by_one(node: Node) -> None:
    node.connection.execute("CREATE TABLE once (key text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    node.connection.execute("INSERT INTO once VALUES ('bad')")
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "a", "bad", "b")

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO once VALUES (%s)", [message.key])
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b"])
        eventually(lambda: failing_keys(node) == [("bad", 1)])


def test_batch_leaves_out_a_failing_key_also_when_it_is_due(node: Node, connect: Connect) -> None:
    """It is tried by a claim of its own, one message at a time."""
    deliver(node, "bad", "a", "bad")
    with node.connection.transaction():
        [head] = Inbox("shipping").peek(node.connection, "bad", limit=1)
        run(node.connection, recording("mailroom", "shipping", failed(head, ValueError())))
    worker = Worker(node.dsn, "shipping", write_ledger)
    worker._in_flight = InFlight(node.dsn, "mailroom", "shipping")
    batch, due = Batch(), Batch(due=True)
    for each in (batch, due):
        connection = connect()
        run(connection, worker._claiming(each, connection))
    assert [message.key for message in batch.messages] == ["a"]
    assert [message.clock for message in due.messages] == [head.clock]


@pytest.mark.slow
def test_failing_keys_use_a_pool_of_their_own_so_that_the_plans_of_others_are_kept(node: Node) -> None:
    """At each rollback psycopg forgets the statements that it has prepared on that connection."""
    node.inbox("shipping", backoff_s=0, max_attempts=5)
    deliver(node, "bad")
    on: dict[str, set[int]] = {}

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        on.setdefault(message.key, set()).add(connection.info.backend_pid)
        if message.key == "bad":
            raise ValueError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: node.rows("SELECT FROM mailroom.parked"))
        for nth in range(3):
            deliver(node, "good")
            eventually(lambda: len(ledger_keys(node)) == nth + 1)  # noqa: B023 - called before the next turn
    assert len(on["good"]) == 1
    assert len(on["bad"] - on["good"]) == 1  # the first attempt was in a batch like any other


@pytest.mark.sample(1)
@pytest.mark.parametrize("messages", [1, 2])
def test_connection_lost_at_commit_is_no_attempt(node: Node, monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    deliver(node, *"ab"[:messages])
    losses = iter(range(2))

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        write_ledger(message, connection)
        if message.clock == messages and next(losses, None) is not None:
            node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [connection.info.backend_pid])

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["a", "b"][:messages])
    assert node.rows("SELECT FROM mailroom.attempt") == failing_keys(node) == []


# A trigger that raises at COMMIT, until `tries` has counted to 3; a sequence keeps its value in rollbacks.
RAISES_AT_COMMIT = """
CREATE SEQUENCE tries;
CREATE FUNCTION raises() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('tries') < 3 THEN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER raises AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION raises()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("code", ["58030", "53100", "40001"])
async def test_error_of_the_server_at_commit_is_no_attempt_whatever_the_driver(
    node: Node, async_source: Any, code: str
) -> None:
    node.connection.execute(RAISES_AT_COMMIT.format(code=code).encode())
    deliver(node, "a")
    async with working_async(AsyncWorker(async_source, "shipping", write_ledger_async, poll_interval_s=0.01)):
        await eventually_async(lambda: ledger_keys(node) == ["a"])
    assert node.rows("SELECT FROM mailroom.attempt") == failing_keys(node) == []


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [b"BEGIN", b"COMMIT"])
@pytest.mark.parametrize("messages", [1, 2])
def test_session_ended_right_behind_a_begin_or_commit_is_no_attempt(node: Node, command: bytes, messages: int) -> None:
    """psycopg raises InternalError for that, which is neither the server's nor an OperationalError."""
    deliver(node, "first")
    keys = [*"ab"[:messages]]
    with proxied(node.dsn) as (network, dsn), working(Worker(dsn, "shipping", write_ledger, poll_interval_s=0.05)):
        eventually(lambda: ledger_keys(node) == ["first"])  # it runs
        network.end_behind(command, 3, only=b"mailroom worker shipping\0")
        deliver(node, *keys)
        eventually(lambda: ledger_keys(node) == ["first", *keys] and not network.endings)
    assert node.rows("SELECT FROM mailroom.attempt") == failing_keys(node) == []


@pytest.mark.slow
def test_cancelled_error_of_a_handler_s_own_is_its_message_s_failure(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            raise asyncio.CancelledError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["a"] and failing_keys(node) == [("bad", 1)])


async def test_cancelled_error_of_an_async_handler_s_own_is_its_message_s_failure(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")

    async def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            gone = asyncio.create_task(asyncio.sleep(NEVER_S))
            gone.cancel()
            await gone
        await write_ledger_async(message, connection)

    async with working_async(AsyncWorker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: ledger_keys(node) == ["a"] and failing_keys(node) == [("bad", 1)])


def test_key_that_is_tried_one_by_one_is_reported_as_due_until_its_last_message(node: Node) -> None:
    deliver(node, "k", "k", "k")
    with node.connection.transaction():
        run(node.connection, suspecting("mailroom", "shipping", ["k"], [3], "died"))
    told = []
    for _ in range(3):
        with node.connection.transaction():
            told.append(run(node.connection, Claims("mailroom", "shipping").claiming_due()).due_in_s)
    assert [due_in_s is not None and due_in_s <= 0 for due_in_s in told] == [True, True, False]


# -- Errors that look like the database's ----------------------------------------------------------------------------


def end_own_backend(connection: Any) -> None:
    query = "SELECT pg_terminate_backend(pg_backend_pid())"
    connection.execute(query if isinstance(connection, psycopg.Connection) else text(query))


def wait_for_a_lock_in_vain(connection: Any) -> None:
    for query in ("SET LOCAL lock_timeout = 1", "LOCK TABLE locked IN EXCLUSIVE MODE"):
        connection.execute(query if isinstance(connection, psycopg.Connection) else text(query))


@pytest.mark.slow
@pytest.mark.parametrize("error_of_its_own", [end_own_backend, wait_for_a_lock_in_vain])
def test_message_that_always_ends_in_a_transient_error_is_counted_and_the_others_go_on(
    node: Node, source: Any, connect: Connect, error_of_its_own: Callable[[Any], None]
) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=2)
    node.connection.execute("CREATE TABLE locked ()")
    connect().execute("LOCK TABLE locked")
    deliver(node, "a", "bad", "b", "bad")

    def handle(message: Message, connection: Any) -> None:
        if message.key == "bad":
            error_of_its_own(connection)
        write_ledger(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: sorted(ledger_keys(node)) == ["a", "b"] and node.rows("SELECT FROM mailroom.parked"))
    assert [attempt for (attempt,) in node.rows("SELECT attempt FROM mailroom.attempt ORDER BY id")] == [1, 2]


def test_conflict_that_comes_of_the_isolation_level_is_no_attempt(node: Node) -> None:
    """Each of the first tries has a snapshot that another transaction outruns."""
    database = psycopg.sql.Identifier(node.connection.info.dbname)
    node.connection.execute(
        psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = serializable").format(database)
    )
    node.connection.execute("CREATE TABLE counted AS SELECT 0 AS number")
    deliver(node, "k")
    calls: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.key)
        if len(calls) <= FORGIVEN + 2:
            node.connection.execute("UPDATE counted SET number = number + 1")
        connection.execute("UPDATE counted SET number = number + 1")
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.01)):
        eventually(lambda: ledger_keys(node) == ["k"])
    assert len(calls) == FORGIVEN + 3
    assert node.rows("SELECT FROM mailroom.attempt") == []


def test_conflict_of_a_handler_s_own_connection_is_an_attempt(node: Node, source: Any) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")
    calls: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.key)
        if message.key == "bad":
            raise psycopg.errors.SerializationFailure("in another database")
        write_ledger(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["a"] and failing_keys(node) == [("bad", 1)])
    assert calls.count("bad") == 1


def test_engine_of_a_handler_s_own_that_loses_its_connection_is_an_attempt(node: Node, source: Any) -> None:
    node.inbox("shipping", backoff_s=3_600)
    deliver(node, "bad", "a")
    calls: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message.key)
        if message.key == "bad":
            lost = psycopg.OperationalError("another database is away")
            raise sqlalchemy.exc.OperationalError("SELECT", {}, lost, connection_invalidated=True)
        write_ledger(message, connection)

    with working(Worker(source, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["a"] and failing_keys(node) == [("bad", 1)])
    assert calls.count("bad") == 1


def test_batch_lost_while_the_worker_stops_is_not_said_to_be_retried(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    deliver(node, "k")

    def handle(message: Message, connection: Any) -> None:
        worker.stop()
        eventually(worker._stopping.is_set)
        node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [connection.info.backend_pid])
        connection.execute("SELECT 1")

    worker = Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)
    with working(worker) as thread:
        thread.join(WITHIN_S)
    said = [each.getMessage() for each in caplog.records if each.name == "mailroom.worker"]
    assert not any("retrying" in each for each in said)
    assert node.delivered("key") == [("k",)]


class Odd(Exception):
    """A user's error that has the drivers' names, for other things."""

    def __init__(self, *arguments: object, **attributes: object) -> None:
        super().__init__(*arguments)
        vars(self).update(attributes)


ODD = [Odd(sqlstate=404), Odd(orig="shop"), Odd({"C": ["x"]})]


def test_error_that_looks_like_a_drivers_is_recorded_reported_and_fatal_as_it_is(node: Node) -> None:
    deliver(node, *(str(nth) for nth in range(len(ODD))))
    reported: list[Exception] = []

    def handle(message: Message, _connection: Any) -> None:
        raise ODD[int(message.key)]

    worker = Worker(node.dsn, "shipping", handle, fatal=(Odd,), on_error=lambda _, raised: reported.append(raised))
    with working(worker):
        eventually(lambda: len(reported) == len(ODD))
    assert reported == ODD
    recorded = "SELECT outcome, error_class, error FROM mailroom.attempt ORDER BY id"
    assert node.rows(recorded) == [("park", "Odd", f"Odd: {error}") for error in ODD]


DEALLOCATES = """
CREATE FUNCTION deallocates() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN EXECUTE 'DEALLOCATE ALL'; RETURN true; END $$
"""


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("source", ["engine", "sessionmaker", "dsn", "pool"], indirect=True)
def test_function_that_deallocates_statements_ends_no_worker_and_is_no_failure(
    node: Node, source: Any, batch: int
) -> None:
    node.connection.execute(DEALLOCATES)

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        connection.execute(text("SELECT deallocates()") if is_sqlalchemy(connection) else "SELECT deallocates()")

    def is_sqlalchemy(connection: Any) -> bool:
        return not isinstance(connection, psycopg.Connection)

    keys = [f"k{number}" for number in range(12)]
    with working(Worker(source, "shipping", handle, batch=batch, poll_interval_s=0.01)):
        for key in keys:
            deliver(node, key)
            eventually(lambda: node.delivered() == [])
    assert ledger_keys(node) == keys
    assert node.value("SELECT count(*) FROM mailroom.attempt") == 0
