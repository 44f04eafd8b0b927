"""Registration: which tables and functions executables may reach, checked against the catalog, and audited."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, LiteralString

import psycopg
import pytest
import sqlalchemy

from dispatcher import AsyncRegistrations, RegisteredFunction, RegisteredTarget, Registrations
from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName, NotInTransaction, SchemaError
from mailroom.testing import execute
from outbox import Store
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, opened_async
from tests.support.node import Node

pytestmark = pytest.mark.both_versions

COUNTERS = "CREATE TABLE counters (name text PRIMARY KEY, hits bigint, body text)"
NOTE = "CREATE FUNCTION note(given jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT given'"
REGISTRATIONS = Registrations()
targets, remove_target = REGISTRATIONS.targets, REGISTRATIONS.remove_target
functions, remove_function = REGISTRATIONS.functions, REGISTRATIONS.remove_function
AUDIT = "SELECT actor, action, key, change, reason FROM mailroom.audit ORDER BY id"


@pytest.fixture
def connection(connect: Connect) -> psycopg.Connection[Any]:
    """The administrator's transaction, in which the tables are made, too."""
    return connect()


@pytest.fixture
def closed(connect: Connect) -> psycopg.Connection[Any]:
    """A connection on which nothing can be asked: what is refused on it is refused before a statement runs."""
    connection = connect()
    connection.close()
    return connection


def register(
    connection: Any, name: str = "stats", table: str = "public.counters", **columns: Any
) -> RegisteredTarget | None:
    given = {"key": "name", "number": "hits", "actor": "ada"} | columns
    return REGISTRATIONS.register_target(connection, name, table, **given)


def register_call(
    connection: Any, name: str = "note", function: str = "public.note", **options: Any
) -> RegisteredFunction | None:
    return REGISTRATIONS.register_function(connection, name, function, **({"actor": "ada"} | options))


def registered_at(node: Node) -> list[datetime]:
    found = [each.created_at for each in targets(node.connection)]
    return found + [each.created_at for each in functions(node.connection)]


# -- What is registered is reached ------------------------------------------------------------------------------------


def test_registered_table_is_written_by_executables(connection: psycopg.Connection[Any]) -> None:
    connection.execute('CREATE SCHEMA "My Shop"')
    connection.execute('CREATE TABLE "My Shop"."Coun.ters" ("The Key" uuid PRIMARY KEY, "N" smallint, "V" bytea)')
    given = {"key": "The Key", "value": "V", "number": "N"}
    assert register(connection, "stats", "My Shop.Coun.ters", **given) is None
    [found] = targets(connection)
    assert (found.table, found.key, found.value, found.number) == ("My Shop.Coun.ters", "The Key", "V", "N")
    key = "3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11"
    Store(target="stats").increment(connection, key, 7)
    Store(target="stats").put(connection, key, b"v")
    assert execute(connection) == 2
    assert connection.execute('SELECT "N", "V" FROM "My Shop"."Coun.ters"').fetchall() == [(7, b"v")]
    connection.rollback()


def test_removed_table_is_not_written_any_more(connection: psycopg.Connection[Any]) -> None:
    connection.execute(COUNTERS)
    register(connection)
    removed = remove_target(connection, "stats", actor="ada")
    assert removed is not None
    assert (removed.name, targets(connection)) == ("stats", [])
    Store(target="stats").increment(connection, "a")
    assert execute(connection) == 1
    assert connection.execute("SELECT count(*) FROM counters").fetchone() == (0,)
    assert connection.execute("SELECT stage, topic FROM mailroom.dead_letter").fetchone() == (
        "execute", "stats.increment",
    )  # fmt: skip
    connection.rollback()


def test_registered_function_is_called(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE called (given jsonb)")
    connection.execute(
        "CREATE FUNCTION note(given jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO public.called VALUES (given)'"
    )
    assert register_call(connection, timeout_s=2.5) is None
    [found] = functions(connection)
    assert (found.name, found.function, found.timeout_s) == ("note", "public.note", 2.5)
    Store().call(connection, "note", {"a": 1})
    assert execute(connection) == 1
    assert connection.execute("SELECT given FROM called").fetchall() == [({"a": 1},)]
    assert remove_function(connection, "note", actor="ada") == found
    Store().call(connection, "note", {"a": 2})
    execute(connection)
    assert connection.execute("SELECT given FROM called").fetchall() == [({"a": 1},)]
    connection.rollback()


def test_rolled_back_registration_is_none(node: Node) -> None:
    node.connection.execute(COUNTERS)
    with node.connection.transaction(force_rollback=True):
        register(node.connection)
        assert len(targets(node.connection)) == 1
    assert (targets(node.connection), node.rows(AUDIT)) == ([], [])


def test_lists_are_by_name(connection: psycopg.Connection[Any]) -> None:
    connection.execute(COUNTERS)
    connection.execute(NOTE)
    for name in ("b", "a", "c"):
        register(connection, name)
        register_call(connection, name)
    assert [each.name for each in targets(connection)] == ["a", "b", "c"]
    assert [each.name for each in functions(connection)] == ["a", "b", "c"]
    connection.rollback()


def test_lists_tell_what_does_not_fit_any_more(connection: psycopg.Connection[Any]) -> None:
    connection.execute(COUNTERS)
    connection.execute(NOTE)
    register(connection)
    register_call(connection)
    assert [each.fault for each in targets(connection)] == [each.fault for each in functions(connection)] == [None]
    connection.execute("ALTER TABLE counters DROP hits")
    connection.execute("ALTER FUNCTION note RENAME TO other")
    [table], [function] = targets(connection), functions(connection)
    assert "has no column 'hits'" in str(table.fault)
    assert "no function 'public.note'" in str(function.fault)
    Store(target="stats").increment(connection, "a")
    Store().call(connection, "note", {})
    assert execute(connection) == 2
    assert connection.execute("SELECT count(*) FROM mailroom.dead_letter").fetchone() == (2,)
    connection.rollback()


def test_registration_works_on_sqlalchemy(node: Node) -> None:
    engine = sqlalchemy.create_engine(
        node.dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sqlalchemy.NullPool
    )
    with engine.begin() as connection:
        connection.exec_driver_sql(COUNTERS)
        connection.exec_driver_sql(NOTE)
        register(connection, value="body")
        register_call(connection)
        assert [str(each) for each in targets(connection)] == [
            "stats: public.counters, key name, value body, number hits"
        ]
        assert [str(each) for each in functions(connection)] == ["note: public.note, 10 s"]
        assert remove_target(connection, "stats", actor="ada") is not None
        assert remove_function(connection, "note", actor="ada") is not None


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_async_class_does_the_same(node: Node, kind: str) -> None:
    node.connection.execute(COUNTERS)
    node.connection.execute(NOTE)
    registrations = AsyncRegistrations()
    async with opened_async(node.dsn, kind) as connection:
        table: dict[str, Any] = {"key": "name", "value": "body", "number": "hits", "actor": "ada"}
        assert (
            await registrations.register_target(connection, "stats", "public.counters", **table, dry_run=True) is None
        )
        assert await registrations.targets(connection) == []
        assert await registrations.register_target(connection, "stats", "public.counters", **table) is None
        assert (
            await registrations.register_function(connection, "note", "public.note", actor="ada", timeout_s=2) is None
        )
        assert (targets(node.connection), functions(node.connection)) == ([], [])
        await connection.commit()
        assert await registrations.targets(connection) == targets(node.connection)
        assert await registrations.functions(connection) == functions(node.connection)
        with pytest.raises(ConfigurationError, match="has no column 'nothing'"):
            await registrations.register_target(connection, "stats", "public.counters", **(table | {"key": "nothing"}))
        [target], [function] = targets(node.connection), functions(node.connection)
        assert await registrations.remove_target(connection, "stats", actor="bob", why="unused") == target
        assert await registrations.remove_function(connection, "note", actor="bob") == function
        await connection.commit()
    assert (targets(node.connection), functions(node.connection)) == ([], [])
    assert node.rows(AUDIT) == [
        ("ada", "executor target add", "stats", f"none -> {target}", None),
        ("ada", "executor function add", "note", f"none -> {function}", None),
        ("bob", "executor target remove", "stats", f"{target} -> none", "unused"),
        ("bob", "executor function remove", "note", f"{function} -> none", None),
    ]


# -- Again, dry runs, the audit ---------------------------------------------------------------------------------------


def test_name_given_to_another_table_is_replaced_and_both_are_audited(connection: psycopg.Connection[Any]) -> None:
    connection.execute(COUNTERS)
    register(connection)
    before = register(connection, value="body", number=None, why="texts now")
    assert before is not None
    assert (before.number, before.value) == ("hits", None)
    [now] = targets(connection)
    assert (now.number, now.value) == (None, "body")
    assert connection.execute(AUDIT).fetchall() == [
        ("ada", "executor target add", "stats", "none -> stats: public.counters, key name, number hits", None),
        (
            "ada",
            "executor target add",
            "stats",
            f"{before} -> stats: public.counters, key name, value body",
            "texts now",
        ),
    ]
    connection.rollback()


def test_name_given_to_another_function_is_replaced_and_both_are_audited(connection: psycopg.Connection[Any]) -> None:
    connection.execute(NOTE)
    register_call(connection)
    before = register_call(connection, timeout_s=20)
    assert before is not None
    assert (before.timeout_s, [each.timeout_s for each in functions(connection)]) == (10, [20])
    remove_function(connection, "note", actor="bob")
    assert connection.execute(AUDIT).fetchall() == [
        ("ada", "executor function add", "note", "none -> note: public.note, 10 s", None),
        ("ada", "executor function add", "note", "note: public.note, 10 s -> note: public.note, 20 s", None),
        ("bob", "executor function remove", "note", "note: public.note, 20 s -> none", None),
    ]
    connection.rollback()


def test_what_is_registered_already_stays_as_it_is_and_is_not_audited_again(node: Node) -> None:
    node.connection.execute(COUNTERS)
    node.connection.execute(NOTE)
    with node.connection.transaction():
        register(node.connection)
        register_call(node.connection)
    before = registered_at(node)
    with node.connection.transaction():
        assert register(node.connection) == targets(node.connection)[0]
        assert register_call(node.connection) == functions(node.connection)[0]
    assert registered_at(node) == before
    assert len(node.rows(AUDIT)) == 2


def test_dry_run_checks_and_changes_nothing(node: Node) -> None:
    node.connection.execute(COUNTERS)
    node.connection.execute(NOTE)
    with node.connection.transaction():
        register(node.connection)
        register_call(node.connection)
    before = (targets(node.connection), functions(node.connection), node.rows(AUDIT))
    with node.connection.transaction():
        assert register(node.connection, value="body", dry_run=True) == before[0][0]
        assert register_call(node.connection, timeout_s=1, dry_run=True) == before[1][0]
        assert remove_target(node.connection, "stats", actor="ada", dry_run=True) == before[0][0]
        assert remove_function(node.connection, "note", actor="ada", dry_run=True) == before[1][0]
        assert node.value("SELECT pg_current_xact_id_if_assigned() IS NULL")
        with pytest.raises(ConfigurationError, match="no column"):
            register(node.connection, number="nothing", dry_run=True)
    assert (targets(node.connection), functions(node.connection), node.rows(AUDIT)) == before


def test_what_is_not_registered_is_not_removed(connection: psycopg.Connection[Any]) -> None:
    assert remove_target(connection, "stats", actor="ada") is None
    assert remove_function(connection, "note", actor="ada") is None
    assert connection.execute(AUDIT).fetchall() == []


CHANGES: dict[str, Callable[..., object]] = {
    "register_target": register,
    "remove_target": lambda connection, **options: remove_target(connection, "stats", **({"actor": "ada"} | options)),
    "register_function": register_call,
    "remove_function": lambda connection, **options: remove_function(
        connection, "note", **({"actor": "ada"} | options)
    ),
}


def test_autocommit_outside_a_transaction_is_refused(node: Node) -> None:
    node.connection.execute(COUNTERS)
    node.connection.execute(NOTE)
    for change in CHANGES.values():
        for dry_run in (False, True):
            with pytest.raises(NotInTransaction):
                change(node.connection, dry_run=dry_run)


def test_who_acts_has_to_be_said(closed: psycopg.Connection[Any]) -> None:
    for change in CHANGES.values():
        for bad in ({"actor": " "}, {"why": "\0"}):
            with pytest.raises(InvalidMessage):
                change(closed, **bad)


def test_another_schema_has_no_registrations(connection: psycopg.Connection[Any]) -> None:
    of_shop = Registrations(schema="shop")
    calls: list[Callable[[], object]] = [
        lambda: of_shop.register_target(connection, "t", "public.t", key="k", number="n", actor="ada"),
        lambda: of_shop.remove_target(connection, "t", actor="ada"),
        lambda: of_shop.targets(connection),
        lambda: of_shop.register_function(connection, "f", "public.f", actor="ada"),
        lambda: of_shop.remove_function(connection, "f", actor="ada"),
        lambda: of_shop.functions(connection),
    ]
    for call in calls:
        with pytest.raises(SchemaError, match="migrate --schema shop"):
            call()


# -- What is refused --------------------------------------------------------------------------------------------------


def test_columns_of_these_types_are_taken(connection: psycopg.Connection[Any]) -> None:
    keys = ["text", "varchar", "varchar(40)", "uuid", "smallint", "integer", "bigint"]
    for nth, key in enumerate(keys):
        value, number = ["bytea", "text", "varchar"][nth % 3], ["smallint", "integer", "bigint"][nth % 3]
        connection.execute(f"CREATE TABLE t{nth} (k {key} PRIMARY KEY, v {value}, n {number}, other jsonb)")
        register(connection, f"t{nth}", f"public.t{nth}", key="k", value="v", number="n")
    assert len(targets(connection)) == len(keys)
    connection.rollback()


TABLES: list[LiteralString] = [
    "CREATE TABLE t (k text NOT NULL UNIQUE, n bigint, id bigint PRIMARY KEY)",
    "CREATE TABLE t (k text PRIMARY KEY, n bigint) PARTITION BY HASH (k)",
    "CREATE TABLE t (k bigint PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY, n bigint)",
    'CREATE TABLE t (k text COLLATE "C" PRIMARY KEY, n bigint)',
]


def test_tables_of_these_forms_are_taken(connection: psycopg.Connection[Any]) -> None:
    for table in TABLES:
        with connection.transaction(force_rollback=True):
            connection.execute(table)
            register(connection, table="public.t", key="k", number="n")


NO_TARGETS: list[tuple[LiteralString, str]] = [
    ("CREATE TABLE other (k text PRIMARY KEY, n bigint)", "no table 'public.t'"),
    ("CREATE TABLE \"T\" (k text PRIMARY KEY, n bigint)", "case-sensitive"),
    ("CREATE VIEW t AS SELECT 'a'::text AS k, 1::bigint AS n", "not an ordinary"),
    ("CREATE MATERIALIZED VIEW t AS SELECT 'a'::text AS k, 1::bigint AS n", "not an ordinary"),
    ("CREATE SEQUENCE t", "not an ordinary"),
    ("CREATE TABLE t (k text PRIMARY KEY, n bigint); CREATE TABLE child () INHERITS (t)", "inherit"),
    ("CREATE TABLE t (key text PRIMARY KEY, n bigint)", "no column 'k'"),
    ("CREATE TABLE t (k text PRIMARY KEY, m bigint)", "no column 'n'"),
    ("CREATE TABLE t (k text PRIMARY KEY, n bigint); ALTER TABLE t DROP n", "no column 'n'"),
    ("CREATE TABLE t (k numeric PRIMARY KEY, n bigint)", "'k' of 'public.t' is numeric; the key may be"),
    ("CREATE TABLE t (k char(8) PRIMARY KEY, n bigint)", "is character; the key may be"),
    ("CREATE TABLE t (k bytea PRIMARY KEY, n bigint)", "is bytea; the key may be"),
    ("CREATE DOMAIN name AS text; CREATE TABLE t (k public.name PRIMARY KEY, n bigint)", "the key may be"),
    ("CREATE DOMAIN text AS integer; CREATE TABLE t (k public.text PRIMARY KEY, n bigint)", "the key may be"),
    ("CREATE TABLE t (k text PRIMARY KEY, n numeric)", "is numeric; the number may be"),
    ("CREATE TABLE t (k text PRIMARY KEY, n text)", "is text; the number may be"),
    ("CREATE TABLE t (k text, n bigint)", "may be null"),
    ("CREATE TABLE t (k text UNIQUE, n bigint)", "may be null"),
    ("CREATE TABLE t (k text NOT NULL, n bigint)", "not unique by itself"),
    ("CREATE TABLE t (k text NOT NULL, n bigint, PRIMARY KEY (k, n))", "not unique by itself"),
    ("CREATE TABLE t (k text NOT NULL, n bigint); CREATE INDEX ON t (k)", "not unique by itself"),
    ("CREATE TABLE t (k text NOT NULL, n bigint); CREATE UNIQUE INDEX ON t (k) WHERE n > 0", "not unique"),
    ("CREATE TABLE t (k text NOT NULL, n bigint); CREATE UNIQUE INDEX ON t (lower(k))", "not unique"),
    ("CREATE TABLE t (k text NOT NULL, n bigint); CREATE UNIQUE INDEX ON t (k) INCLUDE (n)", "not unique"),
    ("CREATE TABLE t (k text NOT NULL, n bigint, UNIQUE (k) DEFERRABLE)", "nor deferrable"),
    ("CREATE TABLE t (k text PRIMARY KEY, n bigint GENERATED ALWAYS AS (length(k)) STORED)", "is generated"),
    ("CREATE TABLE t (k bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, n bigint)", "is generated"),
]  # fmt: skip


def test_table_that_cannot_be_a_target_is_told_why(connection: psycopg.Connection[Any]) -> None:
    for table, told in NO_TARGETS:
        with connection.transaction(force_rollback=True):
            connection.execute(table)
            with pytest.raises(ConfigurationError, match=told):
                register(connection, table="public.t", key="k", number="n")
            assert targets(connection) == []


def test_key_of_which_two_may_be_one_is_refused(connection: psycopg.Connection[Any]) -> None:
    connection.execute('CREATE COLLATION loose FROM "C"')
    connection.execute("CREATE TABLE t (k text COLLATE loose PRIMARY KEY, n bigint)")
    # Not every build of the server has ICU, which alone has such collations.
    connection.execute("UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'loose'")
    with pytest.raises(ConfigurationError, match="nondeterministic"):
        register(connection, table="public.t", key="k", number="n")
    connection.rollback()


def test_value_column_that_is_no_text_or_bytes_is_refused(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE t (k text PRIMARY KEY, v jsonb)")
    with pytest.raises(ConfigurationError, match="is jsonb; the value may be bytea, text, character varying"):
        register(connection, table="public.t", key="k", value="v", number=None)
    connection.rollback()


def test_unique_index_that_could_not_be_built_does_not_count(node: Node) -> None:
    node.connection.execute("CREATE TABLE t (k text NOT NULL, n bigint)")
    node.connection.execute("INSERT INTO t VALUES ('a', 1), ('a', 2)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        node.connection.execute("CREATE UNIQUE INDEX CONCURRENTLY ON t (k)")
    with node.connection.transaction(), pytest.raises(ConfigurationError, match="not unique"):
        register(node.connection, table="public.t", key="k", number="n")


def test_tables_of_a_node_and_of_the_server_are_refused(connection: psycopg.Connection[Any]) -> None:
    for table in ("store", "accounting", "executable_target", "audit"):
        with pytest.raises(ConfigurationError, match="in a schema of Mailroom"):
            register(connection, table=f"mailroom.{table}", key="key", number="number")
    for table in ("pg_catalog.pg_class", "information_schema.sql_parts"):
        with pytest.raises(ConfigurationError, match="in a schema of PostgreSQL"):
            register(connection, table=table)


def test_columns_that_make_no_target_are_refused(connection: psycopg.Connection[Any]) -> None:
    connection.execute(COUNTERS)
    for columns, told in (
        ({"number": None}, "Give a column for values"),
        ({"number": "name"}, "three different columns"),
        ({"value": "hits"}, "three different columns"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            register(connection, **columns)
    connection.rollback()


def test_name_that_is_none_is_refused(closed: psycopg.Connection[Any]) -> None:
    names: list[Any] = ["store", "accounting", "Stats", "1", "", "a" * 42, "a-b", None, 'a"']
    for name in names:
        for registers in (register, register_call):
            with pytest.raises(InvalidName):
                registers(closed, name)


BAD: list[Any] = ['a"b', "a%b", "a{b", "a}b", "a\0b", "a\ud800b", "", 17]


def test_name_that_could_not_be_rendered_is_refused(closed: psycopg.Connection[Any]) -> None:
    for bad in BAD:
        for column in ("key", "value", "number"):
            with pytest.raises(InvalidName, match=r"column .* is not valid"):
                register(closed, **{column: bad})
        for name in (bad,) if bad == 17 else (f"public.{bad}", f"{bad}.counters", bad):
            with pytest.raises(InvalidName, match=r"give schema\.table"):
                register(closed, table=name)
            with pytest.raises(InvalidName, match=r"give schema\.function"):
                register_call(closed, function=name)


def test_name_without_a_schema_is_refused(closed: psycopg.Connection[Any]) -> None:
    with pytest.raises(InvalidName, match=r"give schema\.table"):
        register(closed, table="counters")


def test_timeout_out_of_bounds_is_refused(closed: psycopg.Connection[Any]) -> None:
    for timeout_s in (0, -1, 300.5, float("nan"), float("inf"), True, "10", None):
        with pytest.raises(ConfigurationError, match=r"timeout_s must be .* at most 300, not"):
            register_call(closed, timeout_s=timeout_s)


NO_CALLS: list[tuple[LiteralString, str]] = [
    ("CREATE FUNCTION other(jsonb) RETURNS int LANGUAGE sql AS 'SELECT 1'", "no function 'public.f'"),
    ("CREATE FUNCTION f(text) RETURNS int LANGUAGE sql AS 'SELECT 1'", "exactly one argument, of type jsonb"),
    ("CREATE FUNCTION f(json) RETURNS int LANGUAGE sql AS 'SELECT 1'", "exactly one argument, of type jsonb"),
    ("CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'", "exactly one argument, of type jsonb"),
    ("CREATE FUNCTION f(jsonb, int DEFAULT 1) RETURNS int LANGUAGE sql AS 'SELECT 1'", "exactly one argument"),
    ("CREATE FUNCTION f(VARIADIC jsonb[]) RETURNS int LANGUAGE sql AS 'SELECT 1'", "exactly one argument"),
    ("CREATE PROCEDURE f(jsonb) LANGUAGE sql AS 'SELECT 1'", "is a procedure"),
    ("CREATE AGGREGATE f(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb)", "an aggregate"),
    ("CREATE FUNCTION f(jsonb) RETURNS SETOF int LANGUAGE sql AS 'SELECT 1'", "returns a set"),
    ("CREATE FUNCTION f(jsonb) RETURNS TABLE (a int) LANGUAGE sql AS 'SELECT 1'", "returns a set"),
]


def test_function_that_cannot_be_called_is_told_why(connection: psycopg.Connection[Any]) -> None:
    for function, told in NO_CALLS:
        with connection.transaction(force_rollback=True):
            connection.execute(function)
            with pytest.raises(ConfigurationError, match=told):
                register_call(connection, function="public.f")
            assert functions(connection) == []


def test_function_that_other_ones_of_its_name_stand_beside_is_taken(connection: psycopg.Connection[Any]) -> None:
    for arguments in ("text", "jsonb", "jsonb, int", "jsonb, OUT a int, OUT b int"):
        result = "" if "OUT" in arguments else "RETURNS int"
        name = "g" if "OUT" in arguments else "f"
        connection.execute(
            f"CREATE FUNCTION {name}({arguments}) {result} LANGUAGE sql AS 'SELECT 1{', 2' * (not result)}'"
        )
    for name in ("f", "g"):
        register_call(connection, name, f"public.{name}")
        Store().call(connection, name, {}, notify="told")
    assert execute(connection) == 2
    assert connection.execute("SELECT count(*) FROM mailroom.dead_letter").fetchone() == (0,)
    connection.rollback()
