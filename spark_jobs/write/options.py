"""What the options of a write say, for `format("outbox")` and `OutboxSink` alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql.types import StructType

from mailroom.errors import ConfigurationError
from mailroom.values.names import shown
from spark_jobs.node import Node
from spark_jobs.write.ledger import JOB, SparkBatch
from spark_jobs.write.shape import Shape
from spark_jobs.write.user_sql import Transact, UserSql

# As Spark writes options, and the column each stands for.
FOR_ALL_ROWS = {"topic": "topic", "kind": "kind", "messageType": "message_type", "eventType": "event_type"}
OPTIONS = (*FOR_ALL_ROWS, "commitSql", "onKnownBatch", "onNaN", "stagingSchema", *Node.OPTIONS)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where messages go, what is the same for all of them, and what is done beside them."""

    node: Node
    constants: Mapping[str, str]
    user_sql: UserSql | None
    continues: str | None
    compared: bool
    nan_as_null: bool

    @classmethod
    def of(
        cls, options: Mapping[str, str], commit_sql: str | Sequence[str] = (), transact: Transact | None = None
    ) -> "WriteOptions":
        """Read the options; raises `ConfigurationError` or `InvalidMessage`."""
        stream, continues = options.get("streamName"), options.get("continuesQuery")
        if stream is not None:
            SparkBatch(stream)
        elif continues:
            raise ConfigurationError(
                "Give streamName too (OutboxSink: stream): continuesQuery says whose stream of that name goes on.",
                code="MR-spark-option",
            )
        return cls(
            Node.of(options),
            {column: options[name] for name, column in FOR_ALL_ROWS.items() if name in options},
            UserSql.of(commit_sql, transact),
            continues,
            compared=_is_first(options, "onKnownBatch", "compare", "pass"),
            nan_as_null=not _is_first(options, "onNaN", "refuse", "null"),
        )

    def shape(self, schema: StructType) -> Shape:
        """Check a DataFrame's schema; raises as `Shape.of` does."""
        business = self.user_sql is not None
        return Shape.of(schema, self.constants, business=business, nan_as_null=self.nan_as_null)

    def batch(self, name: str, number: int = JOB, query: str | None = None) -> SparkBatch:
        """Return the batch of that name; raises `InvalidMessage` for a name that the ledger cannot have."""
        return SparkBatch(name, number, query, self.continues, self.compared)


def _is_first(options: Mapping[str, str], name: str, first: str, second: str) -> bool:
    text = options.get(name, first)
    if text not in (first, second):
        raise ConfigurationError(f"{name} is {shown(text)}: it is {first}, or {second}.", code="MR-spark-option")
    return text == first
