"""PgQ 3.5: an event queue inside PostgreSQL, an extension that the server must have.

Events go by COPY into the queue's event table, as PgQ's own client sends many. A ticker makes batches every 20 ms. A
consumer fetches a batch, calls the handler with each event and finishes the batch, in one transaction: consumers of PgQ
do not share a queue, and each gets all of it. Values are JSON of the size of ours. For the rate they are ready text
that nobody parses; for the same work the publisher encodes a dict, and the consumer makes an object of each event.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import psycopg

from mailroom.session import settings

from .floors import BATCH
from .node import Node
from .pipeline import PUBLISHER, Count, Pace, Pipeline
from .workload import INBOX, Event, encoded, texts

EXTENSION = "pgq"
TICK_S = 0.02
TICKER, CONSUMER = "bench ticker", "bench consumer"
EVENTS = "SELECT * FROM pgq.get_batch_events(%s)"
TO_DECODE = "SELECT ev_id, ev_extra1, ev_data, ev_time FROM pgq.get_batch_events(%s)"
_LOOK_S = 0.002


def missing(dsn: str) -> str | None:
    """Say how to install it if the server does not have it."""
    with settings.connect(dsn, "bench", autocommit=True) as connection:
        has = connection.execute("SELECT FROM pg_available_extensions WHERE name = %s", [EXTENSION]).rowcount
        major = connection.info.server_version // 10_000
    if has:
        return None
    return (
        f"Its server needs the extension: on Debian, apt-get install postgresql-{major}-pgq3, "
        f"and MAILROOM_PG_BIN=/usr/lib/postgresql/{major}/bin to measure that server."
    )


@contextmanager
def _queue(node: Node, consumers: list[str]) -> Iterator[str]:
    """Create a queue with consumers, and the extension if the database does not have it yet."""
    queue = node.schema
    with node.connect(autocommit=True) as connection:
        is_new = not connection.execute("SELECT FROM pg_extension WHERE extname = %s", [EXTENSION]).rowcount
        connection.execute("CREATE EXTENSION IF NOT EXISTS pgq")
        connection.execute("SELECT pgq.create_queue(%s)", [queue])
        try:
            lag = f"{TICK_S} seconds"
            connection.execute("SELECT pgq.set_queue_config(%s, 'ticker_max_lag', %s)", [queue, lag])
            for consumer in consumers:
                connection.execute("SELECT pgq.register_consumer(%s, %s)", [queue, consumer])
            yield queue
        finally:
            connection.execute("SELECT pgq.drop_queue(%s, true)", [queue])
            if is_new:
                connection.execute("DROP EXTENSION pgq")


def _publish(
    node: Node, queue: str, rows: Callable[[int], Iterator[tuple[str, str]]], messages: int, began: Count, pace: Pace
) -> None:
    ready = rows(messages)
    with node.connect(role=PUBLISHER) as connection, connection.cursor() as cursor:
        began.add(1)
        while batch := list(islice(ready, BATCH)):
            pace.keep()
            [(table,)] = cursor.execute("SELECT pgq.current_event_table(%s)", [queue]).fetchall()
            with cursor.copy(f"COPY {table} (ev_time, ev_type, ev_data, ev_extra1) FROM STDIN".encode()) as stream:
                now = datetime.now(UTC)
                for key, value in batch:
                    stream.write_row((now, INBOX, value, key))
            connection.commit()
            pace.sent.add(len(batch))


def _tick(node: Node, queue: str) -> None:
    with node.connect(autocommit=True, role=TICKER) as connection:
        while True:
            connection.execute("SELECT pgq.ticker(%s)", [queue])
            time.sleep(TICK_S)


def _handle(_event: object, _connection: psycopg.Connection) -> None:
    pass


def _decoded(row: tuple[Any, ...]) -> Event:
    number, key, value, sent_at = row
    return Event(number, key, json.loads(value), sent_at)


def _consume(node: Node, queue: str, consumer: str, decodes: bool, count: Count) -> None:
    with node.connect(role=CONSUMER) as connection, connection.cursor(binary=True) as cursor:
        while True:
            [(batch,)] = cursor.execute("SELECT pgq.next_batch(%s, %s)", [queue, consumer]).fetchall()
            if batch is None:
                connection.commit()
                time.sleep(_LOOK_S)
                continue
            events = cursor.execute(TO_DECODE if decodes else EVENTS, [batch]).fetchall()
            for event in map(_decoded, events) if decodes else events:
                _handle(event, connection)
            cursor.execute("SELECT pgq.finish_batch(%s)", [batch])
            connection.commit()
            count.add(len(events))


def flow_rate(node: Node, messages: int) -> float:
    """Return the rate of the whole path, from the first COPY until the last batch is finished and committed."""
    began = Count()
    with _queue(node, [INBOX]) as queue, Pipeline(node) as pipeline:
        pipeline.start(_tick, node, queue)
        pipeline.start(_consume, node, queue, INBOX, False, pipeline.counted())
        pipeline.start(_publish, node, queue, texts, messages, began, pipeline.pace(None))
        start = pipeline.wait(lambda: began.value > 0)
        return messages / (pipeline.wait_handled(messages).time_s - start)


@contextmanager
def same_work(node: Node, messages: int, ahead: int, readers: int) -> Iterator[tuple[Pipeline, Count]]:
    """Run a publisher that encodes and `readers` consumers that decode; yield them, and how many were published."""
    consumers = [f"{INBOX}_{nth}" for nth in range(readers)]
    with _queue(node, consumers) as queue, Pipeline(node) as pipeline:
        pipeline.start(_tick, node, queue)
        for consumer in consumers:
            pipeline.start(_consume, node, queue, consumer, True, pipeline.counted())
        pace = pipeline.pace(ahead, readers)
        pipeline.publisher = pipeline.start(_publish, node, queue, encoded, messages, Count(), pace)
        yield pipeline, pace.sent
