"""format("outbox"): what a DataFrame holds is sent exactly once, whatever happens to its tasks and to its driver."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import functions as f

from tests.spark.faulty import FaultySource
from tests.spark.frames import frame, ledger, sent, staging_tables, values
from tests.support.databases import Connect
from tests.support.proxy import CommitFault, proxied

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def write(rows: "DataFrame", dsn: str, key: str = "job", source: str = "outbox", **options: str) -> None:
    options = {"topic": "numbers", "idempotencyKey": key, "dsn": dsn, **options}
    rows.write.format(source).options(**options).mode("append").save()


def test_every_row_is_sent_once_in_order(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    write(frame(spark, 1000), spark_dsn)
    assert sent(connect) == list(range(1000))
    assert ledger(connect) == [("job", -1, 1000)]
    assert staging_tables(connect) == 0
    with connect() as connection:
        rows = connection.execute("SELECT DISTINCT topic, source FROM mailroom.outbox").fetchall()
        assert rows == [("numbers", "mailroom spark job -1")]


def test_same_key_again_sends_nothing(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    write(frame(spark, 500, 4), spark_dsn)
    write(frame(spark, 500, 3), spark_dsn)
    assert sent(connect) == list(range(500))
    write(frame(spark, 500), spark_dsn, key="another")
    assert len(sent(connect)) == 1000


def test_same_key_with_other_rows_is_an_error(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    write(frame(spark, 500), spark_dsn)
    with pytest.raises(CapturedException, match="with 500 messages, and now it has 501"):
        write(frame(spark, 501), spark_dsn)
    assert sent(connect) == list(range(500))
    assert staging_tables(connect) == 0


def test_rows_of_the_users_own_are_committed_with_the_messages(
    spark: "SparkSession", spark_dsn: str, connect: Connect
) -> None:
    rows = spark.range(0, 100, 1, 3).selectExpr("id AS number", "id / 8 AS total", "struct(id) AS value")
    insert = "INSERT INTO orders SELECT number, total FROM {staging}"
    with connect(autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (number bigint, total numeric CHECK (total < 10))")
        with pytest.raises(CapturedException, match=r"CheckViolation \(23514, orders_total_check, statement 1"):
            write(rows, spark_dsn, commitSql=insert)
        assert (sent(connect), ledger(connect), staging_tables(connect)) == ([], [], 0)
        connection.execute("ALTER TABLE orders DROP CONSTRAINT orders_total_check")
        for _ in range(2):
            write(rows, spark_dsn, commitSql=insert)
        stored = connection.execute("SELECT number, total::float8 FROM orders ORDER BY 1").fetchall()
    assert stored == [(number, number / 8) for number in range(100)]
    assert (sent(connect), ledger(connect)) == (list(range(100)), [("job", -1, 100)])
    with pytest.raises(CapturedException, match="A message has no column 'number'"):
        write(rows, spark_dsn)
    with pytest.raises(CapturedException, match="ends the transaction"):
        write(rows, spark_dsn, commitSql="COMMIT")


def test_nan_is_null_for_those_who_say_so(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    rows = spark.range(1).selectExpr("array(named_struct('x', double('NaN'), 'y', 0.5D)) AS value")
    with pytest.raises(CapturedException, match=r"value\[\]\.x is NaN"):
        write(rows, spark_dsn)
    write(rows, spark_dsn, onNaN="null")
    assert values(connect) == [[{"x": None, "y": 0.5}]]


def test_task_killed_after_its_staging_commit(
    spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path
) -> None:
    spark.dataSource.register(FaultySource)
    fault = tmp_path / "fault"
    fault.touch()
    write(frame(spark, 1000), spark_dsn, source="faulty-outbox", killTask=str(fault))
    assert not fault.exists()
    assert sent(connect) == list(range(1000))
    assert staging_tables(connect) == 0


@pytest.mark.nightly  # a key that is used again, and the same of a stream
def test_commit_that_dies_after_the_databases_commit(
    spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path
) -> None:
    spark.dataSource.register(FaultySource)
    fault = tmp_path / "fault"
    fault.touch()
    with pytest.raises(CapturedException, match="dies after the database's"):
        write(frame(spark, 1000), spark_dsn, source="faulty-outbox", failCommit=str(fault))
    assert sent(connect) == list(range(1000))
    write(frame(spark, 1000, 2), spark_dsn)
    assert sent(connect) == list(range(1000))


@pytest.mark.nightly  # as of a sink, and in test_staging.py
def test_answers_to_commits_are_lost(spark: "SparkSession", spark_dsn: str, dsn: str, connect: Connect) -> None:
    with proxied(dsn) as (proxy, through):
        port = through.rpartition(":")[2].partition("/")[0]
        # Two of the four tasks and the driver: it does not matter which comes when.
        faults = iter([CommitFault.SWALLOW, CommitFault.CUT, *[CommitFault.NONE] * 4, CommitFault.SWALLOW])
        proxy.at_commits(lambda: next(faults, CommitFault.NONE))
        write(frame(spark, 1000), f"{spark_dsn} port={port}")
        assert proxy.commits.count(CommitFault.SWALLOW) == 2
    assert sent(connect) == list(range(1000))
    assert staging_tables(connect) == 0


def test_job_whose_row_is_bad_sends_nothing_and_says_which_column(
    spark: "SparkSession", spark_dsn: str, connect: Connect
) -> None:
    rows = frame(spark, 1000).withColumn("key", f.when(f.col("value.id") == 777, "").otherwise(f.col("key")))
    with pytest.raises(CapturedException, match="Column key has a row that has not 1 to 1024 bytes"):
        write(rows, spark_dsn)
    assert sent(connect) == []
    assert staging_tables(connect) == 0


def test_every_column(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    moment = datetime(2031, 5, 6, 7, 8, 9, 123456, UTC)
    number = UUID("8f14e45f-ceea-467f-9a36-dedd4bea2543")
    columns = (
        "message_id string, topic string, key long, kind string, message_type string, event_type string, "
        "value struct<a: int>, headers map<string,string>, deliver_at timestamp, expires_at timestamp, after_clock long"
    )
    full = (str(number), "flights", 42, "E", "O", "C", (1,), {"user": 'a"\\b\u00e9'}, moment, moment, 7)
    empty = (None, "flights", None, None, None, None, None, None, None, None, None)
    rows = spark.createDataFrame([full, empty], columns).coalesce(1)
    rows.write.format("outbox").options(idempotencyKey="job", dsn=spark_dsn).mode("append").save()
    with connect() as connection:
        first, second = connection.execute(
            "SELECT message_id, topic, key, kind::text, message_type::text, event_type::text, "
            "mailroom.cbor_to_jsonb(value), headers, deliver_at, expires_at, after_clock "
            "FROM mailroom.outbox ORDER BY position"
        ).fetchall()
    assert first == (number, "flights", "42", "E", "O", "C", {"a": 1}, {"user": 'a"\\b\u00e9'}, moment, moment, 7)
    fresh = second[0]
    assert fresh.version == 4
    assert second == (fresh, "flights", str(fresh), "M", "U", None, None, None, None, None, None)


def test_columns_match_in_any_case(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    rows = frame(spark, 10).withColumnsRenamed({"key": "KEY", "value": "Value"})
    write(rows, spark_dsn)
    assert sent(connect) == list(range(10))
    with connect() as connection:
        keys = connection.execute("SELECT key FROM mailroom.outbox ORDER BY position").fetchall()
    assert keys == [(f"key-{number}",) for number in range(10)]


def test_save_mode_that_is_left_out_is_told(spark: "SparkSession", spark_dsn: str) -> None:
    rows = frame(spark, 3).write.format("outbox").options(topic="t", idempotencyKey="job", dsn=spark_dsn)
    with pytest.raises(
        CapturedException, match=r'cannot be written in the "ErrorIfExists" mode.* use either the "Append"'
    ):
        rows.save()


def test_options_stand_for_all_rows(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    write(frame(spark, 10), spark_dsn, kind="E", messageType="D", eventType="U")
    with connect() as connection:
        kinds = "SELECT DISTINCT kind::text, message_type::text, event_type::text FROM mailroom.outbox"
        assert connection.execute(kinds).fetchall() == [("E", "D", "U")]


REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("cast(id as string) key", {}, "There is no column value"),
    ("id value", {"topic": ""}, "Topic '' is not valid"),
    ("id value | id number", {}, "A message has no column 'number'; the columns are message_id, topic, key"),
    ("id value | cast(id as double) key", {}, "Column key is double; it has to be string or an integer: cast it"),
    ("id value | map('a', 1) headers", {}, "Column headers is map<string,int>; it has to be map<string,string>"),
    ("id value | 't' topic", {}, "topic is given twice"),
    ("id value | 't' TOPIC", {}, "topic is given twice"),
    ("id value | 'a' key | 'b' Key", {}, r"Columns 'key', 'Key' are one \(case makes no difference\): rename them"),
    ("struct(timestamp_ntz'2020-01-01 00:00:00' at) value", {}, r"value\.at"),
    ("id value | id number", {"commitSql": " "}, "A statement of commit_sql is empty"),
    ("id value", {"onNaN": "0"}, "onNaN is '0': it is refuse, or null"),
    ("id value", {"kind": "X"}, "Column kind has a row that is none of M, E, C, R"),
    ("id value", {"key": ""}, "Give the option idempotencyKey"),
    ("id value", {"key": "k" * 101}, "cannot name a batch in the ledger"),
    ("id value", {"tpoic": "x"}, "There is no option 'tpoic'; there are topic, kind"),
    ("id value", {"dsn": "postgresql://me:secret@db/x"}, "The option dsn holds a password"),
    ("id value", {"schema": "Upper"}, "Schema name 'Upper' is not valid"),
]


def test_what_cannot_be_sent_is_refused_before_anything_runs(spark: "SparkSession", spark_dsn: str) -> None:
    for columns, options, fault in REFUSED:
        rows = spark.range(3).selectExpr(*columns.split(" | "))
        with pytest.raises(CapturedException, match=fault) as failure:
            write(rows, **{"dsn": spark_dsn, **options})
        assert "secret" not in str(failure.value)


def test_database_by_the_name_of_a_variable(spark: "SparkSession", spark_dsn: str) -> None:
    rows = frame(spark, 3).write.format("outbox").mode("append")
    with pytest.raises(CapturedException, match="The environment variable ORDERS_DB is not set here"):
        rows.options(topic="t", idempotencyKey="job", dsnVariable="ORDERS_DB").save()
    with pytest.raises(CapturedException, match="name two databases: give one of them"):
        rows.options(topic="t", idempotencyKey="job", dsnVariable="ORDERS_DB", dsn=spark_dsn).save()


def test_outbox_is_not_overwritten(spark: "SparkSession", spark_dsn: str) -> None:
    rows = frame(spark, 3).write.format("outbox").options(topic="t", idempotencyKey="job", dsn=spark_dsn)
    with pytest.raises(CapturedException, match="cannot be overwritten"):
        rows.mode("overwrite").save()
