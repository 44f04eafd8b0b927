"""What each writer does, in a process of its own: `python -m tests.spark.campaign.lanes LANE DSN DIRECTORY`.

It takes the files of DIRECTORY/source in the order of their names, until DIRECTORY/stop is there and none is left.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from spark_jobs.session import spark_session
from spark_jobs.write.sink import OutboxSink
from tests.spark.cluster import CLUSTER
from tests.spark.frames import message

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

PAUSE_S = 0.2


def streamed(dsn: str, directory: Path) -> None:
    """Stream by the format."""
    _stream(directory, lambda rows: rows.writeStream.format("outbox").options(
        topic="streamed", streamName="streamed", dsn=dsn
    ))  # fmt: skip


def batched(dsn: str, directory: Path) -> None:
    """Stream by `foreachBatch`."""
    _stream(directory, lambda rows: rows.writeStream.foreachBatch(_sink("batched", dsn)))


def stateful(dsn: str, directory: Path) -> None:
    """Stream by `foreachBatch` what a stateful operator lets through: each row comes twice."""
    _stream(directory, lambda rows: rows.dropDuplicates(["value"]).writeStream.foreachBatch(_sink("stateful", dsn)))


def jobs(dsn: str, directory: Path) -> None:
    """Write a DataFrame per file on a cluster of two executors; a large one in chunks."""
    session = spark_session("jobs", "local-cluster[2,1,1024]", {"spark.executor.memory": "1g", **CLUSTER})
    while not _is_over(directory):
        for file in _left(directory):
            rows = _rows(session.read.schema("id long").json(str(file)))
            options = {"topic": "jobs", "idempotencyKey": file.name, "dsn": dsn}
            rows.write.format("outbox").mode("append").options(**options).save()
            _done(directory, file).touch()
        time.sleep(PAUSE_S)


def _sink(name: str, dsn: str) -> "Callable[[DataFrame, int], None]":
    sink = OutboxSink(name, topic=name, dsn=dsn)

    def send(frame: "DataFrame", number: int) -> None:
        sink(frame, number)

    return send


def _stream(directory: Path, writing: "Callable[[DataFrame], DataStreamWriter]") -> None:
    session: SparkSession = spark_session(directory.name, "local[2]")
    while not _is_over(directory):
        left = _left(directory)
        source = session.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(str(directory / "source"))
        query = writing(_rows(source)).option("checkpointLocation", str(directory / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()
        for file in left:
            _done(directory, file).touch()
        time.sleep(PAUSE_S)


def _rows(source: "DataFrame") -> "DataFrame":
    return source.select(*message(f.col("id")))


def _left(directory: Path) -> list[Path]:
    return [file for file in sorted((directory / "source").glob("*.json")) if not _done(directory, file).exists()]


def _done(directory: Path, file: Path) -> Path:
    return directory / "done" / file.name


def _is_over(directory: Path) -> bool:
    return (directory / "stop").exists() and not _left(directory)


LANES = {each.__name__: each for each in (streamed, batched, stateful, jobs)}

if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    LANES[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
