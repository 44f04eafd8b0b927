"""An inbox gets another name, and nothing that was or is sent to it is lost."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from inbox import AsyncInbox, Inbox, Message, Park, Parked, Worker
from mailroom import rename_inbox, rename_inbox_async
from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName, MailroomError, SchemaError, UnknownInbox
from mailroom.node.dead_letter import DeadLetters
from mailroom.registry.exclusive import HAVE_ROWS
from mailroom.testing import work
from outbox import Outbox
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import eventually
from tests.support.working import NEVER_S, is_asleep, working

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.inbox("shipping", "order.paid"),
    pytest.mark.inbox("billing", "order.paid"),
]


def rename(node: Node, old: str = "shipping", new: str = "dispatch", **options: Any) -> int:
    with node.connection.transaction():
        return rename_inbox(node.connection, old, new, actor="ada", **options)


def fails(message: Message, connection: Any) -> None:
    raise Park("no such street")


def kept(node: Node, inbox: str) -> dict[str, int]:
    found = {
        name: node.value(f"SELECT count(*) FROM mailroom.{name} WHERE inbox = '{inbox}'")
        for name in (*HAVE_ROWS, "dead_letter")
    }
    return {name: number for name, number in found.items() if number}


def indexes(node: Node) -> list[str]:
    found = node.rows("SELECT indexname FROM pg_indexes WHERE schemaname = 'mailroom' AND tablename = 'inbox_dispatch'")
    return sorted(name for (name,) in found)


def test_all_that_is_kept_of_it_goes_along(node: Node, dsn: str) -> None:
    for key in "kkab":
        node.send("order.paid", key=key)
    node.deliver_all()
    with psycopg.connect(dsn) as connection:
        work(connection, "shipping", fails)
    node.connection.execute("UPDATE mailroom.inbox_registry SET expire_s = 1000 WHERE name = 'shipping'")
    before, others = kept(node, "shipping"), kept(node, "billing")
    clocks = node.rows("SELECT clock FROM mailroom.inbox WHERE inbox = 'shipping' ORDER BY clock")
    settings = node.rows("TABLE mailroom.inbox_registry")

    assert rename(node, why="its team's word") == 4
    assert kept(node, "shipping") == {}
    assert kept(node, "dispatch") == before | {"subscription": 2}
    assert kept(node, "billing") == others
    assert node.rows("SELECT clock FROM mailroom.inbox WHERE inbox = 'dispatch' ORDER BY clock") == clocks
    renamed = [tuple("dispatch" if part == "shipping" else part for part in row) for row in settings]
    assert sorted(node.rows("TABLE mailroom.inbox_registry")) == sorted(renamed)
    assert indexes(node) == ["clock_of_dispatch", "key_of_dispatch"]
    assert node.rows("SELECT actor, action, inbox, messages, change, reason FROM mailroom.audit") == [
        ("ada", "inbox rename", "shipping", 4, "shipping -> dispatch", "its team's word")
    ]


def test_order_of_each_key_goes_on(node: Node, dsn: str) -> None:
    """Parked messages too come before those that are sent afterwards."""
    for number in range(3):
        node.send("order.paid", number, key="k")
    node.deliver_all()
    with psycopg.connect(dsn) as connection:
        work(connection, "shipping", fails)
    rename(node)
    node.send("order.paid", 3, key="k")
    node.deliver_all()
    with node.connection.transaction():
        assert Parked("dispatch").replay(node.connection, "k", actor="ada").messages == 4
    with node.connection.transaction():
        assert [message.value for message in Inbox("dispatch").reap(node.connection, "k")] == [0, 1, 2, 3]


def test_what_is_sent_to_the_old_name_comes_until_that_is_ended(node: Node) -> None:
    node.inbox("shop")
    with node.connection.transaction():
        for name in ("shipping", "shop"):
            Outbox().command(node.connection, name, 1, key="k", reply_to="shipping")
    rename(node)
    node.send("shipping", 2, key="k")
    node.send("dispatch", 3, key="k")
    node.deliver_all()
    assert [message.value for message in Inbox("dispatch").peek(node.connection)] == [1, 2, 3]
    assert node.dead() == []
    with node.connection.transaction():
        Inbox("dispatch").unsubscribe(node.connection, "shipping")
    node.send("shipping", 4, key="k")
    node.deliver_all()
    assert Inbox("dispatch").backlog(node.connection) == 3
    assert len(node.dead()) == 1


def test_reply_to_the_old_name_comes(node: Node, dsn: str) -> None:
    node.inbox("shop")
    with node.connection.transaction():
        Outbox().command(node.connection, "shop", 1, key="k", reply_to="shipping")
    node.deliver_all()
    rename(node)
    with psycopg.connect(dsn) as connection:
        work(connection, "shop", lambda message, connection: Outbox().reply(connection, message, "done"))
    node.deliver_all()
    [reply] = Inbox("dispatch").peek(node.connection)
    assert (reply.kind, reply.topic) == ("R", "shipping")


def test_dead_letters_are_put_back_where_their_inbox_is_now(node: Node, dsn: str) -> None:
    node.connection.execute("UPDATE mailroom.inbox_registry SET on_failure = 'skip', max_attempts = 1")
    node.send("order.paid", key="k")
    node.deliver_all()
    with psycopg.connect(dsn) as connection:
        work(connection, "shipping", lambda message, _: 1 / 0)
    rename(node)
    with node.connection.transaction():
        DeadLetters().requeue(node.connection, None, actor="ada")
    node.deliver_all()
    assert Inbox("dispatch").backlog(node.connection) == 1


def test_total_inbox_keeps_its_order(node: Node) -> None:
    node.inbox("ledger", "order.paid", order="total")
    for number in range(2):
        node.send("order.paid", number, key="k")
    node.deliver_all()
    rename(node, "ledger")
    assert indexes(node) == ["clock_of_dispatch", "key_of_dispatch", "order_of_dispatch"]
    node.send("order.paid", 2, key="k")
    node.deliver_all()
    with node.connection.transaction():
        assert [message.value for message in Inbox("dispatch").reap_any(node.connection)] == [0, 1, 2]


def test_privileges_go_along(node: Node) -> None:
    node.connection.execute("CREATE ROLE renamed_reader")
    try:
        node.connection.execute("GRANT SELECT ON mailroom.inbox_shipping TO renamed_reader")
        rename(node)
        assert node.value("SELECT has_table_privilege('renamed_reader', 'mailroom.inbox_dispatch', 'SELECT')")
    finally:
        node.connection.execute("DROP OWNED BY renamed_reader; DROP ROLE renamed_reader")


def test_it_may_be_renamed_back_and_its_old_name_be_used(node: Node) -> None:
    rename(node)
    node.inbox("shipping")
    with pytest.raises(SchemaError, match="something of the name"):
        rename(node, "dispatch", "shipping")
    with node.connection.transaction():
        Inbox("shipping").drop(node.connection, actor="ada")
    assert rename(node, "dispatch", "shipping") == 0
    node.send("shipping", key="k")
    node.deliver_all()
    assert Inbox("shipping").backlog(node.connection) == 1


def test_rolled_back_it_is_as_before(node: Node) -> None:
    node.send("order.paid", key="k")
    node.deliver_all()
    before = kept(node, "shipping")
    with node.connection.transaction(force_rollback=True):
        rename_inbox(node.connection, "shipping", "dispatch", actor="ada")
    node.send("order.paid", key="k")
    node.deliver_all()
    assert (kept(node, "shipping"), kept(node, "dispatch")) == (before, {})
    assert Inbox("shipping").backlog(node.connection) == 2


def test_what_is_left_of_another_inbox_is_not_taken_over(node: Node) -> None:
    for left in (
        "INSERT INTO mailroom.subscription (topic, inbox) VALUES ('t', 'dispatch')",
        "INSERT INTO mailroom.spark_drain (inbox, shard, directory) VALUES ('dispatch', 0, '/a')",
        "INSERT INTO mailroom.inbox_registry (name) VALUES ('dispatch')",
    ):
        with node.connection.transaction(force_rollback=True):
            node.connection.execute(left.encode())
            with pytest.raises(SchemaError, match="left of another inbox 'dispatch', in "):
                rename(node)


def test_inbox_that_spark_has_read_keeps_its_name(node: Node) -> None:
    node.connection.execute("INSERT INTO mailroom.spark_drain (inbox, shard, directory) VALUES ('shipping', 0, '/a')")
    with pytest.raises(SchemaError, match="Spark has read inbox 'shipping'"):
        rename(node)


def test_inbox_whose_messages_are_in_hand_is_in_use(
    node: Node, connect: Connect, waits_for: Callable[[str], None]
) -> None:
    waits_for("10ms")
    node.send("order.paid", key="k")
    node.deliver_all()
    batch = connect()
    assert len(Inbox("shipping").reap_any(batch)) == 1
    with pytest.raises(MailroomError, match=r"'shipping' is in use\. .*stop its workers"):
        rename(node)
    batch.commit()
    waits_for("60s")
    assert rename(node) == 0


def test_worker_that_still_runs_ends_with_what_has_happened(node: Node) -> None:
    worker = Worker(node.dsn, "shipping", lambda message, connection: None, poll_interval_s=NEVER_S)

    def runs() -> None:
        with working(worker):
            eventually(lambda: is_asleep(node))
            rename(node)
            eventually(lambda: worker.failure is not None)

    with pytest.raises(UnknownInbox):
        runs()


def test_snapshot_that_may_not_see_the_last_delivery_is_refused(node: Node, connect: Connect) -> None:
    connection = connect()
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(ConfigurationError, match="READ COMMITTED"):
        rename_inbox(connection, "shipping", "dispatch", actor="ada")


def test_wrong_use_is_told(node: Node) -> None:
    before = kept(node, "shipping")
    for old, new, actor, error in (
        ("nowhere", "dispatch", "ada", UnknownInbox),
        ("shipping", "billing", "ada", SchemaError),
        ("shipping", "shipping", "ada", SchemaError),
        ("shipping", "Dispatch!", "ada", InvalidName),
        ("shipping", "dispatch", " ", InvalidMessage),
    ):
        with pytest.raises(error), node.connection.transaction():
            rename_inbox(node.connection, old, new, actor=actor)
    assert kept(node, "shipping") == before


async def test_async_does_the_same(node: Node, dsn: str) -> None:
    node.send("order.paid", key="k")
    node.deliver_all()
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        assert await rename_inbox_async(connection, "shipping", "dispatch", actor="ada") == 1
    assert Inbox("dispatch").backlog(node.connection) == 1


def test_inbox_makes_and_ends_itself(node: Node) -> None:
    connection, inbox = node.connection, Inbox("returns")
    with connection.transaction():
        inbox.create(connection, "order.returned", max_attempts=3)
        assert inbox.subscribe(connection, ["order.returned", "order.lost"]) == ["order.lost"]
        assert inbox.unsubscribe(connection, "order.lost") == ["order.lost"]
    node.send("order.returned", key="k")
    node.deliver_all()
    with connection.transaction():
        assert inbox.rename(connection, "sent_back", actor="ada") == 1
    with connection.transaction():
        assert Inbox("sent_back").drop(connection, actor="ada", discard=True) == 1


async def test_async_inbox_makes_and_ends_itself(node: Node, dsn: str) -> None:
    inbox = AsyncInbox("returns")
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await inbox.create(connection, "order.returned", max_attempts=3)
        assert await inbox.subscribe(connection, ["order.returned", "order.lost"]) == ["order.lost"]
        assert await inbox.unsubscribe(connection, "order.lost") == ["order.lost"]
        assert await inbox.rename(connection, "sent_back", actor="ada") == 0
        assert await AsyncInbox("sent_back").drop(connection, actor="ada") == 0


def test_command_renames_it(node: Node) -> None:
    node.send("order.paid", key="k")
    node.deliver_all()
    refused = mailroom("inbox", "rename", "shipping", "billing", dsn=node.dsn)
    assert (refused.exit_code, "another name" in error_of(refused)) == (1, True)
    told = done("inbox", "rename", "shipping", "dispatch", dsn=node.dsn)
    assert told.startswith("Inbox shipping is dispatch now, with 1 message.\n")
    found = json_of("inbox", "rename", "billing", "shipping", dsn=node.dsn)
    assert found == {"inbox": "shipping", "before": "billing", "schema": "mailroom", "messages": 1}
