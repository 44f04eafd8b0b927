"""Reap: empty a full inbox, by 1 and 4 bare loops around `Inbox.reap_any`, and by 1 and 4 Worker processes.

The floor is one client that takes the same rows by DELETE..RETURNING over ranges of the clock, which locks no key and
keeps no order. Both read 1,000 rows per transaction into the same Python types and commit synchronously.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inbox import Inbox

from . import floors
from .clients import rate_of
from .measure import Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline, reap_rate
from .workload import INBOX


@contextmanager
def reaping(node: Node) -> Iterator[Callable[[], int]]:
    """`Inbox.reap_any` of 100 keys with 10 messages each per transaction, until the inbox is empty."""
    inbox = Inbox(INBOX, schema=node.schema)
    with node.connect() as connection:

        def work() -> int:
            count = 0
            while messages := inbox.reap_any(connection, max_keys=100, per_key=10):
                connection.commit()
                count += len(messages)
            connection.commit()
            return count

        yield work


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    with fresh_node(setup.dsn) as node:
        floors.sorted_insert_rate(node, setup.messages)
        values["DELETE..RETURNING"] = floors.delete_rate(node, setup.messages)
    for clients in (1, 4):
        with fresh_node(setup.dsn) as node:
            node.send(setup.messages)
            node.deliver()
            values[f"reap_any, {clients}"] = rate_of(clients, reaping, node)
        with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
            node.send(setup.messages)
            node.deliver()
            pipeline.work(clients)
            values[f"Worker, {clients}"] = reap_rate(pipeline, setup.messages)
    return values


MEASUREMENT = Measurement(
    "reap",
    "empty a full inbox",
    (
        Line("DELETE..RETURNING"),
        Line("reap_any, 1", baseline="DELETE..RETURNING"),
        Line("reap_any, 4", baseline="DELETE..RETURNING"),
        Line("Worker, 1", baseline="DELETE..RETURNING"),
        Line("Worker, 4", baseline="DELETE..RETURNING"),
    ),
    _run,
)
