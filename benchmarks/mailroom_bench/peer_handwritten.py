"""The queue that one writes by hand in ten lines: a table, DELETE .. FOR UPDATE SKIP LOCKED, and NOTIFY.

The page about benchmarks shows it. A publisher sends by COPY in batches of 1,000 and rings after each; two consumers
take up to 1,000 rows in a transaction, call the handler with each row, commit, and listen when they find none. For the
latency there is one of each, and a transaction for each message. Values are JSON of the size of ours, ready, and nobody
parses them; for the same work the publisher encodes a dict, and the consumer makes an object of each row. A table has
one kind of reader, so for ten of them the publisher writes into ten tables.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_double
from itertools import islice
from multiprocessing.sharedctypes import RawArray
from typing import Any, TypeAlias

import psycopg

from .floors import BATCH
from .latency import AT_MOST, WARM_UP, scheduled
from .measure import Setup
from .node import Node, fresh_node
from .pipeline import PUBLISHER, Count, Pace, Pipeline
from .workload import Event, encoded, number, texts

TABLE = "CREATE TABLE queue (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text, payload text)"
COPY = "COPY queue (key, payload) FROM STDIN"
INSERT = "INSERT INTO queue (key, payload) VALUES (%s, %s)"
TAKE = """
    DELETE FROM queue WHERE id IN (SELECT id FROM queue ORDER BY id LIMIT 1000 FOR UPDATE SKIP LOCKED)
    RETURNING key, payload"""
NOTIFY = "NOTIFY queue"
QUEUE = "queue"  # the table, and its channel
CONSUMER = "bench consumer"
CONSUMERS = 2
POLL_S = 1.0  # behind the doorbell

Handler: TypeAlias = Callable[[psycopg.Connection, str, str], object]


def _connect(node: Node, *, autocommit: bool = False, role: str = "bench") -> psycopg.Connection:
    connection = node.connect(autocommit=True, role=role)
    connection.execute(f"SET search_path = {node.schema}".encode())
    connection.autocommit = autocommit
    return connection


def _of(table: str, statement: str) -> bytes:
    """Return a statement for a table of another name."""
    return statement.replace(QUEUE, table).encode()


def _create(node: Node, *tables: str) -> None:
    with _connect(node, autocommit=True) as connection:
        for table in tables or (QUEUE,):
            connection.execute(_of(table, TABLE))


def _publish(
    node: Node,
    tables: list[str],
    rows: Callable[[int], Iterator[tuple[str, str]]],
    messages: int,
    began: Count,
    pace: Pace,
) -> None:
    ready = rows(messages)
    with _connect(node, role=PUBLISHER) as connection:
        began.add(1)
        while batch := list(islice(ready, BATCH)):
            pace.keep()
            for table in tables:
                with connection.cursor().copy(_of(table, COPY)) as stream:
                    for row in batch:
                        stream.write_row(row)
                connection.execute(_of(table, NOTIFY))
            connection.commit()
            pace.sent.add(len(batch))


def _write(node: Node, messages: int, committed: "Any") -> None:
    ready = list(texts(messages))
    with _connect(node) as connection:
        for nth in scheduled(messages):
            connection.execute(INSERT, ready[nth])
            connection.execute(NOTIFY)
            committed[nth] = time.monotonic()
            connection.commit()


def _consume(node: Node, table: str, ready: Count, handling: Callable[..., Handler], *arguments: object) -> None:
    handle, take = handling(*arguments), _of(table, TAKE)
    with _connect(node, autocommit=True, role=CONSUMER) as connection:
        connection.execute(_of(table, "LISTEN queue"))
        ready.add(1)
        while True:
            with connection.transaction():
                taken = connection.execute(take).fetchall()
                for key, payload in taken:
                    handle(connection, key, payload)
            if not taken:
                for _ in connection.notifies(timeout=POLL_S, stop_after=1):
                    pass


def counting(count: Count) -> Handler:
    """Return a handler that only counts."""

    def handle(_connection: psycopg.Connection, _key: str, _payload: str) -> None:
        count.add(1)

    return handle


def decoding(count: Count) -> Handler:
    """Return a handler that gets an object, with its value decoded."""

    def handle(_connection: psycopg.Connection, key: str, payload: str) -> None:
        Event(None, key, json.loads(payload))
        count.add(1)

    return handle


def recording(count: Count, handled: "Any") -> Handler:
    """Return a handler that records when each message reached it."""

    def handle(_connection: psycopg.Connection, _key: str, payload: str) -> None:
        now = time.monotonic()
        handled[number(json.loads(payload))] = now
        count.add(1)

    return handle


def _work(
    pipeline: Pipeline, consumers: int, handling: Callable[..., Handler], *arguments: object, table: str = QUEUE
) -> None:
    readies = [Count() for _ in range(consumers)]
    for ready in readies:
        pipeline.start(_consume, pipeline.node, table, ready, handling, pipeline.counted(), *arguments)
    pipeline.wait(lambda: all(ready.value for ready in readies))


def flow_rate(node: Node, messages: int) -> float:
    """Return the rate of the whole path, from the first COPY until the last message is handled."""
    began = Count()
    _create(node)
    with Pipeline(node) as pipeline:
        _work(pipeline, CONSUMERS, counting)
        pipeline.start(_publish, node, [QUEUE], texts, messages, began, pipeline.pace(None))
        start = pipeline.wait(lambda: began.value > 0)
        return messages / (pipeline.wait_handled(messages).time_s - start)


@contextmanager
def same_work(node: Node, messages: int, ahead: int, readers: int) -> Iterator[tuple[Pipeline, Count]]:
    """Run a publisher that encodes and consumers that decode; yield them, and how many were published.

    One reader has two consumers of its table, as for the rate; each of several has a table and a consumer.
    """
    tables = [f"{QUEUE}_{nth}" for nth in range(readers)]
    _create(node, *tables)
    with Pipeline(node) as pipeline:
        for table in tables:
            _work(pipeline, CONSUMERS if readers == 1 else 1, decoding, table=table)
        pace = pipeline.pace(ahead, readers)
        pipeline.publisher = pipeline.start(_publish, node, tables, encoded, messages, Count(), pace)
        yield pipeline, pace.sent


def waits_ms(setup: Setup) -> list[float]:
    """Return the latency of each message, in the order of sending."""
    messages = min(AT_MOST, setup.messages) + WARM_UP
    committed, handled = RawArray(c_double, messages), RawArray(c_double, messages)
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        _create(node)
        _work(pipeline, 1, recording, handled)
        pipeline.start(_write, node, messages, committed)
        pipeline.wait_handled(messages)
    return [(handled[nth] - committed[nth]) * 1_000 for nth in range(WARM_UP, messages)]
