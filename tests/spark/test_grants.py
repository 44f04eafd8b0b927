"""The rights of a spark-writer are what `format("outbox")` needs, each of them, and no more."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pyspark.sql import types as spark

from mailroom import resolve
from mailroom.errors import CommitUnknown, SchemaError
from mailroom.roles.statements import Atom, Thing, fixed_atoms
from mailroom.sql.runner import run
from outbox.bulk import advancing
from spark_jobs.node import Node
from spark_jobs.write.commit import SendFailed, commit
from spark_jobs.write.finishing import BulkUnfinished, ChunkPace
from spark_jobs.write.ledger import SparkBatch
from spark_jobs.write.shape import Shape
from spark_jobs.write.staging import Staged, drop, stage, sweep
from spark_jobs.write.user_sql import UserSql
from tests.support.databases import Connect
from tests.support.roles import named, rights

ROOT = Path(__file__).parent.parent.parent
ROLE = "spark-writer"
COLUMNS: dict[str, spark.DataType] = {
    **dict.fromkeys(("message_id", "topic", "key", "kind", "message_type", "event_type"), spark.StringType()),
    "value": spark.LongType(),
    "headers": spark.MapType(spark.StringType(), spark.StringType()),
    **dict.fromkeys(("deliver_at", "expires_at"), spark.TimestampType()),
    "after_clock": spark.LongType(),
}
SHAPE = Shape.of(spark.StructType([spark.StructField(name, kind) for name, kind in COLUMNS.items()]), {})


ATOMS = [
    (atom.privilege if atom.column is None else f"{atom.privilege} ({atom.column})", of)
    for atom in sorted((*fixed_atoms(ROLE), Atom(Thing("schema", "mailroom"), "CREATE")), key=str)
    for of in [f"SCHEMA {atom.thing.name}" if atom.thing.kind == "schema" else f"mailroom.{atom.thing.name}"]
]


@pytest.fixture
def node(dsn: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """The node as a spark-writer sees it, whose password stands in a file, as on a cluster."""
    role = f"{conninfo_to_dict(dsn)['dbname']}_spark_writer"[-63:]
    owner = connect(autocommit=True)
    owner.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'from-a-file'; {named(rights(ROLE), role)}".encode())
    passfile = tmp_path / "passfile"
    passfile.write_text(f"*:*:*:{role}:from-a-file\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    monkeypatch.delenv("PGPASSWORD", raising=False)
    parts = {name: value for name, value in conninfo_to_dict(dsn).items() if name != "password"}
    yield Node.of({"dsn": make_conninfo("", **(parts | {"user": role}))})
    owner.execute(f"DROP OWNED BY {role}".encode())
    owner.execute(f"DROP ROLE {role}".encode())


@pytest.fixture
def without(connect: Connect, node: Node) -> Callable[[str, str], None]:
    """Return what takes a privilege away from the role of `node`."""
    role = conninfo_to_dict(str(node.dsn))["user"]

    def revoke(privilege: str, on: str) -> None:
        connect(autocommit=True).execute(f"REVOKE {privilege} ON {on} FROM {role}".encode())

    return revoke


def staged(node: Node, batch: SparkBatch) -> Staged:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    row: dict[str, Any] = {"message_id": str(uuid4()), "topic": "numbers", "key": "k", "kind": "M", "message_type": "U"}
    row |= {"event_type": "C", "value": 1, "headers": [("a", "b")], "deliver_at": None, "expires_at": moment}
    row |= {"after_clock": 5}
    kinds = {"value": pa.int64(), "after_clock": pa.int64(), "headers": pa.map_(pa.string(), pa.string())}
    kinds |= dict.fromkeys(("deliver_at", "expires_at"), pa.timestamp("us", "UTC"))
    arrays = [pa.array([row[name]], kinds.get(name, pa.string())) for name in COLUMNS]
    return stage(node, batch, SHAPE, [pa.RecordBatch.from_arrays(arrays, names=list(COLUMNS))])


def all_that_spark_does(node: Node) -> None:
    """A job, the same one again, one that is aborted, a sweep; and what becomes of a COMMIT that gets no answer."""
    node = node.check()
    for _ in range(2):
        commit(node, SparkBatch("job"), SHAPE, [staged(node, SparkBatch("job"))])
    large = SparkBatch("large")
    commit(node, large, SHAPE, [staged(node, large) for _ in range(3)], pace=ChunkPace(rows=2, patience_s=0))
    drop(node, [staged(node, SparkBatch("aborted"))])
    staged(node, SparkBatch("abandoned"))
    assert sweep(node, abandoned_after_h=0) == 1
    assert resolve(partial(node.connect, "test"), token_of_now()) == "rolled back"


def token_of_now() -> str:
    """A token as a transaction of this moment would have it, which nobody wrote."""
    return f"{int(datetime.now(UTC).timestamp() * 1000):012x}7{uuid4().hex[13:]}"


def test_rights_are_enough(node: Node, connect: Connect) -> None:
    all_that_spark_does(node)
    sent = connect().execute("SELECT topic, key, after_clock FROM mailroom.outbox").fetchall()
    assert sent == [("numbers", "k", 5)] * 4


def test_writer_is_told_that_row_security_hides_the_ledger(node: Node, connect: Connect) -> None:
    """Whatever it is: what it does not see there it would send again. Policies of users' tables count in their SQL."""
    owner, seen = connect(autocommit=True), []
    role = conninfo_to_dict(str(node.dsn))["user"]
    owner.execute("CREATE TABLE mine (a int); INSERT INTO mine VALUES (1), (2); GRANT SELECT ON mine TO public")
    owner.execute("ALTER TABLE mine ENABLE ROW LEVEL SECURITY; CREATE POLICY one ON mine USING (a = 1)")

    def tell(connection: psycopg.Connection[Any], _: object) -> None:
        seen.extend(connection.execute("SELECT a FROM mine").fetchall())

    first, second = SparkBatch("first"), SparkBatch("second")
    attempt = staged(node, second)
    commit(node, first, SHAPE, [staged(node, first)], UserSql(tell, ""))
    assert seen == [(1,)]
    owner.execute("ALTER TABLE mailroom.spark_batch ENABLE ROW LEVEL SECURITY")
    owner.execute(
        sql.SQL("CREATE POLICY adds ON mailroom.spark_batch FOR INSERT TO {}").format(sql.Identifier(str(role)))
        + sql.SQL(" WITH CHECK (true)")
    )
    with pytest.raises(SendFailed, match=r'row-level security policy for table "spark_batch".*BYPASSRLS'):
        commit(node, second, SHAPE, [attempt])
    with pytest.raises(SchemaError, match=r"hides rows of schema 'mailroom'.*: spark_batch"):
        commit(node, second, SHAPE, [attempt], UserSql(tell, ""))
    with pytest.raises(SchemaError, match=r"hides rows of schema 'mailroom'.*: spark_batch"):
        node.check()


def test_owner_of_the_outbox_goes_on_with_what_the_role_has_left(node: Node, connect: Connect) -> None:
    """The role of the daemon, which is no superuser, and was given nothing on the staging tables."""
    large, owner = SparkBatch("left"), connect(autocommit=True)
    attempts = [staged(node, large) for _ in range(3)]
    house = sql.Identifier(f'{conninfo_to_dict(str(node.dsn))["dbname"]} "100%"'[-63:])
    owner.execute(sql.SQL("CREATE ROLE {}").format(house))
    try:
        owner.execute(sql.SQL("GRANT ALL ON SCHEMA mailroom TO {}").format(house))
        owner.execute(sql.SQL("GRANT ALL ON mailroom.spark_bulk, mailroom.spark_staging TO {}").format(house))
        owner.execute(sql.SQL("ALTER TABLE mailroom.outbox OWNER TO {}").format(house))
        with mock.patch("spark_jobs.write.commit.finish"):  # it dies before
            commit(node, large, SHAPE, attempts, pace=ChunkPace(rows=2))
        owner.execute(sql.SQL("SET ROLE {}").format(house))
        while True:
            with owner.transaction():
                if run(owner, advancing("mailroom", "left", 2)) is None:
                    break
        assert owner.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (3,)
    finally:
        owner.execute("RESET ROLE")
        owner.execute("ALTER TABLE mailroom.outbox OWNER TO CURRENT_USER")
        owner.execute(sql.SQL("DROP OWNED BY {}").format(house))
        owner.execute(sql.SQL("DROP ROLE {}").format(house))


@pytest.mark.parametrize(("privilege", "on"), ATOMS)
def test_each_right_is_needed(node: Node, without: Callable[[str, str], None], privilege: str, on: str) -> None:
    without(privilege, on)
    with pytest.raises((errors.InsufficientPrivilege, SendFailed, BulkUnfinished, CommitUnknown)) as refused:
        all_that_spark_does(node)
    assert isinstance(refused.value, psycopg.Error) or f"{errors.InsufficientPrivilege.sqlstate}" in str(refused.value)


BEYOND = [
    "SELECT value FROM mailroom.outbox",
    "DELETE FROM mailroom.outbox",
    "INSERT INTO mailroom.outbox (topic, value_json, position) OVERRIDING SYSTEM VALUE VALUES ('numbers', '1', 5)",
    "UPDATE mailroom.spark_batch SET messages = 0",
    "DELETE FROM mailroom.spark_batch",
    "SELECT FROM mailroom.inbox",
    "SELECT setval('mailroom.clock', 1)",
]


def test_role_can_do_nothing_else(node: Node) -> None:
    for statement in BEYOND:
        with node.connect("test") as connection, pytest.raises(errors.InsufficientPrivilege):
            connection.execute(statement.encode())
