"""Watching and unwatching tables: on every connection, what is refused, what is listed, and what moves with a table."""

import subprocess
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import Connection
from psycopg.rows import TupleRow

from mailroom import Watched, create_inbox, unwatch, unwatch_async, watch, watch_async, watched, watched_async
from mailroom.embedded import Binaries
from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName, NotInTransaction, SchemaError
from mailroom.schema import migrate, watching
from mailroom.sql.operation import Sql
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.watched import brief, told

pytestmark = pytest.mark.both_versions

THINGS = "CREATE TABLE things (id int PRIMARY KEY, name text, password text)"
# What must be quoted, what drivers and formats take for parameters, and dots, which also part schema and table.
ODD_SCHEMA, ODD_TABLE = 'O"d.d %s', "T:able $1 {schema} %(x)s 'é\\"
ODD_COLUMN = 'p%w "d" n.r :x {y}'


def odd(connection: Any) -> str:
    """Make a table of odd names, with a column `n` and one `r`, and return its name."""
    execute = connection.execute
    schema, table, column = (name.replace('"', '""') for name in (ODD_SCHEMA, ODD_TABLE, ODD_COLUMN))
    execute(
        f'CREATE SCHEMA "{schema}"; CREATE TABLE "{schema}"."{table}" ("{column}" int, "secret %s" int, n int, r int, '
        f'"key" int[], "value" int, PRIMARY KEY ("{column}"))'.encode()
    )
    return f"{ODD_SCHEMA}.{ODD_TABLE}"


@pytest.fixture
def odd_table(connect: Connect) -> str:
    return odd(connect(autocommit=True))


PREFIX = "a' \\ \"é%s:x-"
ODD = Watched(f"{ODD_SCHEMA}.{ODD_TABLE}", "odd", PREFIX, ("secret %s",))


def check_odd(connection: Connection[TupleRow]) -> None:
    table = '"' + ODD_SCHEMA.replace('"', '""') + '"."' + ODD_TABLE.replace('"', '""') + '"'
    connection.execute(f"INSERT INTO {table} VALUES (1, 2, 3, 4, ARRAY[5], 6)".encode())
    connection.execute(f"UPDATE {table} SET n = 7, r = NULL".encode())
    connection.execute(f"DELETE FROM {table}".encode())
    created, updated, deleted = told(connection)
    assert created.key == updated.key == deleted.key == f"{PREFIX}1"
    assert created.value["new"] == {ODD_COLUMN: 1, "n": 3, "r": 4, "key": [5], "value": 6}
    assert updated.value["changed"] == ["n", "r"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_table_is_watched_and_unwatched_on_every_connection(
    dsn: str, connect: Connect, odd_table: str, kind: str
) -> None:
    other = connect(autocommit=True)
    with opened(dsn, kind) as connection:
        watch(connection, odd_table, "odd", key_prefix=PREFIX, without=["secret %s", "secret %s"])
        assert watched(other) == []  # not committed by us
        connection.commit()
        assert watched(connection) == [ODD]
        check_odd(other)
        watch(connection, odd_table, "other")
        assert watched(connection) == [Watched(odd_table, "other", "", ())]
        assert unwatch(connection, odd_table) is True
        assert unwatch(connection, odd_table) is False
        assert watched(connection) == []
        connection.commit()
    assert other.execute("SELECT count(*) FROM pg_trigger WHERE tgname ~ 'watch'").fetchone() == (0,)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_table_is_watched_and_unwatched_on_every_async_connection(
    dsn: str, connect: Connect, odd_table: str, kind: str
) -> None:
    other = connect(autocommit=True)
    async with opened_async(dsn, kind) as connection:
        await watch_async(connection, odd_table, "odd", key_prefix=PREFIX, without="secret %s")
        assert watched(other) == []
        await connection.commit()
        assert await watched_async(connection) == [ODD]
        check_odd(other)
        assert await unwatch_async(connection, odd_table) is True
        assert await unwatch_async(connection, odd_table) is False
        await connection.commit()


def test_watch_is_the_callers_transaction(connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute(THINGS)
    for call in (lambda: watch(connection, "public.things", "t"), lambda: unwatch(connection, "public.things")):
        with pytest.raises(NotInTransaction):
            call()


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", ["watch", "unwatch"])
def test_watch_waits_for_nobody_for_long_and_leaves_the_setting(
    connect: Connect, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = watching.PREPARE.template.replace("'3s'", "'10ms'")
    assert impatient != watching.PREPARE.template
    connection, writer = connect(), connect()
    connection.execute(THINGS)
    if change == "unwatch":
        watch(connection, "public.things", "thing")
    connection.commit()
    writer.execute("INSERT INTO things VALUES (1)")
    connection.execute("SET lock_timeout = '7s'")
    connection.commit()
    calls: dict[str, Callable[[], object]] = {
        "watch": lambda: watch(connection, "public.things", "thing"),
        "unwatch": lambda: unwatch(connection, "public.things"),
    }
    with monkeypatch.context() as soon:
        soon.setattr(watching, "PREPARE", Sql(impatient, watching.PREPARE.columns))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            calls[change]()
    connection.rollback()
    writer.rollback()
    watch(connection, "public.things", "thing")
    unwatch(connection, "public.things")
    assert connection.execute("SHOW lock_timeout").fetchone() == ("7s",)


# -- What is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "public.nothing": "There is no table 'public.nothing'",
    "things": "Give schema.table",
    "public.Things": "case-sensitive and without quotes",
    "public.a_view": "is a view or a foreign table",
    "public.a_matview": "is a view or a foreign table",
    "public.far": "is a view or a foreign table",
    "public.keyless": "has no primary key",
    "public.later": "has a deferrable primary key",
    "public.parent": "inherits from another table, or others inherit",
    "public.child": "inherits from another table, or others inherit",
    "public.parts_1": "is a partition: watch the table that it is a partition of",
    "mailroom.outbox": "is in a schema of Mailroom",
    "mailroom.inbox_shipping": "is in a schema of Mailroom",
    "other_node.node": "is in a schema of Mailroom",
    "pg_catalog.pg_class": "is in a schema of PostgreSQL",
    "a.b.c": "Several tables are called 'a.b.c'",
    "public.things_pkey": "There is no table",
}
OBJECTS = f"""
{THINGS};
CREATE VIEW a_view AS SELECT * FROM things; CREATE MATERIALIZED VIEW a_matview AS SELECT * FROM things;
CREATE FOREIGN DATA WRAPPER nowhere; CREATE SERVER far FOREIGN DATA WRAPPER nowhere;
CREATE FOREIGN TABLE far (id int) SERVER far;
CREATE TABLE later (id int PRIMARY KEY DEFERRABLE); CREATE TABLE keyless (id int UNIQUE NOT NULL);
CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);
CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE parts_1 PARTITION OF parts DEFAULT;
CREATE SCHEMA a; CREATE SCHEMA "a.b";
CREATE TABLE a."b.c" (id int PRIMARY KEY); CREATE TABLE "a.b".c (id int PRIMARY KEY)
"""


def test_what_cannot_be_watched_is_refused_and_says_why(connect: Connect) -> None:
    connection = connect()
    migrate(connection, schema="other_node")
    create_inbox(connection, "shipping")
    connection.execute(OBJECTS.encode())
    for table, reason in REFUSED.items():
        with pytest.raises(ConfigurationError) as raised:
            watch(connection, table, "thing")
        assert reason in str(raised.value), table
    assert watched(connection) == []
    watch(connection, "public.parts", "part")  # nothing above has ended the transaction


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"without": "nothing"}, ConfigurationError, "has no column 'nothing' to leave out"),
    ({"without": ["name", "Password"]}, ConfigurationError, "has no column 'Password'"),
    ({"without": ["ctid"]}, ConfigurationError, "has no column 'ctid'"),
    ({"without": ["id"]}, ConfigurationError, "Column 'id' of 'public.things' is in the primary key"),
    ({"topic": "no topic"}, InvalidMessage, "Topic 'no topic' is not valid"),
    ({"topic": "t" * 191}, InvalidMessage, "is not valid"),
    ({"topic": None}, InvalidMessage, "Topic None is not valid"),
    ({"key_prefix": "x" * 993}, InvalidMessage, "The key_prefix has 993 bytes; 992 are allowed"),
    ({"key_prefix": "a\0b"}, InvalidMessage, "NUL"),
    ({"key_prefix": 7}, InvalidMessage, "The key_prefix is text, not int"),
    ({"table": "public.\ud800"}, InvalidMessage, "not valid Unicode"),
    ({"table": 7}, InvalidMessage, "The table is text, not int"),
    ({"without": [7]}, InvalidMessage, "The column is text, not int"),
    ({"schema": "Mailroom"}, InvalidName, "Schema name 'Mailroom' is not valid"),
    ({"schema": "nowhere"}, SchemaError, "There is no Mailroom schema 'nowhere'"),
]


def test_options_that_cannot_be_are_refused(connect: Connect) -> None:
    connection = connect()
    connection.execute(THINGS)
    for options, error, reason in OPTIONS:
        with pytest.raises(error) as raised:
            watch(connection, **{"table": "public.things", "topic": "thing"} | options)
        assert reason in str(raised.value)


def test_longest_topic_and_prefix_are_sent(connect: Connect) -> None:
    connection = connect()
    connection.execute("CREATE TABLE things (id text PRIMARY KEY)")
    watch(connection, "public.things", "t" * 190, key_prefix="p" * 992)
    connection.execute("INSERT INTO things VALUES (repeat('k', 1000)), (repeat('k', 32))")
    connection.execute("TRUNCATE things")
    hashed, whole, _ = told(connection)
    assert (len(hashed.key), whole.key) == (1024, "p" * 992 + "k" * 32)


# -- What is listed ---------------------------------------------------------------------------------------------------


FAULTS = [
        ("ALTER TABLE things DROP CONSTRAINT things_pkey", "has no primary key"),
        ("ALTER TABLE things RENAME password TO secret", "has no column 'password' to leave out"),
        ("ALTER TABLE things DISABLE TRIGGER USER", "Some of its triggers are disabled"),
        ("ALTER TABLE things ENABLE REPLICA TRIGGER \"0_mailroom_watch_delete\"", "Some of its triggers are disabled"),
        ('DROP TRIGGER "0_mailroom_watch_truncate" ON things', "It lacks the triggers that it needs"),
        ("ALTER TABLE things ADD up int REFERENCES things ON DELETE CASCADE", "It lacks the triggers that it needs"),
        ("CREATE TABLE more () INHERITS (things)", "inherits from another table"),
        (("CREATE TABLE all_things (id int, name text, password text) PARTITION BY LIST (id); "
         "ALTER TABLE all_things ATTACH PARTITION things DEFAULT"), "is a partition"),
]  # fmt: skip


def test_list_says_what_keeps_changes_from_being_told(connect: Connect) -> None:
    connection = connect()
    connection.execute(THINGS)
    watch(connection, "public.things", "thing", without="password")
    assert [each.fault for each in watched(connection)] == [None]
    for change, fault in FAULTS:
        with connection.transaction(force_rollback=True):
            connection.execute(change.encode())
            [found] = watched(connection)
            assert fault in (found.fault or "")
            assert (found.table, found.topic, found.without) == ("public.things", "thing", ("password",))


BROKEN = [
    "ALTER TABLE things DISABLE TRIGGER USER",
    "ALTER TABLE things DISABLE TRIGGER ALL",
    'DROP TRIGGER "0_mailroom_watch_update" ON things',
    "ALTER TABLE things RENAME password TO secret; ALTER TABLE things ADD password text",
    "ALTER TABLE things ADD up int REFERENCES things ON DELETE SET NULL",
]


@pytest.mark.parametrize("partitioned", [False, True])
def test_watching_again_mends_what_was_broken(connect: Connect, partitioned: bool) -> None:
    connection = connect()
    for change in BROKEN:
        with connection.transaction(force_rollback=True):
            is_mended(connection, change, partitioned)


def is_mended(connection: Connection[TupleRow], change: str, partitioned: bool) -> None:
    connection.execute(THINGS.encode() + b" PARTITION BY RANGE (id)" * partitioned)
    if partitioned:
        connection.execute("CREATE TABLE things_all PARTITION OF things DEFAULT")
        change = change.replace("watch_update", "watch_row")
    watch(connection, "public.things", "thing", without="password")
    connection.execute(change.encode())
    is_right = partitioned and " up " in change  # it has row triggers already
    assert [each.fault is None for each in watched(connection)] == [is_right]
    watch(connection, "public.things", "thing", without="password")
    assert [each.fault for each in watched(connection)] == [None]
    connection.execute("INSERT INTO things VALUES (1, 'a')")
    connection.execute("UPDATE things SET name = 'b'")
    assert brief(connection) == [("C", "1"), ("U", "1")]


def test_triggers_that_are_enabled_always_are_no_fault(connect: Connect) -> None:
    connection = connect()
    connection.execute(THINGS)
    watch(connection, "public.things", "thing")
    connection.execute('ALTER TABLE things ENABLE ALWAYS TRIGGER "0_mailroom_watch_insert"')
    assert [each.fault for each in watched(connection)] == [None]
    connection.execute("SET session_replication_role = replica")
    connection.execute("INSERT INTO things VALUES (1)")
    assert brief(connection) == [("C", "1")]


def test_partitioned_table_is_listed_once(connect: Connect) -> None:
    connection = connect()
    connection.execute(
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id); "
        "CREATE TABLE parts_1 PARTITION OF parts DEFAULT"
    )
    watch(connection, "public.parts", "part", key_prefix="p-")
    watch(connection, "public.parts", "part")
    assert watched(connection) == [Watched("public.parts", "part", "", ())]
    connection.execute("INSERT INTO parts_1 VALUES (1)")
    assert brief(connection) == [("C", "1")]
    assert unwatch(connection, "public.parts_1") is False
    assert unwatch(connection, "public.parts")
    connection.execute("UPDATE parts SET id = 2")
    assert brief(connection) == []


# -- Nodes, migrations, dumps -----------------------------------------------------------------------------------------


def test_two_nodes_watch_one_table_side_by_side(connect: Connect) -> None:
    connection = connect()
    migrate(connection, schema="other_node")
    connection.execute(THINGS)
    watch(connection, "public.things", "here", without="password")
    watch(connection, "public.things", "there", schema="other_node")
    connection.execute("INSERT INTO things VALUES (1, 'a', 'b')")
    [(topic, value)] = connection.execute("SELECT topic, value_json -> 'new' FROM other_node.outbox").fetchall()
    assert (topic, value) == ("there.created", {"id": 1, "name": "a", "password": "b"})
    assert [message.topic for message in told(connection)] == ["here.created"]
    assert unwatch(connection, "public.things", schema="other_node")
    assert [each.topic for each in watched(connection)] == ["here"]
    assert watched(connection, schema="other_node") == []


def test_node_that_watches_is_removed_only_when_told_to(connect: Connect) -> None:
    connection = connect()
    connection.execute(THINGS)
    watch(connection, "public.things", "thing")
    with pytest.raises(
        SchemaError, match=r"^Not removed: watched are public\.things\. End that first \(mailroom unwat"
    ):
        migrate(connection, revision="base")
    migrate(connection, revision="base", discard=True)
    connection.execute("INSERT INTO things VALUES (1)")


def test_dump_holds_the_watch_and_restoring_it_sends_nothing(
    dsn: str, empty_dsn: str, connect: Connect, odd_table: str, binaries: Binaries
) -> None:
    if not (binaries.path / "pg_dump").exists():
        pytest.skip("this PostgreSQL has no pg_dump")
    with connect() as connection:
        connection.execute("CREATE TABLE things (junk int, id int PRIMARY KEY, password text, name text)")
        connection.execute("ALTER TABLE things DROP junk")  # in the dump, the others have new numbers
        watch(connection, odd_table, "odd", key_prefix=PREFIX, without="secret %s")
        watch(connection, "public.things", "thing", without=["password"])
        connection.execute("INSERT INTO things VALUES (1, 'a', 'b'), (2, 'c', 'd')")
        listed = watched(connection)
    dumped = subprocess.run([binaries.path / "pg_dump", dsn], check=True, capture_output=True).stdout
    psql = [str(binaries.path / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", empty_dsn]
    subprocess.run(psql, input=dumped, check=True, capture_output=True)
    with psycopg.connect(empty_dsn, autocommit=True) as restored:
        assert brief(restored) == [("C", "1"), ("C", "2")]  # what waited when it was dumped
        assert watched(restored) == listed
        restored.execute("UPDATE things SET name = 'e' WHERE id = 1")
        [message] = told(restored)
        assert (message.value["changed"], message.value["new"]) == (["name"], {"id": 1, "name": "e"})
        check_odd(restored)


# -- The command ------------------------------------------------------------------------------------------------------


def test_command_watches_lists_and_unwatches(dsn: str, connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute(THINGS)
    assert "No table is watched" in done("watch", "--list", dsn=dsn)
    arguments = ["watch", "public.things", "--topic", "thing", "--key-prefix", "t-", "--without", "password"]
    assert done(*arguments, dsn=dsn).startswith("Table public.things is watched: its messages go to thing.created,")
    connection.execute("INSERT INTO things VALUES (1, 'a', 'b')")
    assert brief(connection) == [("C", "t-1")]
    listed = {"table": "public.things", "topic": "thing", "key_prefix": "t-", "without": ["password"], "fault": None}
    assert json_of("watch", "--list", dsn=dsn) == [listed]
    shown = done("watch", "--list", dsn=dsn)
    assert [word in shown for word in ("public.things", "thing", "t-", "password")] == [True] * 4
    assert json_of(*arguments[:4], dsn=dsn) == {
        "table": "public.things",
        "topic": "thing",
        "key_prefix": "",
        "without": [],
    }
    assert json_of("unwatch", "public.things", dsn=dsn) == {"table": "public.things"}
    connection.execute("DELETE FROM things")
    assert brief(connection) == []
    result = mailroom("unwatch", "public.things", dsn=dsn)
    assert (result.exit_code, error_of(result)) == (
        1, "Table public.things is not watched. See: mailroom watch --list"
    )  # fmt: skip


def test_command_notes_a_fault_beside_its_list(dsn: str, connect: Connect) -> None:
    with connect() as connection:
        connection.execute(THINGS)
        watch(connection, "public.things", "thing")
        connection.execute("ALTER TABLE things DROP CONSTRAINT things_pkey")
    result = mailroom("watch", "--list", dsn=dsn)
    assert result.exit_code == 0
    assert result.stderr.startswith("Not all changes of public.things are told. 'public.things' has no primary key")


NO_COMMANDS = [
    ["watch"],
    ["watch", "public.things"],
    ["watch", "--topic", "t"],
    ["watch", "public.things", "--list"],
    ["watch", "--list", "--topic", "t"],
    ["watch", "public.things", "--topic", "no topic"],
    ["watch", "public.things", "--topic", "t" * 191],
    ["watch", "public.none", "--topic", "t"],
    ["watch", "public.things", "--topic", "t", "--key-prefix", "x" * 993],
    ["watch", "public.things", "--topic", "t", "--without", "id"],
    ["unwatch"],
]


def test_command_refuses_what_cannot_be(dsn: str, connect: Connect) -> None:
    with connect() as connection:
        connection.execute(THINGS)
    assert [each for each in NO_COMMANDS if mailroom(*each, dsn=dsn).exit_code == 0] == []
    assert watched(connect()) == []
