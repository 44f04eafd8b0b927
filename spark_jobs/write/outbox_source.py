"""`format("outbox")`: DataFrames and streams written into the outbox, exactly once.

    df.write.format("outbox").option("topic", "flights").option("idempotencyKey", "2026-11-21").mode("append").save()
    df.writeStream.format("outbox").option("topic", "flights").option("streamName", "flights")...

Spark makes a writer in the driver and in each process that runs a task, and another one to commit; so a writer is
nothing but what its options say. What has happened stands in the database.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mailroom.errors import ConfigurationError
from spark_jobs.node import demand_known
from spark_jobs.write.commit import commit
from spark_jobs.write.ledger import SparkBatch
from spark_jobs.write.options import OPTIONS, WriteOptions
from spark_jobs.write.shape import Shape
from spark_jobs.write.staging import Staged, drop, stage

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class OutboxSource(DataSource):
    """The data source `outbox`; it writes only."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "outbox"

    def writer(self, schema: StructType, overwrite: bool) -> "JobWriter":
        """Return the writer of a DataFrame. Raises `ConfigurationError` or `InvalidMessage` before anything runs."""
        options = _options(self.options, overwrite, "idempotencyKey")
        key = self.options.get("idempotencyKey")
        if not key:
            raise ConfigurationError(
                "Give the option idempotencyKey: a name for these rows, such as 'flights-2026-11-21'. Run again with "
                "the same one, the job sends nothing twice.",
                code="MR-spark-key-missing",
            )
        options.batch(key)
        return JobWriter(*_checked(options, schema), key)

    def streamWriter(self, schema: StructType, overwrite: bool) -> "StreamWriter":  # noqa: N802 - Spark's name
        """Return the writer of a stream. Raises `ConfigurationError` or `InvalidMessage` before anything runs."""
        options = _options(self.options, overwrite, "streamName", "continuesQuery", "checkpointLocation")
        return StreamWriter(*_checked(options, schema), self.options.get("streamName"))


def _options(given: Mapping[str, str], overwrite: bool, *others: str) -> WriteOptions:
    demand_known(given, (*OPTIONS, *others))
    if overwrite:
        raise ConfigurationError(
            "An outbox cannot be overwritten: messages are sent for good. Use mode 'append'.", code="MR-spark-option"
        )
    return WriteOptions.of(given, given.get("commitSql", ()))


def _checked(options: WriteOptions, schema: StructType) -> tuple[WriteOptions, Shape]:
    # Before the job runs: hours later its first task would be the one to find out.
    return replace(options, node=options.node.check()), options.shape(schema)


@dataclass
class _Writer:
    options: WriteOptions
    shape: Shape
    name: str | None  # of the job or stream; a stream without one is named by its query

    def abort(self, messages: list[WriterCommitMessage | None], *_: int) -> None:
        """Drop what was staged. Spark calls it after a failed commit too, which may have happened: so no more."""
        drop(self.options.node, _staged(messages))


class JobWriter(_Writer, DataSourceArrowWriter):
    """Writes a DataFrame: all of it once, or nothing."""

    def write(self, iterator: "Iterator[RecordBatch]") -> WriterCommitMessage:
        """Stage the rows of a partition."""
        return stage(self.options.node, self._batch(), self.shape, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Send what the successful tasks have staged."""
        commit(self.options.node, self._batch(), self.shape, _staged(messages), self.options.user_sql)

    def _batch(self) -> SparkBatch:
        return self.options.batch(str(self.name))


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes a stream: each micro-batch once, whole, in order."""

    def write(self, iterator: "Iterator[RecordBatch]") -> WriterCommitMessage:
        """Stage the rows of a partition. The query's id is known here and not where it is committed."""
        query, number = _property("sql.streaming.queryId"), int(_property("streaming.sql.batchId"))
        return stage(self.options.node, self.options.batch(self.name or query, number, query), self.shape, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Send what the successful tasks of the micro-batch have staged."""
        staged = _staged(messages)
        if staged:
            commit(self.options.node, staged[0].batch, self.shape, staged, self.options.user_sql)


def _property(name: str) -> str:
    context = TaskContext.get()
    found = context and context.getLocalProperty(name)
    if not found:
        raise ConfigurationError(
            f"Spark gave this task no {name}: write a stream with writeStream, by its own engine.",
            code="MR-spark-not-by-stream-engine",
        )
    return found


def _staged(messages: list[WriterCommitMessage | None]) -> list[Staged]:
    # None stands for a task that failed.
    return [message for message in messages if isinstance(message, Staged)]
