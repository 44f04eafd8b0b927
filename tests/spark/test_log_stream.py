"""The stream of an inbox that reads a log: a batch that is repeated has the same messages, and nothing is deleted."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from inbox import Inbox
from mailroom import create_inbox, set_inbox, set_log
from mailroom.errors import ConfigurationError
from mailroom.logs.segments import emptying, listing_over, making_segment
from mailroom.sql.runner import run
from spark_jobs.node import Node as SparkNode
from spark_jobs.read import log_stream
from spark_jobs.read.inbox_stream import InboxStreamReader
from spark_jobs.read.log_parts import LaneRange
from tests.logs.support import Reader, make, write
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.roles import rights, role

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS = [f"k{n % 7}" for n in range(25)]
Open = Callable[..., InboxStreamReader]
Offset = dict[str, Any]


@pytest.fixture
def opened(spark_dsn: str) -> Iterator[Open]:
    """Return what makes readers as the driver has them, for batches of 10 of the inbox lake."""
    readers: list[InboxStreamReader] = []

    def make_one(inbox: str = "lake", number: int | None = 3, **options: Any) -> InboxStreamReader:
        readers.append(InboxStreamReader(SparkNode(dsn=options.pop("dsn", spark_dsn)), inbox, number, 10, **options))
        return readers[-1]

    yield make_one
    for reader in readers:
        reader.stop()


def take(reader: InboxStreamReader, start: Offset, end: Offset) -> list[int]:
    """Read a batch as its tasks do, of an offset that has been in a checkpoint; returns the clocks."""
    parts = reader.partitions(json.loads(json.dumps(start)), json.loads(json.dumps(end)))
    found = (batch.column("clock").to_pylist() for one in parts for batch in reader.read(one))
    return sorted(clock for some in found for clock in some)


def go_on(reader: InboxStreamReader, start: Offset | None = None) -> tuple[list[list[int]], list[Offset]]:
    """Run batches as Spark does, each committed when the next one is planned, until nothing is left."""
    ends, found = [start or reader.initialOffset()], list[list[int]]()
    while (end := reader.latestOffset(ends[-1], ReadMaxRows(10))) != ends[-1]:
        if found:
            reader.commit(ends[-1])
        found.append(take(reader, ends[-1], end))
        ends.append(end)
    return found, ends


def sent(node: Node) -> list[int]:
    return [clock for (clock,) in node.rows("SELECT clock FROM mailroom.log ORDER BY clock")]


def positions(node: Node, inbox: str = "lake") -> list[int]:
    """The clocks of the lanes."""
    rows = node.rows(
        "SELECT DISTINCT ON (lane) clock FROM mailroom.log_receipt WHERE inbox = %s "
        "ORDER BY lane, epoch DESC, clock DESC",
        inbox,
    )
    return [clock for (clock,) in rows]


def test_batches_follow_one_another_and_commits_move_the_positions(opened: Open, node: Node) -> None:
    """Also where a delivery has more than a batch, and where it has messages of other inboxes after the last one."""
    make(node, "lake", "billing")
    node.inbox("shipping")
    write(node, KEYS)
    node.send("order.paid", key="k1")
    node.send("shipping", key="k1")
    node.deliver_all()
    reader = opened()
    found, ends = go_on(reader)
    clocks = sent(node)
    assert found == [clocks[:10], clocks[10:20], clocks[20:25], clocks[25:]]
    assert positions(node) == [clocks[24]] * 4  # the last batch, when the next one is planned
    reader.commit(ends[-1])
    reader.commit(ends[-1])
    assert positions(node) == [ends[-1]["clock"]] * 4
    assert set(positions(node, "billing")) == {0}
    assert sent(node) == clocks
    assert reader.reportLatestOffset()["lag_clocks"] == 0
    write(node, ["k1"])
    assert reader.reportLatestOffset()["lag_clocks"] > 0
    assert go_on(reader, ends[-1])[0] == [sent(node)[-1:]]


@pytest.mark.parametrize("is_tried", [False, True])
def test_a_batch_that_is_repeated_has_the_same_messages(opened: Open, node: Node, is_tried: bool) -> None:
    """Whatever was delivered since, and in however many parts."""
    make(node, "lake")
    write(node, KEYS)
    reader = opened()
    start = reader.initialOffset()
    first = reader.latestOffset(start, ReadMaxRows(10))
    if is_tried:
        tasks = reader.partitions(start, first)
        assert len(tasks) > 1
        list(reader.read(tasks[0]))  # and the others died
    reader.stop()
    write(node, KEYS)
    for number in (1, 2, 9):
        again = opened(number=number)
        assert take(again, start, first) == sent(node)[:10]
        again.stop()
    again = opened()
    assert again.latestOffset(start, ReadAllAvailable()) == first
    again.commit(first)
    assert set(positions(node)) == {first["clock"]}
    assert go_on(again, first)[0][0] == sent(node)[10:20]


def test_what_no_task_has_read_is_not_committed(opened: Open, node: Node) -> None:
    make(node, "lake")
    write(node, KEYS)
    reader = opened(number=2)
    start = reader.initialOffset()
    first = reader.latestOffset(start, ReadMaxRows(10))
    [one, _] = reader.partitions(start, first)
    list(reader.read(one))
    reader.commit(first)
    assert set(positions(node)) == {0}
    take(reader, start, first)
    reader.commit(first)
    assert set(positions(node)) == {first["clock"]}


def test_a_stream_goes_on_where_workers_were(opened: Open, node: Node, connect: Connect) -> None:
    """Also where they had read some lanes further than others."""
    make(node, "lake")
    write(node, KEYS)
    worker = Reader(connect(), "lake")
    worker.take(4)
    lane_of: dict[int, int] = dict(node.rows("SELECT clock, lane FROM mailroom.log"))
    taken = {message.clock for message in worker.take(9)}
    before = positions(node)
    assert len(set(before)) > 1
    left = [clock for clock in sent(node) if clock > before[lane_of[clock]]]
    assert taken.isdisjoint(left)
    reader = opened()
    found, ends = go_on(reader)
    assert sorted(clock for batch in found for clock in batch) == left
    assert ends[-1].keys() == ends[1].keys() - {"ahead"}
    reader.commit(ends[-1])
    assert set(positions(node)) == {ends[-1]["clock"]}


def test_a_stream_that_has_read_nothing_yet_starts_again(opened: Open, node: Node) -> None:
    """An inbox that begins now may begin at a clock that no delivery into the log had."""
    make(node, "billing")
    write(node, KEYS)
    node.inbox("shipping")
    node.send("shipping", key="k1")
    node.deliver_all()
    with node.connection.transaction():
        create_inbox(node.connection, "lake", log="orders")
    reader = opened()
    start = reader.initialOffset()
    reader.stop()
    assert reader.latestOffset(start, ReadMaxRows(10)) == start
    write(node, ["k1"])
    assert go_on(reader, start)[0] == [sent(node)[-1:]]


def test_two_streams_of_one_log(opened: Open, node: Node) -> None:
    """Each by an inbox of its own; a second one of the same inbox is refused."""
    make(node, "lake", "other")
    write(node, KEYS)
    one, two = opened(), opened("other")
    assert go_on(one)[0] == go_on(two)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_stream, "PATIENCE_MS", 10)
        with pytest.raises(ConfigurationError, match="Another stream reads inbox 'lake'"):
            opened().initialOffset()


def test_a_worker_beside_the_stream_is_noticed(opened: Open, node: Node, connect: Connect) -> None:
    make(node, "lake", lanes=1)
    write(node, KEYS)
    reader = opened()
    [_, end] = go_on(reader)[1][:2]
    Reader(connect(), "lake").take_all()
    with pytest.raises(ConfigurationError, match="A worker reads inbox 'lake'"):
        reader.latestOffset(end, ReadMaxRows(10))


def test_a_stream_of_some_topics_is_refused(opened: Open, node: Node) -> None:
    make(node, "lake")
    reader = opened()
    start = reader.initialOffset()
    with node.connection.transaction():
        set_inbox(node.connection, "lake", topics=["order.paid"])
    with pytest.raises(ConfigurationError, match="a stream reads all of the log"):
        reader.latestOffset(start, ReadMaxRows(10))


def test_what_left_the_log_ends_the_stream(opened: Open, node: Node, connect: Connect) -> None:
    """The key's later messages would come before it."""
    make(node, "lake", lanes=1)
    write(node, ["a", "b"])
    worker = Reader(connect(), "lake")
    worker.fail(worker.claim().messages[0], node.connection)
    reader = opened()
    start = reader.initialOffset()
    with pytest.raises(ConfigurationError, match="Keys of inbox 'lake' fail"):
        reader.latestOffset(start, ReadMaxRows(10))
    worker.take_all()
    node.connection.execute("DELETE FROM mailroom.key_state")
    assert node.delivered("key") == [("a",)]
    with pytest.raises(ConfigurationError, match="Keys of inbox 'lake' fail"):
        reader.latestOffset(start, ReadMaxRows(10))


def test_an_inbox_that_is_set_back_ends_its_stream_and_begins_another(opened: Open, node: Node) -> None:
    make(node, "lake")
    write(node, KEYS)
    reader = opened()
    _, ends = go_on(reader)
    with node.connection.transaction():
        Inbox("lake").rewind(node.connection, "start", actor="ops", why="anew")
    before = positions(node)
    with pytest.raises(ConfigurationError, match="was set back in its log"):
        reader.latestOffset(ends[-1], ReadMaxRows(10))
    with pytest.raises(ConfigurationError, match="was set back in its log"):
        reader.commit(ends[-1])
    with pytest.raises(ConfigurationError, match="was set back in its log"):
        reader._ask(lambda of: of.reaping(0, ends[-1]["clock"]))  # it was set back just now
    assert positions(node) == before
    reader.stop()
    with pytest.raises(ConfigurationError, match="was set back in its log"):
        reader.latestOffset(ends[-1], ReadMaxRows(10))
    reader.stop()
    assert [clock for batch in go_on(opened(continues=ends[0]["checkpoint"]))[0] for clock in batch] == sent(node)


def days_pass(node: Node, days: int) -> None:
    """Let the janitor come after so many days, as often as it has something to do."""
    now = node.value("SELECT now() + %s * interval '1 day'", days)
    with node.connection.transaction():
        run(node.connection, making_segment(SCHEMA, "orders", now))
    for over in run(node.connection, listing_over(SCHEMA, now)):
        with node.connection.transaction():
            run(node.connection, emptying(SCHEMA, over, now))


def test_a_stream_holds_segments_back_unless_the_log_drops_what_is_unread(opened: Open, node: Node) -> None:
    make(node, "lake")
    write(node, KEYS)
    reader = opened()
    _, ends = go_on(reader)
    days_pass(node, 1)
    days_pass(node, 20)
    assert len(sent(node)) == 25  # the last batch was not committed
    reader.stop()
    with node.connection.transaction():
        set_log(node.connection, "orders", drop_unread=True)
    again = opened()
    tasks = again.partitions(ends[-2], ends[-1])
    days_pass(node, 40)
    assert sent(node) == []
    with pytest.raises(ConfigurationError, match="went while they were read"):
        [list(again.read(task)) for task in tasks]
    for use in (
        lambda: again.latestOffset(ends[-2], ReadMaxRows(10)),
        lambda: again.partitions(ends[-2], ends[-1]),
    ):
        with pytest.raises(
            ConfigurationError, match=f"has dropped messages after clock {ends[-2]['clock']}.*continuesC"
        ):
            use()
    again.stop()
    write(node, ["k1"])
    found, _ = go_on(opened(continues=ends[0]["checkpoint"]))
    assert found == [sent(node)]


def test_a_stream_without_news_has_missed_nothing(opened: Open, node: Node) -> None:
    make(node, "lake")
    with node.connection.transaction():
        set_log(node.connection, "orders", drop_unread=True)
    write(node, KEYS)
    reader = opened()
    _, ends = go_on(reader)
    with node.connection.transaction():
        node.connection.execute("SELECT setval('mailroom.clock', last_value + 100) FROM mailroom.clock")
    for day in (1, 20, 40):
        days_pass(node, day)
        moved = reader.latestOffset(ends[-1], ReadMaxRows(10))
        if moved != ends[-1]:
            reader.commit(ends[-1])
            assert take(reader, ends[-1], moved) == []
            ends.append(moved)
    assert sent(node) == []
    write(node, ["k1"])
    assert go_on(reader, ends[-1])[0] == [sent(node)]


def test_a_checkpoint_of_a_time_that_the_database_lacks_is_refused(opened: Open, node: Node) -> None:
    make(node, "lake")
    write(node, KEYS)
    reader = opened()
    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))
    reader.stop()
    node.connection.execute("UPDATE mailroom.log SET message_id = gen_random_uuid() WHERE clock = %s", [end["clock"]])
    again = opened()
    for place in (end, end | {"clock": 10**6, "message_id": ""}):
        with pytest.raises(ConfigurationError, match="restored to an earlier time"):
            again.latestOffset(place, ReadMaxRows(10))


def test_available_now_ends_with_what_there_was(opened: Open, node: Node) -> None:
    make(node, "lake")
    write(node, KEYS[:15])
    reader = opened()
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    write(node, KEYS)
    found, _ = go_on(reader, start)
    assert found == [sent(node)[:10], sent(node)[10:15]]


def test_a_paused_inbox_has_nothing_and_spark_4_1_is_refused(opened: Open, node: Node) -> None:
    make(node, "lake")
    write(node, KEYS)
    reader = opened()
    start = reader.initialOffset()
    with pytest.raises(ConfigurationError, match=r"Spark 4\.1"):
        reader.latestOffset()
    node.connection.execute("UPDATE mailroom.inbox_registry SET paused_at = now()")
    assert reader.latestOffset(start, ReadMaxRows(10)) == start


def test_the_rights_of_a_spark_reader_are_enough(opened: Open, node: Node) -> None:
    make(node, "lake", "billing")
    write(node, KEYS)
    with role(node.dsn, *rights("spark-reader", "lake", log="orders")) as (_, dsn):
        reader = opened(dsn=dsn)
        found, ends = go_on(reader)
        reader.stop()
        reader.commit(ends[-1])  # it starts again, from its checkpoint
        reader.stop()
    assert found == [sent(node)[:10], sent(node)[10:20], sent(node)[20:]]
    assert set(positions(node)) == {ends[-1]["clock"]}


def test_tasks_share_the_lanes(opened: Open, node: Node) -> None:
    make(node, "lake", lanes=16)
    write(node, [f"key {number}" for number in range(100)])
    reader = opened(number=3)
    start = reader.initialOffset()
    tasks = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    ranges = [task for task in tasks if isinstance(task, LaneRange)]
    bounds = [(one.low, one.high) for one in ranges]
    assert len(bounds) == len(tasks)
    assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
    assert bounds[-1][1] == 16
    sizes = [one.planned.messages for one in ranges if one.planned]
    assert sum(sizes) == 100
    assert min(sizes) > 15


@pytest.mark.slow
def test_a_query_that_fails_reads_its_batch_again(
    spark: "SparkSession", spark_dsn: str, node: Node, tmp_path: Path
) -> None:
    make(node, "lake")
    write(node, KEYS)
    found: dict[int, list[int]] = {}
    crashed: list[list[int]] = []

    def sink(frame: "DataFrame", batch: int) -> None:
        clocks = sorted(row.clock for row in frame.select("clock").collect())
        if batch == 1 and not crashed:
            crashed.append(clocks)
            raise RuntimeError("after the results were written, before Spark knows")
        found[batch] = clocks

    def catch_up() -> None:
        frame = spark.readStream.format("inbox").options(inbox="lake", dsn=spark_dsn, maxMessages=10).load()
        writer = frame.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).foreachBatch(sink)
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="after the results were written"):
        catch_up()
    write(node, KEYS)
    catch_up()
    clocks = sent(node)
    assert crashed == [found[1]]
    assert [clock for batch in sorted(found) for clock in found[batch]] == clocks
    assert set(positions(node)) == {found[max(found) - 1][-1]}
