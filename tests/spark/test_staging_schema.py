"""Staging tables in a schema of the user's choice: made, moved and dropped there, and CREATE is needed only there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pyspark.errors.exceptions.captured import CapturedException

from dispatcher import deliver_all
from dispatcher.housekeeping.janitor import Janitor
from dispatcher.lanes.leading import KEEPER
from mailroom.errors import ConfigurationError, InvalidName
from mailroom.session import settings
from mailroom.values.names import DEFAULT_SCHEMA
from spark_jobs.node import Node
from spark_jobs.write.commit import SentBatch, commit
from spark_jobs.write.finishing import ChunkPace, finish
from spark_jobs.write.ledger import SparkBatch
from spark_jobs.write.sink import OutboxSink
from spark_jobs.write.staging import Staged, stage, sweep
from spark_jobs.write.user_sql import UserSql
from tests.spark.frames import SHAPE, batches, frame, sent, staging_tables
from tests.support.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOB = SparkBatch("job")
LARGE = ChunkPace(rows=4, patience_s=0)
ROWS = 20
ELSEWHERE = "landing"


@pytest.fixture
def owner(connect: Connect) -> psycopg.Connection[Any]:
    connection = connect(autocommit=True)
    connection.execute(f"CREATE SCHEMA {ELSEWHERE}".encode())
    return connection


@pytest.fixture
def node(dsn: str, owner: psycopg.Connection[Any]) -> Node:
    return Node(dsn=dsn, staging=ELSEWHERE)


@pytest.fixture
def role(dsn: str, owner: psycopg.Connection[Any]) -> Iterator[str]:
    """A role with all that Spark's may do in the node's schema, but CREATE."""
    name = f"{conninfo_to_dict(dsn)['dbname']}_loader"[-63:]
    quoted = sql.Identifier(name)
    owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(quoted))
    owner.execute(sql.SQL("GRANT USAGE ON SCHEMA mailroom TO {}").format(quoted))
    owner.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO {}").format(quoted))
    yield name
    owner.execute("RESET ROLE")
    owner.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(quoted))
    owner.execute(sql.SQL("DROP ROLE {}").format(quoted))


@contextmanager
def acting_as(role: str) -> Iterator[None]:
    """Have each session of Spark's act as a role."""
    connect = Node.connect

    def connected(self: Node, name: str, **options: Any) -> psycopg.Connection:
        connection = connect(self, name, **options)
        connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
        if not connection.autocommit:
            connection.commit()
        return connection

    with mock.patch.object(Node, "connect", connected):
        yield


def staged(node: Node, batch: SparkBatch = JOB) -> list[Staged]:
    return [stage(node, batch, SHAPE, batches(*some)) for some in ((0, 11), (11, ROWS))]


def decided_and_left(node: Node) -> None:
    """Decide a large batch and move a chunk of it, as a driver that dies then."""
    with mock.patch("spark_jobs.write.commit.finish"):
        commit(node, JOB, SHAPE, staged(node), pace=LARGE)


def schemas(connect: Connect) -> set[str]:
    """Where staging tables stand."""
    query = "SELECT DISTINCT relnamespace::regnamespace::text FROM pg_class WHERE relname ^@ 'staging_'"
    return {schema for (schema,) in connect().execute(query).fetchall()}


@pytest.mark.parametrize("pace", [ChunkPace(), LARGE], ids=["at once", "in chunks"])
def test_batch_is_staged_there_and_sent(node: Node, connect: Connect, pace: ChunkPace) -> None:
    attempts = staged(node)
    assert schemas(connect) == {ELSEWHERE}
    seen: list[Any] = []
    query = "SELECT count(*), min(mailroom_nth) FROM {staging}"
    user_sql = UserSql.of((), lambda c, s: seen.append(c.execute(query.format(staging=s.rows).encode()).fetchone()))
    assert commit(node, JOB, SHAPE, attempts, user_sql, pace=pace) == SentBatch(ROWS)
    assert seen == [(ROWS, 1)]
    assert sent(connect) == list(range(ROWS))
    assert staging_tables(connect) == 0


def test_role_needs_create_only_there(node: Node, connect: Connect, owner: psycopg.Connection[Any], role: str) -> None:
    owner.execute(sql.SQL("GRANT USAGE, CREATE ON SCHEMA landing TO {}").format(sql.Identifier(role)))
    with acting_as(role):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            staged(Node(dsn=node.dsn))
        assert commit(node, JOB, SHAPE, staged(node)) == SentBatch(ROWS)
        large = SparkBatch("large")
        assert commit(node, large, SHAPE, staged(node, large), pace=LARGE) == SentBatch(ROWS)
        staged(node)
        assert sweep(node, abandoned_after_h=0) == 2
    assert staging_tables(connect) == 0


def test_sweeper_finds_tables_wherever_they_are(node: Node, connect: Connect, owner: psycopg.Connection[Any]) -> None:
    default = Node(dsn=node.dsn)
    staged(node)
    staged(default)
    assert schemas(connect) == {DEFAULT_SCHEMA, ELSEWHERE}
    assert sweep(default, abandoned_after_h=0) == 4
    assert schemas(connect) == set()
    staged(node)
    owner.execute("DROP SCHEMA landing CASCADE")
    assert sweep(default, abandoned_after_h=0) == 2
    assert owner.execute("SELECT count(*) FROM mailroom.spark_staging").fetchone() == (0,)


def test_schema_that_is_closed_to_a_role_stops_none_of_its_sweeps(
    node: Node, connect: Connect, owner: psycopg.Connection[Any], role: str
) -> None:
    staged(node)
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA mailroom TO {}").format(sql.Identifier(role)))
    with acting_as(role):
        staged(Node(dsn=node.dsn))
        assert sweep(node, abandoned_after_h=0) == 2
    assert schemas(connect) == {ELSEWHERE}
    owner.execute("DROP TABLE landing.{}, landing.{}".format(*(
        name for (name,) in owner.execute("SELECT relname FROM pg_class WHERE relname ^@ 'staging_'").fetchall()
    )).encode())  # fmt: skip
    with acting_as(role):
        assert sweep(node, abandoned_after_h=0) == 0  # it cannot see whether they are there


async def test_housekeeping_goes_on_there(node: Node, connect: Connect) -> None:
    decided_and_left(node)
    async with await settings.connect_async(str(node.dsn), "keeper", KEEPER) as keeper:
        janitor = Janitor(DEFAULT_SCHEMA, abandoned_after_s=0)
        for _ in range(2):
            await janitor.run_once(keeper)
    assert sent(connect) == list(range(ROWS))


async def test_housekeeping_leaves_a_table_in_a_schema_that_spark_s_role_may_swap(
    node: Node, connect: Connect, owner: psycopg.Connection[Any], role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner could put a view of the table's name there, whose functions would run with the dispatcher's rights."""
    owner.execute(sql.SQL("ALTER SCHEMA landing OWNER TO {}").format(sql.Identifier(role)))
    with acting_as(role):
        decided_and_left(node)
    async with await settings.connect_async(str(node.dsn), "keeper", KEEPER) as keeper:
        await Janitor(DEFAULT_SCHEMA, abandoned_after_s=0).run_once(keeper)
    assert sent(connect) == []
    assert "its schema has to belong to the owner of Mailroom's" in caplog.text
    with acting_as(role):
        finish(node, JOB.name)
    assert sent(connect) == list(range(ROWS))


def test_name_in_the_list_of_tables_is_a_name(node: Node, owner: psycopg.Connection[Any]) -> None:
    """Others than who wrote it put it into their SQL."""
    for name in ('landing"."x', "", "Landing", "landing\n"):
        with pytest.raises(psycopg.errors.CheckViolation):
            owner.execute(
                "INSERT INTO mailroom.spark_staging (token, name, batch, schema) "
                "VALUES (gen_random_uuid(), 'n', 1, %s)",
                [name],
            )


def write(rows: Any, dsn: str, **options: str) -> None:
    options = {"topic": "numbers", "idempotencyKey": "job", "dsn": dsn, **options}
    rows.write.format("outbox").options(**options).mode("append").save()


def test_option_of_a_write_and_of_a_sink(
    spark: "SparkSession", spark_dsn: str, connect: Connect, owner: psycopg.Connection[Any]
) -> None:
    write(frame(spark, ROWS), spark_dsn, stagingSchema=ELSEWHERE)
    assert sent(connect) == list(range(ROWS))
    made: list[set[str]] = []
    sink = OutboxSink(
        "sink",
        topic="numbers",
        dsn=spark_dsn,
        staging_schema=ELSEWHERE,
        transact=lambda *_: made.append(schemas(connect)),
    )
    assert sink(frame(spark, ROWS)) == SentBatch(ROWS)
    assert made == [{ELSEWHERE}]


@pytest.mark.parametrize("schema", ["nowhere", "closed"])
def test_schema_that_cannot_be_used_is_told_before_anything_runs(
    dsn: str, owner: psycopg.Connection[Any], role: str, schema: str
) -> None:
    owner.execute("CREATE SCHEMA closed")
    with (
        acting_as(role),
        pytest.raises(ConfigurationError, match=f"mailroom grant spark-writer ROLE --staging-schema {schema}"),
    ):
        Node(dsn=dsn, staging=schema).check()
    with pytest.raises(InvalidName, match="Schema name 'Upper' is not valid"):
        Node.of({"stagingSchema": "Upper"})


def test_a_write_tells_of_it(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    with pytest.raises(CapturedException, match="The role cannot stage in the schema nowhere"):
        write(frame(spark, ROWS), spark_dsn, stagingSchema="nowhere")


# -- the dispatcher's drain -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", [None, ELSEWHERE])
def test_drain_finishes_what_a_driver_has_left(
    dsn: str, connect: Connect, owner: psycopg.Connection[Any], staging: str | None
) -> None:
    decided_and_left(Node(dsn=dsn, staging=staging))
    assert deliver_all(dsn).taken == 0  # its driver may be at work
    owner.execute("UPDATE mailroom.spark_bulk SET at = at - interval '61 seconds'")
    assert deliver_all(dsn).taken == ROWS
    assert owner.execute("SELECT count(*) FROM mailroom.spark_bulk").fetchone() == (0,)
