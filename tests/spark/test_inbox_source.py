"""`spark.read.format("inbox")`: a look that sees each message once, and keeps nobody waiting."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import unix_micros

from inbox import Inbox
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run
from mailroom.values import codec
from spark_jobs.arrow import message_rows
from spark_jobs.node import Node as SparkNode
from spark_jobs.read import inbox_rows
from spark_jobs.read.inbox_rows import Chosen, Range, batches, cutting, paging
from spark_jobs.read.inbox_source import InboxReader
from tests.support.node import Node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = [pytest.mark.inbox("shipping", "order.paid"), pytest.mark.inbox("other")]


@pytest.fixture
def there(spark_dsn: str) -> SparkNode:
    return SparkNode(dsn=spark_dsn)


def read(spark: "SparkSession", dsn: str, **options: Any) -> "DataFrame":
    return spark.read.format("inbox").options(inbox="shipping", dsn=dsn, **options).load()


def fill(node: Node, number: int, *, keys: int = 5) -> None:
    """Deliver messages 1..number, each with its number as value."""
    with node.connection.transaction():
        for nth in range(1, number + 1):
            node.send("shipping" if nth % 2 else "order.paid", nth, key=f"order-{nth % keys}")
    node.deliver_all()


def numbers(batches: Iterator[pa.RecordBatch]) -> list[Any]:
    return [codec.decode(value) for batch in batches for value in batch.column("value").to_pylist()]


def test_inbox_in_total_order_is_refused_in_spark(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    node.inbox("ledger", order="total")
    node.send("ledger", 1)
    node.deliver_all()
    with pytest.raises(PySparkException, match="has total order"):
        spark.read.format("inbox").options(inbox="ledger", dsn=spark_dsn).load().collect()
    assert node.delivered("inbox") == [("ledger",)]


def test_columns_are_those_of_the_message(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    until = datetime(9998, 12, 31, 23, 59, 59, 999_999, UTC)
    headers = {"user": "Zoë", "tenant": 'a, "b"'}
    node.send("shipping", {"n": 1}, key="ключ", headers=headers, expires_at=until, event_type="C", message_type="O")
    node.send("order.paid", None)
    node.rows("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', '{\"n\": 1.50}') RETURNING 1")
    node.deliver_all()
    rows = read(spark, spark_dsn).orderBy("clock").collect()
    messages = Inbox("shipping").peek(node.connection)
    assert len(rows) == len(messages) == 3
    for row, message in zip(rows, messages, strict=True):
        for name in ("key", "clock", "sent_clock", "topic", "kind", "message_type", "event_type", "source"):
            assert row[name] == getattr(message, name), name
        assert row.origin == str(message.origin)
        assert row.message_id == str(message.id)
        assert (row.headers or {}) == dict(message.headers)
        assert (row.value is None) == (row.value_json is not None)
        assert (row.value_json.encode() if row.value is None else bytes(row.value)) == message.raw
        for name in ("sent_at", "delivered_at"):
            assert row[name].astimezone(UTC) == getattr(message, name)
    assert rows[0].headers == headers
    assert rows[1].headers is None
    assert json.loads(rows[2].value_json) == {"n": 1.5}
    [(micros,), *rest] = read(spark, spark_dsn).orderBy("clock").select(unix_micros("expires_at")).collect()
    assert micros == (until - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert rest == [(None,), (None,)]


def test_messages_come_once_however_many_partitions(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    fill(node, 300)
    for partitions in (1, 7, 10_000):
        frame = read(spark, spark_dsn, numPartitions=partitions)
        assert frame.rdd.getNumPartitions() == min(partitions, 300)
        if partitions < 10:
            assert sorted(row.clock for row in frame.collect()) == [clock for (clock,) in clocks(node)]


def clocks(node: Node) -> list[Any]:
    return node.rows("SELECT clock FROM mailroom.inbox_shipping ORDER BY clock")


def test_empty_inbox(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    assert read(spark, spark_dsn).collect() == []


def test_nothing_above_the_clock_at_the_plan(there: SparkNode, node: Node) -> None:
    fill(node, 10)
    reader = InboxReader(there, "shipping", 3, None, None, Chosen())
    planned = reader.partitions()
    fill(node, 10)
    assert [number for one in planned for number in numbers(reader.read(one))] == list(range(1, 11))


def test_messages_reaped_meanwhile_are_missing_and_nobody_waits(
    there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pages(monkeypatch, 10)
    fill(node, 30, keys=30)
    with psycopg.connect(node.dsn) as consumer:
        assert len(Inbox("shipping").reap_any(consumer, max_keys=5, per_key=1)) == 5
        reading = batches(there, "shipping", Range(0, 1_000))
        assert next(reading).num_rows == 10  # nobody waits for the one who reaps: they are still there
        consumer.rollback()
        # Between pages nothing is held: neither a lock on the table nor a snapshot that would keep dead rows.
        node.connection.execute("SET lock_timeout = '1s'")
        with node.connection.transaction():
            node.connection.execute("LOCK TABLE mailroom.inbox_shipping")
        assert len(node.sessions("mailroom spark read shipping", "state = 'idle' AND backend_xmin IS NULL")) == 1
        node.connection.execute("DELETE FROM mailroom.inbox_shipping WHERE clock <= 20")
        assert numbers(reading) == list(range(21, 31))


def small_pages(monkeypatch: pytest.MonkeyPatch, rows: int, size: int = inbox_rows.PAGE_BYTES) -> None:
    monkeypatch.setattr(inbox_rows, "FIRST_ROWS", rows)
    monkeypatch.setattr(inbox_rows, "PAGE_ROWS", rows)
    monkeypatch.setattr(inbox_rows, "PAGE_BYTES", size)


def test_pages_are_bounded_by_the_size_of_values(there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pages(monkeypatch, 10, 1_000)
    for size in (10, 5_000, 10, 600, 600, 600):
        node.send("shipping", b"x" * size)
    node.deliver_all()
    # A share is 100 bytes, so the first page ends before the second message; the next ones by a running sum.
    assert value_sizes(there) == [[11], [5_003], [11, 603], [603, 603]]


def value_sizes(there: SparkNode) -> list[list[int]]:
    pages = batches(there, "shipping", Range(0, 1_000))
    return [[len(value) for value in page.column("value").to_pylist()] for page in pages]


def test_page_of_a_running_sum_ends_with_the_message_that_reaches_its_size(
    there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pages(monkeypatch, 10, 1_000)
    for size in (600, 10, 600, 600, 600):
        node.send("shipping", b"x" * size)
    node.deliver_all()
    assert value_sizes(there) == [[603, 11, 603], [603, 603]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each page that is read was asked to be even."""
    asked: list[bool] = []

    def watched(*arguments: Any, even: bool, **named: Any) -> Any:
        asked.append(even)
        return paging(*arguments, even=even, **named)

    monkeypatch.setattr(inbox_rows, "paging", watched)
    return asked


def test_a_page_is_even_until_a_message_has_more_than_its_share(
    there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch, asked: list[bool]
) -> None:
    """What has exactly its share is within it. After a page that was not even, none is tried again."""
    small_pages(monkeypatch, 4, 4 * 102)
    for size in (50, 50, 50, 100, 50, 50, 101, 10, 10, 10):
        node.send("shipping", b"x" * size)
    node.deliver_all()
    assert value_sizes(there) == [[52, 52, 52, 102], [52, 52], [103, 11, 11, 11]]
    assert asked == [True, True, False, False]


def test_a_page_is_not_tried_as_even_where_its_share_is_less_than_messages_have(
    there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch, asked: list[bool]
) -> None:
    small_pages(monkeypatch, 4, 4 * 102)
    monkeypatch.setattr(inbox_rows, "FIRST_ROWS", 2)
    for _ in range(6):
        node.send("shipping", b"x" * 150)
    node.deliver_all()
    assert value_sizes(there) == [[152] * 2, [152] * 3, [152]]
    assert asked == [True, False, False, False]


@pytest.mark.parametrize(
    "columns", [tuple(inbox_rows.ALL.columns), ("key", "value"), ("value_json",), ("headers", "clock", "value")]
)
def test_no_more_than_a_page_is_sent_however_suddenly_messages_are_large(
    node: Node, monkeypatch: pytest.MonkeyPatch, columns: tuple[str, ...]
) -> None:
    """The server holds back what would be more than the page, since the reader would have it in memory by then."""
    monkeypatch.setattr(inbox_rows, "PAGE_BYTES", 10_000)
    for nth in range(20):
        large = "x" * (7_000 if nth in {3, 4, *range(8, 20)} else 50)
        node.send("shipping", large, headers={"user": large})
        node.rows(
            "INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', %s::jsonb) RETURNING 1", f'"{large}"'
        )
    node.deliver_all()
    above = 0
    sent: list[int] = []
    while (last := performed(node, above, Chosen(columns=columns), sent).last) is not None:
        above = last
    small = 20 * 200  # columns that have a near bound, and lengths
    assert max(sent) <= 10_000 + 2 * 7_200 + small  # the message that reaches it, and its headers, are the page's last
    assert len(sent) > 10


def performed(node: Node, above: int, chosen: Chosen, sent: list[int]) -> inbox_rows.Page:
    """Do the steps of a page, and add how many bytes came with each."""

    def noting(steps: Any) -> Any:
        given: Any = None
        while True:
            try:
                given = yield steps.send(given)
            except StopIteration as stop:
                return stop.value
            sent.append(sum(len(cell) for row in given for cell in row if isinstance(cell, bytes | str)))

    with node.connection.transaction():
        page: inbox_rows.Page = run(node.connection, noting(paging("mailroom", "shipping", above, 1_000, chosen, 20)))
    return page


def test_pages_are_bounded_by_the_size_of_what_is_sent(
    there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON is compressed where it is stored, and numbers have more digits there than bytes; headers count too."""
    small_pages(monkeypatch, 10, 100_000)
    texts = [f'"{"x" * 4 * 2**20}"', "[1e9999, 1e9999]", *["[1e9999, 1e9999, 1e9999, 1e9999, 1e9999, 1e9999]"] * 2, "1"]
    for text in texts:
        node.rows("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', %s::jsonb) RETURNING 1", text)
    for _ in range(15):
        node.send("shipping", 1, headers={"user": "x" * 8_000})
    node.deliver_all()
    assert node.value("SELECT max(pg_column_size(value_json)) FROM mailroom.inbox_shipping") < 100_000
    pages = [batch.column("value_json").to_pylist() for batch in batches(there, "shipping", Range(0, 1_000))]
    sizes = [[len(text or "") for text in page] for page in pages]
    assert sizes[:3] == [[len(texts[0])], [20_004, 60_012], [60_012, 1] + [0] * 2]


def test_pages_look_at_few_more_than_they_give(there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def watched(*arguments: Any, **named: Any) -> Any:
        looked_at.append(arguments[-1])
        return paging(*arguments, **named)

    monkeypatch.setattr(inbox_rows, "paging", watched)
    small_pages(monkeypatch, 40, 1_000)
    monkeypatch.setattr(inbox_rows, "FIRST_ROWS", 5)
    for size in (*[1] * 60, *[600] * 5):
        node.send("shipping", b"x" * size)
    node.deliver_all()
    assert len(numbers(batches(there, "shipping", Range(0, 1_000)))) == 65
    assert looked_at == [5, 10, 20, 40, 40, 4, 4, 2]


def test_reading_only(there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(node, 1)
    monkeypatch.setattr(inbox_rows, "PIN", Sql("CREATE TABLE mailroom.written ()"))
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        next(batches(there, "shipping", Range(0, 1)))


# -- what is wanted ---------------------------------------------------------------------------------------------------


def test_only_what_is_wanted_is_read(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    fill(node, 20)
    assert [clock for (clock,) in clocks(node)] == list(range(1, 21))

    def found(**options: Any) -> list[int]:
        return sorted(row.clock for row in read(spark, spark_dsn, numPartitions=3, **options).collect())

    assert found(clockAbove=5, clockUpto=9) == [6, 7, 8, 9]
    assert found(clockAbove=18) == [19, 20]
    assert found(clockUpto=2, topic="order.paid") == [2]
    assert found(key="order-1") == [1, 6, 11, 16]
    assert found(key="order-1", clockAbove=1, clockUpto=11, topic="order.paid") == [6]
    assert found(clockAbove=9, clockUpto=9) == found(clockAbove=20) == found(clockUpto=0) == []
    assert found(key="order-1'; --") == found(key="%(upto)s") == found(topic="none") == []


def test_filters_of_one_query_do_not_touch_the_next(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    fill(node, 20)
    frame = read(spark, spark_dsn)
    assert frame.where("clock > 15").count() == 5
    assert frame.count() == 20
    assert frame.where("key = 'order-1' OR clock = 2").count() == 5


def test_a_key_is_read_page_by_page(there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pages(monkeypatch, 3)
    fill(node, 60)
    reading = list(batches(there, "shipping", Range(3, 50), Chosen(key="order-1")))
    assert numbers(iter(reading)) == list(range(6, 51, 5))
    assert [batch.num_rows for batch in reading] == [3, 3, 3]
    assert len(InboxReader(there, "shipping", 8, None, None, Chosen(key="order-1")).partitions()) == 1


def test_an_inbox_is_read_by_its_indexes(node: Node) -> None:
    fill(node, 50)
    of_key = (Chosen(key="order-1"), "key_of_shipping")
    for (chosen, index), even in product(((Chosen(), "clock_of_shipping"), of_key), (True, False)):
        steps = paging("mailroom", "shipping", 0, 40, chosen, 10_000, even=even)
        with node.connection.transaction():
            plan = explained(node.connection, next(steps), steps.send([]))
        assert index in plan
        assert "Seq Scan" not in plan
        assert "Sort" not in plan
        assert ("WindowAgg" in plan) is not even


def explained(connection: psycopg.Connection[Any], *steps: Any) -> str:
    """The plan of the last step, after the others."""
    for step in steps[:-1]:
        connection.execute(step.statement.sql, step.values)
    rows = connection.execute("EXPLAIN " + steps[-1].statement.sql, steps[-1].values).fetchall()
    return "\n".join(line for (line,) in rows)


def test_only_the_columns_that_are_named_are_read(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    fill(node, 20)
    whole = read(spark, spark_dsn)
    for columns in ("clock", "key, Clock", "value, message_id, sent_at, headers", "delivered_at,value_json,origin"):
        some = read(spark, spark_dsn, columns=columns)
        names = [name.strip().lower() for name in columns.split(",")]
        assert some.columns == names
        assert sorted(map(str, some.collect())) == sorted(map(str, whole.select(*names).collect()))
    assert read(spark, spark_dsn, columns="topic", key="order-1", clockAbove=1).count() == 3


def test_pages_of_some_columns_follow_one_another(
    there: SparkNode, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the clock is none of them; and what is not read bounds no page."""
    for size in (10, 5_000, 10, 600, 600, 600):
        node.send("shipping", b"x" * size, key="a")
    node.deliver_all()
    for columns, rows, pages in ((("topic",), 4, [4, 2]), (("value", "topic"), 10, [1, 1, 2, 2])):
        small_pages(monkeypatch, rows, 1_000)
        for key in (None, "a"):
            found = list(batches(there, "shipping", Range(0, 1_000), Chosen(key, columns=columns)))
            assert [page.num_rows for page in found] == pages
            assert {tuple(page.schema.names) for page in found} == {columns}


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_that_cannot_be_used_are_told(spark: "SparkSession", spark_dsn: str, node: Node) -> None:
    fill(node, 1)
    dsn = {"dsn": spark_dsn}
    for options, text in (
        (dsn, r'Say which inbox to read: .option\("inbox", "shipping"\)'),
        (dsn | {"inbox": "Shipping!"}, "Inbox name 'Shipping!' is not valid"),
        (dsn | {"inbox": "shipping", "numPartitions": "0"}, "numPartitions must be an int from 1 to 10,000, not 0"),
        (dsn | {"inbox": "shipping", "clockAbove": "-1"}, "clockAbove must be an int from 0 to 9,223,.*, not -1"),
        (dsn | {"inbox": "shipping", "key": ""}, "Key '' has 0 bytes"),
        (dsn | {"inbox": "shipping", "topic": "a b"}, "Topic 'a b' is not valid"),
        (dsn | {"inbox": "shipping", "numPartitions": "10001"}, "numPartitions must be .*, not 10001"),
        (dsn | {"inbox": "shipping", "numPartitions": "four"}, "numPartitions is 'four'; give a whole number in d"),
        (dsn | {"inbox": "shipping", "partitions": "4"}, "no option 'partitions'; there are inbox, numPartitions"),
        (dsn | {"inbox": "shipping", "maxMessages": "4"}, "no option 'maxMessages'"),
        (dsn | {"inbox": "shipping", "columns": "key, prio"}, "columns names 'prio'; the columns .* are key, clock, "),
        (dsn | {"inbox": "shipping", "columns": ""}, "columns names ''; the columns of a message are key, clock, "),
        (dsn | {"inbox": "shipping", "columns": "key, KEY"}, "columns names a column twice"),
        (dsn | {"inbox": "nowhere"}, "no inbox 'nowhere' in schema 'mailroom'.* Create it: mailroom inbox create"),
    ):  # fmt: skip
        with pytest.raises(PySparkException, match=f"(?i){text}"):
            spark.read.format("inbox").options(**options).load().collect()
    with pytest.raises(PySparkException, match="no option 'path'"):
        spark.read.format("inbox").options(inbox="shipping", **dsn).load("somewhere")
    with pytest.raises(PySparkException, match=r"leave out .schema\(\), and use select\(\)"):
        spark.read.format("inbox").schema("key string").options(inbox="shipping", **dsn).load().collect()
    assert (
        spark.read.format("inbox")
        .schema(message_rows.ddl(message_rows.ROW_COLUMNS))
        .options(inbox="shipping", **dsn)
        .load()
        .count()
        == 1
    )
    assert spark.read.format("inbox").options(INBOX="shipping", NUMPARTITIONS="2", DSN=spark_dsn).load().count() == 1


def cut(node: Node, *bounds: int | None) -> list[Range]:
    with node.connection.transaction():
        return run(node.connection, cutting("mailroom", "shipping", *bounds))  # type: ignore[arg-type]  # three of them


def demand_covered(found: list[Range], above: int, upto: int) -> None:
    """Everything once, whatever the cuts rest on."""
    assert [one.above for one in found] == [above, *(one.upto for one in found[:-1])]
    assert found[-1].upto == upto
    assert all(one.above < one.upto for one in found)


def shares(node: Node, found: list[Range]) -> list[int]:
    count = "SELECT count(*) FROM mailroom.inbox_shipping WHERE clock > %s AND clock <= %s"
    return [node.value(count, one.above, one.upto) for one in found]


def test_ranges_cover_everything_and_overlap_nowhere(node: Node) -> None:
    fill(node, 100)
    for above, upto, number, ranges in ((0, 1, 1, 1), (0, 10, 3, 3), (5, 6, 10, 1), (7, 10**9, 4, 4), (0, 99, 500, 99)):
        found = cut(node, above, upto, number)
        demand_covered(found, above, upto)
        assert len(found) == ranges
    assert cut(node, 5, 5, 3) == cut(node, 6, 5, 3) == cut(node, 5, 5, None) == []
    assert cut(node, 200, 300, 4) == [Range(200, 300)]
    assert cut(node, 0, 100, None) == [Range(0, 100)]


def test_ranges_have_as_many_messages_wherever_their_clocks_lie(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One old message, some after it, and most of them at the end."""
    node.connection.execute(
        "INSERT INTO mailroom.inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, "
        "value, sent_at) SELECT 'shipping', clock, clock, gen_random_uuid(), gen_random_uuid(), 't', 'k', 'M', 'U', "
        "'\\x01', now() FROM (SELECT 1 UNION ALL SELECT generate_series(300001, 300400) "
        "UNION ALL SELECT generate_series(600001, 612000)) AS c (clock)"
    )
    half = node.value("SELECT pg_relation_size('mailroom.inbox_shipping') / 2")
    # Counted one by one; all blocks looked at, and half of them.
    for walked, sampled, largest in ((20_000, half, 4_134), (100, 3 * half, 4_134), (100, half, 6_200)):
        monkeypatch.setattr(inbox_rows, "CUT", recut(walked, sampled))
        found = cut(node, 0, 612_000, 3)
        demand_covered(found, 0, 612_000)
        assert len(found) == 3
        assert max(shares(node, found)) <= largest
    monkeypatch.setattr(inbox_rows, "CUT", recut(100, 2**23, 4_000))
    assert len(cut(node, 0, 612_000, None)) == 3  # of 12,401 messages


CUT = inbox_rows.CUT


def recut(walked: int, sampled_bytes: int, in_one: int = inbox_rows.IN_ONE) -> Sql:
    """The statement with other bounds."""
    changed = CUT.template
    for before, after in ((20_000, walked), (2**23, sampled_bytes), (50_000, in_one)):
        assert str(before) in changed
        changed = changed.replace(str(before), str(after))
    return Sql(changed, CUT.columns)


def test_ranges_are_cut_without_reading_the_inbox(node: Node) -> None:
    fill(node, 50)
    steps = cutting("mailroom", "shipping", 0, 40, 3)
    with node.connection.transaction():
        plan = explained(node.connection, next(steps), steps.send([]))
    assert "clock_of_shipping" in plan
    assert "Sample Scan" in plan
    assert "Seq Scan" not in plan
