"""Watched tables: every way to change rows is told, as the table itself shows afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import Connection
from psycopg.rows import TupleRow

from mailroom import watch
from tests.support.databases import Connect
from tests.support.watched import Told, brief, replayed, told

pytestmark = pytest.mark.both_versions

PLAIN = "CREATE TABLE things (id int PRIMARY KEY, part int NOT NULL DEFAULT 1, name text)"
# A primary key without the partition's column is not possible.
PARTITIONED = """
CREATE TABLE things (id int, part int NOT NULL DEFAULT 1, name text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
CREATE TABLE things_1 PARTITION OF things FOR VALUES IN (1);
CREATE TABLE things_2 (name text, part int NOT NULL, junk int, id int NOT NULL);
ALTER TABLE things_2 DROP junk;
ALTER TABLE things ATTACH PARTITION things_2 FOR VALUES IN (2);
CREATE TABLE things_3 PARTITION OF things FOR VALUES IN (3) PARTITION BY RANGE (id);
CREATE TABLE things_3_low PARTITION OF things_3 FOR VALUES FROM (MINVALUE) TO (100);
CREATE TABLE things_3_high PARTITION OF things_3 FOR VALUES FROM (100) TO (MAXVALUE);
"""
ROWS = "INSERT INTO things VALUES (1, 1, 'a'), (2, 1, 'b'), (3, 2, 'c'), (4, 3, 'd')"


def table(connection: Connection[TupleRow]) -> list[Any]:
    return [
        row for (row,) in connection.execute("SELECT pg_catalog.to_jsonb(t) FROM public.things AS t ORDER BY id, part")
    ]


class Watcher:
    """The watched table `things` with a few rows, and what its messages make of it."""

    def __init__(self, connection: Connection[TupleRow]) -> None:
        self.connection = connection
        self.rows: dict[str, Any] = {}
        self.do(ROWS)

    def do(self, statement: str) -> list[Told]:
        """Run a statement, and check that what it told leads to what the table has now."""
        self.connection.execute(statement.encode())
        messages = told(self.connection)
        self.rows = replayed(messages, self.rows)
        assert sorted(self.rows.values(), key=lambda row: (row["id"], row["part"])) == table(self.connection)
        return messages

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo at the end what this block does."""
        rows = self.rows
        with self.connection.transaction(force_rollback=True):
            yield
        self.rows = rows


@pytest.fixture(params=[PLAIN, PARTITIONED], ids=["plain", "partitioned"])
def watcher(request: pytest.FixtureRequest, connect: Connect) -> Watcher:
    connection = connect(autocommit=True)
    connection.execute(request.param)
    with connection.transaction():
        watch(connection, "public.things", topic="thing")
    return Watcher(connection)


@pytest.fixture
def partitioned(connect: Connect) -> Watcher:
    connection = connect(autocommit=True)
    connection.execute(PARTITIONED.encode())
    with connection.transaction():
        watch(connection, "public.things", topic="thing")
    return Watcher(connection)


def events(messages: list[Told]) -> str:
    return "".join(sorted(message.event for message in messages))


STATEMENTS = {
    "insert": ("INSERT INTO things VALUES (5, 1, 'e'), (6, 2, 'f')", "CC"),
    "insert select": ("INSERT INTO things SELECT n, 1 + n % 3, 'n' FROM generate_series(10, 40) n", "C" * 31),
    "update": ("UPDATE things SET name = name || id", "UUUU"),
    "changed key": ("UPDATE things SET id = 9 WHERE id = 2", "CD"),
    "changed keys": ("UPDATE things SET id = id + 10", "CCCCDDDD"),
    "delete": ("DELETE FROM things WHERE id > 1", "DDD"),
    "truncate": ("TRUNCATE things", "U"),
    "on conflict, nothing": ("INSERT INTO things VALUES (1, 1, 'z'), (5, 1, 'e') ON CONFLICT DO NOTHING", "C"),
    "merge": (
        (
            "MERGE INTO things t USING (VALUES (1, 'x'), (2, NULL), (9, 'n'), (3, 'c')) AS s (id, name) ON t.id = s.id "
            "WHEN MATCHED AND s.name IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET name = s.name "
            "WHEN NOT MATCHED THEN INSERT VALUES (s.id, 1, s.name)"
        ),
        "CDU",  # the third row is as it was
    ),
    "merge that moves": (
        (
            "MERGE INTO things t USING (VALUES (1, 2), (2, 3), (3, 2)) AS s (id, part) ON t.id = s.id "
            "WHEN MATCHED THEN UPDATE SET part = s.part"
        ),
        None,
    ),
    "merge that deletes and inserts a key": (
        (
            "MERGE INTO things t USING (VALUES (1, true), (1, false)) AS s (id, old) ON t.id = s.id AND s.old "
            "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.id, 1, 'again')"
        ),
        None,
    ),
    "with": (
        (
            "WITH gone AS (DELETE FROM things WHERE id = 1 RETURNING *), "
            "moved AS (UPDATE things SET name = 'w' WHERE id = 2 RETURNING *) "
            "INSERT INTO things SELECT id + 100, part, name FROM gone UNION ALL SELECT id + 200, part, name FROM moved"
        ),
        "CCDU",
    ),
    "two inserts at once": (
        "WITH one AS (INSERT INTO things VALUES (7, 1, 'x')) INSERT INTO things VALUES (8, 1, 'y')",
        "CC",
    ),
    "do": (
        (
            "DO $$ BEGIN INSERT INTO things VALUES (5, 1, 'e'); UPDATE things SET name = 'f' WHERE id = 5; "
            "BEGIN DELETE FROM things; RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN NULL; END; END $$"
        ),
        "CU",
    ),
}


@pytest.mark.every_case
def test_statement_is_told(watcher: Watcher) -> None:
    for name, (statement, expected) in STATEMENTS.items():
        with watcher.undone():
            messages = watcher.do(statement)
            assert expected is None or events(messages) == expected, name
            watcher.do("UPDATE things SET name = 'after'")


def test_on_conflict_tells_new_rows_and_updated_ones(watcher: Watcher) -> None:
    key = ["id", "id, part"][watcher.connection.execute("SELECT 1 FROM pg_class WHERE relname = 'things_1'").rowcount]
    messages = watcher.do(
        f"INSERT INTO things VALUES (1, 1, 'x'), (5, 1, 'e'), (2, 1, 'b') ON CONFLICT ({key}) "
        "DO UPDATE SET name = excluded.name"
    )
    assert events(messages) == "CU"


def test_copy_is_told(watcher: Watcher) -> None:
    with watcher.connection.transaction(), watcher.connection.cursor().copy("COPY things FROM STDIN") as copy:
        for nth in range(100, 400):
            copy.write_row((nth, 1 + nth % 3, f"name {nth}"))
    assert events(watcher.do("DELETE FROM things WHERE id > 399")) == "C" * 300


def test_rows_of_one_insert_are_told_in_their_order(watcher: Watcher) -> None:
    messages = watcher.do("INSERT INTO things SELECT n, 1, 'n' FROM generate_series(300, 100, -1) n")
    assert [message.value["new"]["id"] for message in messages] == list(range(300, 99, -1))


def test_statements_of_a_transaction_are_told_in_order(watcher: Watcher) -> None:
    with watcher.connection.transaction():
        for name in ("x", "y", "z"):
            watcher.connection.execute("UPDATE things SET name = %s WHERE id = 1", [name])
        watcher.connection.execute("DELETE FROM things WHERE id = 1")
    messages = watcher.do("INSERT INTO things VALUES (1, 1, 'again')")
    assert [message.event for message in messages] == list("UUUDC")


# -- What other triggers and constraints do ---------------------------------------------------------------------------


def test_cascades_are_told(watcher: Watcher) -> None:
    connection = watcher.connection
    connection.execute("CREATE TABLE parents (id int PRIMARY KEY); INSERT INTO parents VALUES (1), (2)")
    connection.execute("SET mailroom.watch = off")
    connection.execute("ALTER TABLE things ADD parent int DEFAULT 2")
    connection.execute("UPDATE things SET parent = CASE WHEN id < 3 THEN 1 ELSE 2 END")
    connection.execute("RESET mailroom.watch")
    watcher.rows = {key: {**row, "parent": 1 if row["id"] < 3 else 2} for key, row in watcher.rows.items()}
    for action, statement in (
        ("ON DELETE CASCADE", "DELETE FROM parents WHERE id = 1"),
        ("ON DELETE SET NULL", "DELETE FROM parents WHERE id = 1"),
        ("ON DELETE SET DEFAULT", "DELETE FROM parents WHERE id = 1"),
        ("ON UPDATE CASCADE", "UPDATE parents SET id = id + 10"),
    ):
        with watcher.undone():
            connection.execute(f"ALTER TABLE things ADD FOREIGN KEY (parent) REFERENCES parents {action}".encode())
            assert watcher.do(statement), action


@pytest.fixture
def tree(connect: Connect) -> Watcher:
    """A table that refers to itself, with cascades."""
    connection = connect(autocommit=True)
    connection.execute(
        "CREATE TABLE things (id int PRIMARY KEY, part int NOT NULL DEFAULT 1, name text, "
        "above int REFERENCES things ON UPDATE CASCADE ON DELETE CASCADE)"
    )
    with connection.transaction():
        watch(connection, "public.things", topic="thing")
    return Watcher(connection)


def test_cascade_onto_the_same_table_is_told(tree: Watcher) -> None:
    tree.do("UPDATE things SET above = CASE id WHEN 1 THEN 1 ELSE id - 1 END")  # the first is above itself
    tree.do("UPDATE things SET id = id + 100 WHERE id = 1")
    tree.do("UPDATE things SET id = id + 10, name = 'x' WHERE id IN (2, 101)")
    assert events(tree.do("DELETE FROM things WHERE id = 111")) == "DDDD"


@pytest.mark.parametrize(
    "statement",
    [
        (
            "WITH gone AS (DELETE FROM things WHERE id < 3 RETURNING *) "
            "INSERT INTO things (id, name) SELECT max(id), 'again' FROM gone"
        ),
        (
            "MERGE INTO things USING (VALUES (2, true), (1, false)) AS s (sid, gone) ON id = sid "
            "WHEN MATCHED AND gone THEN DELETE WHEN MATCHED THEN UPDATE SET id = id + 1"
        ),
    ],
)
def test_key_that_a_statement_frees_and_uses_again_is_told_in_this_order(tree: Watcher, statement: str) -> None:
    messages = tree.do(statement)
    assert [message.event for message in messages if message.key == "2"] == ["D", "C"]


def test_row_is_told_as_other_triggers_have_left_it(watcher: Watcher) -> None:
    watcher.connection.execute(
        "CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.id = 9 THEN RETURN NULL; END IF; NEW.name := upper(NEW.name); RETURN NEW; END $$"
    )
    watcher.connection.execute(
        "CREATE TRIGGER shout BEFORE INSERT OR UPDATE ON things FOR EACH ROW EXECUTE FUNCTION shout()"
    )
    [message] = watcher.do("INSERT INTO things VALUES (8, 1, 'h'), (9, 1, 'i')")
    assert message.value["new"]["name"] == "H"


@pytest.mark.parametrize("each", ["FOR EACH STATEMENT", "FOR EACH ROW"])
def test_what_a_later_trigger_does_to_the_same_table_is_told_later(partitioned: Watcher, each: str) -> None:
    partitioned.connection.execute(
        "CREATE FUNCTION follow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN UPDATE things SET name = 'followed' WHERE name = 'new'; RETURN NULL; END $$"
    )
    partitioned.connection.execute(
        f'CREATE TRIGGER "A follow" AFTER INSERT ON things {each} EXECUTE FUNCTION follow()'.encode()
    )
    messages = partitioned.do("INSERT INTO things VALUES (8, 1, 'new')")
    assert [message.event for message in messages] == ["C", "U"]


def test_what_a_later_statement_trigger_does_to_a_plain_table_is_told_later(connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute(PLAIN)
    with connection.transaction():
        watch(connection, "public.things", topic="thing")
    watcher = Watcher(connection)
    connection.execute(
        "CREATE FUNCTION follow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN UPDATE things SET name = 'followed' WHERE name = 'new'; RETURN NULL; END $$"
    )
    connection.execute('CREATE TRIGGER "A follow" AFTER INSERT ON things EXECUTE FUNCTION follow()')
    assert [message.event for message in watcher.do("INSERT INTO things VALUES (8, 1, 'new')")] == ["C", "U"]


# -- Partitions -------------------------------------------------------------------------------------------------------


def test_moved_row_is_a_deletion_and_a_creation(partitioned: Watcher) -> None:
    for statement in (
        "UPDATE things SET part = 2 WHERE id = 1",
        "MERGE INTO things t USING (VALUES (1)) AS s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET part = 3",
        "UPDATE things SET id = 200 WHERE id = 1",
    ):
        messages = partitioned.do(statement)
        assert [message.event for message in messages] == ["D", "C"], statement


def test_row_that_moves_under_its_key_is_deleted_before_it_is_created(connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute(PARTITIONED.encode())
    # A key within which rows can move: the partitions are by a column that it has, and by another expression of it.
    connection.execute(
        "CREATE TABLE moving (id numeric PRIMARY KEY, name text) PARTITION BY RANGE (id); "
        "CREATE TABLE moving_low PARTITION OF moving FOR VALUES FROM (0) TO (10); "
        "CREATE TABLE moving_high PARTITION OF moving FOR VALUES FROM (10) TO (20)"
    )
    with connection.transaction():
        watch(connection, "public.moving", topic="moving")
    connection.execute("INSERT INTO moving VALUES (1, 'a')")
    connection.execute("UPDATE moving SET id = 11")
    assert [message.brief for message in told(connection)] == [("C", "1"), ("D", "1"), ("C", "11")]


def test_what_is_written_into_a_partition_is_told(partitioned: Watcher) -> None:
    for statement, expected in (
        ("INSERT INTO things_2 (id, part, name) VALUES (7, 2, 'x')", "C"),
        ("UPDATE things_2 SET name = 'y' WHERE id = 3", "U"),
        ("UPDATE things_3 SET id = 100", "DC"),
        ("DELETE FROM things_1 WHERE id = 1", "D"),
    ):
        assert "".join(message.event for message in partitioned.do(statement)) == expected, statement


def test_partition_that_comes_later_is_watched(partitioned: Watcher) -> None:
    connection = partitioned.connection
    connection.execute(
        "CREATE TABLE things_4 PARTITION OF things FOR VALUES IN (4); CREATE TABLE things_5 (LIKE things); "
        "ALTER TABLE things ATTACH PARTITION things_5 FOR VALUES IN (5)"
    )
    messages = partitioned.do("INSERT INTO things VALUES (50, 4, 'x'), (51, 5, 'y')")
    assert events(messages) == "CC"
    assert events(partitioned.do("UPDATE things_5 SET name = 'z'")) == "U"
    connection.execute("ALTER TABLE things DETACH PARTITION things_5")
    connection.execute("UPDATE things_5 SET name = 'alone'")
    assert brief(connection) == []


# -- Whoever writes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def as_writer(watcher: Watcher) -> Iterator[Callable[[str], list[Told]]]:
    """Return what runs statements in the role of a writer that has no right but on the table."""
    connection = watcher.connection

    def write(statement: str) -> list[Told]:
        with connection.transaction():
            connection.execute("SET LOCAL ROLE watch_writer")
            connection.execute(statement.encode())
            connection.execute("RESET ROLE")
        return told(connection)

    # Rolled back, since roles are the whole server's.
    with connection.transaction(force_rollback=True):
        connection.execute("CREATE ROLE watch_writer; GRANT CREATE ON SCHEMA public TO watch_writer")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON things TO watch_writer")
        yield write


FORGERY = """
CREATE TABLE forged (id int PRIMARY KEY);
CREATE TRIGGER forge AFTER INSERT ON forged REFERENCING NEW TABLE AS new_rows EXECUTE FUNCTION mailroom.watch('t', '')
"""


def test_writer_needs_no_right_on_the_schema_and_gets_none(as_writer: Callable[[str], list[Told]]) -> None:
    assert events(as_writer("INSERT INTO things VALUES (7, 1, 'x')")) == "C"
    assert events(as_writer("UPDATE things SET name = 'y' WHERE id = 7")) == "U"
    assert events(as_writer("DELETE FROM things WHERE id = 7")) == "D"
    assert as_writer("TRUNCATE things")[0].topic == "thing.truncated"
    for refused in (
        "INSERT INTO mailroom.outbox (topic, value_json) VALUES ('t', '1')",
        "SELECT mailroom.watch_json(ROW(1))",
        FORGERY,
        "GRANT EXECUTE ON FUNCTION mailroom.watch() TO watch_writer",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            as_writer(refused)


def test_usage_of_the_schema_alone_lets_nobody_forge(watcher: Watcher, as_writer: Callable[[str], list[Told]]) -> None:
    watcher.connection.execute("GRANT USAGE ON SCHEMA mailroom TO watch_writer")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for function"):
        as_writer(FORGERY)


# With the very types that the trigger's statements have, so that they would fit better than PostgreSQL's own.
SHADOWED = (
    *("to_jsonb(record)", "concat(text, text)", "md5(text)", "octet_length(text)", "octet_length(bytea)"),
    *("format(text, name)", "jsonb_typeof(jsonb)", "jsonb_build_array(integer)", "jsonb_build_object(text, jsonb)"),
    *("pg_column_size(numeric)", "current_setting(text, boolean)", "quote_literal(text)", "string_agg(text, text)"),
)


def test_nothing_in_the_writers_search_path_is_called(watcher: Watcher) -> None:
    connection = watcher.connection
    connection.execute("CREATE SCHEMA trap")
    for function in SHADOWED:
        connection.execute(
            f"CREATE FUNCTION trap.{function} RETURNS int LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'shadowed'; END $$".encode()
        )
    for table_name in ("outbox", "old_rows", "new_rows", "pg_attribute", "pg_index"):
        connection.execute(f"CREATE TEMP TABLE {table_name} (hostile int)".encode())
    connection.execute("SET search_path = pg_temp, trap, public, pg_catalog")
    assert events(watcher.do("INSERT INTO public.things VALUES (7, 1, 'x')")) == "C"
    assert events(watcher.do("UPDATE public.things SET name = 'y' WHERE id = 7")) == "U"
    assert events(watcher.do("DELETE FROM public.things WHERE id = 7")) == "D"
