"""A delivery of the only message: `DELIVER_ONE` does what the general delivery does with it, and nothing else."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow

from dispatcher.delivery import deliverer
from dispatcher.delivery.deliver import Delivery, delivering
from dispatcher.delivery.deliverer import Deliverer
from dispatcher.delivery.floor import ScanStart
from dispatcher.delivery.single import DELIVER_ONE
from mailroom import create_log
from mailroom.sql.operation import Operation, Step, Together
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node

LATER = datetime.now(UTC) + timedelta(hours=1)

# `billing` is reached in four ways, and `far` wants messages of another node only.
pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.node_sql(
        CLOCKS_ALLOWED,
        "INSERT INTO mailroom.subscription (topic, inbox, origin) VALUES ('billing', 'billing', '*'), "
        "('billing', 'far', 'south'), ('order.#', 'far', 'south')",
    ),
    pytest.mark.inbox("shipping"),
    pytest.mark.inbox("billing", "billing", "billing.#", "order.paid"),
    pytest.mark.inbox("audit", "order.*"),
    pytest.mark.inbox("far"),
]


def sending(topic: str, **fields: Any) -> Callable[[Node], object]:
    return lambda node: node.send(topic, 1, **fields)


def all_of(*changes: Callable[[Node], object]) -> Callable[[Node], object]:
    return lambda node: [change(node) for change in changes]


def having(statement: str) -> Callable[[Node], object]:
    return lambda node: node.connection.execute(statement.encode())


def with_a_log(node: Node) -> None:
    with node.connection.transaction():
        create_log(node.connection, "orders", ["order.#"], lanes=2)


def with_a_total_inbox(node: Node) -> None:
    node.inbox("ordered", "shipping", order="total")


PLAIN = {
    "none": lambda _: None,
    "by the name": sending("shipping", key="k", headers={"user": "u"}),
    "a reply": sending("shipping", key="k", kind="R"),
    "a command": sending("shipping", key="k", kind="C"),
    "to one inbox in many ways": sending("billing"),
    "a command in many ways": sending("billing", kind="C"),
    "an event": sending("order.paid", kind="E"),
    "to a pattern only": sending("order.sent"),
    "after another clock": sending("shipping", after_clock=500),
    "above the ceiling": sending("shipping", after_clock=2_000_000),
    "none above the ceiling": having("SELECT setval('mailroom.clock', 2000000)"),
}
MANY = "more inboxes than there is room for"
SHIPPING = sending("shipping", key="k")
NOT_PLAIN = {
    "two": all_of(SHIPPING, SHIPPING),
    "one for later": sending("shipping", deliver_at=LATER),
    "one that expires": sending("shipping", expires_at=LATER),
    "to nobody": sending("nowhere"),
    "an event to nobody": sending("shipping", kind="E"),
    "a command to a pattern": sending("order.sent", kind="C"),
    "a command to two": all_of(lambda node: node.inbox("refunds", "order.paid"), sending("order.paid", kind="C")),
    "a link": all_of(having("INSERT INTO mailroom.link (name) VALUES ('south')"), SHIPPING),
    "a log": all_of(with_a_log, sending("order.paid")),
    "a total inbox": all_of(with_a_total_inbox, SHIPPING),
    MANY: sending("order.paid"),
}


def noted(operation: Operation[Delivery], steps: list[Step]) -> Operation[Delivery]:
    given: Any = None
    while True:
        try:
            step = operation.send(given)
        except StopIteration as stop:
            delivery: Delivery = stop.value
            return delivery
        steps.append(step)
        given = yield step


# What a delivery leaves, and which clock it stands at; but no times, and no numbers that are given out once.
LEFT = """
SELECT 'inbox', to_jsonb(i) - 'delivered_at' FROM mailroom.inbox AS i
UNION ALL SELECT 'outbox', to_jsonb(o) FROM mailroom.outbox AS o
UNION ALL SELECT 'scheduled', to_jsonb(s) FROM mailroom.scheduled AS s
UNION ALL SELECT 'dead', to_jsonb(d) - '{id,failed_at}'::text[] FROM mailroom.dead_letter AS d
UNION ALL SELECT 'log', to_jsonb(l) - 'delivered_at' FROM mailroom.log AS l
UNION ALL SELECT 'stable', to_jsonb(t) FROM mailroom.stable AS t
UNION ALL SELECT 'fan_out', to_jsonb(f) FROM mailroom.fan_out AS f
UNION ALL SELECT 'clock', to_jsonb(last_value) FROM mailroom.clock
ORDER BY 1, 2
"""


def tried(node: Node, *, is_single: bool, partitions: int | None) -> tuple[Delivery, list[TupleRow], list[Step]]:
    """Deliver and undo it, the clock too; return the delivery, what it left, and its steps."""
    steps: list[Step] = []
    clock = node.value("SELECT last_value FROM mailroom.clock")
    with node.connection.transaction(force_rollback=True):
        one = delivering(SCHEMA, rows=10, max_bytes=2**25, is_single=is_single, partitions=partitions)
        delivery = run(node.connection, noted(one, steps))
        left = node.rows(LEFT)
    node.value("SELECT setval('mailroom.clock', %s)", clock)
    return replace(delivery, inboxes=sorted(delivery.inboxes)), left, steps


def test_the_only_message_is_delivered_as_among_others_and_anything_else_is_left_to_the_general_delivery(
    node: Node, connect: Connect
) -> None:
    sleeper = connect(autocommit=True)
    sleeper.execute(
        "SELECT pg_advisory_lock_shared(1835100527, (r::oid::bigint - 2147483648)::integer) "
        "FROM unnest('{mailroom.inbox_billing,mailroom.inbox_shipping}'::regclass[]) AS r"
    )
    clock = node.value("SELECT last_value FROM mailroom.clock")
    for name, change in (PLAIN | NOT_PLAIN).items():
        partitions = 1 if name == MANY else None
        with node.connection.transaction(force_rollback=True):
            change(node)
            general = tried(node, is_single=False, partitions=partitions)
            alone = tried(node, is_single=True, partitions=partitions)
        node.value("SELECT setval('mailroom.clock', %s)", clock)
        assert alone[:2] == general[:2], name
        assert [isinstance(step, Together) for step in alone[2]][:1] == [True], name
        assert (len(alone[2]) == 1) is (name in PLAIN), name


def test_it_is_not_tried_where_it_could_not_do(node: Node) -> None:
    node.send("shipping")
    hints: list[dict[str, Any]] = [
        {"has_links": True}, {"has_bounds": True}, {"has_logs": True}, {"is_plain": False}, {"rows": 1},
        {"start": ScanStart(0, ((0, 1),))},
    ]  # fmt: skip
    for each in hints:
        steps: list[Step] = []
        with node.connection.transaction(force_rollback=True):
            one = delivering(SCHEMA, **({"rows": 10, "max_bytes": 2**25} | each), is_single=True)
            assert run(node.connection, noted(one, steps)).taken == 1
        ran = [single for step in steps for single in (step.steps if isinstance(step, Together) else (step,))]
        assert DELIVER_ONE.at(schema=SCHEMA) not in [getattr(single, "statement", None) for single in ran], each


async def test_it_is_tried_once_deliveries_of_one_message_are_usual(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def noting(*args: Any, is_single: bool, **hints: Any) -> Operation[Delivery]:
        asked.append(is_single)
        return delivering(*args, is_single=is_single, **hints)

    monkeypatch.setattr(deliverer, "delivering", noting)
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        lane = Deliverer(connection, SCHEMA)
        for sent in (2, 1, 1, 1, 0, 1, 2, 1, 1, 1, 1):
            for _ in range(sent):
                await asyncio.to_thread(node.send, "shipping")
            assert (await lane.deliver()).taken == sent
    assert asked[-10:] == [False, False, False, True, True, True, False, False, False, True]
    clocks = [clock for (clock,) in node.rows("SELECT clock FROM mailroom.inbox_shipping ORDER BY clock")]
    assert clocks == [*range(clocks[0], clocks[0] + 12)]
