"""OutboxSink in a stateful query: a batch that the ledger has is computed all the same, since its state is needed."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

from spark_jobs.write.sink import OutboxSink
from tests.spark.frames import ledger, values
from tests.support.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STATE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Each batch names the very state that it goes on from: one that was not written cannot be made up for.
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    # RocksDB's files are written by Hadoop's own class for them, which the quick one of other tests is not.
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}


@pytest.fixture
def session(spark: "SparkSession") -> "SparkSession":
    other = spark.newSession()
    for name, value in STATE.items():
        other.conf.set(name, value)
    return other


def test_stateful_query_goes_on_after_a_crash_behind_the_commit(
    session: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for nth, words in enumerate((["a", "b"], ["b", "c"], ["a", "c"])):
        file = source / f"{nth}.json"
        file.write_text("".join(json.dumps({"word": word}) + "\n" for word in words))
        os.utime(file, (1_700_000_000 + nth,) * 2)  # Spark takes the oldest first
    sink = OutboxSink("words", topic="words", dsn=spark_dsn)
    crashes = [1]

    def handle(frame: "DataFrame", batch: int) -> None:
        sink(frame, batch)
        if batch in crashes:
            crashes.remove(batch)
            raise RuntimeError("the driver dies between our commit and Spark's")

    def run() -> None:
        words = session.readStream.schema("word string").option("maxFilesPerTrigger", 1).json(str(source))
        counted = (
            words.groupBy("word").count().select(f.col("word").alias("key"), f.struct("word", "count").alias("value"))
        )
        writer = counted.writeStream.outputMode("update").foreachBatch(handle).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="the driver dies"):
        run()
    assert sorted(batch.name for batch in (tmp_path / "checkpoint" / "commits").glob("[0-9]*")) == ["0"]
    assert ledger(connect) == [("words", 0, 2), ("words", 1, 2)]
    run()
    counts = [(value["word"], value["count"]) for value in values(connect)]
    assert sorted(counts) == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1), ("c", 2)]
    assert ledger(connect) == [("words", 0, 2), ("words", 1, 2), ("words", 2, 2)]
