"""OutboxSink: whatever happens to a stream, the outbox and the business table end with exactly its rows, in order."""

import json
import os
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest

import spark_jobs.write.sink as module
from mailroom.errors import ConfigurationError, InvalidMessage
from spark_jobs.node import Node
from spark_jobs.write import commit
from spark_jobs.write.commit import SentBatch
from spark_jobs.write.ledger import JOB, SparkBatch
from spark_jobs.write.sink import OutboxSink
from spark_jobs.write.staging import sweep
from spark_jobs.write.user_sql import Staging
from tests.spark.frames import ledger, staging_tables, values
from tests.support.databases import Connect, Databases
from tests.support.proxy import CommitFault, proxied
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 100  # of a micro-batch
PARTITIONS = 3
INSERT = "INSERT INTO orders (number, total) SELECT number, total FROM {staging}"
Handler = Callable[["DataFrame", int], object]


class Crash(Exception):
    """The driver dies, as far as Spark and the database can tell."""


class Stream:
    """A stream of orders, each micro-batch being a file, and its end in the database."""

    def __init__(self, session: "SparkSession", folder: Path, connect: Connect) -> None:
        self.session = session
        self.connect = connect
        self._input = folder / "input"
        self._input.mkdir()
        self._checkpoints = folder
        self.batches = 0

    def add(self, rows: int = ROWS) -> None:
        """Add the next micro-batch."""
        path = self._input / f"{self.batches}.json"
        numbers = range(self.batches * ROWS, self.batches * ROWS + rows)
        path.write_text("".join(json.dumps({"number": n, "total": f"{n}.25"}) + "\n" for n in numbers))
        os.utime(path, (1_700_000_000 + self.batches,) * 2)  # Spark takes the oldest first
        self.batches += 1

    def frame(self) -> "DataFrame":
        from pyspark.sql import functions as f

        source = self.session.readStream.schema("number bigint, total decimal(10,2)")
        rows = source.option("maxFilesPerTrigger", 1).json(str(self._input))
        return rows.select(
            "number",
            "total",
            f.expr("md5(cast(number AS string))").alias("message_id"),
            f.concat(f.lit("order-"), f.col("number") % 10).alias("key"),
            f.struct("number", "total").alias("value"),
        )

    def run(self, handler: Handler, checkpoint: str = "checkpoint", partitions: int = PARTITIONS) -> None:
        """Run the query until it has taken every file, or raise what it failed with."""

        def handle(frame: "DataFrame", number: int) -> None:
            handler(frame.repartitionByRange(partitions, "number").sortWithinPartitions("number"), number)

        writer = self.frame().writeStream.foreachBatch(handle).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self._checkpoints / checkpoint)).start().awaitTermination()

    def fails(self, handler: Handler, checkpoint: str = "checkpoint", partitions: int = PARTITIONS) -> str:
        """Run a query that fails; returns with what."""
        from pyspark.errors import StreamingQueryException

        with pytest.raises(StreamingQueryException) as caught:
            self.run(handler, checkpoint, partitions)
        return str(caught.value)

    def check(self, *, business: bool = True) -> None:
        """Exactly the rows of all files stand in the outbox, in their order, and in the business table."""
        numbers = range(self.batches * ROWS)
        with self.connect() as connection:
            sent = connection.execute(
                "SELECT message_id, topic, key, source FROM mailroom.outbox ORDER BY position"
            ).fetchall()
            orders = connection.execute("SELECT number, total FROM orders ORDER BY number").fetchall()
            ids = connection.execute("SELECT md5(n::text)::uuid FROM generate_series(0, %s) n", [len(numbers) - 1])
            expected_ids: list[UUID] = [found for (found,) in ids]
        assert values(self.connect) == [{"number": n, "total": Decimal(f"{n}.25")} for n in numbers]
        assert sent == [
            (expected_ids[n], "order.placed", f"order-{n % 10}", f"mailroom spark orders {n // ROWS}") for n in numbers
        ]
        assert orders == ([(n, Decimal(f"{n}.25")) for n in numbers] if business else [])
        assert ledger(self.connect) == [("orders", batch, ROWS) for batch in range(self.batches)]
        assert staging_tables(self.connect) == 0


@pytest.fixture
def stream(spark: "SparkSession", tmp_path: Path, connect: Connect) -> Stream:
    with connect() as connection:
        # Without a key: nothing but the sink keeps an order from standing there twice.
        connection.execute("CREATE TABLE orders (number bigint, total numeric)")
    made = Stream(spark, tmp_path, connect)
    for _ in range(3):
        made.add()
    return made


@pytest.fixture
def sink(spark_dsn: str) -> OutboxSink:
    return OutboxSink("orders", topic="order.placed", dsn=spark_dsn, commit_sql=INSERT)


def without_password(url: str) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(url)
    return psycopg.conninfo.make_conninfo("", **{name: text for name, text in parts.items() if name != "password"})


def staged(connect: Connect, statement: str) -> None:
    """Run a statement on one of the staging tables."""
    with connect(autocommit=True) as connection:
        tables = connection.execute("SELECT relname FROM pg_class WHERE relname ^@ 'staging_' AND relkind = 'r'")
        table = max(name for (name,) in tables)
        connection.execute(statement.replace("{table}", f"mailroom.{table}").encode())


@pytest.fixture
def before_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """Have something done between the staging of a batch, whose number it gets, and the transaction that sends it."""

    def act_before(act: Callable[[int], object]) -> None:
        def acting(node: Node, batch: SparkBatch, *arguments: Any) -> SentBatch:
            act(batch.number)
            return commit.commit(node, batch, *arguments)

        monkeypatch.setattr(module, "commit", acting)

    return act_before


BeforeCommit = Callable[[Callable[[int], object]], None]


def once_at(batch: int, act: Callable[[], object]) -> Callable[[int], None]:
    """`act` at the first attempt at this batch, and nothing otherwise."""
    left = [act]

    def at(number: int) -> None:
        if number == batch and left:
            left.pop()()

    return at


def crash() -> None:
    raise Crash


def test_messages_and_business_rows_are_sent_once_in_order(stream: Stream, sink: OutboxSink) -> None:
    stream.run(sink)
    stream.check()
    stream.add()
    stream.run(sink)
    stream.check()


@pytest.mark.nightly  # as at the end of test_sink_wants_the_number_of_its_batch_inside_a_stream
def test_messages_go_without_business_rows_too(stream: Stream, spark_dsn: str) -> None:
    sink = OutboxSink("orders", topic="order.placed", dsn=spark_dsn)
    stream.run(lambda frame, batch: sink(frame.drop("number", "total"), batch))
    stream.check(business=False)


def test_empty_batch_does_nothing(stream: Stream, sink: OutboxSink) -> None:
    stream.run(lambda frame, batch: sink(frame.limit(0), batch))
    with stream.connect() as connection:
        assert connection.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (0,)
    assert (ledger(stream.connect), staging_tables(stream.connect)) == ([], 0)


# -- The driver -------------------------------------------------------------------------------------------------------


def test_crash_between_the_commit_and_sparks_own_sends_nothing_twice(
    stream: Stream, sink: OutboxSink, before_commit: BeforeCommit
) -> None:
    staged_batches: list[int] = []
    before_commit(staged_batches.append)
    crashes = once_at(1, crash)

    def crashing(frame: "DataFrame", batch: int) -> None:
        sink(frame, batch)
        crashes(batch)

    assert "Crash" in stream.fails(crashing)
    stream.run(sink)
    stream.check()
    assert staged_batches == [0, 1, 1, 2]  # what the ledger has is computed all the same, and compared


def test_crash_before_the_commit_loses_nothing(
    stream: Stream, sink: OutboxSink, before_commit: BeforeCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_commit(once_at(1, crash))
    with monkeypatch.context() as dead:
        dead.setattr(module, "abandon", lambda *_: None)
        assert "Crash" in stream.fails(sink)
    assert staging_tables(stream.connect) == PARTITIONS  # a driver that died leaves them to the sweep
    stream.run(sink)
    stream.check()


@pytest.mark.sample(1)
@pytest.mark.parametrize("partitions", [1, 5])
def test_replay_with_other_partitions_sends_each_row_once(
    stream: Stream, sink: OutboxSink, before_commit: BeforeCommit, partitions: int
) -> None:
    before_commit(once_at(1, crash))
    stream.fails(sink)
    stream.run(sink, partitions=partitions)
    stream.check()


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", [CommitFault.SWALLOW, CommitFault.CUT])
def test_commit_without_an_answer_sends_once(
    stream: Stream, dsn: str, before_commit: BeforeCommit, fault: CommitFault
) -> None:
    with proxied(dsn) as (proxy, through):
        before_commit(once_at(1, lambda: proxy.at_next_commits(fault)))
        dsn = without_password(through)
        stream.run(OutboxSink("orders", topic="order.placed", dsn=dsn, commit_sql=INSERT))
        assert fault in proxy.commits
    stream.check()


def continuing(stream: Stream, spark_dsn: str) -> OutboxSink:
    """The sink of a query with a new checkpoint."""
    with stream.connect() as connection:
        [(query,)] = connection.execute("SELECT DISTINCT query FROM mailroom.spark_batch").fetchall()
    return OutboxSink("orders", topic="order.placed", dsn=spark_dsn, commit_sql=INSERT, continues_query=query)


def test_new_checkpoint_that_continues_a_stream_sends_nothing_twice(
    stream: Stream, sink: OutboxSink, spark_dsn: str
) -> None:
    stream.run(sink)
    stream.add()
    stream.run(continuing(stream, spark_dsn), "another checkpoint")
    stream.check()
    stream.add()
    assert "StreamTaken" in stream.fails(sink)


def test_other_query_with_the_name_sends_nothing(stream: Stream, sink: OutboxSink) -> None:
    stream.run(sink)
    stream.add()
    error = stream.fails(sink, "another checkpoint")
    assert "StreamTaken: The stream 'orders' belongs to the query" in error
    stream.run(sink)
    stream.check()


def test_what_is_continued_is_a_stream_of_a_name(spark_dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="Give streamName too"):
        OutboxSink(topic="t", dsn=spark_dsn, continues_query="1")


def test_new_checkpoint_with_another_cut_sends_nothing(stream: Stream, sink: OutboxSink, spark_dsn: str) -> None:
    stream.run(sink)
    goes_on = continuing(stream, spark_dsn)
    error = stream.fails(lambda frame, batch: goes_on(frame.filter("number % 2 = 0"), batch), "another checkpoint")
    assert "BatchDiffers" in error
    assert f"with {ROWS} messages, and now it has {ROWS // 2}" in error
    stream.check()


def test_without_a_name_the_query_is_the_name(stream: Stream, spark_dsn: str) -> None:
    sink = OutboxSink(topic="order.placed", dsn=spark_dsn, commit_sql=INSERT)
    stream.run(sink)
    stream.run(sink)
    [(query, *_), *_] = found = ledger(stream.connect)
    assert UUID(query)
    assert found == [(query, batch, ROWS) for batch in range(3)]
    stream.run(sink, "another checkpoint")
    assert len(values(stream.connect)) == 2 * 3 * ROWS


# -- Two calls for a batch --------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("sinks", [1, 2])
def test_second_call_with_other_rows_is_not_taken_for_the_first(stream: Stream, spark_dsn: str, sinks: int) -> None:
    even, odd, third = (
        OutboxSink(name, topic="order.placed", dsn=spark_dsn, commit_sql=INSERT)
        for name in ("orders", "orders", "odd orders")
    )

    def even_and_odd(odd: OutboxSink) -> Handler:
        def handler(frame: "DataFrame", batch: int) -> None:
            even(frame.filter("number % 2 = 0"), batch)
            odd(frame.filter("number % 2 = 1"), batch)

        return handler

    error = stream.fails(even_and_odd(odd if sinks == 2 else even))
    assert "BatchDiffers: The batch 0 of 'orders' was sent at" in error
    assert [value["number"] for value in values(stream.connect)] == list(range(0, ROWS, 2))
    # With a name for each it goes on where it stopped: the batch that was sent in half is repeated.
    stream.run(even_and_odd(third))
    assert sorted(value["number"] for value in values(stream.connect)) == list(range(3 * ROWS))


def test_second_call_with_other_sql_is_not_taken_for_the_first(stream: Stream, spark_dsn: str) -> None:
    first, second = (
        OutboxSink("orders", topic="order.placed", dsn=spark_dsn, commit_sql=sql)
        for sql in (INSERT, f"{INSERT} WHERE total > 50")
    )

    def both(frame: "DataFrame", batch: int) -> None:
        first(frame, batch)
        second(frame, batch)

    assert "and now it has as many, but others" in stream.fails(both)


def test_call_is_made_again_in_the_same_batch_and_tells_what_it_did(
    stream: Stream, sink: OutboxSink, before_commit: BeforeCommit, caplog: pytest.LogCaptureFixture
) -> None:
    before_commit(once_at(1, crash))
    told: list[str] = []

    def trying_again(frame: "DataFrame", batch: int) -> None:
        for _ in range(2):
            try:
                sink(frame, batch)
                told.append("sent" if not caplog.messages else "known")
                caplog.clear()
            except Crash:
                told.append("crash")

    with caplog.at_level("WARNING", "mailroom.spark"):
        stream.run(trying_again)
    assert told == ["sent", "known", "crash", "sent", "sent", "known"]
    stream.check()


def test_same_name_in_another_node_is_another_stream(
    stream: Stream, sink: OutboxSink, databases: Databases, password: None
) -> None:
    dsn = databases.create(migrated=True)
    other = OutboxSink("orders", topic="order.placed", dsn=without_password(dsn))

    def both(frame: "DataFrame", batch: int) -> None:
        sink(frame, batch)
        other(frame.drop("number", "total"), batch)

    try:
        stream.run(both)
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (3 * ROWS,)
    finally:
        databases.drop(dsn)
    stream.check()


# -- Another driver ---------------------------------------------------------------------------------------------------


def sent_by_another_driver(connect: Connect, spark_dsn: str, query: str, messages: int) -> Callable[[], None]:
    """Have batch 1 be sent, as the ledger tells, and its staging tables swept."""

    def act() -> None:
        with connect() as connection:
            connection.execute(
                "INSERT INTO mailroom.spark_batch (name, batch, query, messages) "
                f"SELECT name, 1, {query}, {messages} FROM mailroom.spark_batch"
            )
        assert sweep(Node.of({"dsn": spark_dsn})) == PARTITIONS

    return act


def test_batch_that_another_driver_has_sent_meanwhile_is_not_sent(
    stream: Stream, sink: OutboxSink, spark_dsn: str, before_commit: BeforeCommit
) -> None:
    before_commit(once_at(1, sent_by_another_driver(stream.connect, spark_dsn, "query", ROWS)))
    stream.run(sink)
    # The other one's messages are not here; of this one's, all but those of that batch.
    assert [value["number"] // ROWS for value in values(stream.connect)] == [0] * ROWS + [2] * ROWS
    assert ledger(stream.connect) == [("orders", batch, ROWS) for batch in range(3)]
    assert staging_tables(stream.connect) == 0


def test_batch_that_another_query_has_sent_meanwhile_is_told(
    stream: Stream, sink: OutboxSink, spark_dsn: str, before_commit: BeforeCommit
) -> None:
    before_commit(once_at(1, sent_by_another_driver(stream.connect, spark_dsn, "'another one'", ROWS)))
    error = stream.fails(sink)
    assert "StreamTaken" in error
    assert "belongs to the query another one" in error


# -- Tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # as where a COMMIT has no answer
def test_task_that_fails_behind_its_rows_is_tried_again(stream: Stream, sink: OutboxSink) -> None:
    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            raise RuntimeError("this task fails once")

    stream.run(lambda frame, batch: sink(frame.mapInArrow(failing, frame.schema) if batch == 1 else frame, batch))
    stream.check()


def test_tasks_of_a_job_that_fails_leave_nothing_staged(
    spark: "SparkSession", sink: OutboxSink, spark_dsn: str, connect: Connect
) -> None:
    from pyspark import TaskContext
    from pyspark.errors import PythonException

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 0:
            yield from batches
        else:
            with psycopg.connect(spark_dsn, autocommit=True) as watcher:
                eventually(lambda: watcher.execute("SELECT FROM mailroom.spark_staging").rowcount == 1)
            raise RuntimeError("this task fails when the other one has staged")

    frame = spark.range(0, 10, 1, 2).selectExpr("id AS value")
    with pytest.raises(PythonException, match="this task fails"):
        sink(frame.mapInArrow(failing, frame.schema), 0)
    assert (staging_tables(connect), values(connect)) == (0, [])


def test_task_whose_commit_had_no_answer_stages_twice_and_sends_once(
    stream: Stream, dsn: str, before_commit: BeforeCommit
) -> None:
    attempts: list[int] = []
    before_commit(lambda _: attempts.append(staging_tables(stream.connect)))
    with proxied(dsn) as (proxy, through):
        proxy.at_next_commits(CommitFault.SWALLOW, CommitFault.SWALLOW)
        dsn = without_password(through)
        stream.run(OutboxSink("orders", topic="order.placed", dsn=dsn, commit_sql=INSERT))
    assert attempts == [PARTITIONS + 2, PARTITIONS, PARTITIONS]
    stream.check()


# -- What is lost, and what is refused --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", ["TRUNCATE {table}", "DELETE FROM {table} WHERE number % 5 = 0", "DROP TABLE {table}"])
def test_staging_that_a_crash_of_the_server_emptied_is_told(
    stream: Stream, sink: OutboxSink, before_commit: BeforeCommit, loss: str
) -> None:
    before_commit(once_at(1, lambda: staged(stream.connect, loss)))
    error = stream.fails(sink)
    assert "StagingLost" in error
    assert "Nothing was sent: run it again." in error
    assert len(values(stream.connect)) == ROWS
    stream.run(sink)
    stream.check()


def test_sql_that_takes_messages_away_is_told(stream: Stream, spark_dsn: str) -> None:
    statements = [INSERT, "DELETE FROM {staging} WHERE number = 107"]
    sink = OutboxSink("orders", topic="order.placed", dsn=spark_dsn, commit_sql=statements)
    error = stream.fails(sink, partitions=1)  # a view of one table, which lets rows be deleted
    assert "StagingLost: What was staged for the batch 1 of 'orders' is not all there" in error
    assert len(values(stream.connect)) == ROWS
    with stream.connect() as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (ROWS,)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["commit_sql", "transact"])
def test_sql_that_fails_sends_nothing_and_shows_no_row(stream: Stream, spark_dsn: str, how: str) -> None:
    statements = ["SELECT 1", INSERT]

    def transact(connection: psycopg.Connection, staging: Staging) -> None:
        connection.execute(INSERT.replace("{staging}", staging.rows).encode())

    sink = OutboxSink(
        "orders", topic="order.placed", dsn=spark_dsn,
        **({"commit_sql": statements} if how == "commit_sql" else {"transact": transact}),
    )  # fmt: skip
    with stream.connect() as connection:
        connection.execute("ALTER TABLE orders ADD CONSTRAINT cheap CHECK (total < 150)")
    error = stream.fails(sink)
    where = "statement 2 of commit_sql" if how == "commit_sql" else "transact"
    assert f"The batch 1 of 'orders' was not sent: CheckViolation (23514, cheap, {where})" in error
    assert "Failing row contains" not in error
    assert (len(values(stream.connect)), staging_tables(stream.connect)) == (ROWS, 0)
    with stream.connect() as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (ROWS,)
        connection.execute("ALTER TABLE orders DROP CONSTRAINT cheap")
    stream.run(sink)
    stream.check()


def test_work_that_commits_by_itself_is_told_and_leaves_no_staging(stream: Stream, spark_dsn: str) -> None:
    def transact(connection: psycopg.Connection, _: Staging) -> None:
        connection.execute("COMMIT")

    assert "NotAtomic" in stream.fails(OutboxSink("orders", topic="order.placed", dsn=spark_dsn, transact=transact))
    assert (values(stream.connect), staging_tables(stream.connect)) == ([], 0)


def test_statement_that_ends_the_transaction_is_told(spark_dsn: str) -> None:
    for statement in ("COMMIT", " rollback", "END;", "Abort work", "prepare  transaction 'a'"):
        with pytest.raises(ConfigurationError, match="ends the transaction"):
            OutboxSink("orders", dsn=spark_dsn, commit_sql=[INSERT, statement])


def test_several_statements_in_one_text_are_refused(stream: Stream, spark_dsn: str) -> None:
    sink = OutboxSink("orders", topic="order.placed", dsn=spark_dsn, commit_sql=f"{INSERT}; COMMIT")
    assert "SyntaxError (42601, statement 1 of commit_sql)" in stream.fails(sink)
    assert values(stream.connect) == []


def test_row_that_cannot_be_staged_is_not_shown(stream: Stream, sink: OutboxSink) -> None:
    from pyspark.sql import functions as f

    ancient = f.expr("to_timestamp_ntz('-9999-01-01 00:00:00')")
    error = stream.fails(lambda frame, batch: sink(frame.withColumn("at", ancient), batch), partitions=1)
    assert "timestamp out of range" in error
    assert "order-" not in error.partition("Logical Plan")[0]


@pytest.mark.parametrize("of_text", ["{}", "array('a', NULL, {})"])
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("format_string('%s%s\\0', 'sec', 'ret')", "Column note has a row that holds a NUL character"),
        ("CAST(X'736563726574ff' AS STRING)", "Column note has a row that is not UTF-8"),
    ],
)
def test_business_text_that_postgresql_cannot_hold_is_told(
    spark: "SparkSession", sink: OutboxSink, connect: Connect, of_text: str, text: str, fault: str
) -> None:
    from pyspark.errors import PythonException

    frame = spark.sql(f"SELECT 1 AS value, {of_text.format(text)} AS note UNION ALL SELECT 2, NULL").coalesce(1)
    with pytest.raises(PythonException) as caught:
        sink(frame, 0)
    assert fault in str(caught.value)
    assert "secret" not in str(caught.value).partition("Logical Plan")[0]
    assert (values(connect), ledger(connect), staging_tables(connect)) == ([], [], 0)


def test_dataframe_is_sent_once(spark: "SparkSession", stream: Stream, sink: OutboxSink) -> None:
    frame = spark.range(0, ROWS, 1, PARTITIONS).selectExpr("id AS number", "id AS total", "struct(id) AS value")
    assert [sink(frame), sink(frame)] == [SentBatch(ROWS), SentBatch(0, passed_over=ROWS)]
    assert values(stream.connect) == [{"id": number} for number in range(ROWS)]
    assert ledger(stream.connect) == [("orders", JOB, ROWS)]
    with stream.connect() as connection:
        assert connection.execute("SELECT count(*), sum(total) FROM orders").fetchone() == (ROWS, sum(range(ROWS)))


def test_columns_that_no_message_has_need_somewhere_to_go(stream: Stream, spark_dsn: str) -> None:
    sink = OutboxSink("orders", topic="order.placed", dsn=spark_dsn)
    assert "A message has no column 'number'" in stream.fails(sink)
    assert (values(stream.connect), staging_tables(stream.connect)) == ([], 0)


UNSTAGED: list[tuple[str, str]] = [
    ("1 AS mailroom_nth", "Mailroom keeps the name mailroom_nth"),
    ("1 AS MAILROOM_partition", "Mailroom keeps the name MAILROOM_partition"),
    ("1 AS a, 2 AS A", "Columns 'a', 'A' are one (case makes no difference): rename them"),
    ("1 AS Value", "Columns 'value', 'Value' are one (case makes no difference): rename them"),
    *(
        (f"1 AS {name}", f"PostgreSQL keeps the name {name.lower()} in every table")
        for name in ("tableoid", "ctid", "xmin", "xmax", "cmin", "cmax", "CtId")
    ),
    *((f"1 AS `a{sign}b`", "cannot be staged: rename it") for sign in ('"', ".", "``", "%", "{", "}", "\0")),
    (f"1 AS {'a' * 64}", "cannot be staged: rename it"),
    (
        "map('a', 1) AS tags",
        "Column 'tags' is map<string,int>, which no column of a table is: use to_json(column).",
    ),
    ("array(array(1)) AS grid", "Column 'grid' is array<array<int>>, which no column"),
]


def test_column_that_cannot_be_staged_is_told(spark: "SparkSession", sink: OutboxSink) -> None:
    for columns, fault in UNSTAGED:
        frame = spark.range(1).selectExpr("id AS value", *columns.split(", ") if "map" not in columns else [columns])
        with pytest.raises(InvalidMessage) as caught:
            sink(frame, 0)
        assert fault in str(caught.value)


def test_arguments_that_cannot_be_used_are_told(spark: "SparkSession", spark_dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="Give commit_sql or transact"):
        OutboxSink("orders", dsn=spark_dsn, commit_sql=INSERT, transact=lambda *_: None)
    with pytest.raises(ConfigurationError, match="holds a password"):
        OutboxSink("orders", dsn="host=db password=secret")
    with pytest.raises(InvalidMessage, match="cannot name a batch"):
        OutboxSink("", dsn=spark_dsn)
    with pytest.raises(ConfigurationError, match="onKnownBatch is 'skip': it is compare, or pass"):
        OutboxSink("orders", dsn=spark_dsn, on_known_batch="skip")
    frame = spark.range(1).selectExpr("id AS value")
    with pytest.raises(ConfigurationError, match=r"No streaming query runs this in this thread.*InheritableThread"):
        OutboxSink(topic="numbers", dsn=spark_dsn)(frame, 0)
    with pytest.raises(ConfigurationError, match="No streaming query runs this in this thread"):
        OutboxSink("orders", topic="numbers", dsn=spark_dsn, on_known_batch="pass")(frame, 0)


def test_sink_wants_the_number_of_its_batch_inside_a_stream(stream: Stream, spark_dsn: str) -> None:
    """Else each micro-batch would be the same job, and all but the first be passed over."""
    sink = OutboxSink("orders", topic="order.placed", dsn=spark_dsn, on_known_batch="pass")
    calls: list[Callable[[Any], object]] = [
        sink,
        partial(sink, batch_id=None),
        lambda frame: sink(frame, 7),
        OutboxSink("other", topic="order.placed", dsn=spark_dsn),
    ]
    for call in calls:
        error = stream.fails(lambda frame, _, call=call: call(frame.drop("number", "total")))  # type: ignore[misc]
        assert "Hand it the second argument of foreachBatch" in error
        assert "onKnownBatch" not in error
    assert values(stream.connect) == []
    stream.run(lambda frame, number: sink(frame.drop("number", "total"), number))
    stream.check(business=False)


def test_sink_in_a_thread_of_the_user_s_own_knows_its_query(stream: Stream, spark_dsn: str) -> None:
    from pyspark import InheritableThread

    sink = OutboxSink(topic="numbers", dsn=spark_dsn)

    def inherited(frame: "DataFrame", number: int) -> None:
        thread = InheritableThread(target=sink, args=(frame.drop("number", "total"), number))
        thread.start()
        thread.join()

    stream.run(inherited)
    assert [entry[1:] for entry in ledger(stream.connect)] == [(number, ROWS) for number in range(stream.batches)]


def test_sink_is_what_foreach_batch_wants(spark: "SparkSession", sink: OutboxSink) -> None:
    """mypy holds it to both: what `foreachBatch` takes, and what a call with a DataFrame alone gives."""
    calls: tuple[Callable[[DataFrame, int], None], Callable[[DataFrame], SentBatch]] = (sink, sink)
    assert all(map(callable, calls))
    spark.readStream.format("rate").load().writeStream.foreachBatch(sink)


# -- Types ------------------------------------------------------------------------------------------------------------


def test_message_columns_arrive_as_they_were(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    frame = spark.sql(
        "SELECT 'order.placed' AS topic, 7 AS key, 'E' AS kind, 'C' AS message_type, 'U' AS event_type, "
        "map('user', 'ada') AS headers, timestamp'0001-01-01 00:00:00.000001Z' AS deliver_at, "
        "timestamp'9998-12-31 23:59:59.999999Z' AS expires_at, 2L AS after_clock, 'x' AS value "
        "UNION ALL SELECT 'order.placed', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL"
    )
    OutboxSink("orders", dsn=spark_dsn)(frame.coalesce(1), 0)
    with connect() as connection:
        first, second = connection.execute(
            "SELECT topic, key, kind, message_type, event_type, headers, "
            "(deliver_at AT TIME ZONE 'UTC')::text, (expires_at AT TIME ZONE 'UTC')::text, after_clock, value "
            "FROM mailroom.outbox ORDER BY position"
        ).fetchall()
        [(unordered,)] = connection.execute("SELECT key = message_id::text FROM mailroom.outbox WHERE value = '\\xf6'")
    assert first == (
        "order.placed", "7", "E", "C", "U", {"user": "ada"},
        "0001-01-01 00:00:00.000001", "9998-12-31 23:59:59.999999", 2, b"\x61x",
    )  # fmt: skip
    assert second[2:] == ("M", "U", None, None, None, None, None, b"\xf6")
    assert unordered


def test_business_columns_arrive_as_they_were(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    columns = {
        "yes": ("true", "true"),
        "tiny": ("cast(-100 AS tinyint)", "-100"),
        "small": ("cast(1000 AS smallint)", "1000"),
        "number": ("5", "5"),
        "big": ("-9223372036854775808", "-9223372036854775808"),
        "single": ("cast(1.5 AS float)", "1.5"),
        "double": ("double(-0.1)", "-0.1"),
        "none": ("double('NaN')", "NaN"),
        "price": ("129.95", "129.95"),
        "tiny price": ("cast('0.000000000000000001' AS decimal(38,18))", "0.000000000000000001"),
        "Größe?": ("'Zürich'", "Zürich"),
        "raw": ("X'00ff'", "\\x00ff"),
        "day": ("date'1582-10-04'", "1582-10-04"),
        "moment": ("timestamp'2026-08-02 12:30:45.5Z'", "2026-08-02 12:30:45.5+00"),
        "local": ("timestamp_ntz'1969-08-02 12:30:45.5'", "1969-08-02 12:30:45.5"),
        "tags": ("array('a', NULL, '')", '{a,NULL,""}'),
        "none of them": ("cast(array() AS array<int>)", "{}"),
        "yeses": ("array(true, false)", "{t,f}"),
        "tinies": ("array(cast(1 AS tinyint), cast(2 AS tinyint))", "{1,2}"),
        "bigs": ("array(1L, NULL, 9223372036854775807)", "{1,NULL,9223372036854775807}"),
        "doubles": ("array(double(0.5), double('-Infinity'))", "{0.5,-Infinity}"),
        "prices": ("array(129.95, 0.05)", "{129.95,0.05}"),
        "raws": ("array(X'00ff')", '{"\\\\x00ff"}'),
        "days": ("array(date'2026-08-02')", "{2026-08-02}"),
        "moments": ("array(timestamp'2026-08-02 12:30:45.5Z', NULL)", '{"2026-08-02 12:30:45.5+00",NULL}'),
        "locals": ("array(timestamp_ntz'2026-08-02 12:30:45.5')", '{"2026-08-02 12:30:45.5"}'),
    }
    texts = ", ".join(f'"{name}"::text AS "{name}"' for name in columns)
    sink = OutboxSink(
        "orders", topic="order.placed", dsn=spark_dsn,
        commit_sql=[
            "SET LOCAL timezone = 'UTC'", "CREATE TABLE of_types AS SELECT * FROM {staging}",
            f"CREATE TABLE seen AS SELECT {texts}, mailroom_nth AS nth FROM {{staging}} ORDER BY mailroom_nth",
        ],
    )  # fmt: skip
    of_row = ", ".join(f"{of} AS `{name}`" for name, (of, _) in columns.items())
    nulls = ", ".join("NULL" for _ in columns)
    sink(
        spark.sql(f"SELECT 1 AS value, {of_row} UNION ALL SELECT 2, {nulls} UNION ALL SELECT 3, {of_row}").coalesce(1),
        0,
    )
    with connect() as connection:
        first, second, third = connection.execute("SELECT * FROM seen ORDER BY nth").fetchall()
        types = connection.execute(
            "SELECT column_name, data_type, numeric_scale FROM information_schema.columns "
            "WHERE table_name = 'of_types' AND column_name IN ('price', 'tiny', 'prices') ORDER BY 1"
        ).fetchall()
    assert first[:-1] == third[:-1] == tuple(text for _, text in columns.values())
    assert second[:-1] == (None,) * len(columns)
    assert types == [("price", "numeric", 2), ("prices", "ARRAY", None), ("tiny", "smallint", 0)]
