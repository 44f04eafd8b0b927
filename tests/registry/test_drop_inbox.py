"""An inbox is dropped with all that is kept of it, and nothing is lost that nobody gave up."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from inbox import Inbox, Message, Park, Worker
from mailroom import drop_inbox, drop_inbox_async
from mailroom.errors import ConfigurationError, InvalidMessage, MailroomError, SchemaError, UnknownInbox
from mailroom.registry.exclusive import HAVE_ROWS
from mailroom.testing import work
from outbox import Outbox
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import eventually, wait_until_blocked
from tests.support.working import NEVER_S, is_asleep, working

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.inbox("shipping", "order.paid"),
    pytest.mark.inbox("billing", "order.paid"),
]

TABLES = "SELECT count(*) FROM pg_class WHERE relname = 'inbox_shipping'"


def drop(node: Node, **options: Any) -> int:
    with node.connection.transaction():
        return drop_inbox(node.connection, "shipping", actor="ada", **options)


def fails(message: Message, connection: Any) -> None:
    raise Park("no such street")


def kept(node: Node) -> dict[str, int]:
    found = {name: node.value(f"SELECT count(*) FROM mailroom.{name} WHERE inbox = 'shipping'") for name in HAVE_ROWS}
    return {name: number for name, number in found.items() if number}


def park(node: Node, dsn: str) -> None:
    """Have a key parked with the message of its failure, and a later one."""
    for _ in range(2):
        node.send("order.paid", key="k")
    node.deliver_all()
    with psycopg.connect(dsn) as connection:
        work(connection, "shipping", fails)


def test_nothing_is_left_of_it_and_others_keep_what_is_theirs(node: Node, dsn: str) -> None:
    park(node, dsn)
    assert set(kept(node)) == {"subscription", "key_state", "parked", "attempt"}
    assert drop(node, discard=True, why="nobody reads it") == 2
    assert (kept(node), node.value(TABLES)) == ({}, 0)
    assert node.rows("SELECT name FROM mailroom.inbox_registry") == [("billing",)]
    assert node.rows("SELECT actor, action, inbox, messages, reason FROM mailroom.audit") == [
        ("ada", "inbox drop", "shipping", 2, "nobody reads it")
    ]
    assert Inbox("billing").backlog(node.connection) == 2
    node.send("order.paid", key="k")
    node.deliver_all()
    assert Inbox("billing").backlog(node.connection) == 3
    node.inbox("shipping", "order.paid")
    node.send("order.paid", key="k")
    node.deliver_all()
    assert [message.key for message in Inbox("shipping").peek(node.connection)] == ["k"]


@pytest.mark.parametrize("is_parked", [False, True])
def test_inbox_with_messages_stays_unless_they_are_given_up(node: Node, dsn: str, is_parked: bool) -> None:
    if is_parked:
        park(node, dsn)
    else:
        node.send("order.paid", key="k")
        node.deliver_all()
    before = kept(node)
    with pytest.raises(SchemaError, match=r"holds . messages, . of them parked\. .*--discard"):
        drop(node)
    assert (kept(node), node.value(TABLES)) == (before, 1)
    assert drop(node, discard=True) == 1 + is_parked


def test_command_that_is_given_up_is_answered(node: Node) -> None:
    node.inbox("answers")
    with node.connection.transaction():
        id = Outbox().command(node.connection, "shipping", 1, key="k", reply_to="answers")
    node.deliver_all()
    drop(node, discard=True)
    node.deliver_all()
    [answer] = Inbox("answers").peek(node.connection)
    assert (answer.status, answer.headers["correlation"]) == (500, str(id))


def test_dead_letters_stay(node: Node, dsn: str) -> None:
    node.connection.execute("UPDATE mailroom.inbox_registry SET on_failure = 'skip', max_attempts = 1")
    node.send("order.paid", key="k")
    node.deliver_all()
    with psycopg.connect(dsn) as connection:
        work(connection, "shipping", lambda message, _: 1 / 0)
    drop(node)
    assert node.rows("SELECT stage, inbox FROM mailroom.dead_letter") == [("reap", "shipping")]


def test_total_inbox_is_dropped_with_its_bounds(node: Node) -> None:
    node.inbox("ledger", "order.paid", order="total")
    node.send("order.paid", key="k")
    node.deliver_all()
    assert node.value("SELECT count(*) FROM mailroom.stable WHERE inbox = 'ledger'") > 0
    with node.connection.transaction():
        assert drop_inbox(node.connection, "ledger", actor="ada", discard=True) == 1
    assert node.value("SELECT count(*) FROM mailroom.stable WHERE inbox = 'ledger'") == 0
    node.send("order.paid", key="k")
    assert node.deliver_all().delivered == 2


def test_rolled_back_it_is_there_as_before(node: Node) -> None:
    node.send("order.paid", key="k")
    node.deliver_all()
    with node.connection.transaction(force_rollback=True):
        drop_inbox(node.connection, "shipping", actor="ada", discard=True)
    node.send("order.paid", key="k")
    node.deliver_all()
    assert len(Inbox("shipping").peek(node.connection)) == 2


def test_delivery_that_comes_first_is_waited_for_and_seen(
    node: Node, connect: Connect, waits_for: Callable[[str], None]
) -> None:
    """Its message would be deleted unseen."""
    waits_for("60s")
    delivery = connect()
    delivery.execute("SELECT mailroom.take_dispatch_turn()")
    delivery.execute(
        "INSERT INTO mailroom.inbox "
        "(inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, value_json, sent_at) "
        "VALUES ('shipping', 1, 1, gen_random_uuid(), gen_random_uuid(), 'order.paid', 'k', 'M', 'U', '1', now())"
    )
    with ThreadPoolExecutor(1) as thread:
        dropping = thread.submit(drop, node)
        wait_until_blocked(delivery, node.connection.info.backend_pid)
        delivery.commit()
        with pytest.raises(SchemaError, match="holds 1 messages"):
            dropping.result()


def test_inbox_whose_messages_are_in_hand_is_in_use(
    node: Node, connect: Connect, waits_for: Callable[[str], None]
) -> None:
    waits_for("10ms")
    node.send("order.paid", key="k")
    node.deliver_all()
    batch = connect()
    assert len(Inbox("shipping").reap_any(batch)) == 1
    with pytest.raises(MailroomError, match=r"'shipping' is in use\. .*stop its workers"):
        drop(node, discard=True)
    batch.commit()
    waits_for("60s")
    assert drop(node) == 0


def test_worker_that_still_runs_ends_with_what_has_happened(node: Node) -> None:
    worker = Worker(node.dsn, "shipping", lambda message, connection: None, poll_interval_s=NEVER_S)

    def runs() -> None:
        with working(worker):
            eventually(lambda: is_asleep(node))
            drop(node)
            eventually(lambda: worker.failure is not None)

    with pytest.raises(UnknownInbox):
        runs()


def test_snapshot_that_may_not_see_the_last_delivery_is_refused(node: Node, connect: Connect) -> None:
    connection = connect()
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(ConfigurationError, match="READ COMMITTED"):
        drop_inbox(connection, "shipping", actor="ada")


def test_wrong_use_is_told(node: Node) -> None:
    for name, actor, error in (("nowhere", "ada", UnknownInbox), ("shipping", " ", InvalidMessage)):
        with pytest.raises(error), node.connection.transaction():
            drop_inbox(node.connection, name, actor=actor)
    assert node.value(TABLES) == 1


async def test_async_does_the_same(node: Node, dsn: str) -> None:
    node.send("order.paid", key="k")
    node.deliver_all()
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        assert await drop_inbox_async(connection, "shipping", actor="ada", discard=True) == 1
    assert node.value(TABLES) == 0


def test_command_drops_it(node: Node) -> None:
    node.send("order.paid", key="k")
    node.deliver_all()
    refused = mailroom("inbox", "drop", "shipping", dsn=node.dsn)
    assert (refused.exit_code, "--discard" in error_of(refused)) == (1, True)
    assert done("inbox", "drop", "shipping", "--discard", dsn=node.dsn) == (
        "Inbox shipping is dropped, with 1 message.\n"
    )
    told = {"inbox": "billing", "schema": "mailroom", "messages": 1}
    assert json_of("inbox", "drop", "billing", "--discard", dsn=node.dsn) == told
