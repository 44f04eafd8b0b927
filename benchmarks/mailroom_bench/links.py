"""Links: what a delivery costs the server if its messages go to another node, and not into an inbox of this one.

The measure is the processor time of the backend that delivers, per message, over a session like the dispatcher's; so
the server must be on this machine. The batches are full ones. The first of them, which also plans the statement, is not
counted. "beside a link" delivers into the inbox while a link waits for other topics.

What was stamped is then read by another node, in full batches: "fetch" is what the source's server takes for it, with
the search for the batch's end; "receive" the target's server; "all of it" these, the stamp, and the process between the
two servers.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psycopg

from dispatcher.delivery.deliver import DELIVERY_SESSION, delivering
from dispatcher.delivery.deliverer import BATCH_ROWS, MAX_BYTES
from dispatcher.links.at_source.bounds import START, Position, bounding
from dispatcher.links.at_source.fetch import fetching
from dispatcher.links.receive import RECEIVING_SESSION as RECEIVING
from dispatcher.links.receive import receiving
from mailroom import subscribe
from mailroom.sql.runner import run

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .processor import missing, used_s
from .workload import INBOX

STAYS, LEAVES = "bench.stays", "bench.leaves"
WARM_UP = 1_000


def _allow_link(node: Node) -> None:
    node.execute(
        f"INSERT INTO {node.schema}.link (name) VALUES ('reader')",
        f"INSERT INTO {node.schema}.link_topic (topic, link) SELECT '{LEAVES}', number FROM {node.schema}.link",
    )


@contextmanager
def _session(node: Node, settings: Mapping[str, str]) -> Iterator[psycopg.Connection]:
    with node.connect(autocommit=True) as session:
        for name, value in settings.items():
            session.execute(f"SET {name} = '{value}'".encode())
        yield session


def _processor_us(processes: Sequence[int]) -> list[float]:
    return [1e6 * used_s(pid) for pid in processes]


def _deliver(node: Node, session: psycopg.Connection, messages: int) -> None:
    taken = 0
    while taken < messages:
        with session.transaction():
            taken += run(session, delivering(node.schema, rows=BATCH_ROWS, max_bytes=MAX_BYTES)).taken


def _deliver_us(setup: Setup, topic: str, *, linked: bool) -> float:
    """Return the server's processor time per message, in microseconds, of delivering a full outbox."""
    with fresh_node(setup.dsn) as node:
        with node.connect() as connection:
            subscribe(connection, INBOX, STAYS, schema=node.schema)
        if linked:
            _allow_link(node)
        node.execute(f"UPDATE {node.schema}.node SET clock_ceiling = 1000000000", "ANALYZE")
        with _session(node, DELIVERY_SESSION) as session:
            for messages in (WARM_UP, setup.messages):
                node.send(messages, topic=topic)
                [before] = _processor_us([session.info.backend_pid])
                _deliver(node, session, messages)
                [after] = _processor_us([session.info.backend_pid])
    return (after - before) / setup.messages


def _read(source: Node, at_source: psycopg.Connection, target: Node, at_target: psycopg.Connection) -> None:
    """Fetch and receive what the source's only link has, in full batches."""
    position: Position | None = START
    with at_target.cursor() as cursor:
        cursor.execute(
            f"SELECT last, last_id, stamped_at, sent_clock FROM {target.schema}.receipt "
            "ORDER BY last DESC LIMIT 1".encode()
        )
        if (row := cursor.fetchone()) is not None:
            position = Position(*row)
    while position is not None:
        bounds = run(at_source, bounding(source.schema, 1, position))
        if bounds.last is None:
            return
        batch = run(at_source, fetching(source.schema, 1, after=position.seq, to=bounds.last))
        with at_target.transaction():
            position = run(at_target, receiving(target.schema, 1, batch, position)).position


def _read_us(setup: Setup) -> list[float]:
    """Return the processor time per message of the source's server, the target's, and the process between them."""
    with fresh_node(setup.dsn) as source, fresh_node(setup.dsn) as target:
        _allow_link(source)
        target.execute(
            f"INSERT INTO {target.schema}.origin (name, id, link) VALUES ('source', gen_random_uuid(), 1)",
            f"INSERT INTO {target.schema}.subscription (topic, inbox, origin) VALUES ('{LEAVES}', '{INBOX}', 'source')",
        )
        for node in (source, target):
            node.execute(f"UPDATE {node.schema}.node SET clock_ceiling = 1000000000", "ANALYZE")
        with _session(source, DELIVERY_SESSION) as at_source, _session(target, RECEIVING) as at_target:
            processes = [at_source.info.backend_pid, at_target.info.backend_pid, os.getpid()]
            for messages in (WARM_UP, setup.messages):
                source.send(messages, topic=LEAVES)
                _deliver(source, at_source, messages)
                before = _processor_us(processes)
                _read(source, at_source, target, at_target)
                after = _processor_us(processes)
    return [(now - then) / setup.messages for now, then in zip(after, before, strict=True)]


def _run(setup: Setup) -> Values:
    stamp = _deliver_us(setup, LEAVES, linked=True)
    fetch, receive, between = _read_us(setup)
    return {
        "deliver": _deliver_us(setup, STAYS, linked=False),
        "deliver beside a link": _deliver_us(setup, STAYS, linked=True),
        "stamp to one link": stamp,
        "fetch": fetch,
        "receive": receive,
        "all of it": stamp + fetch + receive + between,
    }


MEASUREMENT = Measurement(
    "links",
    "the server's work for messages to other nodes",
    (
        Line("deliver", unit="us/message"),
        Line("deliver beside a link", unit="us/message", baseline="deliver"),
        Line("stamp to one link", unit="us/message", baseline="deliver", bar=Bar(ratio_at_most=1.0)),
        Line("fetch", unit="us/message", baseline="deliver"),
        Line("receive", unit="us/message", baseline="deliver", bar=Bar(ratio_at_most=1.1)),
        Line("all of it", unit="us/message", baseline="deliver", bar=Bar(ratio_at_most=2.1)),
    ),
    _run,
    missing,
)
