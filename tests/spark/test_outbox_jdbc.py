"""outbox_jdbc written by Spark's own JDBC writer: exactly the rows of the DataFrame, whatever is done twice."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from spark_jobs.session import DRIVER, HOW_TO_GET_JDBC, jdbc_jar
from tests.support.databases import Connect
from tests.support.proxy import CommitFault, proxied
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS, TASKS, BATCH = 400, 4, 20
TABLE = "mailroom.outbox_jdbc"
Write = Callable[..., None]


def jdbc_options(dsn: str) -> dict[str, str]:
    """What Spark's `format("jdbc")` needs to reach the database."""
    with psycopg.connect(dsn) as connection:
        at = connection.info
        url = f"jdbc:postgresql://{at.host}:{at.port}/{at.dbname}?ApplicationName=orders"
        return {"driver": DRIVER, "url": url, "user": at.user, "password": at.password}


@pytest.fixture
def session(connect: Connect) -> psycopg.Connection[Any]:
    return connect(autocommit=True)


@pytest.fixture
def orders(spark: "SparkSession") -> "DataFrame":
    """The orders: the same rows in the same tasks whenever they are computed, with ids from what they are."""
    if jdbc_jar() is None:
        pytest.skip(f"Spark has no JDBC driver for PostgreSQL. {HOW_TO_GET_JDBC}")
    return spark.range(0, ROWS, 1, TASKS).selectExpr(
        "md5(concat('order-', id)) AS message_id",
        "'order.paid' AS topic",
        "concat('order-', id % 10) AS key",
        "to_json(struct(id, 'paid' AS state)) AS value_json",
    )


@pytest.fixture
def write(dsn: str) -> Write:
    def write(frame: "DataFrame", to: str = dsn, table: str = TABLE, **options: str) -> None:
        frame.write.format("jdbc").options(
            **jdbc_options(to), dbtable=table, batchsize=BATCH, reWriteBatchedInserts="true", **options
        ).mode("append").save()

    return write


def check_sent(session: psycopg.Connection[Any]) -> None:
    """Exactly the rows that were to be sent, and in each task's order."""
    rows = session.execute(
        """
        SELECT (value_json ->> 'id')::bigint AS n, message_id = md5(concat('order-', value_json ->> 'id'))::uuid, topic,
               key, value_json
        FROM mailroom.outbox ORDER BY position
        """
    ).fetchall()
    assert sorted(rows) == [(n, True, "order.paid", f"order-{n % 10}", {"id": n, "state": "paid"}) for n in range(ROWS)]
    size = ROWS // TASKS
    for task in range(TASKS):
        mine = [n for n, *_ in rows if n // size == task]
        assert mine == sorted(mine)


def failing_once(frame: "DataFrame") -> "DataFrame":
    """The same rows; the first attempt of each odd task fails after half of them. Header attempt: which one it was."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        attempt, half = context.attemptNumber(), ROWS // TASKS // 2
        for batch in batches:
            marked = batch.append_column("headers", pa.array([f'{{"attempt": "{attempt}"}}'] * len(batch)))
            for start in range(0, len(batch), BATCH // 2):
                if attempt == 0 and context.partitionId() % 2 == 1 and start >= half:
                    raise RuntimeError("this task fails once")
                yield marked.slice(start, BATCH // 2)

    return frame.mapInArrow(pass_on, f"{frame._jdf.schema().toDDL()}, headers STRING")


def test_job_that_runs_twice_sends_each_row_once(
    orders: "DataFrame", write: Write, session: psycopg.Connection[Any]
) -> None:
    for _ in range(2):
        write(orders)
    check_sent(session)
    assert session.execute("SELECT DISTINCT source FROM mailroom.outbox").fetchall() == [("orders",)]


def test_append_by_one_call_does(orders: "DataFrame", dsn: str, session: psycopg.Connection[Any]) -> None:
    options = jdbc_options(dsn)
    url = options.pop("url")
    for _ in range(2):
        orders.write.jdbc(url, TABLE, mode="append", properties=options)
    check_sent(session)


# Two jobs at once do what a task and its speculative copy do; `spark.speculation` cannot be set in a running session.
def test_two_jobs_at_once_send_each_row_once(
    orders: "DataFrame", write: Write, session: psycopg.Connection[Any]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write, orders) for _ in range(2)]:
            done.result()
    check_sent(session)


@pytest.mark.parametrize(("isolation", "attempts"), [("READ_COMMITTED", {"1"}), ("NONE", {"0", "1"})])
def test_task_that_fails_half_way_and_is_tried_again_sends_each_row_once(
    orders: "DataFrame", write: Write, session: psycopg.Connection[Any], isolation: str, attempts: set[str]
) -> None:
    write(failing_once(orders), isolationLevel=isolation)
    check_sent(session)
    # Without transactions the rows of the first attempt are there, and the second passes them over.
    of_odd_tasks = session.execute(
        "SELECT DISTINCT headers ->> 'attempt' FROM mailroom.outbox WHERE (value_json ->> 'id')::bigint / %s %% 2 = 1",
        [ROWS // TASKS],
    )
    assert {attempt for (attempt,) in of_odd_tasks} == attempts


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", [CommitFault.SWALLOW, CommitFault.CUT])
def test_commit_whose_answer_is_lost_sends_each_row_once(
    orders: "DataFrame", write: Write, dsn: str, session: psycopg.Connection[Any], fault: CommitFault
) -> None:
    with proxied(dsn) as (proxy, through):
        proxy.at_next_commits(fault, fault)
        write(orders, through)
        assert proxy.commits.count(fault) == 2
    check_sent(session)


def test_commit_that_passes_only_after_the_task_was_tried_again_sends_each_row_once(
    orders: "DataFrame", write: Write, dsn: str, session: psycopg.Connection[Any]
) -> None:
    with proxied(dsn) as (proxy, through):
        proxy.at_next_commits(CommitFault.HOLD)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write, orders, through)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"
            eventually(lambda: session.execute(waiting).fetchone() == (1,))
            proxy.release()
            writing.result()
    check_sent(session)


def test_foreach_sends_each_row_once(orders: "DataFrame", spark_dsn: str, session: psycopg.Connection[Any]) -> None:
    def send(rows: Iterator[Any]) -> None:
        from pyspark import TaskContext

        with psycopg.connect(spark_dsn) as connection:
            connection.cursor().executemany(
                f"INSERT INTO {TABLE} (message_id, topic, key, value_json) VALUES (%s, %s, %s, %s)",
                [(row.message_id, row.topic, row.key, row.value_json) for row in rows],
            )
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("this task fails once, after its COMMIT")

    orders.foreachPartition(send)
    check_sent(session)


def test_append_to_the_outbox_itself_is_at_least_once(
    orders: "DataFrame", write: Write, dsn: str, session: psycopg.Connection[Any]
) -> None:
    with proxied(dsn) as (proxy, through):
        proxy.at_next_commits(CommitFault.SWALLOW)
        write(orders.drop("message_id"), through, table="mailroom.outbox", stringtype="unspecified")
    assert session.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (ROWS + ROWS // TASKS,)


def test_row_without_id_fails_the_job_and_tells_why(
    orders: "DataFrame", write: Write, session: psycopg.Connection[Any]
) -> None:
    with pytest.raises(Exception, match=r"outbox_jdbc has no message_id[\s\S]*Give each message a UUID"):
        write(orders.selectExpr("nullif(message_id, md5('order-7')) AS message_id", "topic", "key", "value_json"))
    with pytest.raises(Exception, match="outbox_jdbc has no message_id"):
        write(orders.drop("message_id"))


def test_all_types_that_spark_sends_fit(orders: "DataFrame", write: Write, session: psycopg.Connection[Any]) -> None:
    write(
        orders.limit(1).selectExpr(
            "message_id", "topic", "key", "'E' AS kind", "'O' AS message_type", "'U' AS event_type", "X'01' AS value",
            "CAST(NULL AS STRING) AS value_json", "to_json(map('user', 'ada')) AS headers",
            "TIMESTAMP '2030-01-02 03:04:05.678901' AS deliver_at", "CAST(NULL AS TIMESTAMP) AS expires_at",
            "7L AS after_clock",
        )
    )  # fmt: skip
    row = session.execute(
        "SELECT kind, message_type, event_type, value, headers, (deliver_at AT TIME ZONE 'UTC')::text, after_clock "
        "FROM mailroom.outbox"
    ).fetchone()
    assert row == ("E", "O", "U", b"\x01", {"user": "ada"}, "2030-01-02 03:04:05.678901", 7)
