"""`format("outbox")`: DataFrames and streams written into the outbox, exactly once.

    df.write.format("outbox").option("topic", "flights").option("idempotencyKey", "2026-11-21").mode("append").save()
    df.writeStream.format("outbox").option("topic", "flights").option("streamName", "flights")...

Spark makes a writer in the driver and in each process that runs a task, and another one to commit; so a writer is
nothing but what its options say. What has happened stands in the database.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mailroom.errors import ConfigurationError
from spark_jobs.node import Node
from spark_jobs.options import demand_known, is_compared, is_nan_null
from spark_jobs.write.columns import Shape
from spark_jobs.write.commit import commit
from spark_jobs.write.ledger import Batch
from spark_jobs.write.staging import Staged, drop, stage
from spark_jobs.write.user_sql import UserSql

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# As Spark spells options, and the column each stands for.
FOR_ALL_ROWS = {"topic": "topic", "kind": "kind", "messageType": "message_type", "eventType": "event_type"}
OPTIONS = (*FOR_ALL_ROWS, "commitSql", "onKnownBatch", "onNaN", *Node.OPTIONS)


class OutboxSource(DataSource):
    """The data source `outbox`; it writes only. Options: see `docs/spark.md`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "outbox"

    def writer(self, schema: StructType, overwrite: bool) -> "JobWriter":
        """Return the writer of a DataFrame. Raises `ConfigurationError` or `InvalidMessage` before anything runs."""
        demand_known(self.options, (*OPTIONS, "idempotencyKey"))
        _demand_append(overwrite)
        key = self.options.get("idempotencyKey")
        if not key:
            raise ConfigurationError(
                "Give the option idempotencyKey: a name for these rows, such as 'flights-2026-11-21'. Run again with "
                "the same one, the job sends nothing twice."
            )
        batch = Batch(key, compared=_compared(self.options))
        return JobWriter(_node(self.options), _shape(schema, self.options), batch, _user_sql(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> "StreamWriter":  # noqa: N802 - Spark's name
        """Return the writer of a stream. Raises `ConfigurationError` or `InvalidMessage` before anything runs."""
        demand_known(self.options, (*OPTIONS, "streamName", "continuesQuery", "checkpointLocation"))
        _demand_append(overwrite)
        stream, continues = self.options.get("streamName"), self.options.get("continuesQuery")
        if continues and not stream:
            raise ConfigurationError("Give streamName too: continuesQuery says whose stream of that name goes on.")
        return StreamWriter(
            _node(self.options), _shape(schema, self.options), stream, continues, _compared(self.options),
            _user_sql(self.options),
        )  # fmt: skip


def _node(options: Mapping[str, str]) -> Node:
    # Looked at here, before the job runs: hours later its first task would be the one to find out.
    node = Node.of(options)
    node.check()
    return node


def _compared(options: Mapping[str, str]) -> bool:
    return is_compared(options.get("onKnownBatch", "compare"))


def _shape(schema: StructType, options: Mapping[str, str]) -> Shape:
    return Shape.of(
        schema,
        {column: options[name] for name, column in FOR_ALL_ROWS.items() if name in options},
        business="commitSql" in options,
        nan_as_null=is_nan_null(options.get("onNaN", "refuse")),
    )


def _user_sql(options: Mapping[str, str]) -> UserSql | None:
    return UserSql.of(options.get("commitSql", ()), None)


def _demand_append(overwrite: bool) -> None:
    if overwrite:
        raise ConfigurationError("An outbox cannot be overwritten: messages are sent for good. Use mode 'append'.")


class JobWriter(DataSourceArrowWriter):
    """Writes a DataFrame: all of it once, or nothing."""

    def __init__(self, node: Node, shape: Shape, batch: Batch, user_sql: UserSql | None = None) -> None:
        self.node = node
        self.shape = shape
        self.batch = batch
        self.user_sql = user_sql

    def write(self, iterator: "Iterator[RecordBatch]") -> WriterCommitMessage:
        """Stage the rows of a partition."""
        return stage(self.node, self.batch, self.shape, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Send what the successful tasks have staged."""
        commit(self.node, self.batch, self.shape, _staged(messages), self.user_sql)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop what was staged. Spark calls it after a failed commit too, which may have happened: so no more."""
        drop(self.node, _staged(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream: each micro-batch once, whole, in order."""

    def __init__(
        self, node: Node, shape: Shape, stream: str | None, continues: str | None = None, compared: bool = True,
        user_sql: UserSql | None = None,
    ) -> None:  # fmt: skip
        self.node = node
        self.shape = shape
        self.stream = stream
        self.continues = continues
        self.compared = compared
        self.user_sql = user_sql

    def write(self, iterator: "Iterator[RecordBatch]") -> WriterCommitMessage:
        """Stage the rows of a partition. The query's id is known here and not where it is committed."""
        query, number = _property("sql.streaming.queryId"), int(_property("streaming.sql.batchId"))
        batch = Batch(self.stream or query, number, query, self.continues, self.compared)
        return stage(self.node, batch, self.shape, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Send what the successful tasks of the micro-batch have staged."""
        staged = _staged(messages)
        if staged:
            commit(self.node, staged[0].batch, self.shape, staged, self.user_sql)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Drop what was staged; see `JobWriter.abort`."""
        drop(self.node, _staged(messages))


def _property(name: str) -> str:
    context = TaskContext.get()
    found = context and context.getLocalProperty(name)
    if not found:
        raise ConfigurationError(f"Spark told this task no {name}: write a stream with writeStream, by its own engine.")
    return found


def _staged(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    # None stands for a task that failed.
    return [message for message in messages if isinstance(message, Staged)]
