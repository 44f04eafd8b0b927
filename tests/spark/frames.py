"""Rows that tests of the writers send, and what of them is in the outbox."""

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as spark

from mailroom.values import codec
from spark_jobs.write.shape import Shape
from tests.support.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# The shape that `frame` has, for tests that need no session.
SHAPE = Shape.of(
    spark.StructType(
        [
            spark.StructField("key", spark.StringType()),
            spark.StructField("value", spark.StructType([spark.StructField("id", spark.LongType())])),
        ]
    ),
    {"topic": "numbers"},
)


def batches(first: int, last: int, size: int = 100) -> "list[pa.RecordBatch]":
    """Arrow record batches of `SHAPE`, with the ids from `first` up to `last`, as Spark hands them to a task."""
    ids = [pa.array(range(low, min(low + size, last))) for low in range(first, last, size)]
    return [
        pa.record_batch(
            [
                pa.array([f"key-{number % 10}" for number in some.to_pylist()]),
                pa.StructArray.from_arrays([some], ["id"]),
            ],
            ["key", "value"],
        )
        for some in ids
    ]


def message(number: "Column") -> "list[Column]":
    from pyspark.sql import functions as f

    return [f.concat(f.lit("key-"), number % 10).alias("key"), f.struct(number.alias("id")).alias("value")]


def frame(session: "SparkSession", count: int, partitions: int = 4) -> "DataFrame":
    """A DataFrame of `SHAPE` with the ids from 0 up to `count`."""
    from pyspark.sql import functions as f

    return session.range(0, count, 1, partitions).select(*message(f.col("id")))


def sent(connect: Connect) -> list[int]:
    """The ids in the outbox, in its order."""
    return [value["id"] for value in values(connect)]


def values(connect: Connect) -> list[Any]:
    with connect() as connection:
        rows = connection.execute("SELECT value FROM mailroom.outbox ORDER BY position").fetchall()
    return [codec.decode(value) for (value,) in rows]


def staging_tables(connect: Connect) -> int:
    with connect() as connection:
        [tables] = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relname ^@ 'staging_' AND relkind = 'r'"
        ).fetchone() or (0,)
    return int(tables)


def ledger(connect: Connect) -> list[tuple[Any, ...]]:
    with connect() as connection:
        return connection.execute("SELECT name, batch, messages FROM mailroom.spark_batch ORDER BY 1, 2").fetchall()
