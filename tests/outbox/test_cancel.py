"""Cancel: nobody gets a cancelled message, and what is not cancelled is delivered in order."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors

from dispatcher.delivery.deliver import delivering, releasing
from inbox import Inbox
from mailroom.errors import NotInTransaction
from mailroom.sql.operation import Execute, Operation, Sql
from mailroom.sql.runner import run
from outbox import AsyncOutbox, Outbox
from outbox import cancel as cancels
from outbox.cancel import cancelling
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node
from tests.support.roles import role
from tests.support.waiting import wait_until_blocked

OUTBOX = Outbox()
LATER = datetime.now(UTC) + timedelta(days=1)
IDLING = "idle_in_transaction_session_timeout"
RIGHTS = (
    "GRANT USAGE ON SCHEMA mailroom TO {role}",
    "GRANT SELECT ON mailroom.alembic_version TO {role}",
    "GRANT SELECT, DELETE ON mailroom.outbox, mailroom.scheduled, mailroom.outbox_jdbc_id TO {role}",
    "GRANT UPDATE ON mailroom.dispatch_turn TO {role}",
)


pytestmark = [pytest.mark.inbox("shipping"), pytest.mark.node_sql(CLOCKS_ALLOWED)]


@pytest.fixture(autouse=True)
def _sessions_may_idle_for_50_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds up a test between two statements of a transaction."""
    longer = re.sub(rf"\b{cancels.IDLE_S}(?= ?s')", "50", cancels.LIMIT_IDLING.template)
    monkeypatch.setattr(cancels, "LIMIT_IDLING", Sql(longer, cancels.LIMIT_IDLING.columns))


def cancel(node: Node, id: UUID, **options: bool) -> bool:
    with node.connection.transaction():
        return OUTBOX.cancel(node.connection, id, **options)


def got(node: Node) -> list[Any]:
    return [message.value for message in Inbox("shipping").peek(node.connection)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_message_in_the_outbox_and_a_scheduled_one(node: Node, dsn: str, kind: str) -> None:
    ids = [node.send("shipping", nth, key="k") for nth in range(3)]
    later = node.send("shipping", 3, key="k", deliver_at=LATER)
    node.deliver(rows=0)
    with opened(dsn, kind) as connection:
        assert OUTBOX.cancel(connection, ids[1])
        assert not OUTBOX.cancel(connection, ids[1])
        connection.commit()
        node.deliver()
        assert node.value("SELECT count(*) FROM mailroom.scheduled") == 1
        assert OUTBOX.cancel(connection, later)
        connection.commit()
        assert not OUTBOX.cancel(connection, ids[0])
    node.deliver_all(now=LATER + timedelta(days=1))
    assert got(node) == [0, 2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_each_async_driver(node: Node, dsn: str, kind: str) -> None:
    id = node.send("shipping", key="k")
    async with opened_async(dsn, kind) as connection:
        assert await AsyncOutbox().cancel(connection, id, free_once=True)
        await connection.commit()
    assert node.deliver().taken == 0


def test_unknown_and_uncommitted_messages_are_too_late(node: Node, connect: Connect) -> None:
    other = connect()
    id = OUTBOX.send(other, "shipping", 1)
    assert not cancel(node, id)
    assert not cancel(node, uuid4())
    other.commit()
    assert cancel(node, id)


def test_senders_own_message_before_its_commit(node: Node) -> None:
    with node.connection.transaction():
        assert OUTBOX.cancel(node.connection, OUTBOX.send(node.connection, "shipping", 1))
    assert node.deliver().taken == 0


def test_outside_of_a_transaction(node: Node) -> None:
    with pytest.raises(NotInTransaction):
        OUTBOX.cancel(node.connection, uuid4())


@pytest.mark.parametrize("commits", [True, False])
def test_delivery_waits_for_an_open_cancel_and_overtakes_nothing(node: Node, connect: Connect, commits: bool) -> None:
    """A plain delivery inserts copies of the rows of its snapshot, so it would deliver a row that is gone since."""
    id = node.send("shipping", 0, key="k")
    node.send("shipping", 1, key="k")
    canceller = connect()
    assert OUTBOX.cancel(canceller, id)
    with ThreadPoolExecutor(1) as thread:
        delivery = thread.submit(node.deliver)
        assert wait_until_blocked(canceller, node.connection.info.backend_pid) == [canceller.info.backend_pid]
        canceller.commit() if commits else canceller.rollback()
        assert delivery.result().taken == 2 - commits
    assert got(node) == [1] if commits else [0, 1]


def test_cancel_waits_for_an_open_delivery_and_is_too_late(node: Node, connect: Connect) -> None:
    id = node.send("shipping", 0, key="k")
    deliverer, canceller = connect(), connect()
    assert run(deliverer, delivering(SCHEMA, rows=10, max_bytes=2**25)).taken == 1
    with ThreadPoolExecutor(1) as thread:
        cancelled = thread.submit(OUTBOX.cancel, canceller, id)
        wait_until_blocked(node.connection, canceller.info.backend_pid)
        deliverer.commit()
        assert not cancelled.result()
    assert got(node) == [0]


def before_the_lock(operation: Operation[Any], act: Callable[[], object]) -> Operation[Any]:
    """Run an operation, and do something just before it takes the dispatch lock."""
    answer = None
    while True:
        try:
            step = operation.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(step, Execute) and "take_dispatch_turn" in step.statement.sql:
            act()
        answer = yield step


def test_message_that_moves_meanwhile_is_found(node: Node, connect: Connect) -> None:
    """What is scheduled gets another place in the outbox when it is due."""
    id = node.send("shipping", key="k", deliver_at=LATER)
    node.deliver()
    due = LATER + timedelta(days=1)
    moved = []
    session = connect()
    operation = cancelling(SCHEMA, id)
    assert run(session, before_the_lock(operation, lambda: moved.append(release(node, due)))) == ["k"]
    session.commit()
    assert moved == [1]
    assert node.waiting() == []


def release(node: Node, now: datetime) -> int:
    with node.connection.transaction():
        return run(node.connection, releasing(SCHEMA, now=now))


def test_at_repeatable_read_it_fails_where_the_message_was_delivered_meanwhile(node: Node, connect: Connect) -> None:
    id = node.send("shipping", key="k")
    session = connect()
    session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.execute("SELECT 1")
    node.deliver()
    with pytest.raises(errors.SerializationFailure):
        OUTBOX.cancel(session, id)


def test_session_may_not_idle_in_the_transaction(node: Node, connect: Connect) -> None:
    session = connect()
    for own, then in (("0", "50s"), ("1h", "50s"), ("40s", "40s"), ("50s", "50s")):
        session.execute(f"SET {IDLING} = '{own}'")
        session.commit()
        for id, limit in ((uuid4(), own), (node.send("shipping"), then)):
            OUTBOX.cancel(session, id)  # too late: nothing is held
            assert session.execute(f"SHOW {IDLING}").fetchall() == [(limit,)]
            session.commit()
        assert session.execute(f"SHOW {IDLING}").fetchall() == [(own,)]
        session.commit()


def test_text_of_once_is_freed_where_that_is_said(node: Node, connect: Connect) -> None:
    def send(connection: psycopg.Connection[Any]) -> UUID:
        return OUTBOX.send(connection, "shipping", 1, key="k", once="42")

    with node.connection.transaction():
        id = send(node.connection)
    assert cancel(node, id)
    with node.connection.transaction():
        assert send(node.connection) == id
    assert node.waiting() == []

    node.connection.execute("DELETE FROM mailroom.outbox_jdbc_id")
    with node.connection.transaction():
        send(node.connection)
    canceller, sender = connect(), connect()
    assert OUTBOX.cancel(canceller, id, free_once=True)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send, sender)
        wait_until_blocked(node.connection, sender.info.backend_pid)
        canceller.commit()
        assert sending.result() == id
    sender.commit()
    assert node.waiting() == ["k"]
    node.deliver()
    assert not cancel(node, id, free_once=True)
    assert node.value("SELECT count(*) FROM mailroom.outbox_jdbc_id") == 1


def test_rights_that_it_takes(node: Node) -> None:
    id = node.send("shipping")
    for left_out in (None, *RIGHTS[2:]):
        with role(node.dsn, *(grant for grant in RIGHTS if grant != left_out)) as (_, dsn), psycopg.connect(dsn) as own:
            if left_out is None:
                assert OUTBOX.cancel(own, id, free_once=True)
                own.rollback()
            else:
                with pytest.raises(errors.InsufficientPrivilege):
                    OUTBOX.cancel(own, id, free_once=True)
                own.rollback()


def test_command(node: Node, dsn: str) -> None:
    id = node.send("shipping", key="k")
    assert done("outbox", "cancel", str(id), "--actor", "ada", "--why", "a mistake", dsn=dsn) == (
        f"Message {id} of key k is cancelled.\n"
    )
    assert node.rows("SELECT actor, action, inbox, key, change, reason FROM mailroom.audit") == [
        ("ada", "outbox cancel", None, "k", str(id), "a mistake")
    ]
    again = node.send("shipping", key="k", once="42")
    assert json_of("outbox", "cancel", str(again), "--free-once", dsn=dsn) == {
        "id": str(again), "key": "k", "cancelled": True, "free_once": True,
    }  # fmt: skip
    assert "its once is free" in node.value("SELECT change FROM mailroom.audit ORDER BY id DESC LIMIT 1")
    assert node.value("SELECT count(*) FROM mailroom.outbox_jdbc_id") == 0


def test_command_that_is_too_late_says_where_the_message_is(node: Node, dsn: str) -> None:
    ids = [node.send("shipping", key="k"), node.send("nobody")]
    node.deliver()
    places = ["in inbox shipping", "a dead letter", "nowhere"]
    for id, place in zip([*ids, uuid4()], places, strict=True):
        assert f"is not cancelled: it is {place}" in error_of(mailroom("outbox", "cancel", str(id), dsn=dsn))
    assert node.value("SELECT count(*) FROM mailroom.audit") == 0
