"""A staging table that Spark's own JDBC writer fills: its columns, its rows, and which of them count.

Spark may run a task again although it has committed (the answer was lost), or twice at once (speculation), and JDBC's
writer tells nobody which attempt it was. So each row names its partition and its attempt, the last row of an attempt
says how many there were, and of each partition one whole attempt is taken.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import types as spark

from mailroom.errors import InvalidMessage
from mailroom.names import shown
from mailroom.operation import IN_TRANSACTION, Operation, Sql
from spark_jobs.columns import COLUMNS, Shape, without_nul
from spark_jobs.ledger import Batch
from spark_jobs.staging import creating, table

PARTITION, ATTEMPT, NTH = OURS = ("mailroom_partition", "mailroom_attempt", "mailroom_nth")
MAX_NAME_BYTES = 63
SYSTEM_COLUMNS = ("tableoid", "ctid", "xmin", "xmax", "cmin", "cmax")

# For each type of staging: what JDBC's writer can write in its place, and what that becomes again. Times travel as
# text: java.sql.Timestamp has another calendar before 1582.
TRAVELS = {
    "uuid": (spark.BinaryType(), "bytea", "pg_catalog.encode({name}, 'hex'::text)::uuid"),
    "text": (spark.StringType(), "text", "{name}"),
    "bytea": (spark.BinaryType(), "bytea", "{name}"),
    "jsonb": (spark.StringType(), "text", "{name}::jsonb"),
    "timestamptz": (spark.StringType(), "text", "{name}::timestamptz"),
    "bigint": (spark.LongType(), "bigint", "{name}"),
}
BUSINESS: dict[type[spark.DataType], str] = {
    spark.BooleanType: "boolean",
    spark.ByteType: "smallint",
    spark.ShortType: "smallint",
    spark.IntegerType: "integer",
    spark.LongType: "bigint",
    spark.FloatType: "real",
    spark.DoubleType: "double precision",
    spark.StringType: "text",
    spark.BinaryType: "bytea",
    spark.DateType: "date",
    spark.TimestampType: "timestamptz",
    spark.TimestampNTZType: "timestamp",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of messages and those of the business that go with them."""

    shape: Shape
    business: tuple[tuple[str, spark.DataType], ...]

    @classmethod
    def of(cls, schema: spark.StructType, constants: Mapping[str, str], *, business: bool) -> "Layout":
        """Check a DataFrame's schema; without `business`, columns that no message has are refused.

        Raises `InvalidMessage` for columns that are missing, unknown, of a wrong name or of a type that JDBC lacks.
        """
        shape = Shape.of(schema, constants, others=business)
        names = [name.lower() for name in schema.fieldNames()]
        for field in schema.fields:
            if field.name not in COLUMNS:
                _check_name(field.name, names.count(field.name.lower()))
                _business_type(field.name, field.dataType)
        fields = tuple((field.name, field.dataType) for field in schema.fields if field.name not in COLUMNS)
        return cls(shape, fields)

    def columns(self) -> list[tuple[str, str]]:
        """Return the columns of the table with their types in PostgreSQL."""
        messages = [(quoted(name), TRAVELS[kind][1]) for name, kind in self.shape.staged()]
        business = [(quoted(name), _business_type(name, kind)) for name, kind in self.business]
        return [*messages, *business, (PARTITION, "integer"), (ATTEMPT, "bigint"), (NTH, "bigint")]

    def spark_schema(self) -> spark.StructType:
        """Return the schema of `rows`."""
        schema = spark.StructType()
        for name, kind in self.shape.staged():
            schema.add(name, TRAVELS[kind][0])
        for name, business in self.business:
            schema.add(name, business)
        return schema.add(PARTITION, spark.IntegerType()).add(ATTEMPT, spark.LongType()).add(NTH, spark.LongType())

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return a partition's rows for the table; runs in its task. Raises `InvalidMessage` for one over a limit."""
        context = cast(TaskContext, TaskContext.get())
        partition, attempt = context.partitionId(), context.taskAttemptId()
        names = self.spark_schema().fieldNames()
        nth = 0
        kinds: list[pa.DataType] = []
        for batch in batches:
            if batch.num_rows:
                arrays = self._arrays(batch)
                kinds = [array.type for array in arrays]
                numbers = np.arange(nth + 1, nth + 1 + batch.num_rows)
                yield _batch(names, arrays, partition, attempt, numbers)
                nth += batch.num_rows
        if nth:
            yield _batch(names, [pa.nulls(1, kind) for kind in kinds], partition, attempt, np.array([-nth]))

    def _arrays(self, batch: pa.RecordBatch) -> list[pa.Array]:
        prepared = zip(self.shape.prepared(batch), self.shape.staged(), strict=True)
        messages = [pc.cast(array, pa.string()) if kind == "timestamptz" else array for array, (_, kind) in prepared]
        for name, kind in self.business:
            if isinstance(kind, spark.StringType):
                without_nul(batch.column(name), name)
            if isinstance(kind, spark.ArrayType) and isinstance(kind.elementType, spark.StringType):
                without_nul(batch.column(name).flatten(), name)
        return [*messages, *(batch.column(name) for name, _ in self.business)]

    def expressions(self) -> str:
        """Return what the view of the rows that count shows: every column with its own type."""
        messages = [
            f"{TRAVELS[kind][2].format(name=quoted(name))} AS {quoted(name)}" for name, kind in self.shape.staged()
        ]
        return ", ".join([*messages, *(quoted(name) for name, _ in self.business), PARTITION, NTH])


def quoted(name: str) -> str:
    """Return a name that `Layout.of` has checked as SQL has it."""
    return f'"{name}"'


def _check_name(name: str, times: int) -> None:
    if times > 1:
        raise InvalidMessage(f"There are {times} columns {shown(name)}: rename them (upper and lower case are one).")
    if name.lower() in COLUMNS:
        raise InvalidMessage(f"Column {shown(name)} is nearly {name.lower()} of messages: spell it so, or rename it.")
    if name.lower() in OURS:
        raise InvalidMessage(f"Mailroom keeps the name {name}: rename the column.")
    if name.lower() in SYSTEM_COLUMNS:
        raise InvalidMessage(f"PostgreSQL keeps the name {name.lower()} in every table: rename the column.")
    if not 1 <= len(name.encode()) <= MAX_NAME_BYTES or set(name) & set('"%{}.`\0'):
        raise InvalidMessage(
            f"Column {shown(name)} cannot be staged: rename it to 1 to {MAX_NAME_BYTES} bytes without dots, quotes "
            '" and `, %, { and }.'
        )


def _business_type(name: str, kind: spark.DataType) -> str:
    if isinstance(kind, spark.DecimalType):
        return f"numeric({kind.precision},{kind.scale})"
    if isinstance(kind, spark.ArrayType) and not isinstance(kind.elementType, spark.ArrayType):
        return f"{_business_type(name, kind.elementType)}[]"
    for takes, staged in BUSINESS.items():
        if isinstance(kind, takes):
            return staged
    raise InvalidMessage(
        f"JDBC cannot write column {shown(name)}, which is {kind.simpleString()}: use to_json(column)."
    )


def _batch(
    names: list[str],
    arrays: list[pa.Array],
    partition: int,
    attempt: int,
    nth: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> pa.RecordBatch:
    ours = [
        pa.array(np.full(len(nth), partition, np.int32)),
        pa.array(np.full(len(nth), attempt, np.int64)),
        pa.array(nth, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays([*arrays, *ours], names)


# Committed with the table. A crash of the server empties an unlogged table, and tasks may fill it again afterwards.
MARK = Sql(f"INSERT INTO {{schema}}.{{table}} ({PARTITION}, {ATTEMPT}, {NTH}) VALUES (-1, -1, 0)")


def creating_for_jdbc(schema: str, batch: Batch, layout: Layout) -> Operation[UUID]:
    """Make a staging table for JDBC, marked as never emptied; returns its token."""
    yield IN_TRANSACTION
    token = yield from creating(schema, batch, layout.columns())
    yield MARK.at(schema=schema, table=table(token))()
    return token


ATTEMPTS = Sql(
    f"SELECT {PARTITION}, {ATTEMPT}, count(*), min({NTH}) FROM {{schema}}.{{table}} GROUP BY 1, 2 ORDER BY 1, 2",
    columns=("integer", "bigint", "bigint", "bigint"),
)


def choosing(schema: str, token: UUID) -> Operation[dict[int, int] | None]:
    """Return the attempts that count, one of each partition, with their numbers of rows; None if rows are missing."""
    found = yield ATTEMPTS.at(schema=schema, table=table(token))()
    partitions = {partition for partition, *_ in found}
    # By default JDBC's writer commits a task's rows in one transaction. It goes on without one, though, if it cannot
    # find out about transactions, or if an option says so: whether an attempt is whole, its last row tells.
    whole = {partition: (attempt, rows - 1) for partition, attempt, rows, last in reversed(found) if rows - 1 == -last}
    if -1 not in partitions or partitions != set(whole):
        return None
    return {attempt: rows for partition, (attempt, rows) in sorted(whole.items()) if partition >= 0}


# By their names, not by deleting the others: an attempt that Spark has given up may commit at any moment.
SHOW = Sql(
    f"CREATE VIEW {{schema}}.{{table}}_rows AS SELECT {{expressions}} FROM {{schema}}.{{table}} "
    f"WHERE {ATTEMPT} = ANY (ARRAY[{{attempts}}]::bigint[]) AND {NTH} > 0"
)
HIDE = Sql("DROP VIEW IF EXISTS {schema}.{table}_rows")
IN_ORDER = f"ORDER BY {PARTITION}, {NTH}"


def showing(schema: str, token: UUID, layout: Layout, attempts: Iterable[int]) -> Operation[str]:
    """Make a view of the rows of these attempts, with the types of the outbox; returns its name in the schema."""
    yield IN_TRANSACTION
    listed = ", ".join(map(str, attempts))
    yield SHOW.at(schema=schema, table=table(token), expressions=layout.expressions(), attempts=listed)()
    return f"{table(token)}_rows"


def hiding(schema: str, token: UUID) -> Operation[None]:
    """Drop the view."""
    yield HIDE.at(schema=schema, table=table(token))()
