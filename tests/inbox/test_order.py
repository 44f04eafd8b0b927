"""The order of an inbox: looked up once, and all work on the inbox goes by it."""

import re
from pathlib import Path
from typing import Any

import pytest

from inbox.by_key.claim import Share
from inbox.by_key.key_order import KeyOrder
from inbox.claims import Claims
from inbox.order import finding_order
from inbox.total_order.total_order import TotalOrder
from mailroom.order.traits import ORDER
from mailroom.sql.operation import Execute, Operation
from mailroom.sql.runner import run
from tests.support.node import SCHEMA, Node

ORDERS = {"key": KeyOrder, "total": TotalOrder}


def noted(operation: Operation[Any], texts: list[str]) -> Operation[Any]:
    """Run the operation, and note the statements."""
    given = None
    while True:
        try:
            step = operation.send(given)
        except StopIteration as stop:
            return stop.value
        if isinstance(step, Execute):
            texts.append(step.statement.sql)
        given = yield step


@pytest.mark.parametrize("order", ORDERS)
def test_order_is_the_one_that_the_inbox_was_made_with_and_is_looked_up_once(node: Node, order: str) -> None:
    node.inbox("shipping", order=order)
    assert run(node.connection, finding_order(SCHEMA, "shipping")) == ORDERS[order](SCHEMA, "shipping")
    claims, texts = Claims(SCHEMA, "shipping"), list[str]()
    for _ in range(3):
        with node.connection.transaction():
            run(node.connection, noted(claims.claiming(Share(1, 1, 1)), texts))
            run(node.connection, noted(claims.claiming_due(), texts))
    assert texts.count(ORDER.at(schema=SCHEMA, inbox="shipping").sql) == 1


# Another thing: a type of Python's, and a progress bar of rich's.
OTHER = re.compile(r"TypedDict, total=False|add_task\(.*total=")
ASKED = re.compile(
    r"""\b(is|has)_total|\btotal=|[=!]= ["']total["']|"order\\?" = 'total'|isinstance\(.*(Total|Key)Order"""
)
ROOT = Path(__file__).parents[2]


def test_nobody_outside_of_the_rooms_of_orders_asks_which_order_an_inbox_has() -> None:
    """An order says its traits (`mailroom.order.traits`), so another order is another row there."""
    packages = ("mailroom", "outbox", "inbox", "dispatcher", "spark_jobs", "benchmarks", "examples")
    files = {path for package in packages for end in ("py", "html") for path in (ROOT / package).rglob(f"*.{end}")}
    rooms = {path for room in ("mailroom/order", "inbox/total_order") for path in (ROOT / room).rglob("*.py")}
    assert len(files) > len(rooms) > 0
    asking = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files - rooms
        for line in path.read_text().splitlines()
        if ASKED.search(OTHER.sub("", line))
    }
    assert asking == set()
