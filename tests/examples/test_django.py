"""Mailroom on Django's connection: inside `transaction.atomic()`, with the ORM, and as the connection of `mail`."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, ProgrammingError, connections, models, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper as Sqlite

from inbox import AsyncWorker, Handlers, Inbox, Message, Parked, Reject, Requests, Worker
from mailroom import create_inbox, set_inbox, subscribe, testing
from mailroom.errors import ConfigurationError, NotInTransaction, UnsupportedConnection
from mailroom.schema import current_revision, migrate
from mailroom.sql import apart
from mailroom.sql.apart import WritesApart
from mailroom.sql.savepoint import savepoint
from mailroom.testing.mail import Mail, mailing
from outbox import AsyncOutbox, Outbox, Outgoing, Store
from tests.support.django import connected, found_in
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import working, working_async

OUTBOX = Outbox()


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    id = models.IntegerField(primary_key=True)
    state = models.TextField()

    class Meta:
        app_label = "tests"
        db_table = "shop_order"


pytestmark = [
    pytest.mark.inbox("shipping", "order.paid"),
    pytest.mark.node_sql("CREATE TABLE shop_order (id int PRIMARY KEY, state text NOT NULL)"),
]


@pytest.fixture
def connection(node: Node) -> Iterator[Any]:
    """What `django.db.connection` is in a program: the proxy of this thread's connection."""
    with connected(node.dsn) as connection:
        yield connection


def pay_and_fail(connection: Any, order: int) -> None:
    with suppress(KeyError), transaction.atomic():
        Order.objects.create(id=order, state="paid")
        OUTBOX.send(connection, "order.paid", {"order": order})
        raise KeyError


def test_message_commits_with_the_orm_or_not_at_all(node: Node, connection: Any) -> None:
    with transaction.atomic():
        Order.objects.create(id=1, state="paid")
        OUTBOX.send(connection, "order.paid", {"order": 1}, key=1)
        OUTBOX.send_many(connection, [Outgoing("order.paid", {"order": 2})])
        OUTBOX.publish(connection, "order.paid", {"order": 3})
        OUTBOX.command(connection, "shipping", {"order": 4})
        Store().increment(connection, "orders")
    pay_and_fail(connection, 5)
    with transaction.atomic():
        pay_and_fail(connection, 6)
        OUTBOX.send(connection, "order.paid", {"order": 7})
    node.deliver_all()
    rows = Inbox("shipping").peek(node.connection)
    assert [message.value["order"] for message in rows] == [1, 2, 3, 4, 7]
    assert node.value("SELECT count(*) FROM shop_order") == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda connection: OUTBOX.send(connection, "order.paid", 1),
        lambda connection: OUTBOX.send_many(connection, [Outgoing("order.paid", 1)]),
        lambda connection: Inbox("shipping").reap_any(connection),
        testing.deliver,
        lambda connection: savepoint(connection, "s"),
    ],
    ids=["send", "send_many", "reap_any", "deliver", "savepoint"],
)
def test_outside_of_atomic_it_is_refused_by_one_error_that_says_what_to_do(
    connection: Any, call: Callable[[Any], object]
) -> None:
    with pytest.raises(NotInTransaction, match=r"`with transaction\.atomic\(\): \.\.\.` \(Django\)"):
        call(connection)
    assert Inbox("shipping").backlog(connection) == 0  # what only reads needs no transaction


def test_messages_are_reaped_with_the_orm_exactly_once(node: Node, connection: Any) -> None:
    node.send("shipping", {"order": 1})
    node.deliver_all()

    def ship(state: str | None) -> None:
        with transaction.atomic():
            [message] = Inbox("shipping").reap_any(connection)
            Order.objects.create(id=message.value["order"], state=state)

    with pytest.raises(IntegrityError):
        ship(None)
    ship("shipped")
    assert Inbox("shipping").backlog(connection) == 0
    assert Order.objects.get().state == "shipped"


def test_errors_of_the_database_are_django_s(connection: Any) -> None:
    with pytest.raises(ProgrammingError) as raised, transaction.atomic():
        Outbox(schema="no_such_schema").send(connection, "order.paid", 1)
    assert isinstance(raised.value.__cause__, psycopg.errors.UndefinedTable)
    with transaction.atomic():
        OUTBOX.send(connection, "order.paid", 1)


@pytest.mark.slow
def test_node_is_migrated_on_django_s_connection(node: Node, connection: Any) -> None:
    with transaction.atomic():
        migrate(connection, schema="tenant")
        create_inbox(connection, "shipping", schema="tenant")
    assert current_revision(connection, schema="tenant") == current_revision(node.connection)


def test_other_connections_are_refused_by_one_error_that_says_what_to_use(connection: Any, tmp_path: Path) -> None:
    other = Sqlite({**connections.settings["default"], "NAME": tmp_path / "other"}, "other")  # in memory none is closed
    try:
        with pytest.raises(
            UnsupportedConnection, match=r"connection 'other' .*django\.db\.backends\.postgresql, with psycopg 3"
        ):
            OUTBOX.send(other, "order.paid", 1)
    finally:
        other.close()


async def test_async_methods_refuse_it(connection: Any) -> None:
    with pytest.raises(UnsupportedConnection, match=r"give a psycopg\.AsyncConnection"):
        await AsyncOutbox().send(connection, "order.paid", 1)


# -- Handlers ---------------------------------------------------------------------------------------------------------


def test_rejected_command_undoes_what_the_orm_did_and_the_rest_goes_on(connection: Any) -> None:
    handlers = Handlers()

    @handlers.on("shipping")
    def take(message: Message, connection: Any) -> dict[str, int]:
        try:
            Order.objects.create(id=message.value, state="new" if message.value else None)
        except IntegrityError:
            raise Reject("no state") from None
        return {"order": message.value}

    with transaction.atomic():
        for order in (1, 0, 2):
            OUTBOX.command(connection, "shipping", order, key="k", reply_to="answers")
        testing.deliver(connection)
        for message in Inbox("shipping").reap_any(connection):
            handlers(message, connection)
        assert [sent.headers["status"] for sent in testing.sent(connection, "answers")] == ["200", "400", "200"]
    assert sorted(Order.objects.values_list("id", flat=True)) == [1, 2]


# -- Workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def configured(node: Node) -> Iterator[None]:
    """Let connections that Django opens in any thread lead to the test's database."""
    before = connections.settings["default"]
    connections.settings["default"] = {**before, **found_in(node.dsn)}
    forget()
    try:
        yield
    finally:
        forget()
        connections.settings["default"] = before


def forget() -> None:
    """Have this thread's connection made anew, by the settings of then: one that is closed keeps its own."""
    with suppress(AttributeError):  # there is none
        connections["default"].close()
        del connections["default"]


def ship_by_orm(message: Message, connection: Any) -> None:
    """Fail for good, after a write, at the key `poison`."""
    Order.objects.create(id=message.value["order"], state="shipped")
    OUTBOX.send(connection, "shipped", {"order": message.value["order"]})
    if message.key == "poison":
        raise KeyError


def orders(node: Node) -> list[tuple[int]]:
    return node.rows("SELECT id FROM shop_order ORDER BY id")


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("source", ["alias", "connection"])
def test_worker_on_django_s_connection_commits_the_orm_s_writes_with_its_messages(node: Node, source: str) -> None:
    """One poison message among others: each of the others is there once, and what the poison wrote is not."""
    with node.connection.transaction():
        set_inbox(node.connection, "shipping", max_attempts=2, backoff_s=0)
        subscribe(node.connection, "shipping", "order.paid")
        for order in (11, 12, 13, 14):
            OUTBOX.send(node.connection, "shipping", {"order": order}, key="poison" if order == 13 else order)
    node.deliver_all()
    node.connection.execute("ALTER TABLE shop_order DROP CONSTRAINT shop_order_pkey")  # so that doubles would be seen
    given: Any = "django:default" if source == "alias" else connections["default"]
    with working(Worker(given, "shipping", ship_by_orm, parallel=2, poll_interval_s=0.05)):
        eventually(lambda: Parked("shipping").keys(node.connection))
        eventually(lambda: len(orders(node)) >= 3)
        eventually(lambda: node.delivered() == [])  # the next claim has moved the poison away
    assert orders(node) == [(11,), (12,), (14,)]
    assert node.value("SELECT count(*) FROM mailroom.outbox WHERE topic = 'shipped'") == 3
    connections["default"].close()


@pytest.mark.slow
@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("source", ["alias", "connection"])
def test_requests_are_asked_on_django_s_connection(node: Node, source: str) -> None:
    node.inbox("replies", expire_s=600)
    handlers = Handlers()
    handlers.on("shipping")(lambda message, _: message.value + 1)
    given: Any = "django:default" if source == "alias" else connections["default"]
    with working(Worker(node.dsn, "shipping", handlers, dispatch=True)), Requests(given, "replies") as requests:
        assert [requests.ask("shipping", number, timeout_s=WITHIN_S) for number in (1, 2)] == [2, 3]
    connections["default"].close()


@pytest.mark.slow
@pytest.mark.usefixtures("configured")
def test_conflict_of_the_orm_is_no_attempt_and_a_swallowed_error_is_one(node: Node) -> None:
    tries: list[int] = []

    def handle(message: Message, connection: Any) -> None:
        tries.append(message.value)
        if message.value == 1 and tries.count(1) == 1:
            with connections["default"].cursor() as cursor:
                cursor.execute("DO 'BEGIN RAISE serialization_failure; END'")
        if message.value == 2:
            with suppress(ValueError), transaction.atomic(savepoint=False):
                raise ValueError

    node.inbox("shipping", max_attempts=1)
    for value in (1, 2):
        node.send("shipping", value, key=value)
    node.deliver_all()
    with working(Worker("django:default", "shipping", handle, batch=1, poll_interval_s=0.05)):
        eventually(lambda: [parked.key for parked in Parked("shipping").keys(node.connection)] == ["2"])
        eventually(lambda: tries.count(1) > 1 and node.delivered() == [])
    assert node.rows("SELECT key FROM mailroom.attempt") == [("2",)]


@pytest.mark.usefixtures("configured")
def test_lost_connection_of_another_alias_is_opened_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**connections.settings["default"], "CONN_MAX_AGE": None}
    monkeypatch.setitem(connections.settings, "other", other)
    read: list[int] = []

    def handle(message: Message, connection: Any) -> None:
        with connections["other"].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            read.append(cursor.fetchone()[0])
        if len(read) == 1:
            node.value("SELECT pg_terminate_backend(%s, 60000)", read[0])

    node.inbox("shipping", backoff_s=0)
    for value in (1, 2):
        node.send("shipping", value, key="k")
    node.deliver_all()
    with working(Worker("django:default", "shipping", handle, batch=1, poll_interval_s=0.05)):
        eventually(lambda: node.delivered() == [])
    assert len(set(read)) == 2


@pytest.mark.usefixtures("configured")
def test_rejected_command_of_a_worker_undoes_what_the_orm_did(node: Node) -> None:
    handlers = Handlers()

    @handlers.on("shipping")
    def take(message: Message, connection: Any) -> dict[str, int]:
        try:
            Order.objects.create(id=message.value, state="new" if message.value else None)
        except IntegrityError:
            raise Reject("no state") from None
        return {"order": message.value}

    with node.connection.transaction():
        for order in (1, 0, 2):
            OUTBOX.command(node.connection, "shipping", order, key="k", reply_to="answers")
    node.deliver_all()
    with working(Worker("django:default", "shipping", handlers, poll_interval_s=0.05)):
        eventually(lambda: node.delivered() == [])
    assert orders(node) == [(1,), (2,)]


def test_alias_that_django_does_not_have_is_refused() -> None:
    worker = Worker("django:other", "shipping", ship_by_orm)
    with pytest.raises(ConfigurationError, match="no database 'other'"):
        worker.run()


def test_async_worker_refuses_django_s_connections_and_names_the_one_that_takes_them(connection: Any) -> None:
    async def handle(message: Message, connection: Any) -> None: ...

    for source in ("django:default", connection):
        with pytest.raises(ConfigurationError, match="Worker, with a sync handler"):
            AsyncWorker(source, "shipping", handle)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("write", ["orm", "cursor", "send", "new connection"])
def test_write_on_django_s_connection_beside_another_source_fails_the_message_and_says_what_to_do(
    node: Node, write: str
) -> None:
    """It would be committed once per attempt."""

    def handle(message: Message, connection: Any) -> None:
        assert Order.objects.count() == 0  # to read is no harm
        if write == "send":
            with transaction.atomic():
                OUTBOX.send(connections["default"], "shipping", 2)
        elif write == "cursor":
            with connections["default"].cursor() as cursor:
                cursor.execute("WITH w AS (INSERT INTO shop_order VALUES (1, 'x') RETURNING id) SELECT * FROM w")
        else:
            if write == "new connection":
                connections["default"].close()
                del connections["default"]
            Order.objects.create(id=1, state="shipped")

    node.inbox("shipping", max_attempts=2, backoff_s=0)
    node.send("shipping", 1, key="k")
    node.deliver_all()
    with working(Worker(node.dsn, "shipping", closing_django(handle), poll_interval_s=0.05)):
        eventually(lambda: Parked("shipping").keys(node.connection))
    assert orders(node) == []
    [error] = {error for (error,) in node.rows("SELECT error FROM mailroom.attempt")}
    assert "Worker('django:default', ...)" in error


def closing_django(handle: Callable[[Message, Any], None]) -> Callable[[Message, Any], None]:
    """Close what Django opened in a thread of the worker: in a program, that ends with the process."""

    def handler(message: Message, connection: Any) -> None:
        try:
            handle(message, connection)
        finally:
            connections["default"].close()

    return handler


@pytest.mark.slow
async def test_write_on_django_s_connection_in_an_async_handler_is_found_out_too(node: Node, configured: None) -> None:
    def write() -> None:
        try:
            Order.objects.create(id=1, state="shipped")
        finally:
            connections["default"].close()

    async def handle(message: Message, connection: Any) -> None:
        await sync_to_async(write)()

    node.inbox("shipping", max_attempts=1)
    node.send("shipping", 1, key="k")
    node.deliver_all()
    async with working_async(AsyncWorker(node.dsn, "shipping", handle)):
        await eventually_async(lambda: Parked("shipping").keys(node.connection))
    assert orders(node) == []


def test_write_to_another_database_of_django_s_is_the_handler_s_own_matter(
    node: Node, connection: Any, target_dsn: str
) -> None:
    with psycopg.connect(target_dsn) as other:
        other.execute("CREATE TABLE shop_order (id int PRIMARY KEY, state text NOT NULL)")
    node.send("shipping", 1, key="k")
    node.deliver_all()

    def handle(message: Message, _connection: Any) -> None:
        with connected(target_dsn):
            Order.objects.create(id=1, state="shipped")

    with working(Worker(node.dsn, "shipping", handle, poll_interval_s=0.05)):
        eventually(lambda: node.delivered() == [])
    assert orders(node) == []
    with psycopg.connect(target_dsn) as other:
        assert other.execute("SELECT count(*) FROM shop_order").fetchone() == (1,)


STATEMENTS = [
    ("SELECT 1", False),
    ("  /* why */ (SELECT 1)", False),
    ("-- why\nSELECT 1 FOR UPDATE", False),
    ("WITH a AS (SELECT 1 FOR NO KEY UPDATE) SELECT * FROM a", False),
    ("WITH a AS (DELETE FROM t RETURNING *) SELECT * FROM a", True),
    ("INSERT INTO t VALUES (1)", True),
    ("savepoint s", False),
    ("CREATE TABLE t ()", True),
    ("NOTIFY c", True),
    ("COPY t FROM STDIN", True),
]


def test_statement_that_writes_is_known_by_its_text() -> None:
    assert [(statement, apart.writes(statement)) for statement, _ in STATEMENTS] == STATEMENTS


# -- In users' tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["drain", "work", "mail"])
def test_write_on_django_s_connection_fails_in_tests_as_in_a_worker(node: Node, connection: Any, way: str) -> None:
    """The test is on psycopg's connection; green, it would hide that each attempt writes once more."""

    def ship(message: Message, _connection: Any) -> None:
        Order.objects.create(id=1, state="shipped")

    with psycopg.connect(node.dsn) as conn, mailing(conn, "mailroom") as mail:
        OUTBOX.send(conn, "shipping", 1)
        if way == "drain":
            with pytest.raises(WritesApart):
                testing.handle_all(conn, "shipping", ship)
        else:
            assert isinstance(mail, Mail)
            worked = mail.handle_all(shipping=ship) if way == "mail" else testing.work(conn, "shipping", ship)
            [failure] = worked.failures
            assert isinstance(failure.error, WritesApart)
    assert orders(node) == []


def test_mail_works_with_the_orm_and_leaves_nothing(node: Node, connection: Any) -> None:
    handed = []

    def ship(message: Message, conn: psycopg.Connection[Any]) -> None:
        handed.append(type(conn))
        conn.execute("UPDATE shop_order SET state = state || '!' WHERE id = 1")
        if message.value == "broken":
            Order.objects.create(id=2, state=None)
        if message.value == "swallowed":
            try:
                with transaction.atomic(savepoint=False):
                    raise ValueError
            except ValueError:
                pass
        Order.objects.filter(id=1).update(state="shipped")

    with mailing(connection, "mailroom") as mail:
        assert isinstance(mail, Mail)
        Order.objects.create(id=1, state="paid")
        for value in ("broken", "swallowed", "fine"):
            OUTBOX.send(mail.connection, "shipping", value, key=value)
        set_inbox(mail.connection, "shipping", max_attempts=1)
        worked = mail.handle_all(shipping=ship)
        assert [message.value for message in worked.handled] == ["fine"]
        assert [(failure.message.key, failure.outcome) for failure in worked.failures] == [
            ("broken", "park"), ("swallowed", "park"),
        ]  # fmt: skip
        assert sorted(parked.key for parked in Parked("shipping").keys(mail.connection)) == ["broken", "swallowed"]
        assert Order.objects.get().state == "shipped"
        assert handed == [psycopg.Connection] * 3  # as a worker hands it over
    assert Order.objects.count() == 0
    assert node.waiting() == []
    assert node.delivered() == []


NOT_SET_UP = """
import datetime
import django.db
from mailroom.sql.apart import in_hand
from mailroom.sql.runner import django_over
with in_hand(object(), 1, datetime.datetime.now(datetime.UTC)):
    assert django_over(object()) is None  # asked for each answer
    print("handled")
"""


@pytest.mark.slow
def test_django_that_is_imported_and_not_set_up_fails_no_message() -> None:
    """Other packages import it only to look whether it is there."""
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", NOT_SET_UP], capture_output=True, text=True, timeout=WITHIN_S, env=environment
    )
    assert (done.stdout, done.returncode) == ("handled\n", 0), done.stderr
