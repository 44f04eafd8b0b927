"""format("outbox"): what a DataFrame holds is sent exactly once."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from mailroom import codec
from tests.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def rows(spark: "SparkSession", count: int, partitions: int = 4) -> "DataFrame":
    from pyspark.sql import functions as f

    numbers = spark.range(0, count, 1, partitions)
    return numbers.select(
        f.concat(f.lit("key-"), f.col("id") % 10).alias("key"),
        f.struct("id", (f.col("id") * 2).cast("string").alias("twice")).alias("value"),
    )


def write(frame: "DataFrame", dsn: str, key: str = "job", **options: str) -> None:
    options = {"topic": "numbers", "idempotencyKey": key, "dsn": dsn, **options}
    frame.write.format("outbox").options(**options).mode("append").save()


def sent(connect: Connect) -> list[Any]:
    with connect() as connection:
        found = connection.execute("SELECT value FROM mailroom.outbox ORDER BY position").fetchall()
    return [codec.decode(value) for (value,) in found]


def expected(count: int) -> list[Any]:
    return [{"id": number, "twice": str(number * 2)} for number in range(count)]


def test_every_row_is_sent_once_in_order(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    write(rows(spark, 1000), spark_dsn)
    assert sent(connect) == expected(1000)
    with connect() as connection:
        assert connection.execute("SELECT name, batch, query, messages FROM mailroom.spark_batch").fetchall() == [
            ("job", -1, None, 1000)
        ]
        assert connection.execute("SELECT DISTINCT topic, source FROM mailroom.outbox").fetchall() == [
            ("numbers", "mailroom spark job -1")
        ]
        assert connection.execute("SELECT count(*) FROM mailroom.spark_staging").fetchone() == (0,)
