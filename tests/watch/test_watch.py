"""Watched tables: what each kind of statement tells, and what is in a message."""

import json
from typing import Any

import psycopg
import pytest
from psycopg import Connection
from psycopg.rows import TupleRow

from inbox import Handlers, Message
from mailroom import Watched, create_inbox, unwatch, watch, watched
from mailroom.testing import handle_all
from tests.support.databases import Connect
from tests.support.waiting import WITHIN_S
from tests.support.watched import brief, replayed, told

pytestmark = pytest.mark.both_versions

CUSTOMERS = "CREATE TABLE customers (id bigint PRIMARY KEY, name text, password text DEFAULT 'secret')"


@pytest.fixture
def connection(connect: Connect) -> Connection[TupleRow]:
    """An autocommit connection to a database with the watched table `customers`."""
    connection = connect(autocommit=True)
    connection.execute(CUSTOMERS)
    with connection.transaction():
        watch(connection, "public.customers", topic="customer", without=["password"])
    return connection


def row(id: int, name: str | None) -> dict[str, Any]:
    return {"id": id, "name": name}


# -- What a message has -----------------------------------------------------------------------------------------------


def test_each_row_is_told_with_its_codes_key_and_value(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')")
    ada, bob = told(connection)
    assert (ada.topic, ada.codes, ada.key) == ("customer.created", "EOC", "1")
    assert ada.value == {"old": None, "new": row(1, "Ada"), "changed": []}
    assert bob.value["new"] == row(2, "Bob")
    connection.execute("UPDATE customers SET name = 'Cy' WHERE id = 1")
    [updated] = told(connection)
    assert (updated.topic, updated.codes, updated.key) == ("customer.updated", "EOU", "1")
    assert updated.value == {"old": row(1, "Ada"), "new": row(1, "Cy"), "changed": ["name"]}
    connection.execute("DELETE FROM customers WHERE id = 1")
    [deleted] = told(connection)
    assert (deleted.topic, deleted.codes, deleted.key) == ("customer.deleted", "EOD", "1")
    assert deleted.value == {"old": row(1, "Cy"), "new": None, "changed": []}


def test_truncate_tells_one_message_of_the_collection(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')")
    connection.execute("TRUNCATE customers")
    *_, last = told(connection)
    assert (last.topic, last.codes) == ("customer.truncated", "ECU")
    assert last.value == {"old": None, "new": None, "changed": []}


def test_messages_are_the_writers_and_go_with_its_transaction(connection: Connection[TupleRow]) -> None:
    with connection.transaction(force_rollback=True):
        connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
        assert connection.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (1,)
    assert told(connection) == []


def test_handlers_read_what_was_told(connection: Connection[TupleRow]) -> None:
    found: list[Any] = []
    handlers = Handlers()

    @handlers.on("customer.*")
    def note(message: Message, _: Any) -> None:
        found.append((message.topic, message.key, message.value["new"]))

    with connection.transaction():
        create_inbox(connection, "audit", ["customer.#"])
        connection.execute("INSERT INTO customers VALUES (7, 'Ada')")
        assert handle_all(connection, "audit", handlers) == 1
    assert found == [("customer.created", "7", row(7, "Ada"))]


VALUES = {
    "numeric 'NaN'": "NaN",
    "float8 '-Infinity'": "-Infinity",
    "float8 '0.1'": 0.1,
    "timestamptz '2026-01-02 03:04:05.678+02'": "2026-01-02T01:04:05.678+00:00",
    "timestamptz 'infinity'": "infinity",
    "date '2026-01-02'": "2026-01-02",
    "interval '1 day 02:03'": "1 day 02:03:00",
    r"bytea '\x00ff'": r"\x00ff",
    "bigint '9007199254740993'": 9007199254740993,
    "ARRAY[1, NULL]": [1, None],
    """json '{"a": [1, {"b": "é"}]}'""": {"a": [1, {"b": "é"}]},
    "tstzrange('2026-01-02', '2026-01-03')": '["2026-01-02 00:00:00+00","2026-01-03 00:00:00+00")',
    "ROW(1, 'x')::pair": {"a": 1, "b": "x"},
    "'late'::mood": "late",
    "'\U0001f600\"\\ \t'": '\U0001f600"\\ \t',
}


def test_values_are_written_alike_whatever_the_session_has_set(connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute("CREATE TYPE pair AS (a int, b text); CREATE TYPE mood AS ENUM ('late')")
    connection.execute("SET TimeZone = 'UTC'")
    columns = ", ".join(f"{written} AS v{nth}" for nth, written in enumerate(VALUES))
    connection.execute(f"CREATE TABLE things AS SELECT 1 AS id, {columns}".encode())
    connection.execute("ALTER TABLE things ADD PRIMARY KEY (id)")
    with connection.transaction():
        watch(connection, "public.things", topic="thing")
    connection.execute(
        "SET TimeZone = 'Asia/Tokyo'; SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'iso_8601'; "
        "SET bytea_output = 'escape'; SET extra_float_digits = -10"
    )
    connection.execute("DELETE FROM things")
    [message] = told(connection)
    found = {written: message.value["old"][f"v{nth}"] for nth, written in enumerate(VALUES)}
    assert found == VALUES


# -- Keys -------------------------------------------------------------------------------------------------------------

KEYS = {
    "a int PRIMARY KEY": ("7", "7"),
    "a text PRIMARY KEY": ("'x y'", "x y"),
    "a text PRIMARY KEY, b int GENERATED ALWAYS AS (1) STORED": ("'é'", "é"),
    "a uuid PRIMARY KEY": ("'6D7A1C1E-0000-4000-8000-000000000001'", "6d7a1c1e-0000-4000-8000-000000000001"),
    "a timestamptz PRIMARY KEY": ("'2026-01-02 00:00+02'", "2026-01-01T22:00:00+00:00"),
    "a numeric PRIMARY KEY": ("1.50", "1.50"),
    "a boolean PRIMARY KEY": ("true", "true"),
    "b int DEFAULT 3, a text, PRIMARY KEY (a, b)": ("'x\"'", '["x\\"", 3]'),
    "b int DEFAULT 3, a text, PRIMARY KEY (a) INCLUDE (b)": ("'x'", "x"),
    '"A %s" int DEFAULT 5, a int, PRIMARY KEY ("A %s", a)': ("1", "[5, 1]"),
    "i int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int": ("9", "1"),
    "i int GENERATED ALWAYS AS (a * 2) STORED PRIMARY KEY, a int": ("9", "18"),
}


def test_key_is_the_prefix_and_the_primary_key(connect: Connect) -> None:
    connection = connect()
    found = {}
    for columns, (value, _) in KEYS.items():
        connection.execute(f"CREATE TABLE things ({columns})".encode())
        hidden = ["b"] if "INCLUDE" in columns else []
        watch(connection, "public.things", topic="thing", key_prefix="thing-", without=hidden)
        connection.execute(f"INSERT INTO things (a) VALUES ({value})".encode())
        found[columns] = [message.key for message in told(connection)]
        connection.execute("DROP TABLE things")
    assert found == {columns: [f"thing-{key}"] for columns, (_, key) in KEYS.items()}


def test_key_that_no_message_may_have_is_told_by_its_md5(connect: Connect) -> None:
    connection = connect()
    connection.execute("CREATE TABLE things (id text PRIMARY KEY)")
    for prefix in ("", "p-"):
        watch(connection, "public.things", topic="thing", key_prefix=prefix)
        room = 1024 - len(prefix)
        connection.execute(
            "INSERT INTO things VALUES (''), (repeat('x', %s)), (repeat('x', %s)), (repeat('é', 600))", [room, room + 1]
        )
        empty, longest, long, wide = told(connection)
        assert empty.key == (prefix or "d41d8cd98f00b204e9800998ecf8427e")
        assert longest.key == prefix + "x" * room
        assert [len(each.key) for each in (long, wide)] == [len(prefix) + 32] * 2
        assert long.value["new"] == {"id": "x" * (room + 1)}
        connection.execute("DELETE FROM things")
        assert {each.key for each in told(connection)} == {empty.key, longest.key, long.key, wide.key}


def test_updates_pair_by_key_whatever_the_order_of_the_rows(connection: Connection[TupleRow]) -> None:
    connection.execute("ALTER TABLE customers DROP CONSTRAINT customers_pkey, ADD PRIMARY KEY (id) DEFERRABLE")
    connection.execute("INSERT INTO customers SELECT n, 'name ' || n FROM generate_series(1, 4) n")
    rows = replayed(told(connection))
    connection.execute("UPDATE customers SET id = CASE id WHEN 3 THEN 9 ELSE id % 4 + 1 END")  # 4 becomes 1, 2 has 1's
    messages = told(connection)
    assert sorted(message.brief for message in messages) == [("C", "9"), ("D", "4"), ("U", "1"), ("U", "2"), ("U", "3")]
    assert {key: each["name"] for key, each in replayed(messages, rows).items()} == {
        "1": "name 4", "2": "name 1", "3": "name 2", "9": "name 3"
    }  # fmt: skip


def test_changed_key_is_a_deletion_and_a_creation(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
    rows = replayed(told(connection))
    connection.execute("UPDATE customers SET id = 2")
    messages = told(connection)
    assert sorted(message.brief for message in messages) == [("C", "2"), ("D", "1")]
    assert replayed(messages, rows) == {"2": row(2, "Ada")}


# -- What is not told -------------------------------------------------------------------------------------------------


def test_rows_that_did_not_change_are_not_told(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')")
    told(connection)
    connection.execute("UPDATE customers SET name = CASE id WHEN 1 THEN name ELSE 'Cy' END")
    assert brief(connection) == [("U", "2")]


def test_hidden_columns_are_in_no_message_and_alone_make_none(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada', 'canary-1')")
    connection.execute("UPDATE customers SET password = 'canary-2'")
    connection.execute("UPDATE customers SET password = 'canary-3', name = 'Bob'")
    connection.execute("DELETE FROM customers")
    messages = told(connection)
    assert [message.event for message in messages] == ["C", "U", "D"]
    assert messages[1].value["changed"] == ["name"]
    assert not [message for message in messages if "canary" in json.dumps(message.value) or "password" in str(message)]


def test_statement_that_tells_nothing_does_not_ring(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
    [(oid,)] = connection.execute("SELECT 'mailroom.outbox'::regclass::oid").fetchall()
    told(connection)
    connection.execute(f'LISTEN "mailroom:{oid}"'.encode())
    for statement in (
        "INSERT INTO customers SELECT 9, 'x' WHERE false",
        "INSERT INTO customers VALUES (1, 'x') ON CONFLICT DO NOTHING",
        "UPDATE customers SET name = 'x' WHERE false",
        "UPDATE customers SET name = name",
        "UPDATE customers SET password = 'other'",
        "DELETE FROM customers WHERE false",
    ):
        with connection.transaction():
            connection.execute(statement.encode())
        assert told(connection) == [], statement
        assert list(connection.notifies(timeout=0)) == [], statement
    # A change that is told rings, whatever kind of statement makes it.
    for change in ("UPDATE customers SET name = 'Bob'", "DELETE FROM customers", "INSERT INTO customers VALUES (2)"):
        connection.execute(change.encode())
        assert len(list(connection.notifies(timeout=WITHIN_S, stop_after=1))) == 1


def test_update_does_not_ring_where_the_writer_has_turned_that_off(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
    with connection.transaction():
        connection.execute("SET LOCAL mailroom.notify = off")
        connection.execute("UPDATE customers SET name = 'Bob'")
        connection.execute("PREPARE TRANSACTION 'watched'")  # refused after a NOTIFY
    connection.execute("COMMIT PREPARED 'watched'")
    assert brief(connection) == [("C", "1"), ("U", "1")]


def test_setting_turns_the_watch_off_for_a_transaction(connection: Connection[TupleRow]) -> None:
    with connection.transaction():
        connection.execute("SET LOCAL mailroom.watch = off")
        connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
        connection.execute("UPDATE customers SET name = 'Bob'")
        connection.execute("TRUNCATE customers")
    connection.execute("INSERT INTO customers VALUES (2, 'Cy')")
    assert brief(connection) == [("C", "2")]


def test_replicas_tell_nothing(connection: Connection[TupleRow]) -> None:
    connection.execute("SET session_replication_role = replica")
    connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
    connection.execute("SET session_replication_role = origin")
    connection.execute("UPDATE customers SET name = 'Bob'")
    assert brief(connection) == [("U", "1")]


# -- Limits: the writer never fails -----------------------------------------------------------------------------------

MIB = 1024 * 1024
TOO_LARGE = {"too_large": True}


@pytest.mark.slow
def test_row_that_no_message_holds_is_told_without_it(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, repeat('x', %s))", [20 * MIB])
    connection.execute("UPDATE customers SET name = repeat('y', %s)", [20 * MIB])
    connection.execute("UPDATE customers SET name = repeat('y', %s)", [9 * MIB])
    connection.execute("UPDATE customers SET name = repeat('z', %s)", [9 * MIB])  # each fits, both do not
    connection.execute("DELETE FROM customers")
    *messages, last = told(connection)
    assert [(each.event, each.key, each.value) for each in messages] == [
        (event, "1", TOO_LARGE) for event in ("C", "U", "U", "U")
    ]
    assert (last.event, len(last.value["old"]["name"])) == ("D", 9 * MIB)


def test_value_of_exactly_the_limit_is_told(connection: Connection[TupleRow]) -> None:
    frame = len('{"new": {"id": 1, "name": ""}, "old": null, "changed": []}')
    connection.execute("INSERT INTO customers VALUES (1, repeat('x', %s))", [16 * MIB - frame])
    connection.execute("INSERT INTO customers VALUES (2, repeat('x', %s))", [16 * MIB - frame + 1])
    fits, over = told(connection)
    assert len(fits.value["new"]["name"]) == 16 * MIB - frame
    assert over.value == TOO_LARGE


# What to_jsonb fails at, or writes at many times its size.
AWKWARD = {
    "text": "repeat('x', 260 * 1024 * 1024)",
    "json": r"""'{"a": "\u0000"}'::json""",
    "jsonb": "(SELECT jsonb_agg(1e131000) FROM generate_series(1, 150))",
    "numeric[]": "array_fill(1e131000, ARRAY[150])",
    "float8[]": "array_fill(0.123456789012345::float8, ARRAY[1000000])",
}


SLOW = {"text": [pytest.mark.slow], "float8[]": [pytest.mark.nightly]}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW.get(kind, [])) for kind in AWKWARD])
def test_row_that_cannot_be_written_as_json_does_not_fail_the_writer(connect: Connect, kind: str) -> None:
    connection = connect(autocommit=True)
    connection.execute(f"CREATE TABLE things (id int PRIMARY KEY, it {kind})".encode())
    with connection.transaction():
        watch(connection, "public.things", topic="thing")
    connection.execute(f"INSERT INTO things VALUES (1, {AWKWARD[kind]})".encode())
    connection.execute("UPDATE things SET id = id + 1 - 1")
    connection.execute("DELETE FROM things")
    assert [(each.brief, each.value) for each in told(connection)] == [
        ((event, "1"), TOO_LARGE) for event in ("C", "U", "D")
    ]


# -- Virtual and generated columns, and tables that change ------------------------------------------------------------


def test_generated_columns_are_told_as_stored(connect: Connect) -> None:
    connection = connect()
    connection.execute("CREATE TABLE things (id int PRIMARY KEY, a int, b int GENERATED ALWAYS AS (a * 2) STORED)")
    watch(connection, "public.things", topic="thing")
    connection.execute("INSERT INTO things VALUES (1, 2)")
    connection.execute("UPDATE things SET a = 3")
    created, updated = told(connection)
    assert created.value["new"] == {"id": 1, "a": 2, "b": 4}
    assert updated.value == {"old": created.value["new"], "new": {"id": 1, "a": 3, "b": 6}, "changed": ["a", "b"]}


def test_virtual_columns_are_left_out(connect: Connect) -> None:
    connection = connect()
    if connection.info.server_version < 180000:
        pytest.skip("virtual generated columns came with PostgreSQL 18")
    connection.execute("CREATE TABLE things (id int PRIMARY KEY, a int, v int GENERATED ALWAYS AS (a * 2) VIRTUAL)")
    watch(connection, "public.things", topic="thing", without=["v"])
    watch(connection, "public.things", topic="thing")
    connection.execute("INSERT INTO things VALUES (1, 2)")
    connection.execute("UPDATE things SET a = 3")
    created, updated = told(connection)
    assert created.value["new"] == {"id": 1, "a": 2}
    assert updated.value["changed"] == ["a"]


def test_columns_are_those_that_the_table_has_now(connection: Connection[TupleRow]) -> None:
    connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
    connection.execute("ALTER TABLE customers ADD email text DEFAULT 'none'")
    connection.execute("UPDATE customers SET name = 'Bob'")
    connection.execute("ALTER TABLE customers RENAME name TO full_name; ALTER TABLE customers DROP email")
    connection.execute("UPDATE customers SET full_name = 'Cy'")
    connection.execute("ALTER TABLE customers ALTER full_name TYPE bytea USING convert_to(full_name, 'UTF8')")
    connection.execute("DELETE FROM customers")
    _, added, renamed, retyped = told(connection)
    assert added.value["new"] == {"id": 1, "name": "Bob", "email": "none"}
    assert renamed.value == {"old": {"id": 1, "full_name": "Bob"}, "new": {"id": 1, "full_name": "Cy"},
                             "changed": ["full_name"]}  # fmt: skip
    assert retyped.value["old"] == {"id": 1, "full_name": "\\x4379"}


HIDDEN_IS_GONE = (
    (["RENAME password TO secret"], "has no column 'password' to leave out"),
    (["DROP password"], "has no column 'password' to leave out"),
    (["RENAME password TO secret", "ADD password text"], "A column that is left out is not the one that had its name"),
)


@pytest.mark.parametrize("partitioned", [False, True])
def test_nothing_of_a_row_is_told_where_a_hidden_column_is_gone(connect: Connect, partitioned: bool) -> None:
    connection = connect()
    for changes, fault in HIDDEN_IS_GONE:
        with connection.transaction(force_rollback=True):
            withholds(connection, changes, fault, partitioned)


def withholds(connection: Connection[TupleRow], changes: list[str], fault: str, partitioned: bool) -> None:
    connection.execute(CUSTOMERS.encode() + b" PARTITION BY RANGE (id)" * partitioned)
    if partitioned:  # its columns have other numbers
        connection.execute("CREATE TABLE part (junk int, password text, id bigint NOT NULL, name text)")
        connection.execute("ALTER TABLE part DROP junk; ALTER TABLE customers ATTACH PARTITION part DEFAULT")
    watch(connection, "public.customers", topic="customer", without="password")
    connection.execute("INSERT INTO customers VALUES (1, 'Ada', 'canary')")
    for change in changes:
        connection.execute(f"ALTER TABLE customers {change}".encode())
    connection.execute("UPDATE customers SET name = 'Bob'")
    created, updated = told(connection)
    assert created.value["new"] == row(1, "Ada")
    assert (updated.brief, updated.value) == (("U", "1"), {"withheld": True})
    [found] = watched(connection)
    assert fault in (found.fault or "")
    watch(connection, "public.customers", topic="customer")
    connection.execute("UPDATE customers SET name = 'Cy'")
    [updated] = told(connection)
    assert updated.value["changed"] == ["name"]


def test_renamed_table_is_watched_under_its_new_name(connection: Connection[TupleRow]) -> None:
    connection.execute(
        "CREATE SCHEMA shop; ALTER TABLE customers SET SCHEMA shop; ALTER TABLE shop.customers RENAME TO c"
    )
    connection.execute("INSERT INTO shop.c VALUES (1, 'Ada')")
    assert brief(connection) == [("C", "1")]
    assert watched(connection) == [Watched("shop.c", "customer", "", ("password",))]


def test_table_without_its_primary_key_is_not_changed_untold(connection: Connection[TupleRow]) -> None:
    connection.execute("ALTER TABLE customers DROP CONSTRAINT customers_pkey")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has no primary key any more") as raised:
        connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
    assert "mailroom unwatch" in (raised.value.diag.message_hint or "")
    with connection.transaction():
        assert unwatch(connection, "public.customers")
    connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
