"""`once=`: a message that is sent once for a text, however often its sender is run, and by however many at once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from inbox import Inbox
from mailroom import create_inbox, schema, testing
from mailroom.errors import InvalidMessage, NotInTransaction
from mailroom.sql.operation import Execute, Operation
from mailroom.sql.runner import run
from outbox import AsyncOutbox, Outbox, Outgoing
from tests.support.command import done, error_of, mailroom
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.roles import named, rights
from tests.support.waiting import wait_until_blocked

OUTBOX = Outbox()
Session = psycopg.Connection[Any]
IDS = "SELECT id FROM mailroom.outbox_jdbc_id"
# For ever: what a release sends once must be the same message to the next one.
PAID_42 = UUID("d4e0b5b4-b01c-565b-94de-348adf556624")


@pytest.fixture
def session(connect: Connect) -> Session:
    """A session in autocommit."""
    return connect(autocommit=True)


def pay(connection: Any, value: object = 1, once: str = "42", outbox: Outbox = OUTBOX) -> UUID:
    return outbox.publish(connection, "order.paid", value, once=once)


def values(connection: Session, topic: str = "order.paid") -> list[object]:
    return [message.value for message in testing.sent(connection, topic)]


# -- Once --------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_second_send_returns_the_id_and_sends_nothing(dsn: str, kind: str, session: Session) -> None:
    with opened(dsn, kind) as connection:
        sends: list[Callable[..., UUID]] = [OUTBOX.send, OUTBOX.publish, OUTBOX.command]
        for nth, send in enumerate(sends):
            ids = [send(connection, "orders", (nth + 1) * number, once=f"text {nth}") for number in (1, 100)]
            assert len(set(ids)) == 1
        assert OUTBOX.command(connection, "orders", 4, reply_to="answers", once="4", key="k", headers={"a": "b"})
        connection.commit()
    found = testing.sent(session, "orders")
    assert [(message.value, message.kind) for message in found] == [(1, "M"), (2, "E"), (3, "C"), (4, "C")]
    assert [message.key for message in found] == [*(str(message.id) for message in found[:3]), "k"]
    assert found[3].headers == {"a": "b", "reply_to": "answers"}
    assert {message.id for message in found} == {id for (id,) in session.execute(IDS)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_second_async_send_returns_the_id_and_sends_nothing(dsn: str, kind: str, session: Session) -> None:
    outbox = AsyncOutbox()
    async with opened_async(dsn, kind) as connection:
        for nth, send in enumerate((outbox.send, outbox.publish, outbox.command)):
            ids = [await send(connection, "orders", (nth + 1) * number, once=f"text {nth}") for number in (1, 100)]  # type: ignore[operator]  # of three signatures
            assert len(set(ids)) == 1
        await connection.commit()
    assert [(message.value, message.kind) for message in testing.sent(session, "orders")] == [
        (1, "M"), (2, "E"), (3, "C")
    ]  # fmt: skip


def test_id_is_that_of_topic_and_text_and_of_nothing_else(connect: Connect) -> None:
    with connect() as connection:
        ids = {
            OUTBOX.send(connection, topic, 1, once=text)
            for topic, text in (
                ("a", "b"),
                ("a", "b.c"),
                ("a.b", "c"),
                ("a", "é"),
                ("A", "b"),
                ("a", "b "),
                ("a", "\n"),
            )
        }
        assert len(ids) == 7
        assert OUTBOX.command(connection, "a", 2, once="b", key="k") in ids
        assert pay(connection) == PAID_42


def test_it_is_known_after_its_message_was_delivered_and_reaped(connect: Connect) -> None:
    with connect() as connection:
        create_inbox(connection, "shipping", ["order.paid"])
        pay(connection, 1)
        testing.deliver(connection)
        assert [message.value for message in Inbox("shipping").reap_any(connection)] == [1]
        pay(connection, 2)
        assert values(connection) == []


@pytest.mark.slow
def test_nodes_know_only_their_own(dsn: str, session: Session) -> None:
    with opened(dsn, "Connection psycopg") as connection:
        schema.migrate(connection, schema="second")
        connection.commit()
    with session.transaction():
        assert pay(session) == pay(session, outbox=Outbox(schema="second"))
    assert len(testing.sent(session, "order.paid", schema="second")) == len(values(session)) == 1


def test_plain_sends_note_no_id_and_run_the_statement_they_ran(connect: Connect) -> None:
    with connect() as connection:
        OUTBOX.send(connection, "orders", 1)
        OUTBOX.send_many(connection, [Outgoing("orders", 1)])
        assert connection.execute(IDS).fetchall() == []
        [step] = [each for each in OUTBOX._send(Outgoing("orders", 1))[0] if isinstance(each, Execute)]
        assert "outbox_jdbc" not in step.statement.sql


def test_messages_of_two_handlers_with_one_text_are_one(connect: Connect) -> None:
    with connect() as connection:
        create_inbox(connection, "shipping")
        for _ in range(2):
            OUTBOX.send(connection, "shipping", 1, headers={"saga": "s"})
        create_inbox(connection, "billing", ["order.paid"])
        testing.work(connection, "shipping", lambda _, conn: pay(conn))
        assert Inbox("billing").backlog(connection) == 1


# -- Transactions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("commits", "sent"), [(True, [1]), (False, [2])])
def test_of_two_writers_at_once_the_second_waits_and_takes_the_place_of_a_first_that_rolls_back(
    session: Session, connect: Connect, commits: bool, sent: list[int]
) -> None:
    first, second = connect(), connect()
    ids = [pay(first, 1)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pay, second, 2)
        assert wait_until_blocked(session, second.info.backend_pid) == [first.info.backend_pid]
        first.commit() if commits else first.rollback()
        ids.append(waiting.result())
    second.commit()
    assert values(session) == sent
    assert ids[0] == ids[1]


def test_rolled_back_send_leaves_neither_message_nor_id(session: Session) -> None:
    with session.transaction(force_rollback=True):
        pay(session, 1)
    assert session.execute(IDS).fetchall() == []
    with session.transaction():
        pay(session, 2)
    assert values(session) == [2]


def test_send_that_the_table_refuses_leaves_no_id(session: Session) -> None:
    session.execute("ALTER TABLE mailroom.outbox ADD CONSTRAINT strict CHECK (key <> 'bad')")
    with session.transaction(), pytest.raises(errors.CheckViolation), session.transaction():
        OUTBOX.send(session, "order.paid", 1, key="bad", once="42")
    assert session.execute(IDS).fetchall() == []


def interrupted(operation: Operation[None]) -> Operation[None]:
    """Run the operation up to its first statement, of which no answer comes back: the caller is cancelled in it."""
    for step in operation:
        yield step
        if isinstance(step, Execute):
            raise KeyboardInterrupt


def test_who_is_cancelled_in_the_send_and_commits_has_sent_both_or_neither(session: Session, connect: Connect) -> None:
    with connect() as connection:
        with pytest.raises(KeyboardInterrupt):
            run(connection, interrupted(OUTBOX._send(Outgoing("order.paid", 1), "42")[0]))
        connection.commit()
        pay(connection, 2)
    assert len(values(session)) == 1


def test_at_repeatable_read_what_another_has_sent_meanwhile_is_40001_and_may_be_tried_again(
    session: Session, connect: Connect
) -> None:
    late = connect()
    late.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    late.execute("SELECT 1")  # its snapshot
    with session.transaction():
        pay(session, 1)
    with pytest.raises(errors.SerializationFailure):
        pay(late, 2)
    late.rollback()
    pay(late, 2)
    late.commit()
    assert values(session) == [1]


# -- What is refused ---------------------------------------------------------------------------------------------------


NO_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"once": ""}, "once is empty: give the text"),
    ({"once": 42}, "once is int: give the text"),
    ({"once": b"42"}, "once is bytes"),
    ({"once": "\ud800"}, "text of once is not valid Unicode"),
    ({"once": "a\0"}, "NUL"),
    ({"once": "42", "id": UUID(int=1)}, "Give id or once, not both"),
]


def test_what_is_no_text_or_comes_with_an_id_is_refused(connect: Connect) -> None:
    with connect() as connection:
        for given, told in NO_TEXTS:
            for send in (OUTBOX.send, OUTBOX.publish, OUTBOX.command):
                with pytest.raises(InvalidMessage, match=told):
                    send(connection, "orders", 1, **given)
        assert connection.execute(IDS).fetchall() == []
        with pytest.raises(InvalidMessage, match="Topic 'no topic' is not valid"):
            OUTBOX.send(connection, "no topic", 1, once="42")


def test_lone_statement_is_refused(session: Session) -> None:
    with pytest.raises(NotInTransaction):
        pay(session)
    assert session.execute(IDS).fetchall() == []


# -- Who may -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_writer(session: Session, connect: Connect, dsn: str) -> Iterator[Session]:
    """A session of a writer's role, with what `mailroom grant` gives and nothing else."""
    role = f"{conninfo_to_dict(dsn)['dbname']}_shop_writer"[-63:]
    session.execute(f"CREATE ROLE {role}; {named(rights('writer'), role)}".encode())
    writer = connect()
    writer.execute(f"SET SESSION AUTHORIZATION {role}".encode())
    writer.commit()
    yield writer
    writer.close()
    session.execute(f"DROP OWNED BY {role}".encode())
    session.execute(f"DROP ROLE {role}".encode())


def test_role_may_send_once(session: Session, as_writer: Session) -> None:
    for value in (1, 2):
        pay(as_writer, value)
    as_writer.commit()
    assert values(session) == [1]


def test_role_can_neither_see_nor_forget_ids(as_writer: Session) -> None:
    for do in ("SELECT id FROM", "DELETE FROM"):
        with pytest.raises(errors.InsufficientPrivilege), as_writer.transaction():
            as_writer.execute(f"{do} mailroom.outbox_jdbc_id".encode())


# -- From a shell ------------------------------------------------------------------------------------------------------


def test_command_that_is_run_twice_sends_once_and_prints_the_same_id(dsn: str, session: Session) -> None:
    command = ("outbox", "send", "order.paid", "--kind", "event", "--once", "42", "--value")
    printed = [done(*command, value, dsn=dsn).strip() for value in ("1", "2")]
    assert printed == [str(PAID_42)] * 2
    assert f'"id": "{PAID_42}"' in done("--json", *command, "3", dsn=dsn)
    done("outbox", "send", "order.paid", "--once", "43", "--value", "4", dsn=dsn)
    assert values(session) == [1, 4]


def test_command_that_cannot_send_once_is_wrong_usage(dsn: str) -> None:
    for arguments, told in (
        (("--once", "", "--value", "1"), "once is empty"),
        (("--once", "42", "--csv", "-"), "--once goes with --value"),
    ):
        result = mailroom("outbox", "send", "order.paid", *arguments, dsn=dsn, stdin=b"a\n1\n")
        assert (result.exit_code, told in error_of(result)) == (2, True)
