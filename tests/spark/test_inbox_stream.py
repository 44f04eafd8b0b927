"""`spark.readStream.format("inbox")`: every message in exactly one batch, whatever ends the query, and reaped after."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from shutil import copytree, rmtree
from typing import TYPE_CHECKING, Any
from unittest import mock

import psycopg
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from dispatcher.delivery.deliver import delivering
from inbox import Inbox, Worker
from mailroom.errors import ConfigurationError, ConnectionFailed, UnknownInbox
from mailroom.session.commit import ATTEMPTS
from mailroom.sql.operation import Sql
from mailroom.sql.pooler import PooledConnection
from mailroom.sql.runner import run
from mailroom.values import codec
from spark_jobs.node import Node as SparkNode
from spark_jobs.read import deliveries, inbox_stream, offsets
from spark_jobs.read.inbox_stream import InboxStreamReader
from tests.support.node import Node, failing
from tests.support.proxy import proxied
from tests.support.roles import rights, role
from tests.support.waiting import eventually
from tests.support.working import working

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


pytestmark = pytest.mark.inbox("shipping")


@pytest.fixture
def reader(spark_dsn: str) -> Iterator[InboxStreamReader]:
    """A reader as the driver has it, for batches of 10."""
    reader = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    yield reader
    reader.stop()


def send(node: Node, *numbers: int) -> None:
    with node.connection.transaction():
        for number in numbers:
            node.send("shipping", number, key=f"order-{number % 5}")
    node.deliver_all()


def waiting(node: Node) -> list[Any]:
    """The numbers in the inbox."""
    rows = node.rows("SELECT value FROM mailroom.inbox_shipping ORDER BY clock")
    return [codec.decode(value) for (value,) in rows]


def values(frame: "DataFrame") -> list[Any]:
    return sorted(codec.decode(bytes(row.value)) for row in frame.select("value").collect())


class Stream:
    """A query from the inbox, started anew from the same checkpoint each time."""

    def __init__(self, spark: "SparkSession", dsn: str, directory: Path) -> None:
        self._spark = spark
        self._dsn = dsn
        self._checkpoint = str(directory / "checkpoint")

    def writer(self, *, stateful: bool = False, **options: Any) -> "DataStreamWriter":
        frame = self._spark.readStream.format("inbox").options(inbox="shipping", dsn=self._dsn, **options).load()
        if stateful:  # each message of a later time moves the watermark, for which Spark makes one more batch
            frame = frame.withWatermark("sent_at", "1 hour").dropDuplicates(["message_id", "sent_at"])
        return frame.writeStream.option("checkpointLocation", self._checkpoint)


@pytest.fixture
def stream(spark: "SparkSession", spark_dsn: str, tmp_path: Path) -> Stream:
    return Stream(spark, spark_dsn, tmp_path)


# -- end to end -------------------------------------------------------------------------------------------------------


def test_everything_is_in_the_files_once(spark: "SparkSession", stream: Stream, node: Node, tmp_path: Path) -> None:
    files = str(tmp_path / "files")

    def catch_up(**options: Any) -> None:
        writer = stream.writer(**options).format("parquet").option("path", files)
        writer.trigger(availableNow=True).start().awaitTermination()

    send(node, *range(50))
    catch_up(maxMessages=20)
    assert values(spark.read.parquet(files)) == list(range(50))
    assert waiting(node) == list(range(40, 50))  # the last batch, until the next one is planned
    send(node, *range(50, 75))
    catch_up(maxMessages=20, numPartitions=3)
    assert values(spark.read.parquet(files)) == list(range(75))
    assert waiting(node) == list(range(70, 75))
    catch_up()
    assert values(spark.read.parquet(files)) == list(range(75))


def test_a_batch_that_is_repeated_has_the_same_messages(stream: Stream, node: Node) -> None:
    """Whether its results were written before the crash or not, and in however many partitions."""
    attempts: list[tuple[int, list[Any], int]] = []
    crash_in = 1

    def sink(frame: "DataFrame", batch: int) -> None:
        attempts.append((batch, values(frame), frame.rdd.getNumPartitions()))
        if batch == crash_in:
            raise RuntimeError("after the results were written, before Spark knows")

    def go_on(**options: Any) -> None:
        writer = stream.writer(maxMessages=20, **options).foreachBatch(sink)
        writer.trigger(availableNow=True).start().awaitTermination()

    send(node, *range(50))
    with pytest.raises(StreamingQueryException, match="after the results were written"):
        go_on(numPartitions=1)
    assert waiting(node) == list(range(20, 50))  # the first batch is done, the second is not
    send(node, *range(50, 60))
    with pytest.raises(StreamingQueryException, match="after the results were written"):
        go_on(numPartitions=7)
    crash_in = -1
    go_on(numPartitions=2)
    second = list(range(20, 40))
    assert attempts == [
        (0, list(range(20)), 1), (1, second, 1), (1, second, 7), (1, second, 2), (2, list(range(40, 60)), 2),
    ]  # fmt: skip
    assert waiting(node) == list(range(40, 60))


def test_a_query_that_goes_on_reaps_behind_itself(stream: Stream, node: Node) -> None:
    batches: dict[int, list[Any]] = {}

    def sink(frame: "DataFrame", batch: int) -> None:
        batches[batch] = values(frame)

    query = stream.writer().foreachBatch(sink).start()
    try:
        for first in (0, 10, 20):
            send(node, *range(first, first + 10))
            query.processAllAvailable()
            assert waiting(node) == list(range(first, first + 10))
        query.stop()
        send(node, 30)
        query = stream.writer().foreachBatch(sink).start()  # nothing of the one before is in its way
        query.processAllAvailable()
    finally:
        query.stop()
    assert sorted(number for batch in batches.values() for number in batch) == list(range(31))
    assert waiting(node) == [30]


def test_what_it_raises_is_seen(stream: Stream, node: Node) -> None:
    with pytest.raises(Exception, match="maxMessages must be an int from 1 to 1,000,000, not 0"):
        stream.writer(maxMessages=0).format("noop").start().awaitTermination()
    with pytest.raises(Exception, match="no option 'key'"):
        stream.writer(key="order-1").format("noop").start().awaitTermination()


def take(reader: InboxStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
    """Read a batch as its tasks do; returns the numbers."""
    values = (batch.column("value").to_pylist() for one in reader.partitions(start, end) for batch in reader.read(one))
    return [codec.decode(value) for some in values for value in some]


# -- offsets ----------------------------------------------------------------------------------------------------------


def clock(offset: dict[str, Any]) -> int:
    return int(offset["clock"])


def test_a_batch_ends_at_its_last_message(reader: InboxStreamReader, node: Node) -> None:
    start = reader.initialOffset()
    assert clock(start) == 0
    assert reader.latestOffset(start, ReadMaxRows(10)) == start
    send(node, *range(25))
    assert reader.getDefaultReadLimit() == ReadMaxRows(10)
    assert clock(reader.latestOffset(start, ReadAllAvailable())) == 25
    ends = [start]
    for _ in range(4):
        ends.append(reader.latestOffset(ends[-1], ReadMaxRows(10)))
    assert [clock(end) for end in ends] == [0, 10, 20, 25, 25]
    reader.commit(ends[3])
    assert reader.latestOffset(ends[3], ReadMaxRows(10)) == ends[3]  # empty: where it starts
    assert reader.partitions(ends[3], ends[3]) == []


def test_progress_tells_how_far_behind_a_batch_is(reader: InboxStreamReader, node: Node) -> None:
    assert reader.reportLatestOffset()["lag_clocks"] == 0
    send(node, *range(25))
    node.rows("UPDATE mailroom.inbox_shipping SET delivered_at = delivered_at - interval '1 hour' RETURNING 1")
    start = reader.initialOffset()
    lags = []
    for _ in range(3):
        start = reader.latestOffset(start, ReadMaxRows(10))
        told = reader.reportLatestOffset()
        lags.append((clock(told), told["lag_clocks"], told["lag_s"] >= 3600))
    assert lags == [(25, 15, True), (25, 5, True), (25, 0, False)]
    assert start.keys() == {
        "inbox",
        "checkpoint",
        "clock",
        "message_id",
        "batch",
        "messages",
        "digest",
    }  # what the checkpoint holds


def test_spark_4_1_tells_neither_start_nor_limit(reader: InboxStreamReader, node: Node, spark_dsn: str) -> None:
    send(node, *range(25))
    start = reader.initialOffset()
    ends = [reader.latestOffset() for _ in range(4)]
    assert [clock(end) for end in ends] == [10, 20, 25, 25]
    reader.stop()
    again = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    try:
        assert clock(again.latestOffset()) == 25  # not known where to start counting
        again.partitions(start, ends[0])  # a batch that is repeated tells
        assert clock(again.latestOffset()) == 20
    finally:
        again.stop()


def test_available_now_ends_with_what_there_was(reader: InboxStreamReader, node: Node) -> None:
    send(node, *range(15))
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    send(node, *range(15, 40))
    first = reader.latestOffset(start, ReadMaxRows(10))
    second = reader.latestOffset(first, ReadMaxRows(10))
    assert (clock(first), clock(second)) == (10, 15)
    assert reader.latestOffset(second, ReadMaxRows(10)) == second


def test_nothing_is_given_out_before_it_is_durable(reader: InboxStreamReader, node: Node) -> None:
    start = reader.initialOffset()
    node.connection.execute("SET synchronous_commit = off")
    with node.connection.transaction():
        node.allow_clocks()
    with node.connection.transaction():
        node.send("shipping", 1)
    node.deliver()
    written = node.value("SELECT pg_current_wal_insert_lsn()")
    assert clock(reader.latestOffset(start, ReadMaxRows(10))) == 1
    assert node.value("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", written)


# -- reaping ----------------------------------------------------------------------------------------------------------


def test_commit_reaps_what_was_read_and_no_more(
    reader: InboxStreamReader, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    reap = offsets.REAP.template.replace(str(offsets.REAPED_ROWS), "3")
    monkeypatch.setattr(offsets, "REAP", Sql(reap, offsets.REAP.columns))
    send(node, *range(25))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(10))
    assert take(reader, start, end) == list(range(10))
    for _ in range(2):
        reader.commit(end)
        assert waiting(node) == list(range(10, 25))
    last = reader.latestOffset(end, ReadAllAvailable())
    assert take(reader, end, last) == list(range(10, 25))
    node.rows("DELETE FROM mailroom.inbox_shipping WHERE clock = 15 RETURNING 1")
    reader.commit(last)
    assert waiting(node) == []


def test_a_commit_that_did_not_happen_is_made_up_for(reader: InboxStreamReader, node: Node) -> None:
    send(node, *range(25))
    start = reader.initialOffset()
    first = reader.latestOffset(start, ReadMaxRows(10))
    take(reader, start, first)
    second = reader.latestOffset(first, ReadMaxRows(10))
    take(reader, first, second)
    reader.commit(second)
    assert waiting(node) == list(range(20, 25))


def test_what_no_task_has_read_stays_and_is_told(
    reader: InboxStreamReader, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """A sink that takes a part, or nothing, of a batch; and nothing after it goes, which stays in its order."""
    reader._number = 2
    send(node, *range(20))
    start = reader.initialOffset()
    first = reader.latestOffset(start, ReadMaxRows(10))
    [one, _] = reader.partitions(start, first)
    list(reader.read(one))
    second = reader.latestOffset(first, ReadMaxRows(10))
    reader.commit(first)
    take(reader, first, second)
    reader.commit(second)
    assert waiting(node) == list(range(20))
    assert [record.getMessage()[:61] for record in caplog.records] == [
        "stream shipping: of batch 1 not every message was read, so it"
    ] * 2
    take(reader, start, first)  # Spark repeats it
    reader.commit(second)
    assert waiting(node) == []


@pytest.mark.parametrize("where", ["", "WHERE key = 'order-1'"])
def test_a_task_that_reads_less_than_was_planned_fails(reader: InboxStreamReader, node: Node, where: str) -> None:
    """Another consumer between the plan and the tasks, or a database of another moment."""
    send(node, *range(10))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(10))
    [planned] = reader.partitions(start, end)
    node.connection.execute(f"DELETE FROM mailroom.inbox_shipping {where}".encode())
    with pytest.raises(ConfigurationError, match=r"A task of batch 1 .* read \d messages, and 10 were planned"):
        list(reader.read(planned))
    left = waiting(node)
    reader.commit(end)
    assert waiting(node) == left


def test_other_messages_at_the_same_clocks_are_others(reader: InboxStreamReader, node: Node) -> None:
    send(node, *range(10))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(10))
    [planned] = reader.partitions(start, end)
    node.connection.execute("UPDATE mailroom.inbox_shipping SET message_id = gen_random_uuid() WHERE clock = 5")
    with pytest.raises(ConfigurationError, match="read 10 messages, and 10 were planned"):
        list(reader.read(planned))


def test_what_is_taken_between_the_plan_and_its_ranges_is_missed(reader: InboxStreamReader, node: Node) -> None:
    send(node, *range(10))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(10))
    node.connection.execute("DELETE FROM mailroom.inbox_shipping WHERE key = 'order-1'")
    with pytest.raises(ConfigurationError, match="had 10 messages when it was planned, and they are not all there"):
        reader.partitions(start, end)


# -- a checkpoint that is not the one before --------------------------------------------------------------------------


def run_batches(reader: InboxStreamReader, count: int, start: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Run this many batches as Spark does, each committed when the next one is planned; returns where each ends."""
    ends = [start or reader.initialOffset()]
    for _ in range(count):
        ends.append(reader.latestOffset(ends[-1], ReadMaxRows(10)))
        if len(ends) > 2:
            reader.commit(ends[-2])
        take(reader, ends[-2], ends[-1])
    return ends


def test_the_rights_of_a_spark_reader_are_enough_and_show_no_other_stream(node: Node) -> None:
    node.inbox("billing")
    node.connection.execute(
        "INSERT INTO mailroom.spark_stream (inbox, checkpoint, batch, above, upto, message_id, messages, digest) "
        "VALUES ('billing', 'of another', 1, 0, 9, 'id', 1, 1)"
    )
    send(node, *range(25))
    with role(node.dsn, *rights("spark-reader", "shipping")) as (_, dsn):
        reader = InboxStreamReader(SparkNode(dsn=dsn), "shipping", None, 10)
        try:
            with mock.patch.object(inbox_stream, "number_of_task", side_effect=count().__next__):  # as Spark's tasks
                ends = run_batches(reader, 3)
            reader.commit(ends[-1])  # of a batch that Spark has made without data
            reader.stop()
            reader.commit(ends[-1])  # it starts again, from its checkpoint
        finally:
            reader.stop()
        with psycopg.connect(dsn, autocommit=True) as stream:
            seen = stream.execute("SELECT DISTINCT inbox FROM mailroom.my_spark_stream").fetchall()
            assert seen == [("shipping",)]
            assert stream.execute("UPDATE mailroom.my_spark_stream SET read = '{}'").rowcount == 1
            for forged in (
                "UPDATE mailroom.my_spark_stream SET inbox = 'billing'",
                FORGED,
                "TABLE mailroom.spark_stream",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    stream.execute(forged.encode())
    assert waiting(node) == []
    assert node.rows("SELECT checkpoint FROM mailroom.spark_stream WHERE inbox = 'billing'") == [("of another",)]


# The row is there: also that is not told.
FORGED = (
    "INSERT INTO mailroom.my_spark_stream (inbox, checkpoint, batch, above, upto, message_id, messages, digest) "
    "VALUES ('billing', 'mine', 1, 0, 9, 'id', 1, 1)"
)


def test_a_checkpoint_set_back_is_refused(reader: InboxStreamReader, node: Node, spark_dsn: str) -> None:
    """Its numbers stand for other messages at a sink that has seen them: it would pass over what it is given now."""
    send(node, *range(50))
    ends = run_batches(reader, 4)
    reader.stop()
    for use in (
        lambda: reader.latestOffset(ends[1], ReadMaxRows(10)),
        lambda: reader.partitions(ends[1], ends[2]),
        lambda: reader.partitions(ends[0], ends[1]),
    ):
        with pytest.raises(ConfigurationError, match=r"The checkpoint was set back: .* up to batch 4.*continuesCheckp"):
            use()
    assert waiting(node) == list(range(30, 50))
    reader.stop()
    # The last one was not committed: the same number has the same messages, however many are allowed now.
    again = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 20)
    assert again.latestOffset(ends[3], ReadMaxRows(20)) == ends[4]
    assert take(again, ends[3], ends[4]) == list(range(30, 40))
    assert clock(again.latestOffset(ends[4], ReadMaxRows(20))) == 50
    again.commit(ends[4])
    again.stop()
    last = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    with pytest.raises(ConfigurationError, match="had 10 messages when it was planned, and they are not all there"):
        last.partitions(ends[3], ends[4])
    last.stop()


def test_a_new_checkpoint_has_to_be_told(reader: InboxStreamReader, node: Node, spark_dsn: str) -> None:
    """A file sink with a log of its own passes over the numbers, which begin again."""
    send(node, *range(30))
    ends = run_batches(reader, 2)
    reader.stop()
    old = ends[0]["checkpoint"]
    new = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    refused = rf"was read up to batch 2 under checkpoint {old}.*another path.*continuesCheckpoint\", \"{old}\""
    with pytest.raises(ConfigurationError, match=refused):
        new.latestOffset(new.initialOffset(), ReadMaxRows(10))
    new.stop()
    told = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10, continues=old)
    run_batches(told, 2)
    assert waiting(node) == list(range(20, 30))
    told.stop()
    late = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    with pytest.raises(ConfigurationError, match=r"was read up to batch 2 under checkpoint"):
        late.latestOffset(ends[2], ReadMaxRows(10))
    late.stop()


def test_batches_that_are_kept_are_read_again_the_same(node: Node, spark_dsn: str) -> None:
    send(node, *range(60))
    reader = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10, keep_batches=2)
    ends = run_batches(reader, 5)
    assert waiting(node) == list(range(20, 60))  # batch 4 is committed, and two are kept
    for number in (2, 3, 4):
        assert reader.latestOffset(ends[number], ReadMaxRows(10)) == ends[number + 1]
        assert take(reader, ends[number], ends[number + 1]) == list(range(number * 10, number * 10 + 10))
    with pytest.raises(ConfigurationError, match="The checkpoint was set back"):
        reader.latestOffset(ends[1], ReadMaxRows(10))
    reader.stop()


def read_as(reader: InboxStreamReader, start: dict[str, Any], end: dict[str, Any], number: int) -> list[Any]:
    """Read a batch as tasks of Spark's batch of this number, which others have done before it is committed."""
    with mock.patch.object(inbox_stream, "number_of_task", return_value=number):
        return take(reader, start, end)


@pytest.mark.parametrize("idle", [0, 2])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_number_that_spark_has_used_is_not_used_for_another_batch(
    node: Node, spark_dsn: str, idle: int, restarted: bool
) -> None:
    """Spark counts batches too in which there is nothing of the inbox, as those of a query with a watermark."""

    def opened() -> InboxStreamReader:
        return InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10, keep_batches=5)

    send(node, *range(20))
    reader = opened()
    ends = [reader.initialOffset()]
    for number in range(2):
        ends.append(reader.latestOffset(ends[-1], ReadMaxRows(10)))
        if number:
            reader.commit(ends[-2])
        read_as(reader, ends[-2], ends[-1], number)
    for nth in range(idle):
        if restarted and nth:
            reader.stop()
            reader = opened()
        assert reader.latestOffset(ends[-1], ReadMaxRows(10)) == ends[-1]
        reader.commit(ends[-1])
    reader.stop()

    again = opened()  # whose checkpoint was set back to the state after the first batch
    send(node, *range(20, 30))
    with pytest.raises(ConfigurationError, match=r"set back: what is Spark's batch 2 now was batch 1"):
        read_as(again, ends[1], ends[2], 2)
    assert read_as(again, ends[1], ends[2], 1) == list(range(10, 20))
    ends.append(again.latestOffset(ends[-1], ReadMaxRows(10)))
    again.commit(ends[-2])
    for number in range(2, 2 + idle):
        with pytest.raises(ConfigurationError, match=f"set back: what is Spark's batch {number} now comes after batch"):
            read_as(again, ends[-2], ends[-1], number)
    assert read_as(again, ends[-2], ends[-1], 2 + idle) == list(range(20, 30))
    again.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_numbers_of_a_stateful_query_stand_for_the_same_messages_also_if_it_is_set_back(
    stream: Stream, node: Node, spark_dsn: str, tmp_path: Path
) -> None:
    """Its watermark makes batches without data, which take numbers of Spark's; the sink goes by them."""
    taken: dict[int, list[Any]] = {}
    checkpoint, older = tmp_path / "checkpoint", tmp_path / "older"

    def sink(frame: "DataFrame", batch: int) -> None:
        if batch == 1 and not older.exists():  # the state after the first batch, and of the next one nothing but a plan
            copytree(checkpoint, older)
            (older / "offsets" / "1").unlink()
        found = values(frame)
        assert taken.setdefault(batch, found) == found

    def go_on() -> None:
        writer = stream.writer(maxMessages=10, keepBatches=5, stateful=True)
        query = writer.outputMode("append").foreachBatch(sink).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    for first in (0, 10):
        send(node, *range(first, first + 10))
        go_on()
    numbers = [list(range(10)), [], list(range(10, 20)), []]
    assert [taken.get(number) for number in range(4)] == numbers
    newest = checkpoint.rename(tmp_path / "newest")
    send(node, *range(20, 30))
    copytree(older, checkpoint)
    with pytest.raises(StreamingQueryException, match="set back: what is Spark's batch 1 now was batch 2 of the query"):
        go_on()
    assert waiting(node) == list(range(30))
    rmtree(checkpoint)
    newest.rename(checkpoint)
    go_on()
    assert [number for _, batch in sorted(taken.items()) for number in batch] == list(range(30))


@pytest.mark.parametrize(("passed_over", "left"), [(1, 0), (4, 30)])
def test_nothing_is_deleted_after_a_batch_that_the_sink_has_passed_over(
    reader: InboxStreamReader, node: Node, caplog: pytest.LogCaptureFixture, passed_over: int, left: int
) -> None:
    """A file sink in whose directory another query has written: such a batch is not even planned."""
    send(node, *range(60))
    end = reader.initialOffset()
    for number in range(1, 6):
        start, end = end, reader.latestOffset(end, ReadMaxRows(10))
        if number != passed_over:
            take(reader, start, end)
        reader.commit(end)
    assert waiting(node) == list(range(left, 60))
    assert f"of batch {passed_over} not every message was read" in caplog.messages[-1]


# -- sole consumer ----------------------------------------------------------------------------------------------------


def test_a_second_stream_is_refused(
    reader: InboxStreamReader, node: Node, spark_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.inbox("other")
    reader.initialOffset()
    second = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    with monkeypatch.context() as impatient:
        impatient.setattr(offsets, "PATIENCE_MS", 10)
        with pytest.raises(ConfigurationError, match="Another stream reads inbox 'shipping'"):
            second.initialOffset()
    other = InboxStreamReader(SparkNode(dsn=spark_dsn), "other", None, 10)
    other.initialOffset()
    other.stop()
    reader.stop()
    second.initialOffset()
    second.stop()


def test_a_worker_beside_it_is_found_out(reader: InboxStreamReader, node: Node) -> None:
    node.inbox("other")

    def refusal() -> str:
        try:
            reader.latestOffset(start, ReadMaxRows(10))
        except ConfigurationError as error:
            return str(error)
        return ""

    start = reader.initialOffset()
    with working(Worker(node.dsn, "other", lambda message, connection: None)):
        asleep = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
        eventually(lambda: node.value(asleep))
        assert not refusal()
    with working(Worker(node.dsn, "shipping", lambda message, connection: None)):
        assert "A worker reads inbox 'shipping', and a stream must have it alone" in eventually(refusal)
    eventually(lambda: not refusal())


def test_parked_keys_are_not_passed_by(reader: InboxStreamReader, node: Node) -> None:
    node.inbox("shipping", max_attempts=1)
    send(node, *range(5))
    start = reader.initialOffset()
    [message] = Inbox("shipping").peek(node.connection, limit=1)
    with node.connection.transaction():
        run(node.connection, failing("shipping", message, ValueError()))
    with pytest.raises(ConfigurationError, match="Keys of inbox 'shipping' are parked"):
        reader.latestOffset(start, ReadMaxRows(10))


def test_what_is_parked_behind_it_is_not_to_be_replayed_for_it(reader: InboxStreamReader, node: Node) -> None:
    """It may have been parked between a plan and its tasks, and replayed it would be deleted unread."""
    node.inbox("shipping", max_attempts=1)
    send(node, *range(5))
    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))
    [message] = Inbox("shipping").peek(node.connection, limit=1)
    with node.connection.transaction():
        run(node.connection, failing("shipping", message, ValueError()))
    reader.prepareForTriggerAvailableNow()  # which is asked before it is known how far the stream has come
    with pytest.raises(ConfigurationError, match=r"parked which the stream has passed.*another checkpointLocation"):
        reader.latestOffset(end, ReadMaxRows(10))


def test_a_checkpoint_of_another_history_is_refused(reader: InboxStreamReader, node: Node) -> None:
    send(node, *range(5))
    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))
    reader.stop()
    node.connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
    for use in (
        lambda: reader.latestOffset(end, ReadMaxRows(10)),
        lambda: reader.partitions(end, end),
        lambda: reader.commit(end),
    ):
        with pytest.raises(ConfigurationError, match="The checkpoint is of shipping@"):
            use()
    assert waiting(node) == list(range(5))


# -- a session that is lost -------------------------------------------------------------------------------------------

NAME = "mailroom spark stream shipping"


def test_a_query_goes_on_after_a_lost_session(stream: Stream, node: Node) -> None:
    batches: dict[int, list[Any]] = {}

    def sink(frame: "DataFrame", batch: int) -> None:
        node.end_sessions(NAME)
        batches[batch] = values(frame)

    query = stream.writer(maxMessages=5).foreachBatch(sink).start()
    try:
        for first in (0, 10):
            send(node, *range(first, first + 10))
            query.processAllAvailable()
            node.end_sessions(NAME)
        query.processAllAvailable()
    finally:
        query.stop()
    assert [number for _, batch in sorted(batches.items()) for number in batch] == list(range(20))
    assert waiting(node) == list(range(15, 20))


def test_each_step_is_taken_once_more_on_another_session(reader: InboxStreamReader, node: Node) -> None:
    send(node, *range(25))
    start = reader.initialOffset()
    node.end_sessions(NAME)
    reader.prepareForTriggerAvailableNow()
    node.end_sessions(NAME)
    end = reader.latestOffset(start, ReadMaxRows(10))
    node.end_sessions(NAME)
    assert reader.partitions(start, end)
    node.end_sessions(NAME)
    take(reader, start, end)
    last = reader.latestOffset(end, ReadMaxRows(10))
    node.end_sessions(NAME)
    reader.commit(end)
    assert waiting(node) == list(range(10, 25))
    take(reader, end, last)
    node.end_sessions(NAME)
    reader.commit(last)
    assert waiting(node) == list(range(20, 25))
    assert len(node.sessions(NAME)) == 1


@pytest.mark.parametrize("taken", ["clock = 1", "clock > 9", "true"])
def test_what_another_took_meanwhile_ends_the_stream(reader: InboxStreamReader, node: Node, taken: str) -> None:
    """Its tasks may not have read it, and nobody would know."""
    send(node, *range(10))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(10))
    node.end_sessions(NAME)
    node.connection.execute(f"DELETE FROM mailroom.inbox_shipping WHERE {taken}".encode())
    for use in (
        lambda: reader.partitions(start, end),
        lambda: reader.latestOffset(end, ReadMaxRows(10)),
        lambda: reader.commit(end),
    ):
        with pytest.raises(ConfigurationError, match=r"nother consumer took messages.* another checkpointLocation"):
            use()


def test_another_stream_that_came_meanwhile_ends_it(
    reader: InboxStreamReader, node: Node, spark_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = reader.initialOffset()
    node.end_sessions(NAME)
    other = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    other.initialOffset()
    monkeypatch.setattr(offsets, "PATIENCE_MS", 10)
    with pytest.raises(ConfigurationError, match="Another stream reads inbox 'shipping'"):
        reader.latestOffset(start, ReadMaxRows(10))
    other.stop()


def test_a_server_that_stays_away_ends_it(
    node: Node, spark_dsn: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(inbox_stream, "sleep", lambda _: pauses.append(1))
    with proxied(dsn) as (proxy, through):
        reader = InboxStreamReader(SparkNode(dsn=through), "shipping", None, 10)
        start = reader.initialOffset()
        proxy.cut()
        with pytest.raises((ConnectionFailed, psycopg.OperationalError)):
            reader.latestOffset(start, ReadMaxRows(10))
        assert len(pauses) == ATTEMPTS - 1
        first = InboxStreamReader(SparkNode(dsn=through), "shipping", None, 10)
        with pytest.raises(ConnectionFailed):  # at once
            first.initialOffset()
    assert len(pauses) == ATTEMPTS - 1


# -- a database restored to an earlier time ---------------------------------------------------------------------------


def restore(node: Node, clock: int) -> None:
    """Put the node back to where its clock was there and nothing in the inbox."""
    node.connection.execute("DELETE FROM mailroom.inbox_shipping")
    node.connection.execute("SELECT setval('mailroom.clock', %s)", [clock])


def deliver(node: Node, topic: str, *numbers: int) -> None:
    """Deliver without the jump of the clock by which a dispatcher begins."""
    node.allow_clocks()
    with node.connection.transaction():
        for number in numbers:
            node.send(topic, number)
    node.deliver()


def demand_refused(reader: InboxStreamReader, end: dict[str, Any]) -> None:
    for use in (
        lambda: reader.latestOffset(end, ReadMaxRows(10)),
        lambda: reader.partitions(reader.initialOffset(), end),
        lambda: reader.commit(end),
    ):
        with pytest.raises(ConfigurationError, match=r"restored to an earlier time.* Name another checkpointLocation"):
            use()


@pytest.fixture
def end(spark_dsn: str, node: Node) -> dict[str, Any]:
    """Where a stream has read to that has ended: the fifth message."""
    deliver(node, "shipping", *range(5))
    before = InboxStreamReader(SparkNode(dsn=spark_dsn), "shipping", None, 10)
    [_, end] = run_batches(before, 1)
    before.stop()
    assert clock(end) == 5
    return end


def test_a_clock_that_was_not_given_out_is_refused(reader: InboxStreamReader, node: Node, end: dict[str, Any]) -> None:
    restore(node, 4)
    demand_refused(reader, end)
    restore(node, 4)
    deliver(node, "shipping", 10)
    node.connection.execute("DELETE FROM mailroom.inbox_shipping")
    assert reader.latestOffset(end, ReadMaxRows(10)) == end  # now nothing else can turn up below it


def test_a_clock_that_another_message_has_is_refused(
    reader: InboxStreamReader, node: Node, end: dict[str, Any]
) -> None:
    restore(node, 2)
    deliver(node, "shipping", *range(10, 14))
    demand_refused(reader, end)
    assert waiting(node) == list(range(10, 14))


def test_a_clock_that_another_inbox_has_is_refused(reader: InboxStreamReader, node: Node, end: dict[str, Any]) -> None:
    node.inbox("other")
    restore(node, 2)
    deliver(node, "shipping", 10)
    deliver(node, "other", *range(11, 15))
    demand_refused(reader, end)
    assert waiting(node) == [10]


def test_a_delivery_under_way_is_waited_for(
    reader: InboxStreamReader, node: Node, end: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has given out the clock, and its messages are not seen."""
    restore(node, 2)
    node.send("shipping", 10)
    with psycopg.connect(node.dsn) as dispatcher:
        run(dispatcher, delivering("mailroom", rows=10, max_bytes=1_000))
        node.connection.execute("SELECT setval('mailroom.clock', 5)")
        monkeypatch.setattr(deliveries, "LOOKS", 1)
        with pytest.raises(ConfigurationError, match=r"A delivery.*has been under way for a minute"):
            reader.latestOffset(end, ReadMaxRows(10))
    demand_refused(reader, end)


def test_what_is_left_of_a_batch_is_reaped_after_a_crash(
    reader: InboxStreamReader, node: Node, end: dict[str, Any]
) -> None:
    node.connection.execute("DELETE FROM mailroom.inbox_shipping WHERE clock <= 3")  # a commit that was cut off
    deliver(node, "shipping", 5)
    assert clock(reader.latestOffset(end, ReadMaxRows(10))) == 6
    reader.commit(end)
    assert waiting(node) == [5]


def test_a_checkpoint_of_which_nothing_is_left_goes_on(
    reader: InboxStreamReader, node: Node, end: dict[str, Any]
) -> None:
    node.connection.execute("DELETE FROM mailroom.inbox_shipping")
    assert reader.latestOffset(end, ReadMaxRows(10)) == end
    deliver(node, "shipping", 5)
    assert clock(reader.latestOffset(end, ReadMaxRows(10))) == 6


def test_a_pooler_is_refused(reader: InboxStreamReader, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    pooled = PooledConnection.connect(node.dsn, autocommit=True)
    monkeypatch.setattr(SparkNode, "connect", lambda *_, **__: pooled)
    with pytest.raises(ConfigurationError, match="a connection string that names the server itself"):
        reader.initialOffset()
    assert pooled.closed


def test_an_unknown_inbox_is_told(spark_dsn: str, node: Node) -> None:
    with pytest.raises(UnknownInbox, match="mailroom inbox create nowhere"):
        InboxStreamReader(SparkNode(dsn=spark_dsn), "nowhere", None, 10).initialOffset()


def test_inbox_in_total_order_is_refused_in_spark(
    spark: "SparkSession", spark_dsn: str, node: Node, tmp_path: Path
) -> None:
    node.inbox("ledger", order="total")
    node.send("ledger", 1)
    node.deliver_all()
    stream = spark.readStream.format("inbox").options(inbox="ledger", dsn=spark_dsn).load()
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    with pytest.raises(StreamingQueryException, match="has total order"):
        writer.start().processAllAvailable()
    assert node.delivered("inbox") == [("ledger",)]
