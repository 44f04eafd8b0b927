"""`spark.read` of a log: a range of times or clocks, as a whole or not at all, whatever its inboxes have read."""

from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from dispatcher.delivery.deliver import delivering
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from spark_jobs.drain import drain
from spark_jobs.node import Node as SparkNode
from spark_jobs.read import deliveries, inbox_rows
from spark_jobs.read.inbox_rows import Chosen
from spark_jobs.read.inbox_source import InboxReader, InboxSource
from spark_jobs.read.log_source import LogReader, Span
from tests.logs.support import Reader, make, write
from tests.spark.test_log_stream import days_pass, sent
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.roles import rights, role

KEYS = [f"k{n % 7}" for n in range(25)]


def read(dsn: str, *, number: int | None = 3, key: str | None = None, **span: Any) -> list[list[int]]:
    """The clocks that each task reads."""
    reader = LogReader(SparkNode(dsn=dsn), "orders", number, Span(**span), Chosen(key, columns=("clock",)))
    return [
        [clock for batch in reader.read(task) for clock in batch.column("clock").to_pylist()]
        for task in reader.partitions()
    ]


def flat(tasks: list[list[int]]) -> list[int]:
    return sorted(clock for task in tasks for clock in task)


def test_all_that_a_log_has_is_read_once_whatever_its_inboxes_have_read(
    spark_dsn: str, node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes share out among tasks, in which each lane comes in order, page by page."""
    monkeypatch.setattr(inbox_rows, "FIRST_ROWS", 2)
    make(node, "billing")
    assert flat(read(spark_dsn)) == []
    write(node, KEYS)
    Reader(connect(), "billing").take_all()
    days_pass(node, 1)
    write(node, KEYS)
    tasks = read(spark_dsn)
    assert flat(tasks) == sent(node)
    assert len([task for task in tasks if task]) == 3
    in_turn = [clock for task in tasks for clock in task]
    lane_of: dict[int, int] = dict(node.rows("SELECT clock, lane FROM mailroom.log"))
    for lane in range(4):
        of_lane = [clock for clock in in_turn if lane_of[clock] == lane]
        assert of_lane == sorted(of_lane)
    of_key = [clock for (clock,) in node.rows("SELECT clock FROM mailroom.log WHERE key = 'k3' ORDER BY clock")]
    assert read(spark_dsn, number=1, key="k3") == [of_key]
    middle = sent(node)[10:30]
    assert flat(read(spark_dsn, above=middle[0] - 1, upto=middle[-1])) == middle
    with role(node.dsn, *rights("spark-reader", "billing", log="orders")) as (_, dsn):
        assert flat(read(dsn, since=node.value("SELECT now() - interval '1 hour'"))) == sent(node)


def test_times_that_follow_one_another_have_each_message_once(spark_dsn: str, node: Node) -> None:
    """Also where a time lies between the messages of one delivery."""
    make(node, "billing")
    deliveries = []
    for _ in range(3):
        before = len(sent(node))
        write(node, KEYS[:5])
        deliveries.append(sent(node)[before:])
    start = datetime.fromisoformat("2026-03-02T00:00:00+00:00")
    for nth, clocks in enumerate(deliveries):
        node.rows(
            "UPDATE mailroom.log_tick SET at = %s WHERE clock = %s RETURNING 1", start + timedelta(days=nth), clocks[-1]
        )
    node.connection.execute("UPDATE mailroom.log_segment SET opened_at = %s", [start - timedelta(days=9)])
    node.connection.execute("UPDATE mailroom.log_registry SET created_at = %s", [start - timedelta(days=9)])
    days = [start + timedelta(days=nth, seconds=-1) for nth in range(4)]
    assert [flat(read(spark_dsn, since=one, until=next_one)) for one, next_one in pairwise(days)] == deliveries
    assert flat(read(spark_dsn, since=start + timedelta(seconds=1))) == deliveries[1] + deliveries[2]
    assert flat(read(spark_dsn, until=start)) == []


def test_a_delivery_under_way_is_waited_for(
    spark_dsn: str, node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time may be over, and its messages are not seen: the next range of times would not have them."""
    make(node)
    write(node, KEYS[:5])
    for key in KEYS[:5]:
        node.send("order.paid", key=key)
    dispatcher = connect()
    run(dispatcher, delivering(SCHEMA, rows=10, max_bytes=1_000_000))
    until = node.value("SELECT clock_timestamp()")
    look = deliveries.UNDER_WAY.at

    def seen(**names: str) -> Any:
        if len(looks) == 1:
            dispatcher.commit()
        looks.append(1)
        return look(**names)

    looks: list[int] = []
    monkeypatch.setattr(deliveries.UNDER_WAY, "at", seen)
    assert len(flat(read(spark_dsn, until=until))) == 10
    assert len(looks) == 2


def test_what_is_gone_is_told(spark_dsn: str, node: Node) -> None:
    make(node)
    write(node, KEYS)
    first = sent(node)
    before = node.value("SELECT now() - interval '1 hour'")
    assert flat(read(spark_dsn, since=before, above=1)) == first[1:]  # it had nothing before
    days_pass(node, 1)
    write(node, KEYS)
    reader = LogReader(SparkNode(dsn=spark_dsn), "orders", 1, Span(), Chosen())
    [task] = reader.partitions()
    days_pass(node, 9)
    left = sent(node)
    assert left == sent(node)[-25:]
    assert left[0] > first[-1]
    with pytest.raises(ConfigurationError, match="went while they were read"):
        list(reader.read(task))
    for span in ({"since": before}, {"above": first[3]}):
        with pytest.raises(ConfigurationError, match=r"has everything since .*, and has dropped messages"):
            read(spark_dsn, **span)
    assert flat(read(spark_dsn)) == flat(read(spark_dsn, above=first[-1])) == left


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"inbox": "a", "log": "b"}, "an inbox or a log, not both"),
        ({"inbox": "a", "since": "2026-01-01T00:00:00Z"}, "since and until are of a log"),
        ({"log": "a", "until": "2026-01-01"}, "give a time with its zone"),
    ],
)
def test_options_of_logs(options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        InboxSource(options | {"columns": "clock"}).reader(StructType([StructField("clock", LongType())]))


def test_what_cannot_be_read_says_what_can(spark_dsn: str, node: Node, tmp_path: Path) -> None:
    make(node, "billing")
    with pytest.raises(ConfigurationError, match="There is no log 'nothing'"):
        LogReader(SparkNode(dsn=spark_dsn), "nothing", 1, Span(), Chosen()).partitions()
    reader = InboxReader(SparkNode(dsn=spark_dsn), "billing", None, None, None, Chosen())
    with pytest.raises(ConfigurationError, match=r"Inbox 'billing' reads a log.*option\(.log"):
        reader.partitions()
    with pytest.raises(ConfigurationError, match="Inbox 'billing' reads a log"):
        drain(SparkNode(dsn=spark_dsn), "billing", str(tmp_path))
    with pytest.raises(ConfigurationError, match="mailroom inbox create NAME --log LOG"):
        InboxSource({"log": "orders"}).streamReader(StructType())
