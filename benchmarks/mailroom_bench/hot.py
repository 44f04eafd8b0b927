"""Hot: one key holds three times (and 0.3 times) `--messages`, all older than the messages of 1,000 other keys.

"held": another transaction has locked the hot key; "free": the worker may take it too. The measure is the rate at which
one Worker handles the other keys' messages, divided by the same without the hot key. The bar of 0.9 compares the small
and the large backlog.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from inbox import Inbox, Message

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Count, Handler, Pipeline, reap_rate
from .workload import INBOX

HOT_KEY = "hot"


def counting_others(count: Count) -> Handler:
    """Return a handler that counts the messages of every key but the hot one."""

    def handle(message: Message, _connection: psycopg.Connection[Any]) -> None:
        if message.key != HOT_KEY:
            count.add(1)

    return handle


@contextmanager
def _working_on_hot_key(node: Node) -> Iterator[None]:
    with node.connect() as connection:
        Inbox(INBOX, schema=node.schema).reap(connection, HOT_KEY, limit=1)
        yield
        connection.rollback()


def _others_rate(setup: Setup, hot: int, *, held: bool) -> float:
    with fresh_node(setup.dsn) as node:
        if hot:
            node.send_one_key(HOT_KEY, hot)
            node.deliver()
        node.send(setup.messages)
        node.deliver()
        if not held:
            return _rate(node, setup.messages)
        with _working_on_hot_key(node):
            return _rate(node, setup.messages)


def _rate(node: Node, messages: int) -> float:
    with Pipeline(node) as pipeline:
        pipeline.work(1, counting_others)
        return reap_rate(pipeline, messages)


def _run(setup: Setup) -> Values:
    large, small = 3 * setup.messages, 3 * setup.messages // 10
    values = {
        "no hot key": _others_rate(setup, 0, held=False),
        "held, small": _others_rate(setup, small, held=True),
        "held, large": _others_rate(setup, large, held=True),
        "free, small": _others_rate(setup, small, held=False),
        "free, large": _others_rate(setup, large, held=False),
    }
    for state in ("held", "free"):
        values[f"{state}, large : small"] = values[f"{state}, large"] / values[f"{state}, small"]
    return values


MEASUREMENT = Measurement(
    "hot",
    "other keys beside one with a deep backlog",
    (
        Line("no hot key"),
        Line("held, small", baseline="no hot key", bar=Bar(ratio_at_least=0.7)),
        Line("held, large", baseline="no hot key", bar=Bar(ratio_at_least=0.7)),
        Line("free, small", baseline="no hot key", bar=Bar(ratio_at_least=0.7)),
        Line("free, large", baseline="no hot key", bar=Bar(ratio_at_least=0.7)),
        Line("held, large : small", unit="", bar=Bar(at_least=0.9)),
        Line("free, large : small", unit="", bar=Bar(at_least=0.9)),
    ),
    _run,
)
