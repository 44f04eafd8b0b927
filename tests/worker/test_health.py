"""A worker says how it is: what ends it, what keeps it from working, and that no lost connection ends it."""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import TimeoutError
from sqlalchemy.orm import sessionmaker

from inbox import AsyncWorker, Message, Worker
from mailroom import drop_inbox
from mailroom.errors import ConfigurationError, ConnectionFailed, SchemaError, UnknownInbox
from mailroom.session import backoff
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    deliver,
    failing_keys,
    is_asleep,
    ledger_keys,
    working,
    write_ledger,
    write_ledger_async,
)

pytestmark = SHIPPING_WITH_LEDGER

NOWHERE = "postgresql://nobody:s3cret@127.0.0.1:1/none"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "pause_s", lambda failures, longest_s: 0.01)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.getMessage() for each in caplog.records if each.name == "mailroom.worker" and each.levelno >= logging.ERROR
    ]


# -- Connections ------------------------------------------------------------------------------------------------------


class Doors:
    """What makes an engine's connections, until they are shut: then it raises what no database would."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.shut: Exception | None = None
        self.refused = threading.Event()

    def reopen(self) -> None:
        self.shut = None

    def open(self) -> psycopg.Connection:
        if self.shut is not None:
            self.refused.set()
            raise self.shut
        return psycopg.connect(self._dsn, application_name="doors")


@pytest.fixture
def doors(node: Node) -> Doors:
    return Doors(node.dsn)


@pytest.fixture(params=["engine", "sessionmaker"])
def small(request: pytest.FixtureRequest, node: Node) -> Iterator[tuple[Any, Engine]]:
    """A source whose pool has one connection, and its engine."""
    engine = create_engine(
        node.dsn.replace("postgresql:", "postgresql+psycopg:"), pool_size=1, max_overflow=0, pool_timeout=0.05
    )
    yield (engine if request.param == "engine" else sessionmaker(engine)), engine
    engine.dispose()


def test_pool_that_the_application_has_used_up_holds_the_worker_up_and_does_not_end_it(
    node: Node, small: tuple[Any, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    source, engine = small
    worker = Worker(source, "shipping", write_ledger, poll_interval_s=0.02, listen_dsn=node.dsn)
    with working(worker):
        deliver(node, "a")
        eventually(lambda: ledger_keys(node) == ["a"] and worker.healthy, WITHIN_S)
        [give_back] = eventually(lambda: taken(engine), WITHIN_S)
        eventually(lambda: not worker.healthy, WITHIN_S)
        assert type(worker.failure).__name__ == "TimeoutError"
        deliver(node, "b")
        give_back()
        eventually(lambda: ledger_keys(node) == ["a", "b"] and worker.healthy, WITHIN_S)
        assert worker.failure is None
    assert not worker.healthy
    assert failing_keys(node) == []
    assert "shipping: no connection, trying again (TimeoutError" in caplog.text


def taken(engine: Engine) -> list[Callable[[], None]]:
    """Take the engine's only connection, if the worker has none at this moment; return what gives it back."""
    with contextlib.suppress(TimeoutError):
        return [engine.connect().close]
    return []


def test_whatever_a_source_raises_while_it_connects_is_tried_again(
    node: Node, doors: Doors, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine("postgresql+psycopg://", creator=doors.open, pool_size=1, max_overflow=0)
    worker = Worker(engine, "shipping", write_ledger, poll_interval_s=0.02, listen_dsn=node.dsn)
    try:
        with working(worker):
            eventually(lambda: worker.healthy, WITHIN_S)
            doors.shut = KeyError("token s3cret")
            node.end_sessions("doors")
            assert doors.refused.wait(WITHIN_S)
            eventually(lambda: worker.failure is doors.shut, WITHIN_S)
            deliver(node, "a")
            doors.shut = None
            eventually(lambda: ledger_keys(node) == ["a"] and worker.healthy, WITHIN_S)
    finally:
        engine.dispose()
    assert "s3cret" not in caplog.text
    assert errors(caplog) == []


def test_failure_that_cannot_be_recorded_for_want_of_a_connection_is_recorded_later(
    node: Node, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record before the rollback fails, too; the message comes again and is counted then."""
    engine = create_engine("postgresql+psycopg://", creator=doors.open, pool_size=1, max_overflow=0)
    deliver(node, "a")
    calls: list[Message] = []

    def handle(message: Message, connection: Any) -> None:
        calls.append(message)
        if len(calls) == 1:
            doors.shut = LookupError()
            connection.invalidate()
        raise ValueError

    monkeypatch.setattr("inbox.worker.in_flight.InFlight.replace", cannot)
    worker = Worker(engine, "shipping", handle, poll_interval_s=0.02, listen_dsn=node.dsn)
    try:
        with working(worker):
            assert doors.refused.wait(WITHIN_S)
            doors.shut = None
            eventually(lambda: failing_keys(node), WITHIN_S)
    finally:
        engine.dispose()


def cannot(*_: object) -> None:
    raise psycopg.OperationalError


def test_first_connection_that_is_refused_is_tried_again(
    node: Node, doors: Doors, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine("postgresql+psycopg://", creator=doors.open)
    doors.shut = psycopg.OperationalError("connection refused")
    deliver(node, "a")
    worker = Worker(engine, "shipping", write_ledger, poll_interval_s=NEVER_S, listen_dsn=node.dsn)
    try:
        with worker:  # does not wait until it is connected
            assert (worker.healthy, type(worker.failure).__name__) == (False, "OperationalError")
            assert "no first connection" in caplog.text
            doors.reopen()
            eventually(lambda: ledger_keys(node) == ["a"] and worker.healthy, WITHIN_S)
    finally:
        engine.dispose()
    assert errors(caplog) == []


def test_worker_that_cannot_connect_stops(caplog: pytest.LogCaptureFixture) -> None:
    with Worker(NOWHERE, "shipping", write_ledger) as worker:
        assert isinstance(worker.failure, ConnectionFailed)
        assert not worker.healthy
    assert "Cannot connect" in caplog.text
    assert "s3cret" not in caplog.text


async def test_async_worker_that_cannot_connect_stops() -> None:
    async with AsyncWorker(NOWHERE, "shipping", write_ledger_async) as worker:
        assert isinstance(worker.failure, ConnectionFailed)


def test_first_connection_that_fails_by_a_fatal_class_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(NOWHERE, "shipping", write_ledger, fatal=(ConnectionFailed,))
    with pytest.raises(ConnectionFailed) as caught:
        worker.run()
    assert worker.failure is caught.value
    assert "s3cret" not in str(caught.value)
    [line] = errors(caplog)
    assert line.startswith("shipping: the worker has ended: Cannot connect")


def test_dispatcher_beside_a_worker_whose_first_connection_is_refused_tries_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[str] = []
    from dispatcher.lanes.leading import Leading

    run = Leading.run

    async def running(leading: Leading) -> None:
        if leading._role == "dispatcher":
            times.append(leading._role)
            if len(times) < 3:
                raise ConnectionFailed("Cannot connect: refused.")
        await run(leading)

    monkeypatch.setattr(Leading, "run", running)
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.05, dispatch=True)):
        node.send("shipping", key="k")
        eventually(lambda: ledger_keys(node) == ["k"], WITHIN_S)
    assert len(times) >= 3


# -- Endings ----------------------------------------------------------------------------------------------------------


def test_unknown_inbox_ends_it_at_once_and_is_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(node.dsn, "nowhere", write_ledger)
    with pytest.raises(UnknownInbox), worker:
        raise AssertionError("the block has run")
    assert isinstance(worker.failure, UnknownInbox)
    [line] = errors(caplog)
    assert "mailroom inbox create" in line


async def test_unknown_inbox_ends_an_async_worker_at_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    worker = AsyncWorker(node.dsn, "nowhere", write_ledger_async)
    with pytest.raises(UnknownInbox):
        async with worker:
            raise AssertionError("the block has run")
    assert isinstance(worker.failure, UnknownInbox)
    assert len(errors(caplog)) == 1


def drop(node: Node) -> None:
    with node.connection.transaction():
        drop_inbox(node.connection, "shipping", actor="ada")


def delete_row(node: Node) -> None:
    node.connection.execute("DELETE FROM mailroom.subscription; DELETE FROM mailroom.inbox_registry")


@pytest.mark.parametrize(
    ("takes_away", "error", "advice"),
    [(drop, UnknownInbox, "mailroom inbox create"), (delete_row, SchemaError, "Put it back from a backup")],
    ids=["dropped", "row deleted by hand"],
)
def test_inbox_that_goes_away_ends_it_with_an_error_that_says_so(
    node: Node,
    caplog: pytest.LogCaptureFixture,
    takes_away: Callable[[Node], None],
    error: type[Exception],
    advice: str,
) -> None:
    worker = Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.02)

    def serve() -> None:
        with worker:
            eventually(lambda: worker.healthy and is_asleep(node), WITHIN_S)
            takes_away(node)
            eventually(lambda: worker.failure, WITHIN_S)
            assert not worker.healthy

    with pytest.raises(error, match=advice):
        serve()
    assert len(errors(caplog)) == 1


async def test_error_that_ends_a_worker_beside_an_api_is_known_and_logged_at_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    worker = AsyncWorker(node.dsn, "shipping", write_ledger_async, poll_interval_s=0.02)

    async def serve() -> None:
        async with worker:
            await eventually_async(lambda: worker.healthy and is_asleep(node), WITHIN_S)
            # In a thread: it waits for the worker's transaction, which goes on in this event loop.
            await asyncio.to_thread(node.connection.execute, "ALTER VIEW mailroom.my_key_state RENAME TO away")
            await eventually_async(lambda: not worker.healthy and errors(caplog), WITHIN_S)

    with pytest.raises(psycopg.errors.UndefinedTable):
        await serve()
    assert 'relation "mailroom.my_key_state" does not exist' in errors(caplog)[0]


def test_error_of_the_block_goes_before_that_of_the_worker(node: Node) -> None:
    worker = Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.02)

    def serve() -> None:
        with worker:
            node.connection.execute("ALTER VIEW mailroom.my_key_state RENAME TO away")
            eventually(lambda: worker.failure, WITHIN_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()


async def test_handler_that_exits_does_not_end_the_event_loop_beside_it(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    deliver(node, "a")

    async def handle(message: Message, connection: Any) -> None:
        sys.exit(7)

    worker = AsyncWorker(node.dsn, "shipping", handle)
    with pytest.raises(SystemExit):
        async with worker:
            await eventually_async(lambda: isinstance(worker.failure, SystemExit), WITHIN_S)
    assert errors(caplog)[0].startswith("shipping: the worker has ended: SystemExit")


def test_worker_of_a_block_finishes_its_batch(node: Node) -> None:
    deliver(node, "a", "b")
    busy = threading.Event()

    def handle(message: Message, connection: Any) -> None:
        busy.set()
        eventually(worker._stopping.is_set)
        write_ledger(message, connection)

    worker = Worker(node.dsn, "shipping", handle)
    with worker:
        assert busy.wait(WITHIN_S)
    assert worker.failure is None
    assert ledger_keys(node) == ["a", "b"]


async def test_async_worker_of_a_block_that_is_cancelled_stops(node: Node) -> None:
    deliver(node, "a")

    async def serve() -> None:
        async with AsyncWorker(node.dsn, "shipping", write_ledger_async):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await eventually_async(lambda: ledger_keys(node) == ["a"], WITHIN_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_async_worker_cancelled_while_it_begins_leaves_no_task(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = asyncio.Event()

    async def never(worker: AsyncWorker) -> None:
        opening.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(AsyncWorker, "_open", never)
    task = asyncio.create_task(AsyncWorker(node.dsn, "shipping", write_ledger_async).__aenter__())
    await opening.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_message_that_fails_is_not_the_worker_s_failure(node: Node) -> None:
    def handle(message: Message, connection: Any) -> None:
        raise ValueError

    deliver(node, "a")
    with Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S) as worker:
        eventually(lambda: failing_keys(node), WITHIN_S)
        assert worker.failure is None


def test_conflict_of_a_batch_is_not_the_worker_s_failure(node: Node) -> None:
    """Only what keeps it from claiming is."""
    deliver(node, "a")
    seen: list[object] = []

    def handle(message: Message, connection: Any) -> None:
        seen.append(worker.failure)
        if len(seen) == 1:
            connection.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")
        write_ledger(message, connection)

    worker = Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)
    with worker:
        eventually(lambda: ledger_keys(node) == ["a"], WITHIN_S)
    assert seen == [None, None]


def test_sessions_that_lead_to_another_database_are_not_tried_again(node: Node, target_dsn: str) -> None:
    worker = Worker(node.dsn, "shipping", write_ledger, listen_dsn=target_dsn)
    with pytest.raises(ConfigurationError, match="listen_dsn"):
        worker.run()
    assert isinstance(worker.failure, ConfigurationError)
