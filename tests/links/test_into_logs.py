"""What comes from other nodes and brokers fills logs, by the same statements that fill inboxes."""

from typing import Any

import psycopg
import pytest

from dispatcher.links.receiver import Receiver
from mailroom import create_log, set_log
from mailroom.doctor.examining import examining
from mailroom.node.dead_letter import DeadLetters
from mailroom.registry.logs import listing_logs
from mailroom.sql.runner import run
from tests.logs.support import Reader, make
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node

ROWS: tuple[dict[str, Any], ...] = (
    {"key": "a", "sent_clock": 10},
    {"key": "event", "kind": "E", "sent_clock": 20},
    {"key": "command", "kind": "C", "sent_clock": 30},
    {"key": "other", "topic": "refund", "sent_clock": 40},
    {"key": "late", "expires_at": "2020-01-01 UTC", "sent_clock": 50},
    {"key": "a", "sent_clock": 60},
)
LOGGED = "SELECT key, clock, sent_clock FROM mailroom.log ORDER BY clock"


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    target.allow_clocks()
    make(target, "billing", lanes=2)
    return linked(source, target, ["#"])


def subscribe(pair: Linked, *topics: str, origin: str = "north") -> None:
    """Subscribe the log to topics of the source."""
    with pair.target.connection.transaction():
        set_log(pair.target.connection, "orders", subscribe=topics, origin=origin)


@pytest.mark.parametrize(
    ("topic", "origin", "senders"), [("order.paid", "north", None), ("order.#", "*", [None] * len(ROWS))]
)
def test_what_comes_fills_logs_in_order_of_its_clocks(
    pair: Linked, topic: str, origin: str, senders: list[None] | None
) -> None:
    """Over a link, and as a bridge takes it in."""
    target = pair.target
    pair.inbox("shipping", "order.paid")
    target.send("order.paid", key="here")
    target.deliver_all()
    pair.put(*ROWS)
    assert [each.topics for each in run(target.connection, listing_logs(SCHEMA))] == [("order.#",)]
    subscribe(pair, topic, origin=origin)
    reception = pair.take(senders=senders)
    assert (reception.outcome, reception.has_logs, reception.delivered) == ("taken", True, 3 + 4)
    logged = target.rows(LOGGED)
    assert [(key, sent) for key, _, sent in logged[1:]] == [("a", 10), ("event", 20), ("a", 60)]
    assert [key for key, _, _ in target.dead()] == ["other"]
    assert target.delivered("inbox, key") == [("shipping", key) for key in ("here", "a", "event", "command", "a")][1:]
    [(clock, rows)] = target.rows("SELECT clock, rows FROM mailroom.log_tick ORDER BY clock DESC LIMIT 1")
    assert rows == 3
    assert logged[-1][1] <= clock == target.value("SELECT last_value FROM mailroom.clock")
    target.send("order.paid", key="after")
    target.deliver_all()
    with psycopg.connect(target.dsn) as connection:
        taken = Reader(connection, "billing").take_all()
    assert sorted(each.clock for each in taken) == [clock for _, clock, _ in target.rows(LOGGED)]
    assert target.rows(LOGGED)[-1][0] == "after"
    [log] = run(target.connection, listing_logs(SCHEMA))
    assert log.topics_of == {origin: [topic]}
    with target.connection.transaction():
        set_log(target.connection, "orders", unsubscribe=topic, origin=origin)
    pair.put({"key": "gone"})
    assert pair.take(senders=senders and [None], has_logs=True).delivered == 1


def test_a_log_wakes_its_readers_and_is_no_way_of_a_fan_out(pair: Linked) -> None:
    target = pair.target
    for name in ("i1", "i2", "i3"):
        pair.inbox(name, "order.paid")
    subscribe(pair, "order.paid")
    sleeper = psycopg.connect(target.dsn, autocommit=True)
    sleeper.execute(
        "SELECT pg_advisory_lock_shared(1835100527, ('mailroom.log_orders'::regclass::oid::bigint - 2147483648)::int)"
    )
    pair.put(*({"key": key} for key in "ab"))
    reception = pair.take(partitions=2)
    sleeper.close()
    assert (reception.delivered, reception.waits, reception.woken) == (2, True, 1)
    assert [key for key, _, _ in target.rows(LOGGED)] == ["a", "b"]
    assert target.rows("SELECT DISTINCT inbox FROM mailroom.fan_out_way ORDER BY 1") == [("i1",), ("i2",), ("i3",)]


async def test_what_a_log_refuses_goes_alone_to_dead_letter_and_comes_back(pair: Linked) -> None:
    """Of another node and of this one: what is well goes into the log, though its batch had a message that was not."""
    target = pair.target
    subscribe(pair, "order.paid")
    check = "ALTER TABLE mailroom.log_orders ADD CONSTRAINT no_bad CHECK (key <> 'bad')"
    target.connection.execute(check)
    for key in ("good", "bad", "fine"):
        target.send("order.paid", key=key)
    target.deliver_all()
    pair.put(*({"key": key} for key in ("good", "bad", "fine")))
    position = pair.position()
    async with await psycopg.AsyncConnection.connect(target.dsn, autocommit=True) as connection:
        reception = await Receiver(connection, SCHEMA).receive(pair.origin, pair.batch(position), position)
    assert (reception.delivered, reception.dead) == (2, 1)
    assert [key for key, _, _ in target.rows(LOGGED)] == ["good", "fine"] * 2
    assert sorted(stage for (stage,) in target.rows("SELECT stage FROM mailroom.dead_letter")) == ["deliver", "receive"]
    target.connection.execute("ALTER TABLE mailroom.log_orders DROP CONSTRAINT no_bad")
    with target.connection.transaction():
        assert DeadLetters().requeue(target.connection, ids=None, actor="me") == 2
    target.deliver_all()
    assert [key for key, _, _ in target.rows(LOGGED)] == [*["good", "fine"] * 2, "bad", "bad"]
    assert target.value("SELECT count(*) FROM mailroom.log_tick") == 4
    assert target.dead() == []


def test_the_doctor_takes_no_subscription_of_a_log_for_one_of_nothing(node: Node) -> None:
    with node.connection.transaction():
        create_log(node.connection, "orders", ["order.#"])
        assert "M015" not in [each.id for each in run(node.connection, examining(schema=SCHEMA))]
