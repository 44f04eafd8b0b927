"""`foreachBatch`: what a stream's micro-batches hold is sent exactly once, and business rows with it.

    insert = "INSERT INTO orders SELECT number, total FROM {staging}"
    sink = OutboxSink("orders", topic="order.placed", commit_sql=insert)
    frame.writeStream.foreachBatch(sink).option("checkpointLocation", ...).start()
    OutboxSink("orders-2026-11-21", topic="order.placed", commit_sql=insert)(frame)  # a DataFrame

Each task stages its rows as `format("outbox")` does, and reports that to the driver by the one row it returns. Then one
transaction of the driver does the rest: the batch's row in the ledger, the business rows, the messages.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload
from uuid import UUID

import pyarrow as pa

from mailroom.errors import ConfigurationError
from mailroom.values.names import DEFAULT_SCHEMA
from mailroom.values.numbers import MAX_INT64, whole
from spark_jobs.arrow.content import BatchContent
from spark_jobs.node import Node
from spark_jobs.write.commit import SentBatch, commit
from spark_jobs.write.ledger import JOB, SparkBatch
from spark_jobs.write.options import WriteOptions
from spark_jobs.write.shape import Shape
from spark_jobs.write.staging import Staged, abandon, left_to_a_sweep, stage
from spark_jobs.write.user_sql import Transact

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# What a thread knows of the micro-batch that it runs, as Spark names it.
QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


class OutboxSink:
    """Sends each micro-batch once, whole and in order; give it to `writeStream.foreachBatch`, or call it.

    `stream` names the stream in the ledger. Without it the query's id does, and a query with a new checkpoint sends
    everything again. The name belongs to the query that sent its last batch. Another one, such as a new checkpoint
    makes, names that query's id as `continues_query` to go on with the stream.

    `topic`, `kind`, `message_type` and `event_type` go for all rows; else they are columns.

    `commit_sql`, a statement or a list of them, runs in the transaction that sends the batch, with `{staging}` for its
    rows; or `transact(connection, staging)` does, which must not commit and may be run more than once. Then the
    DataFrame may have columns that no message has. Both run as the role of the connection string, with its own
    search_path, and not at all for a batch without rows.

    The ledger knows a batch by the stream's name, its number and its content. One that it has is computed and compared,
    and not sent: if its content is another one, that is `BatchDiffers`. `on_known_batch="pass"` leaves the comparison
    out, for rows that come out otherwise each time. So no other sink has that name, in this query or another one.
    `on_nan="null"` sends NaN in a value as null; otherwise it is refused.

    The database is named as in `format("outbox")`: `dsn` without a password, `dsn_variable`, or neither. `schema` is
    the node's, and tasks stage in that one or in `staging_schema`.

    Raises `ConfigurationError`. A call raises `InvalidMessage`, `SendFailed`, `StagingLost`, `BatchDiffers` or
    `StreamTaken`, after which nothing of the batch was sent, or an error of Spark, of which the same is true; after
    `CommitUnknown` it may have been, and after `BulkUnfinished` a part of it was. Spark then fails the query; started
    again from its checkpoint it repeats the batch, and what was sent is not sent twice.
    """

    def __init__(
        self,
        stream: str | None = None,
        *,
        topic: str | None = None,
        kind: str | None = None,
        message_type: str | None = None,
        event_type: str | None = None,
        dsn: str | None = None,
        dsn_variable: str | None = None,
        schema: str = DEFAULT_SCHEMA,
        staging_schema: str | None = None,
        commit_sql: str | Sequence[str] = (),
        transact: Transact | None = None,
        continues_query: str | None = None,
        on_known_batch: str = "compare",
        on_nan: str = "refuse",
    ) -> None:
        given = {
            "streamName": stream, "topic": topic, "kind": kind, "messageType": message_type, "eventType": event_type,
            "dsn": dsn, "dsnVariable": dsn_variable, "schema": schema, "stagingSchema": staging_schema,
            "continuesQuery": continues_query, "onKnownBatch": on_known_batch, "onNaN": on_nan,
        }  # fmt: skip
        self._stream = stream
        options = {name: text for name, text in given.items() if text is not None}
        self._options = WriteOptions.of(options, commit_sql, transact)

    @overload
    def __call__(self, frame: "DataFrame") -> SentBatch: ...

    @overload  # as `foreachBatch` wants it
    def __call__(self, frame: "DataFrame", batch_id: int) -> None: ...

    def __call__(self, frame: "DataFrame", batch_id: int | None = None) -> SentBatch | None:
        """Send a DataFrame, all of it; or a micro-batch, called by Spark in the driver. Nothing that the ledger has."""
        number = _number(frame, batch_id)
        sent = self._send(frame, JOB if number is None else number)
        return sent if number is None else None

    def _send(self, frame: "DataFrame", batch_id: int) -> SentBatch:
        query = frame.sparkSession.sparkContext.getLocalProperty(QUERY)
        name = self._stream or query
        # Two queries of one stream's name are told apart by their ids, or else by what their batches hold.
        is_told_apart = query or batch_id == JOB or self._options.compared
        if name is None or not is_told_apart:
            raise ConfigurationError(
                "No streaming query runs this in this thread: give it to writeStream.foreachBatch, whose thread alone "
                "knows the query (threads of your own inherit it as pyspark.InheritableThread), or name a stream, with "
                'on_known_batch="compare".',
                code="MR-spark-no-query",
            )
        batch, shape = self._options.batch(name, batch_id, query), self._options.shape(frame.schema)
        node = self._options.node.pinned()
        try:
            # Whether the ledger has the batch or not: a stateful query goes on from the state that its tasks leave.
            staged = _staged(frame, node, batch, shape)
            return commit(node, batch, shape, staged, self._options.user_sql)
        except BaseException:
            # A query that fails at each start would fill the disk.
            with left_to_a_sweep():
                abandon(node, batch)
            raise


def _number(frame: "DataFrame", given: int | None) -> int | None:
    """Return the number of the micro-batch that this thread runs, which has to be `given`; None outside of a stream.

    Without it each micro-batch would count as the same job, and all but the first be passed over.
    """
    context = frame.sparkSession.sparkContext
    query, batch = context.getLocalProperty(QUERY), context.getLocalProperty(BATCH)
    if query and (given is None or batch not in (None, str(given))):
        raise ConfigurationError(
            f"The sink was called {'without a number' if given is None else f'with the number {given}'} for "
            f"micro-batch {batch or 'of a stream'}, and it knows batches by their numbers: it would take the rows for "
            "some that were sent before. Nothing was sent. Hand it the second argument of foreachBatch, as "
            "foreachBatch(sink) does: lambda frame, number: sink(frame, number).",
            code="MR-spark-batch-number",
        )
    return None if given is None else whole(given, "the number of a micro-batch", 0, MAX_INT64, ConfigurationError)


def _staged(frame: "DataFrame", node: Node, batch: SparkBatch, shape: Shape) -> list[Staged]:
    """Stage the rows of each partition, and return the attempts that count, in the order of the partitions.

    Only Spark knows which ones these are: `collect` returns one result of each partition. An attempt whose answer was
    lost has committed too. And where a shuffle is computed again and comes out otherwise, an attempt of one partition
    may hold rows that are in another one now.
    """

    def of_task(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = stage(node, batch, shape, rows)
        if found.token:
            row = {"token": str(found.token), "messages": found.content.messages, "digest": found.content.digest}
            yield pa.RecordBatch.from_pylist([row | {"size": found.size}])

    rows = frame.mapInArrow(of_task, "token string, messages bigint, digest binary, size bigint").collect()
    return [Staged(batch, UUID(row.token), BatchContent(row.messages, bytes(row.digest)), row.size) for row in rows]
