"""Bulk: the latency of other messages beside and after a large Spark batch of five times `--messages`.

Other clients send 50 messages/s on a schedule, as in `latency`: before the batch, while it moves, and until it is
delivered. The measure is the time from their COMMIT to their handler. Spark is not needed: SQL fills the staging
tables, and the driver's part runs twice, in chunks and in one transaction. The rates are those of the move, and of the
batch from then until it is in its inbox.
"""

import time
from contextlib import ExitStack
from ctypes import c_double
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any

from mailroom import create_inbox
from mailroom.sql.runner import run
from outbox import Outbox

from .clients import PROCESSES
from .latency import percentile, recording
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Count, Pipeline
from .spark import missing_extra
from .workload import INBOX, KEY, KEYS, VALUE, outgoing

if TYPE_CHECKING:
    from spark_jobs.write.staging import Staged

TIMES = 5
PER_SECOND = 50
AT_MOST = 60 * 60 * PER_SECOND
WARM_UP = 50
BEFORE = 250
TABLES = 2
BULK = "bulk"  # its topic and inbox; the other messages have those of all measurements


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one batch: the latencies of others before it and from its start on, and its own durations."""

    before_ms: list[float]
    beside_ms: list[float]
    moved_s: float
    delivered_s: float


def _write(node: Node, sent: Count, stop: Count, committed: "Any") -> None:
    outbox = Outbox(schema=node.schema)
    with node.connect() as connection:
        start = time.monotonic()
        for nth, message in enumerate(outgoing(AT_MOST)):
            time.sleep(max(0.0, start + nth / PER_SECOND - time.monotonic()))
            if stop.value:
                return
            outbox.send(connection, INBOX, message.value, key=message.key)
            committed[nth] = time.monotonic()
            connection.commit()
            sent.add(1)


def _staged(node: Node, messages: int) -> "list[Staged]":
    from outbox.bulk import NTH, table
    from spark_jobs.arrow.content import BatchContent
    from spark_jobs.write.ledger import SparkBatch
    from spark_jobs.write.staging import Staged, creating

    staged = []
    columns = ((NTH, "bigint"), ("message_id", "uuid"), ("key", "text"), ("value", "bytea"))
    for _ in range(TABLES):
        with node.connect() as connection:
            token = run(connection, creating(node.schema, SparkBatch(BULK), columns, is_large=True))
            connection.execute(
                f"INSERT INTO {node.schema}.{table(token)} SELECT nth, gen_random_uuid(), {KEY}, %(value)s::bytea "
                "FROM generate_series(1, %(messages)s) AS nth".encode(),
                {"keys": KEYS, "value": VALUE, "messages": messages // TABLES},
            )
        staged.append(Staged(SparkBatch(BULK), token, BatchContent(messages // TABLES)))
    return staged


def _is_taken(node: Node, last: int) -> bool:
    with node.connect(autocommit=True) as connection:
        connection.execute("SET enable_seqscan = off")
        statement = f"SELECT NOT EXISTS (SELECT FROM {node.outbox} WHERE position <= %s)".encode()
        return connection.execute(statement, [last]).fetchone() == (True,)


def move_beside(dsn: str, messages: int, *, chunks: bool) -> Run:
    """Move a batch of messages beside others', in chunks or in one transaction."""
    from pyspark.sql.types import BinaryType, StringType, StructField, StructType

    from spark_jobs.node import Node as SparkNode
    from spark_jobs.write.commit import commit
    from spark_jobs.write.finishing import PACE, ChunkPace
    from spark_jobs.write.ledger import SparkBatch
    from spark_jobs.write.shape import Shape

    shape = Shape.of(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())]), {"topic": BULK}
    )
    committed, handled = RawArray(c_double, AT_MOST), RawArray(c_double, AT_MOST)
    sent, stop = Count(), Count()
    with fresh_node(dsn) as node, Pipeline(node) as pipeline, ExitStack() as ending:
        with node.connect() as connection:
            create_inbox(connection, BULK, schema=node.schema)
        staged = _staged(node, messages)
        pipeline.dispatch()
        pipeline.work(1, recording, handled, frozenset())
        writer = PROCESSES.Process(target=_write, args=(node, sent, stop, committed), daemon=True)
        writer.start()
        ending.callback(writer.kill)
        pipeline.wait_handled(WARM_UP + BEFORE)
        began = time.monotonic()
        commit(
            SparkNode(node.schema, node.dsn),
            SparkBatch(BULK),
            shape,
            staged,
            pace=PACE if chunks else ChunkPace(rows=messages),
        )
        moved = time.monotonic()
        with node.connect() as connection:
            [(last,)] = connection.execute(f"SELECT last_value FROM {node.outbox}_position_seq".encode()).fetchall()
        while not _is_taken(node, last):
            time.sleep(0.05)
        delivered = time.monotonic()
        stop.add(1)
        writer.join()
        pipeline.wait_handled(sent.value)
        waits = [(committed[nth], 1_000 * (handled[nth] - committed[nth])) for nth in range(WARM_UP, sent.value)]
    return Run(
        [wait for at, wait in waits if at < began],
        [wait for at, wait in waits if began <= at < delivered],
        moved - began,
        delivered - began,
    )


def _run(setup: Setup) -> Values:
    messages = TIMES * setup.messages
    chunks, whole = (move_beside(setup.dsn, messages, chunks=chunks) for chunks in (True, False))
    return {
        "others, p50 before": percentile(chunks.before_ms, 50),
        "others, p99 before": percentile(chunks.before_ms, 99),
        "others, p50 beside": percentile(chunks.beside_ms, 50),
        "others, p99 beside": percentile(chunks.beside_ms, 99),
        "others, p99 beside one transaction": percentile(whole.beside_ms, 99),
        "moved, one transaction": messages / whole.moved_s,
        "moved": messages / chunks.moved_s,
        "delivered, one transaction": messages / whole.delivered_s,
        "delivered": messages / chunks.delivered_s,
    }


MEASUREMENT = Measurement(
    "bulk",
    "others' messages beside a large batch of Spark, five times the messages",
    (
        Line("others, p50 before", unit="ms"),
        Line("others, p99 before", unit="ms"),
        Line("others, p50 beside", unit="ms", baseline="others, p50 before"),
        Line("others, p99 beside", unit="ms", bar=Bar(at_most=1_000)),
        Line("others, p99 beside one transaction", unit="ms"),
        Line("moved, one transaction"),
        Line("moved", baseline="moved, one transaction"),
        Line("delivered, one transaction"),
        Line("delivered", baseline="delivered, one transaction"),
    ),
    _run,
    missing_extra,
)
