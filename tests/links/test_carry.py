"""`mailroom.testing.carry`, and dead letters of other nodes, which come again as what they were."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy

from inbox import Inbox
from mailroom.errors import ConfigurationError
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.runner import run
from mailroom.testing import carry, carry_async, handle_all
from outbox import Outbox
from tests.links.test_fetch import ROWS
from tests.support.links import Linked, linked
from tests.support.node import Node, failing


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    made = linked(source, target, ["#"])
    made.inbox("billing", "order.paid")
    return made


@pytest.fixture
def connections(pair: Linked) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    with psycopg.connect(pair.source.dsn) as source, psycopg.connect(pair.target.dsn) as target:
        yield source, target
        source.rollback()
        target.rollback()


# -- Carry ------------------------------------------------------------------------------------------------------------


def test_message_goes_to_the_other_node_and_a_rollback_leaves_nothing(
    pair: Linked, connections: tuple[psycopg.Connection[Any], psycopg.Connection[Any]]
) -> None:
    source, target = connections
    Outbox().send(source, "order.paid", {"order": 42}, key="order-42")
    assert carry(source, target) == 1
    assert carry(source, target) == 0
    [message] = Inbox("billing").reap_any(target)
    assert (message.key, message.value, message.origin) == ("order-42", {"order": 42}, pair.source_id)
    assert message.clock > message.sent_clock
    source.rollback()
    target.rollback()
    assert (pair.receipts(), pair.target.delivered(), pair.source.rows("SELECT FROM mailroom.transit")) == ([], [], [])


@pytest.mark.slow
def test_answer_comes_back_over_a_link_the_other_way(
    pair: Linked, connections: tuple[psycopg.Connection[Any], psycopg.Connection[Any]]
) -> None:
    back = linked(pair.target, pair.source, ["order.answer"], name="south", reader="north")
    back.inbox("shop", "order.answer")
    pair.source.connection.execute("UPDATE mailroom.node SET name = 'north'")
    source, target = connections
    Outbox().send(source, "order.paid", 1, key="k")
    carry(source, target)
    handle_all(
        target, "billing", lambda message, conn: Outbox().send(conn, "order.answer", message.sent_clock, key="k")
    )
    assert carry(target, source) == 1
    [answer] = Inbox("shop").reap_any(source)
    assert answer.clock > answer.sent_clock > answer.value


def test_nodes_that_are_not_linked_are_told_what_to_do(
    pair: Linked, connections: tuple[psycopg.Connection[Any], psycopg.Connection[Any]]
) -> None:
    source, target = connections
    pair.target.connection.execute("UPDATE mailroom.node SET name = 'south'")
    with pytest.raises(ConfigurationError, match="does not read the node south"):
        carry(target, source)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_carry_works_in_sessions_of_sqlalchemy_on_other_drivers(pair: Linked, driver: str) -> None:
    engines = [
        sqlalchemy.create_engine(
            node.dsn.replace("postgresql:", f"postgresql+{driver}:", 1), poolclass=sqlalchemy.NullPool
        )
        for node in (pair.source, pair.target)
    ]
    pair.put(*({"topic": "order.paid"} | row for row in ROWS if "sent_at" not in row))
    with engines[0].connect() as source, engines[1].connect() as target:
        Outbox().send(source, "order.paid", 42, key="last")
        assert carry(source, target) == len(ROWS)
        target.commit()
    assert pair.target.value("SELECT key FROM mailroom.inbox ORDER BY clock DESC LIMIT 1") == "last"


async def test_carry_works_on_async_connections(pair: Linked) -> None:
    pair.source.send("order.paid", 42)
    async with (
        await psycopg.AsyncConnection.connect(pair.source.dsn) as source,
        await psycopg.AsyncConnection.connect(pair.target.dsn) as target,
    ):
        assert await carry_async(source, target) == 1
    assert len(pair.target.delivered()) == 1


# -- Dead letters of other nodes --------------------------------------------------------------------------------------


def requeue(pair: Linked, **options: Any) -> int:
    with pair.target.connection.transaction():
        return DeadLetters().requeue(pair.target.connection, None, actor="tests", **options)


def died(pair: Linked, *rows: dict[str, Any]) -> None:
    """Receive rows of a topic that nobody gets."""
    pair.target.allow_clocks()
    pair.put(*({"topic": "order.sent", "sent_clock": 500 + nth} | row for nth, row in enumerate(rows)))
    assert pair.take().dead == len(rows)


def test_requeued_message_keeps_its_origin_and_its_clock_there(pair: Linked) -> None:
    died(pair, {"key": "a"}, {"key": "b", "kind": "C"})
    pair.inbox("shipping", "order.sent")
    assert requeue(pair) == 2
    assert pair.target.delivered("inbox, key, origin, sent_clock") == [
        ("shipping", "a", pair.source_id, 500),
        ("shipping", "b", pair.source_id, 501),
    ]
    assert all(clock > 501 for (clock,) in pair.target.delivered("clock"))
    assert (pair.target.dead(), pair.target.waiting()) == ([], [])


def test_requeue_follows_the_subscriptions_to_that_node_only(pair: Linked) -> None:
    died(pair, {"key": "a"})
    pair.inbox("shipping", "order.sent", origin="")
    pair.inbox("late", "order.sent", since=500)
    requeue(pair)
    assert pair.target.delivered() == []
    assert pair.target.dead() == [("a", "receive", "no inbox gets this topic of that node")]
    assert pair.target.rows("SELECT origin, sent_clock FROM mailroom.dead_letter") == [(pair.source_id, 500)]


def test_requeue_goes_into_no_total_inbox(pair: Linked) -> None:
    died(pair, {"key": "a"})
    pair.inbox("ledger", "order.sent", order="total")
    requeue(pair)
    assert pair.target.dead() == [("a", "receive", "only inboxes in total order get this topic: send it anew")]
    pair.inbox("shipping", "order.sent")
    requeue(pair)
    assert pair.target.delivered("inbox") == [("shipping",)]


def test_message_that_an_inbox_skipped_comes_back_with_its_origin_and_clock(pair: Linked) -> None:
    pair.target.allow_clocks()
    pair.target.connection.execute("UPDATE mailroom.inbox_registry SET on_failure = 'skip', max_attempts = 1")
    pair.put({"key": "far", "sent_clock": 500})
    pair.take()
    pair.target.send("billing", key="near")
    pair.target.deliver()
    for _ in range(2):
        with pair.target.connection.transaction(force_rollback=True):
            message = Inbox("billing").reap_any(pair.target.connection)[0]
        with pair.target.connection.transaction():
            run(pair.target.connection, failing("billing", message, ValueError("no")))
    letters = pair.target.rows("SELECT key, stage, origin, sent_clock FROM mailroom.dead_letter ORDER BY key")
    assert letters == [("far", "reap", pair.source_id, 500), ("near", "reap", None, None)]
    assert requeue(pair) == 2
    rows = pair.target.rows(
        "SELECT key, origin = %s, sent_clock, clock FROM mailroom.inbox ORDER BY key", pair.source_id
    )
    assert rows[0][:3] == ("far", True, 500)
    assert rows[1][1] is False
    assert rows[1][2] == rows[1][3]
    pair.target.connection.execute("TRUNCATE mailroom.inbox_billing")


def test_what_a_total_inbox_skipped_is_refused(pair: Linked) -> None:
    pair.target.connection.execute(
        "INSERT INTO mailroom.dead_letter (stage, reason, inbox, message_id, topic, key, kind, message_type, value, "
        "sent_at) VALUES ('reap', 'no', 'billing', gen_random_uuid(), 't', 'k', 'M', 'U', '\\xf6', now())"
    )
    pair.target.connection.execute("UPDATE mailroom.inbox_registry SET \"order\" = 'total'")
    with pytest.raises(ConfigurationError, match="total order"):
        requeue(pair)
    assert len(pair.target.dead()) == 1
