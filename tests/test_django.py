"""Mailroom on Django's connection: inside `transaction.atomic()`, with the ORM, and as the connection of `mail`."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError, ProgrammingError, connections, models, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper as Sqlite

from inbox import Handlers, Inbox, Message, Parked, Rejected
from mailroom import testing
from mailroom.errors import NotInTransaction, UnsupportedConnection
from mailroom.mail import Mail, mailing
from mailroom.schema import create_inbox, current_revision, migrate
from mailroom.sql.savepoint import savepoint
from outbox import AsyncOutbox, Outbox, Outgoing, Store
from tests.support.databases import Connect
from tests.support.django import connected
from tests.support.node import Node

OUTBOX = Outbox()


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    id = models.IntegerField(primary_key=True)
    state = models.TextField()

    class Meta:
        app_label = "tests"
        db_table = "shop_order"


@pytest.fixture
def node(dsn: str, connect: Connect) -> Node:
    node = Node(dsn, connect(autocommit=True))
    node.inbox("shipping", "order.paid")
    node.connection.execute("CREATE TABLE shop_order (id int PRIMARY KEY, state text NOT NULL)")
    return node


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
    node.drain()
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
    node.drain()

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
        Outbox("no_such_schema").send(connection, "order.paid", 1)
    assert isinstance(raised.value.__cause__, psycopg.errors.UndefinedTable)
    with transaction.atomic():
        OUTBOX.send(connection, "order.paid", 1)


def test_node_is_migrated_on_django_s_connection(node: Node, connection: Any) -> None:
    with transaction.atomic():
        migrate(connection, "tenant")
        create_inbox(connection, "shipping", schema="tenant")
    assert current_revision(connection, "tenant") == current_revision(node.connection)


def test_other_connections_are_refused_by_one_error_that_says_what_to_use(connection: Any) -> None:
    other = Sqlite({**connections.settings["default"], "NAME": ":memory:"}, "other")
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
            raise Rejected("no state") from None
        return {"order": message.value}

    with transaction.atomic():
        for order in (1, 0, 2):
            OUTBOX.command(connection, "shipping", order, key="k", reply_to="answers")
        testing.deliver(connection)
        for message in Inbox("shipping").reap_any(connection):
            handlers(message, connection)
        assert [sent.headers["status"] for sent in testing.sent(connection, "answers")] == ["200", "400", "200"]
    assert sorted(Order.objects.values_list("id", flat=True)) == [1, 2]


# -- In users' tests --------------------------------------------------------------------------------------------------


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
        create_inbox(mail.connection, "shipping", max_attempts=1)
        worked = mail.drain(shipping=ship)
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
