"""The order of an inbox: looked up once, and whoever works on the inbox goes by it."""

from typing import Any

import pytest

from inbox.by_key.claim import Share
from inbox.by_key.key_order import KeyOrder
from inbox.claims import Claims
from inbox.order import finding_order
from inbox.total_order.total_order import TotalOrder
from mailroom.order.total import IS_TOTAL
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
    assert texts.count(IS_TOTAL.at(schema=SCHEMA, inbox="shipping").sql) == 1
