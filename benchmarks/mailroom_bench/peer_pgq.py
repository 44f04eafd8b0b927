"""PgQ 3.5: an event queue inside PostgreSQL, an extension that the server must have.

Events go by COPY into the queue's event table, as PgQ's own client sends many. A ticker makes batches every 20 ms. One
consumer fetches a batch, calls the handler with each event and finishes the batch, in one transaction: consumers of PgQ
do not share a queue. Values are JSON of the size of ours, and nobody parses them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice

import psycopg

from mailroom.session import settings

from .floors import BATCH
from .node import Node
from .pipeline import Count, Pipeline
from .workload import INBOX, texts

EXTENSION = "pgq"
TICK_S = 0.02
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
def _queue(node: Node) -> Iterator[str]:
    """Create a queue with a consumer, and the extension if the database does not have it yet."""
    queue = node.schema
    with node.connect(autocommit=True) as connection:
        is_new = not connection.execute("SELECT FROM pg_extension WHERE extname = %s", [EXTENSION]).rowcount
        connection.execute("CREATE EXTENSION IF NOT EXISTS pgq")
        connection.execute("SELECT pgq.create_queue(%s)", [queue])
        try:
            lag = f"{TICK_S} seconds"
            connection.execute("SELECT pgq.set_queue_config(%s, 'ticker_max_lag', %s)", [queue, lag])
            connection.execute("SELECT pgq.register_consumer(%s, %s)", [queue, INBOX])
            yield queue
        finally:
            connection.execute("SELECT pgq.drop_queue(%s, true)", [queue])
            if is_new:
                connection.execute("DROP EXTENSION pgq")


def _publish(node: Node, queue: str, messages: int, began: Count) -> None:
    ready = texts(messages)
    with node.connect() as connection, connection.cursor() as cursor:
        began.add(1)
        while batch := list(islice(ready, BATCH)):
            [(table,)] = cursor.execute("SELECT pgq.current_event_table(%s)", [queue]).fetchall()
            with cursor.copy(f"COPY {table} (ev_time, ev_type, ev_data, ev_extra1) FROM STDIN".encode()) as stream:
                now = datetime.now(UTC)
                for key, value in batch:
                    stream.write_row((now, INBOX, value, key))
            connection.commit()


def _tick(node: Node, queue: str) -> None:
    with node.connect(autocommit=True) as connection:
        while True:
            connection.execute("SELECT pgq.ticker(%s)", [queue])
            time.sleep(TICK_S)


def _handle(_event: tuple[object, ...], _connection: psycopg.Connection) -> None:
    pass


def _consume(node: Node, queue: str, count: Count) -> None:
    with node.connect() as connection, connection.cursor(binary=True) as cursor:
        while True:
            [(batch,)] = cursor.execute("SELECT pgq.next_batch(%s, %s)", [queue, INBOX]).fetchall()
            if batch is None:
                connection.commit()
                time.sleep(_LOOK_S)
                continue
            events = cursor.execute("SELECT * FROM pgq.get_batch_events(%s)", [batch]).fetchall()
            for event in events:
                _handle(event, connection)
            cursor.execute("SELECT pgq.finish_batch(%s)", [batch])
            connection.commit()
            count.add(len(events))


def flow_rate(node: Node, messages: int) -> float:
    """Return the rate of the whole path, from the first COPY until the last batch is finished and committed."""
    began = Count()
    with _queue(node) as queue, Pipeline(node) as pipeline:
        pipeline.start(_tick, node, queue)
        pipeline.start(_consume, node, queue, pipeline.counted())
        pipeline.start(_publish, node, queue, messages, began)
        start = pipeline.wait(lambda: began.value > 0)
        return messages / (pipeline.wait_handled(messages).time_s - start)
