"""writeStream.format("outbox"): each micro-batch is sent exactly once, whatever happens between two of them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

from tests.spark.faulty import FaultySource
from tests.spark.frames import ledger, message, sent, staging_tables
from tests.support.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class Stream:
    """A stream of numbered rows, one file for each micro-batch, into the outbox."""

    def __init__(self, spark: "SparkSession", dsn: str, directory: Path) -> None:
        self.spark = spark
        self.dsn = dsn
        self.source = directory / "source"
        self.source.mkdir()
        self.checkpoint = directory / "checkpoint"

    def add(self, first: int, last: int) -> None:
        """Add the file of a micro-batch."""
        text = "".join(json.dumps({"id": number}) + "\n" for number in range(first, last))
        (self.source / f"{first:08}.json").write_text(text)

    def run(self, *, source: str = "outbox", partitions: int = 3, files: int = 1, **options: str) -> "StreamingQuery":
        """Send what the stream has not sent yet; raises what ended it."""
        rows = (
            self.spark.readStream.schema("id long")
            .option("maxFilesPerTrigger", files)
            .json(str(self.source))
            .repartitionByRange(partitions, "id")
            .select(*message(f.col("id")))
        )
        options = {"topic": "numbers", "dsn": self.dsn, "checkpointLocation": str(self.checkpoint), **options}
        query = rows.writeStream.format(source).options(**options).trigger(availableNow=True).start()
        query.awaitTermination()
        return query


@pytest.fixture
def stream(spark: "SparkSession", spark_dsn: str, tmp_path: Path) -> Stream:
    spark.dataSource.register(FaultySource)
    made = Stream(spark, spark_dsn, tmp_path)
    for nth in range(3):
        made.add(nth * 100, nth * 100 + 100)
    return made


def test_micro_batches_are_sent_in_order(stream: Stream, connect: Connect) -> None:
    query = stream.run(streamName="numbers")
    assert sorted(sent(connect)) == list(range(300))
    assert ledger(connect) == [("numbers", batch, 100) for batch in range(3)]
    with connect() as connection:
        rows = connection.execute("SELECT DISTINCT query FROM mailroom.spark_batch").fetchall()
        assert rows == [(str(query.id),)]
        sources = connection.execute("SELECT source, count(*) FROM mailroom.outbox GROUP BY 1 ORDER BY 1").fetchall()
        assert sources == [(f"mailroom spark numbers {batch}", 100) for batch in range(3)]
    stream.add(300, 350)
    stream.run(streamName="numbers")
    assert sorted(sent(connect)) == list(range(350))
    assert staging_tables(connect) == 0


def test_rows_of_the_users_own_are_committed_with_each_micro_batch(stream: Stream, connect: Connect) -> None:
    # `value` is CBOR there.
    copy = "INSERT INTO numbers SELECT (mailroom.cbor_to_jsonb(value) ->> 'id')::bigint FROM {staging}"
    with connect(autocommit=True) as connection:
        connection.execute("CREATE TABLE numbers (number bigint)")
        stream.run(streamName="numbers", commitSql=copy)
        stream.checkpoint = stream.checkpoint.with_name("another")
        stream.run(streamName="numbers", commitSql=copy, onKnownBatch="pass", continuesQuery=_owner(connection))
        numbers = connection.execute("SELECT number FROM numbers ORDER BY 1").fetchall()
    assert numbers == [(number,) for number in range(300)]
    assert sorted(sent(connect)) == list(range(300))


def _owner(connection: psycopg.Connection[Any]) -> str:
    [(query,)] = connection.execute("SELECT DISTINCT query FROM mailroom.spark_batch").fetchall()
    return str(query)


@pytest.mark.nightly  # as of a sink
def test_without_a_name_the_querys_id_is_the_ledgers(stream: Stream, connect: Connect) -> None:
    query = stream.run()
    assert {name for name, _, _ in ledger(connect)} == {str(query.id)}


def test_commit_that_dies_after_the_databases_commit(stream: Stream, connect: Connect, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.touch()
    with pytest.raises(StreamingQueryException):
        stream.run(source="faulty-outbox", failCommit=str(fault), streamName="numbers")
    assert len(sent(connect)) == 100
    # The replay comes in another number of partitions, which is nothing to the ledger.
    stream.run(partitions=7, streamName="numbers")
    assert sorted(sent(connect)) == list(range(300))
    assert staging_tables(connect) == 0


@pytest.mark.nightly  # as of a job, in test_outbox_source.py
def test_task_killed_after_its_staging_commit(stream: Stream, connect: Connect, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.touch()
    stream.run(source="faulty-outbox", killTask=str(fault), streamName="numbers")
    assert not fault.exists()
    assert sorted(sent(connect)) == list(range(300))
    assert staging_tables(connect) == 0


@pytest.mark.nightly  # as of a sink, and with the rows of the users' own
def test_new_checkpoint_that_continues_a_stream_repeats_nothing(stream: Stream, connect: Connect) -> None:
    old = stream.run(streamName="numbers")
    first, stream.checkpoint = stream.checkpoint, stream.checkpoint.with_name("another")
    stream.add(300, 400)
    for _ in range(2):
        stream.run(streamName="numbers", continuesQuery=str(old.id))
    stream.checkpoint = first
    with pytest.raises(StreamingQueryException, match="'numbers' belongs to the query"):
        stream.run(streamName="numbers")
    assert sorted(sent(connect)) == list(range(400))
    assert [batch for _, batch, _ in ledger(connect)] == [0, 1, 2, 3]


@pytest.mark.nightly  # as of a sink
def test_other_stream_of_that_name_is_refused(stream: Stream, connect: Connect, tmp_path: Path) -> None:
    """Its batches have the same numbers and sizes: nobody could tell that its rows are left out."""
    old = stream.run(streamName="numbers")
    (tmp_path / "other").mkdir()
    other = Stream(stream.spark, stream.dsn, tmp_path / "other")
    for nth in range(10, 14):
        other.add(nth * 100, nth * 100 + 100)
    told = rf"'numbers' belongs to the query {old.id}.*Nothing was sent.*continuesQuery={old.id}"
    with pytest.raises(StreamingQueryException, match=told):
        other.run(streamName="numbers")
    assert sorted(sent(connect)) == list(range(300))
    assert staging_tables(connect) == 0
    other.run(streamName="other numbers")
    assert sorted(sent(connect))[300:] == list(range(1_000, 1_400))


def test_what_is_continued_is_a_stream_of_a_name(stream: Stream) -> None:
    with pytest.raises(StreamingQueryException, match="Give streamName too"):
        stream.run(continuesQuery="1")


@pytest.mark.nightly  # as of a sink
def test_new_checkpoint_that_cuts_otherwise_is_refused(stream: Stream, connect: Connect) -> None:
    old = stream.run(streamName="numbers")
    stream.checkpoint = stream.checkpoint.with_name("another")
    with pytest.raises(StreamingQueryException, match="now it has 200"):
        stream.run(streamName="numbers", files=2, continuesQuery=str(old.id))
    assert sorted(sent(connect)) == list(range(300))
    assert staging_tables(connect) == 0
