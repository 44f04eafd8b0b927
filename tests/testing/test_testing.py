"""The test kit: a message all the way on the test's own connection, and nothing left after a rollback."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from inbox import Inbox, Message, Park, Parked, Retry, Skip
from mailroom import set_inbox, testing
from mailroom.errors import ConfigurationError, NotInTransaction
from mailroom.node.dead_letter import DeadLetters
from mailroom.testing.emptying import EMPTIED
from outbox import AsyncOutbox, AsyncStore, Outbox, Store
from tests.support.databases import Connect
from tests.support.drivers import opened, opened_async
from tests.support.node import Node
from tests.support.noted import END

pytestmark = [pytest.mark.inbox("shipping", "order.paid"), pytest.mark.inbox("billing")]

OUTBOX = Outbox()


@pytest.fixture
def connection(node: Node, connect: Connect) -> Iterator[psycopg.Connection[Any]]:
    """The test's own transaction, rolled back at its end."""
    with connect() as connection, connection.transaction(force_rollback=True):
        yield connection


def test_message_goes_all_the_way_and_a_rollback_leaves_nothing(node: Node, connect: Connect) -> None:
    with connect() as connection:
        OUTBOX.send(connection, "shipping", {"state": "paid"}, key="order-42")
        assert testing.deliver(connection) == 1
        [message] = Inbox("shipping").reap(connection, "order-42")
        assert message.value == {"state": "paid"}
        connection.rollback()
    assert node.waiting() == []
    assert node.delivered() == []
    assert node.value("SELECT clock_ceiling FROM mailroom.node") == 0


def test_clock_given_out_in_a_rolled_back_test_does_not_spoil_the_node(node: Node, connect: Connect) -> None:
    with connect() as connection:
        OUTBOX.send(connection, "shipping", 1)
        testing.deliver(connection)
        connection.rollback()
    node.send("shipping")
    assert node.deliver_all().delivered == 1


# What a node is, what was set up, and what others know as well: both sides of a link would no longer agree.
KEPT = (
    "alembic_version", "node", "dispatch_turn", "execute_turn", "lease", "periodic", "subscription", "inbox_registry",
    "limits", "stable", "reaped_day", "log_registry", "log_segment", "log_topic", "log_lane", "log_receipt",
    "executable_target", "executable_function", "link", "link_allowed", "link_topic",
    "transit", "origin", "receipt", "known", "bridge_out", "bridge_known", "bridge_parts", "bridge_last", "bridge_in",
    "bridge_position", "bridge_mark", "spark_batch", "spark_staging", "spark_bulk", "spark_stream", "spark_drain",
)  # fmt: skip


def test_what_tests_committed_is_taken_out_and_the_inboxes_stay(node: Node) -> None:
    """Of each of our tables it was decided whether it is emptied."""
    tables = node.rows(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace AND relkind IN ('r', 'p') "
        "AND NOT relispartition"
    )
    assert sorted((*EMPTIED, *KEPT)) == sorted(name for (name,) in tables)
    settings = "SELECT name, max_attempts, paused_at FROM mailroom.inbox_registry ORDER BY name"
    before = node.rows(settings)
    for key in ("a", "b"):
        node.send("order.paid", key=key)
    node.deliver_all()
    node.send("order.paid", key="c")
    with node.connection.transaction():
        Store().increment(node.connection, "sold", 1)
        testing.execute(node.connection)
        testing.work(node.connection, "shipping", fail)
        Inbox("billing").pause(node.connection, actor="ada")
    clock = node.value("SELECT last_value FROM mailroom.clock")
    with pytest.raises(NotInTransaction):
        testing.empty(node.connection)
    with node.connection.transaction():
        testing.empty(node.connection)
    left = [name for name in EMPTIED if node.rows(f"SELECT FROM mailroom.{name}")]
    assert left == []
    assert node.rows(settings) == before
    assert node.value("SELECT last_value FROM mailroom.clock") == clock
    node.connection.execute(
        "INSERT INTO mailroom.lease (role, holder, epoch, until, host, pid, backend_pid, backend_from, state, counts) "
        "VALUES ('dispatcher', gen_random_uuid(), 1, now() + '1 h', 'mill', 17, 0, now(), 'awake', '{}')"
    )
    with node.connection.transaction(), pytest.raises(ConfigurationError, match="dispatcher on mill pid 17 leads"):
        testing.empty(node.connection)


def fail(message: Message, connection: object) -> None:
    raise LookupError("on purpose")


def test_sent_tells_what_stands_in_the_outbox_in_the_order_sent(
    connection: psycopg.Connection[Any],
) -> None:
    later = datetime(2100, 1, 1, tzinfo=UTC)
    first = OUTBOX.send(connection, "shipping", [1], key="k", headers={"user": "u"}, deliver_at=later)
    OUTBOX.publish(connection, "order.paid", None, event_type="C")
    second = OUTBOX.command(connection, "shipping", 2, reply_to="answers", message_type="O")
    found = testing.sent(connection, "shipping")
    assert [(sent.id, sent.value, sent.kind) for sent in found] == [(first, [1], "M"), (second, 2, "C")]
    assert (found[0].key, found[0].headers, found[0].deliver_at) == ("k", {"user": "u"}, later)
    assert (found[1].headers, found[1].message_type) == ({"reply_to": "answers"}, "O")
    [event] = testing.sent(connection, "order.paid")
    assert (event.kind, event.event_type) == ("E", "C")


def test_sent_reads_a_value_written_as_json(connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', '{\"a\": [1]}')")
    [sent] = testing.sent(connection, "shipping")
    assert sent.value == {"a": [1]}


def test_what_was_delivered_is_not_sent_any_more(connection: psycopg.Connection[Any]) -> None:
    OUTBOX.send(connection, "shipping", 1)
    testing.deliver(connection)
    assert testing.sent(connection, "shipping") == []


def test_deliver_takes_everything_there_is(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json) SELECT 'shipping', to_jsonb(n) FROM generate_series(1, 2500) n"
    )
    assert testing.deliver(connection) == 2_500
    assert Inbox("shipping").backlog(connection) == 2_500


def test_deliver_decides_by_now_what_is_due_and_what_has_expired(connection: psycopg.Connection[Any]) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    later = soon + timedelta(hours=1)
    OUTBOX.send(connection, "shipping", 1, key="due", deliver_at=soon)
    OUTBOX.send(connection, "billing", 1, key="expired", deliver_at=soon, expires_at=later)
    testing.deliver(connection)
    assert Inbox("shipping").peek(connection) == []
    testing.deliver(connection, now=later)
    assert [message.key for message in Inbox("shipping").peek(connection)] == ["due"]
    assert Inbox("billing").peek(connection) == []


@pytest.mark.slow
def test_execute_applies_all_there_is_and_a_rollback_leaves_nothing(node: Node, connect: Connect) -> None:
    store = Store()
    with connect() as connection:
        connection.execute(
            "INSERT INTO mailroom.outbox_executable (operation, key, amount) "
            "SELECT 'increment', 'k' || n % 10, 1 FROM generate_series(1, 2500) n"
        )
        store.delete_range(connection, "k0", "k5")
        store.increment(connection, "k0", 7, notify="shipping")
        Store(target="gone").delete(connection, "k9")
        assert testing.execute(connection) == 2_503
        assert testing.execute(connection) == 0
        assert [store.get(connection, key) for key in ("k0", "k4", "k5", "k9")] == [7, None, 250, 250]
        assert connection.execute("SELECT topic FROM mailroom.dead_letter").fetchall() == [("gone.delete",)]
        assert testing.deliver(connection) == 1
        [told] = Inbox("shipping").reap(connection, "k0")
        assert told.value["number"] == 7
        connection.rollback()
    assert node.rows("SELECT * FROM mailroom.store") == []
    assert node.value("SELECT count(*) FROM mailroom.outbox_executable") == 0


def test_handle_all_calls_the_handler_until_nothing_is_left_also_for_what_it_sends(
    connection: psycopg.Connection[Any],
) -> None:
    seen: list[object] = []

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        seen.append(message.value)
        if message.value == 1:
            OUTBOX.send(connection, "shipping", 2, key="k")
            OUTBOX.send(connection, "billing", 3)

    OUTBOX.send(connection, "shipping", 1, key="k")
    assert testing.handle_all(connection, "shipping", handle) == 2
    assert seen == [1, 2]
    assert Inbox("billing").backlog(connection) == 1


def test_handle_all_lets_the_handler_s_exception_out(connection: psycopg.Connection[Any]) -> None:
    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        raise ValueError("no such state")

    OUTBOX.send(connection, "shipping", 1)
    with pytest.raises(ValueError, match="no such state"):
        testing.handle_all(connection, "shipping", handle)


async def nothing(message: Message, connection: object) -> None:
    raise AssertionError("not to be awaited")


class AsyncObject:
    async def __call__(self, message: Message, connection: object) -> None:
        raise AssertionError("not to be awaited")


def test_async_handler_is_refused_before_anything_is_taken(connection: psycopg.Connection[Any]) -> None:
    OUTBOX.send(connection, "shipping", 1)
    handlers: list[Any] = [nothing, partial(nothing), AsyncObject()]
    for call, name in ((testing.handle_all, "handle_all"), (testing.work, "work")):
        for handler in handlers:
            with pytest.raises(ConfigurationError, match=rf"async: use {name}_async, with an async connection\." + END):
                call(connection, "shipping", handler)
    assert testing.deliver(connection) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("call", [testing.handle_all, testing.work])
def test_handler_that_returns_something_to_await_is_refused_and_not_counted(
    connection: psycopg.Connection[Any], call: Callable[..., object]
) -> None:
    OUTBOX.send(connection, "shipping", 1)
    with pytest.raises(ConfigurationError, match=r"returned an awaitable.*use (handle_all|work)_async"):
        call(connection, "shipping", lambda message, connection: nothing(message, connection))
    assert connection.execute("SELECT count(*) FROM mailroom.key_state").fetchone() == (0,)


@pytest.mark.parametrize("call", [testing.handle_all_async, testing.work_async])
async def test_async_kit_awaits_the_handler_until_nothing_is_left(
    node: Node, call: Callable[..., Awaitable[object]]
) -> None:
    seen: list[object] = []

    async def handle(message: Message, connection: Any) -> None:
        await asyncio.sleep(0)
        seen.append(message.value)
        if message.value == 1:
            await AsyncOutbox().send(connection, "shipping", 2, key="k")

    async with await psycopg.AsyncConnection.connect(node.dsn) as connection:
        await AsyncOutbox().send(connection, "shipping", 1, key="k")
        done = await call(connection, "shipping", handle)
        assert seen == [1, 2]
        assert (done if isinstance(done, int) else len(done.handled)) == 2  # type: ignore[attr-defined]
        await AsyncOutbox().send(connection, "shipping", 3, key="k")
        with pytest.raises(
            ConfigurationError, match=r"returned no awaitable, so it is not async: use (handle_all|work)\."
        ):
            await call(connection, "shipping", lambda message, connection: None)
        await connection.rollback()


# -- What a worker would make of failures -----------------------------------------------------------------------------

REFUSED = "INSERT INTO mailroom.subscription (topic, inbox) VALUES ('1 is not a topic', 'shipping')"


class Broken(Exception):
    """What the handler raises."""


def failing(message: Message, connection: Any) -> None:
    """Send a message, which must not stay, and fail as the value says."""
    OUTBOX.send(connection, "billing", "effect", key="k")
    match message.value:
        case "park":
            raise Park("no such order")
        case "skip":
            raise Skip("not for us")
        case "retry":
            raise Retry(30)
        case "rollback":
            raise psycopg.Rollback
        case "swallow":
            execute = connection.execute if isinstance(connection, psycopg.Connection) else connection.exec_driver_sql
            with suppress(psycopg.Error, DBAPIError):
                execute(REFUSED)
        case "ok":
            return
        case _:
            raise Broken(message.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["psycopg", "Connection psycopg2", "Connection pg8000"])
def test_work_records_failures_as_a_worker_does(node: Node, kind: str) -> None:
    values = ["ok", "park", "skip", "retry", "swallow", "other", "fatal"]
    with opened(node.dsn, kind) as connection:
        set_inbox(connection, "shipping", max_attempts=2, backoff_s=10, backoff_max_s=10)
        for value in values:
            OUTBOX.send(connection, "shipping", value, key=value)
            OUTBOX.send(connection, "shipping", "ok", key=value)
        worked = testing.work(connection, "shipping", failing)
        assert [message.key for message in worked.handled] == ["ok", "ok", "skip"]
        assert {failure.message.key: (failure.outcome, failure.attempt) for failure in worked.failures} == {
            "park": ("park", 1), "skip": ("skip", 1), "retry": ("retry", 1), "swallow": ("retry", 1),
            "other": ("retry", 1), "fatal": ("retry", 1),
        }  # fmt: skip
        assert isinstance(worked.failures[-1].error, Broken)
        assert Inbox("billing").backlog(connection) == len(worked.handled)  # what the others sent is gone
        assert [parked.key for parked in Parked("shipping").keys(connection)] == ["park"]
        assert [letter.reason for letter in DeadLetters().find(connection)] == ["not for us"]
        connection.rollback()


@pytest.mark.slow
@pytest.mark.parametrize("year", [2020, 2100])
def test_work_tries_again_when_now_has_come(connection: psycopg.Connection[Any], year: int) -> None:
    set_inbox(connection, "shipping", max_attempts=3, backoff_s=10, backoff_max_s=10)
    OUTBOX.send(connection, "shipping", "always", key="k")
    now = datetime(year, 1, 1, tzinfo=UTC)
    seen: list[tuple[str, int]] = []
    for seconds in (0, 1, 11, 12, 22, 40):
        worked = testing.work(connection, "shipping", failing, now=now + timedelta(seconds=seconds))
        seen += [(failure.outcome, failure.attempt) for failure in worked.failures]
        expected = 1 if seconds < 11 else 2 if seconds < 22 else 3
        assert len(seen) == expected, seconds
    assert seen == [("retry", 1), ("retry", 2), ("park", 3)]


def test_work_of_a_key_without_back_off_goes_on_until_its_attempts_run_out(connection: psycopg.Connection[Any]) -> None:
    set_inbox(connection, "shipping", max_attempts=3, backoff_s=0, backoff_max_s=0, on_failure="skip")
    OUTBOX.send(connection, "shipping", "always", key="k")
    OUTBOX.send(connection, "shipping", "ok", key="k")
    worked = testing.work(connection, "shipping", failing)
    assert [(failure.outcome, failure.attempt) for failure in worked.failures] == [
        ("retry", 1),
        ("retry", 2),
        ("skip", 3),
    ]
    assert [message.value for message in worked.handled] == ["ok"]


def test_work_takes_fatal_classes_as_a_worker_does(connection: psycopg.Connection[Any]) -> None:
    OUTBOX.send(connection, "shipping", "always", key="k")
    [failure] = testing.work(connection, "shipping", failing, fatal=(Broken,)).failures
    assert failure.outcome == "park"


def test_rollback_of_psycopg_out_of_a_handler_is_a_failure(connection: psycopg.Connection[Any]) -> None:
    OUTBOX.send(connection, "shipping", "rollback", key="k")
    [failure] = testing.work(connection, "shipping", failing).failures
    assert isinstance(failure.error, psycopg.Rollback)


def test_work_in_a_session_rolls_its_objects_back_too(node: Node) -> None:
    class Base(DeclarativeBase):
        pass

    class Shipment(Base):
        __tablename__ = "shipments"
        id: Mapped[int] = mapped_column(primary_key=True)

    def ship(message: Message, session: Session) -> None:
        session.add(Shipment(id=message.value))  # the second of an id fails when it is flushed, after the handler

    engine = create_engine(node.dsn.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)
    with Session(engine) as session:
        Base.metadata.create_all(session.connection())
        for value in (1, 1, 2):
            OUTBOX.send(session, "shipping", value)
        worked = testing.work(session, "shipping", ship)
        assert [message.value for message in worked.handled] == [1, 2]
        assert [type(failure.error) for failure in worked.failures] == [IntegrityError]
        assert sorted(session.scalars(select(Shipment.id))) == [1, 2]
        session.rollback()


async def test_async_work_records_failures_too(node: Node) -> None:
    async def handle(message: Message, connection: Any) -> None:
        await AsyncOutbox().send(connection, "billing", "effect")
        raise Park("no such order")

    async with opened_async(node.dsn, "AsyncSession asyncpg") as session:
        await AsyncOutbox().send(session, "shipping", 1, key="k")
        [failure] = (await testing.work_async(session, "shipping", handle)).failures
        assert (failure.outcome, failure.attempt, failure.message.key) == ("park", 1, "k")
        assert await testing.sent_async(session, "billing") == []
        await session.rollback()


@pytest.mark.parametrize("call", [testing.deliver, testing.execute])
def test_kit_refuses_to_commit_by_itself(node: Node, call: Callable[..., int]) -> None:
    with pytest.raises(NotInTransaction):
        call(node.connection)


def test_kit_works_in_a_session_of_sqlalchemy(node: Node) -> None:
    engine = create_engine(node.dsn.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session:
        OUTBOX.send(session, "shipping", {"a": 1}, key="k")
        [sent] = testing.sent(session, "shipping")
        assert sent.value == {"a": 1}
        assert testing.deliver(session) == 1
        assert [message.value for message in Inbox("shipping").reap(session, "k")] == [{"a": 1}]
        Store().put(session, "k", b"v")
        Store(target="gone").delete(session, "k")
        assert testing.execute(session) == 2
        assert Store().get(session, "k") == b"v"
        session.rollback()
    engine.dispose()
    assert node.delivered() == []


async def test_kit_works_on_async_connections(node: Node) -> None:
    async with await psycopg.AsyncConnection.connect(node.dsn) as connection:
        await AsyncOutbox().send(connection, "shipping", {"a": 1}, key="k")
        [sent] = await testing.sent_async(connection, "shipping")
        assert sent.value == {"a": 1}
        assert await testing.deliver_async(connection) == 1
        await AsyncStore().increment(connection, "k")
        assert await testing.execute_async(connection) == 1
        assert await AsyncStore().get(connection, "k") == 1
        await connection.rollback()
    assert node.delivered() == []
