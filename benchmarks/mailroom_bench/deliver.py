"""Deliver: drain waiting messages from the outbox into an inbox, by the same calls as the daemon.

The floor is one sorted INSERT..SELECT of as many rows into the inbox's columns and indexes: a delivery that does not
delete, number or route. Both commit asynchronously, as the dispatcher does.
"""

import time

from . import floors
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .workload import KEYS


def deliver_rate(node: Node, messages: int, keys: int = KEYS) -> float:
    """Return the rate at which a full outbox is drained; the messages are left in the inbox."""
    node.send(messages, keys)
    start = time.monotonic()
    node.deliver()
    return messages / (time.monotonic() - start)


def _run(setup: Setup) -> Values:
    with fresh_node(setup.dsn) as node:
        floor = floors.sorted_insert_rate(node, setup.messages)
        return {"sorted INSERT..SELECT": floor, "deliver": deliver_rate(node, setup.messages)}


MEASUREMENT = Measurement(
    "deliver",
    "deliver the outbox into an inbox",
    (
        Line("sorted INSERT..SELECT"),
        Line("deliver", baseline="sorted INSERT..SELECT", bar=Bar(ratio_at_least=0.30)),
    ),
    _run,
)
