"""Publish: messages committed into the outbox, one per transaction by 1, 4 and 16 clients, and by COPY.

Each is compared with the bare INSERT (or COPY) of encoded rows by the same processes into a table with the outbox's
columns and primary key. Nobody delivers meanwhile, but "awake" is held, as by a dispatcher that delivers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox import Outbox

from . import floors
from .clients import rate, rate_of
from .measure import Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .workload import INBOX, outgoing


@contextmanager
def sending(node: Node, messages: int) -> Iterator[Callable[[], int]]:
    """`Outbox.send`, one message per transaction."""
    outbox = Outbox(schema=node.schema)
    ready = [(message.value, message.key) for message in outgoing(messages)]
    with node.connect() as connection:

        def work() -> int:
            for value, key in ready:
                outbox.send(connection, INBOX, value, key=key)
                connection.commit()
            return messages

        yield work


@contextmanager
def sending_many(node: Node, messages: int) -> Iterator[Callable[[], int]]:
    """`Outbox.send_many`, 1,000 messages per transaction."""
    outbox = Outbox(schema=node.schema)
    ready = list(outgoing(messages))
    with node.connect() as connection:

        def work() -> int:
            for first in range(0, messages, floors.BATCH):
                outbox.send_many(connection, ready[first : first + floors.BATCH])
                connection.commit()
            return messages

        yield work


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    with fresh_node(setup.dsn) as node, node.awake():
        floors.make_outbox(node)
        few = setup.messages // 10  # one commit each, so they take a hundred times as long
        for clients in (1, 4, 16):
            values[f"insert, {clients}"] = floors.insert_rate(node, clients, few)
            node.execute(f"TRUNCATE {node.outbox}")
            values[f"send, {clients}"] = rate_of(clients, sending, node, few // clients)
        values["COPY"] = floors.copy_rate(node, setup.messages)
        node.execute(f"TRUNCATE {node.outbox}")
        values["send_many"] = rate(sending_many, node, setup.messages)
    return values


MEASUREMENT = Measurement(
    "publish",
    "commit messages into the outbox",
    (
        Line("send, 1", baseline="insert, 1"),
        Line("send, 4", baseline="insert, 4"),
        Line("send, 16", baseline="insert, 16"),
        Line("send_many", baseline="COPY"),
    ),
    _run,
)
