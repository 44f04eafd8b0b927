"""A worker that gets fewer sessions than it would have works with those, and says what it does without."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from sqlalchemy import create_engine

from inbox import AsyncWorker, Message, Worker
from mailroom.errors import ConnectionFailed
from mailroom.session.home import MISSED_S, ROOM_S, Home
from mailroom.session.settings import SESSION
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    deliver,
    is_asleep,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = SHIPPING_WITH_LEDGER

POLL_S = 0.05


@pytest.fixture
def limited(node: Node, request: pytest.FixtureRequest) -> Iterator[str]:
    """A role that may have this many sessions."""
    role = f"limited_{node.value('SELECT pg_backend_pid()')}"
    with node.connection.transaction():
        for statement in (
            f"CREATE ROLE {role} LOGIN PASSWORD 'x' CONNECTION LIMIT {request.param}",
            f"GRANT USAGE ON SCHEMA mailroom TO {role}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA mailroom, public TO {role}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA mailroom, public TO {role}",
        ):
            node.connection.execute(statement.encode())
    try:
        yield make_conninfo(node.dsn, user=role, password="x")
    finally:
        eventually(lambda: not node.rows("SELECT FROM pg_stat_activity WHERE usename = %s", role))
        node.connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


@pytest.mark.slow
@pytest.mark.parametrize("limited", [1, 2, 3], indirect=True)
def test_worker_with_fewer_sessions_than_it_wants_handles_its_messages_and_says_what_is_missing(
    node: Node, limited: str, caplog: pytest.LogCaptureFixture
) -> None:
    with working(Worker(limited, "shipping", write_ledger, parallel=2, poll_interval_s=POLL_S)):
        for key in "abc":
            deliver(node, key)
            eventually(lambda key=key: key in ledger_keys(node), WITHIN_S)  # type: ignore[misc]
    assert ledger_keys(node) == ["a", "b", "c"]
    assert "too many connections for role" in caplog.text


@pytest.mark.parametrize("limited", [2], indirect=True)
def test_worker_that_would_also_dispatch_does_not_end_for_want_of_sessions(
    node: Node, limited: str, caplog: pytest.LogCaptureFixture
) -> None:
    with working(Worker(limited, "shipping", write_ledger, dispatch=True, poll_interval_s=POLL_S)):
        eventually(lambda: "dispatcher: lost the database connection" in caplog.text)
        deliver(node, "a")
        eventually(lambda: ledger_keys(node) == ["a"], WITHIN_S)


@pytest.mark.parametrize("limited", [3], indirect=True)
async def test_async_worker_does_the_same(node: Node, limited: str) -> None:
    async with working_async(AsyncWorker(limited, "shipping", write_ledger_async, poll_interval_s=POLL_S)):
        deliver(node, "a")
        await eventually_async(lambda: ledger_keys(node) == ["a"], WITHIN_S)


@pytest.mark.slow
@pytest.mark.parametrize("limited", [1], indirect=True)
def test_failing_key_is_tried_again_though_there_is_no_session_for_failing_keys(node: Node, limited: str) -> None:
    tries: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        tries.append(message.key)
        if len(tries) == 1:
            raise ValueError
        write_ledger(message, connection)

    deliver(node, "k")
    with working(Worker(limited, "shipping", handle, poll_interval_s=POLL_S)):
        eventually(lambda: ledger_keys(node) == ["k"], WITHIN_S)


@pytest.mark.slow
def test_session_that_the_server_ends_while_it_idles_is_replaced_without_a_word(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """idle_session_timeout does so, each time that nothing came for a while."""
    dsn = make_conninfo(node.dsn, options="-c idle_session_timeout=1s")
    with working(Worker(dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        for key in "abc":
            eventually(lambda: is_asleep(node) and not node.sessions("mailroom worker shipping"))
            deliver(node, key)
            eventually(lambda key=key: key in ledger_keys(node), WITHIN_S)  # type: ignore[misc]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("limited", [3], indirect=True)
@pytest.mark.parametrize("source", ["Engine", "DSN"])
def test_sessions_beside_the_batches_make_room_for_a_lane(
    node: Node, limited: str, source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an outage the others may be back first, and nobody else has gone."""
    monkeypatch.setattr("inbox.sessions.transactions.ANSWER_S", 1.0)
    monkeypatch.setattr("mailroom.session.home.MISSED_S", 1.0)
    monkeypatch.setattr("mailroom.session.listener.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("inbox.sessions.wakeup.HEARTBEAT_S", 0.1)
    strangers: list[psycopg.Connection[Any]] = []
    named = make_conninfo(limited, application_name="mailroom worker shipping")
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(named))
    given = engine if source == "Engine" else limited
    with contextlib.ExitStack() as closing:
        closing.callback(engine.dispose)
        closing.enter_context(working(Worker(given, "shipping", write_ledger, poll_interval_s=POLL_S)))
        eventually(lambda: is_asleep(node))
        eventually(lambda: node.sessions("mailroom worker in flight shipping"))

        def stranger_has_it() -> bool:
            for lane in node.sessions("mailroom worker shipping"):  # again, if the worker was faster
                node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [lane])
            with contextlib.suppress(psycopg.OperationalError):
                strangers.append(closing.enter_context(psycopg.connect(limited)))
            return bool(strangers)

        eventually(stranger_has_it, WITHIN_S)
        deliver(node, "a")
        eventually(lambda: ledger_keys(node) == ["a"], WITHIN_S)
    assert "batches get no session" in caplog.text


def test_sessions_beside_the_batches_that_an_outage_has_ended_are_back_with_the_server(node: Node) -> None:
    """What they had could be given to nobody, and without them nobody counts deaths or hears of deliveries."""
    now = [100.0]
    home = Home(node.dsn, monotonic=lambda: now[0])
    home.connect("worker in flight shipping", SESSION).close()
    home.wanted()
    now[0] += MISSED_S
    home.missed()
    with home.connect("worker in flight shipping", SESSION):
        home.missed()
        with pytest.raises(ConnectionFailed, match="given up"):
            home.check_room()
    now[0] += ROOM_S
    home.missed()
    home.check_room()
