"""Watch: what users define is never run with the rights of the schema's owner, unless the owner is who defined it."""

from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow

from mailroom import watch
from tests.support.databases import Connect
from tests.support.watched import told

pytestmark = pytest.mark.both_versions

CAST = """
CREATE SCHEMA app;
CREATE TYPE app.state AS ENUM ('open', 'paid');
CREATE DOMAIN app.known AS app.state;
CREATE TYPE app.pair AS (state app.state, n int, "odd ""name" text);
CREATE TYPE app.span AS RANGE (subtype = app.state);
CREATE FUNCTION app.as_json(app.state) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('test.ran', current_user, false);
    RETURN '"cast"';
END $$;
CREATE FUNCTION app.as_json(app.span) RETURNS json LANGUAGE sql RETURN app.as_json(lower($1));
CREATE FUNCTION app.as_text(app.state) RETURNS text LANGUAGE sql RETURN app.as_json($1)::text;
CREATE CAST (app.state AS json) WITH FUNCTION app.as_json(app.state);
CREATE CAST (app.span AS json) WITH FUNCTION app.as_json(app.span);
CREATE CAST (app.state AS text) WITH FUNCTION app.as_text(app.state);
"""
PAIR = {"state": "paid", "n": 1, 'odd "name': None}
COLUMNS = {
    "app.state": ("'paid'", "paid"),
    "app.known": ("'paid'", "paid"),
    "app.state[]": ("'{paid,open,NULL}'", ["paid", "open", None]),
    "app.span": ("'[open,paid)'", "[open,paid)"),
    "app.pair": ("ROW('paid', 1, NULL)", PAIR),
    "app.pair[]": ("ARRAY[ROW('paid', 1, NULL)::app.pair]", '{"(paid,1,)"}'),
}


@pytest.fixture
def connection(connect: Connect) -> Iterator[psycopg.Connection[TupleRow]]:
    """A transaction of a superuser, who owns the node. Rolled back, since roles are the whole server's."""
    with connect() as connection, connection.transaction(force_rollback=True):
        yield connection


@pytest.fixture
def user(connection: psycopg.Connection[TupleRow]) -> str:
    """A role without rights at the node, which has types with casts to json of its own."""
    role = f"mailroom_test_{token_hex(8)}"
    database = connection.info.dbname
    connection.execute(f'CREATE ROLE {role}; GRANT CREATE ON DATABASE "{database}" TO {role}'.encode())
    connection.execute(f"SET LOCAL ROLE {role}".encode())
    connection.execute(CAST)
    connection.execute("RESET ROLE")
    return role


def values(connection: psycopg.Connection[Any], column: str, literal: str, *, by_row: bool = False) -> Any:
    """Watch a table with such a column, insert a row, change it and delete it; return the values told of the column."""
    connection.execute(
        f"CREATE TABLE app.things (id int PRIMARY KEY, v {column}, w int) {'PARTITION BY LIST (id)' * by_row}".encode()
    )
    if by_row:
        connection.execute("CREATE TABLE app.all_things PARTITION OF app.things DEFAULT")
    watch(connection, "app.things", topic="thing")
    connection.execute(f"INSERT INTO app.things VALUES (1, {literal}, 1), (2, NULL, 1)".encode())
    connection.execute("UPDATE app.things SET w = 2 WHERE id = 1")
    connection.execute("DELETE FROM app.things WHERE id = 1")
    first, none, changed, gone = (message.value for message in told(connection))
    assert none["new"] == {"id": 2, "v": None, "w": 1}
    assert changed["changed"] == ["w"]
    assert first["new"]["v"] == changed["old"]["v"] == changed["new"]["v"] == gone["old"]["v"]
    return first["new"]["v"]


def ran_as(connection: psycopg.Connection[Any]) -> Any:
    [(role,)] = connection.execute("SELECT nullif(current_setting('test.ran', true), '')")
    return role


@pytest.mark.parametrize("by_row", [False, True])
def test_cast_of_a_user_is_not_run_with_the_rights_of_the_owner(
    connection: psycopg.Connection[Any], user: str, by_row: bool
) -> None:
    for column, (literal, expected) in COLUMNS.items():
        with connection.transaction(force_rollback=True):
            assert values(connection, column, literal, by_row=by_row) == expected, column
            assert ran_as(connection) is None, column


def test_cast_of_a_user_is_not_run_for_a_key(connection: psycopg.Connection[Any], user: str) -> None:
    connection.execute("CREATE TABLE app.things (state app.state, n int, PRIMARY KEY (state, n))")
    watch(connection, "app.things", topic="thing")
    connection.execute("INSERT INTO app.things VALUES ('paid', 1)")
    assert [message.key for message in told(connection)] == ['["paid", 1]']
    assert ran_as(connection) is None


def test_cast_whose_function_is_anothers_is_not_run(connection: psycopg.Connection[Any], user: str) -> None:
    connection.execute("ALTER TYPE app.state OWNER TO current_user")
    assert values(connection, "app.state", "'paid'") == "paid"
    assert ran_as(connection) is None


def test_cast_of_the_owner_is_run(connection: psycopg.Connection[Any]) -> None:
    connection.execute(CAST)
    assert values(connection, "app.pair", "ROW('paid', 1, NULL)") == PAIR | {"state": "cast"}
    assert ran_as(connection) is not None
