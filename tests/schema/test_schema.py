"""The schema of a node: up and down, side by side, by every way it is migrated, and within users' own migrations."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from psycopg import sql

import alembic
from alembic import command
from inbox import Inbox
from mailroom import create_inbox, schema, set_inbox
from mailroom.errors import ConfigurationError, InvalidName, NotInTransaction, SchemaError
from mailroom.registry.inboxes import Order
from mailroom.session.settings import DSN_VARIABLE
from mailroom.sql.runner import _psycopg_step
from mailroom.testing import deliver
from outbox import Outbox
from tests.support.command import alembic as run_alembic
from tests.support.databases import Connect
from tests.support.noted import END
from tests.support.waiting import WITHIN_S, wait_until_blocked

pytestmark = pytest.mark.both_versions

ROOT = Path(__file__).parents[2]


@contextmanager
def begun(dsn: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def tables(dsn: str, name: str = "mailroom") -> set[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [name])
        return {table for (table,) in rows}


@pytest.mark.slow
def test_schema_goes_up_and_down_and_up_again(empty_dsn: str) -> None:
    for _ in range(2):
        with begun(empty_dsn) as connection:
            schema.migrate(connection)
            assert schema.current_revision(connection) == schema.HEAD
            schema.check(connection)
        assert {"outbox", "inbox", "node"} <= tables(empty_dsn)
        with begun(empty_dsn) as connection:
            schema.migrate(connection, revision="base")
            assert schema.current_revision(connection) is None
        assert tables(empty_dsn) <= {"alembic_version"}


@pytest.mark.slow
def test_going_down_leaves_no_function_sequence_or_type(empty_dsn: str) -> None:
    with begun(empty_dsn) as connection:
        schema.migrate(connection)
        create_inbox(connection, "shipping")
        schema.migrate(connection, revision="base")
        left = connection.exec_driver_sql(
            "SELECT relname FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace "
            "AND relname NOT LIKE 'alembic_version%%' "
            "UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'mailroom'::regnamespace"
        )
        assert left.all() == []


def test_migrating_again_changes_nothing(dsn: str) -> None:
    with begun(dsn) as connection:
        before = connection.exec_driver_sql("SELECT id, pg_current_xact_id_if_assigned() FROM mailroom.node").all()
        schema.migrate(connection)
        assert connection.exec_driver_sql("SELECT id FROM mailroom.node").scalar() == before[0][0]


def test_rolled_back_migration_leaves_nothing(empty_dsn: str) -> None:
    with begun(empty_dsn) as connection:
        schema.migrate(connection)
        connection.rollback()
    assert tables(empty_dsn) == set()


# "order" is a word of SQL's own.
@pytest.mark.sample(1)
@pytest.mark.parametrize("other", ["tenant_b", "order"])
def test_nodes_of_one_database_do_not_see_each_other(dsn: str, other: str, connect: Connect) -> None:
    with begun(dsn) as connection:
        schema.migrate(connection, schema=other)
        create_inbox(connection, "shipping", schema=other)
        create_inbox(connection, "shipping")
    user = connect()
    Outbox(schema=other).send_many(user, [])
    Outbox(schema=other).send(user, "shipping", "for the other", key="k")
    assert deliver(user) == 0
    assert deliver(user, schema=other) == 1
    assert Inbox("shipping").reap(user, "k") == []
    assert [message.value for message in Inbox("shipping", schema=other).reap_any(user)] == ["for the other"]
    ids = user.execute(
        sql.SQL("SELECT (SELECT id FROM mailroom.node), (SELECT id FROM {}.node)").format(sql.Identifier(other))
    ).fetchall()
    assert ids[0][0] != ids[0][1]


@pytest.mark.slow
def test_one_node_goes_down_and_the_other_stays(dsn: str) -> None:
    with begun(dsn) as connection:
        schema.migrate(connection, schema="tenant_b")
        schema.migrate(connection, schema="tenant_b", revision="base")
        schema.check(connection)


def test_name_outside_the_alphabet_is_refused_before_anything_happens(empty_dsn: str) -> None:
    with begun(empty_dsn) as connection:
        for name in ("Tenant", "1st", "a-b", "", "x" * 42, 'a"b', "pg_mine", "a\n"):
            with pytest.raises(InvalidName):
                schema.migrate(connection, schema=name)
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["outbox", "inbox", "scheduled", "dead_letter"])
def test_going_down_refuses_while_messages_are_there_and_discards_when_told(dsn: str, where: str) -> None:
    with begun(dsn) as connection:
        create_inbox(connection, "shipping")
        topic = "nobody" if where == "dead_letter" else "shipping"
        connection.exec_driver_sql(f"INSERT INTO mailroom.outbox (topic, value_json) VALUES ('{topic}', '1')")
        if where == "scheduled":
            connection.exec_driver_sql("UPDATE mailroom.outbox SET deliver_at = now() + interval '1 hour'")
        if where != "outbox":
            deliver(connection)
    with begun(dsn) as connection, pytest.raises(SchemaError, match=f"{where} still hold.*--discard"):
        schema.migrate(connection, revision="base")
    assert "outbox" in tables(dsn)
    with begun(dsn) as connection:
        schema.migrate(connection, revision="base", discard=True)
    assert tables(dsn) <= {"alembic_version"}


def test_message_committed_while_going_down_waits_is_not_lost(dsn: str, connect: Connect) -> None:
    writer, observer = connect(), connect()
    failed: list[SchemaError] = []
    writer.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', '1')")
    pids: list[int] = []

    def go_down() -> None:
        try:
            with begun(dsn) as connection:
                pids.append(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
                started.set()
                schema.migrate(connection, revision="base")
        except SchemaError as error:
            failed.append(error)

    started = threading.Event()
    thread = threading.Thread(target=go_down)
    thread.start()
    started.wait(WITHIN_S)
    wait_until_blocked(observer, pids[0])
    writer.commit()
    thread.join(WITHIN_S)
    assert len(failed) == 1
    assert observer.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (1,)


def test_refused_migration_leaves_the_transaction_and_its_settings_as_they_were(dsn: str) -> None:
    with begun(dsn) as connection:
        connection.exec_driver_sql("SET LOCAL search_path = public")
        connection.exec_driver_sql("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('a', '1')")
        with pytest.raises(SchemaError):
            schema.migrate(connection, revision="base")
        assert connection.exec_driver_sql("SHOW search_path").scalar() == "public"
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "0"


@pytest.mark.slow
def test_callers_settings_are_what_they_were_after_migrating_and_making_an_inbox(empty_dsn: str) -> None:
    with begun(empty_dsn) as connection:
        connection.exec_driver_sql("SET LOCAL search_path = mine, public")
        connection.exec_driver_sql("SET LOCAL lock_timeout = '7s'")
        schema.migrate(connection)
        create_inbox(connection, "shipping")
        assert connection.exec_driver_sql("SHOW search_path").scalar() == "mine, public"
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "7s"


def test_autocommit_connection_is_refused_and_nothing_lands_in_another_schema(empty_dsn: str) -> None:
    engine = sa.create_engine(empty_dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sa.NullPool)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(NotInTransaction),
    ):
        schema.migrate(connection)
    assert tables(empty_dsn, "public") == set()


def waits_for_another(dsn: str, connect: Connect, change: Callable[[sa.Connection], object]) -> None:
    """Run `change` in two transactions at once; the second waits for the first, and both succeed."""
    errors: list[BaseException] = []
    pids: list[int] = []
    started = threading.Event()

    def second() -> None:
        try:
            with begun(dsn) as connection:
                pids.append(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
                # Looked up before: what the session remembers of "there is none" must not count.
                connection.exec_driver_sql("SELECT to_regclass('mailroom.inbox_shipping')")
                started.set()
                change(connection)
        except BaseException as error:
            errors.append(error)

    with begun(dsn) as first:
        change(first)
        thread = threading.Thread(target=second)
        thread.start()
        started.wait(WITHIN_S)
        wait_until_blocked(connect(), pids[0])
    thread.join(WITHIN_S)
    assert errors == []


def test_two_first_migrations_at_once_make_one_schema(dsn: str, connect: Connect) -> None:
    waits_for_another(dsn, connect, lambda connection: schema.migrate(connection, schema="tenant_b"))
    assert "outbox" in tables(dsn, "tenant_b")


def test_same_inbox_made_twice_at_once_is_made_once(dsn: str, connect: Connect) -> None:
    waits_for_another(dsn, connect, lambda connection: create_inbox(connection, "shipping", ["order.paid"]))
    assert "inbox_shipping" in tables(dsn)


OF_INBOX = """
SELECT c.relkind, c.reloptions,
       replace(coalesce(pg_get_indexdef(c.oid), pg_get_expr(c.relpartbound, c.oid)), %(name)s, ''),
       (SELECT array_agg((attname, attnotnull, atttypid, col_description(c.oid, attnum))::text ORDER BY attnum)
        FROM pg_attribute WHERE attrelid = c.oid)
FROM pg_class AS c
WHERE c.oid = to_regclass('mailroom.inbox_' || %(name)s)
   OR c.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = to_regclass('mailroom.inbox_' || %(name)s))
ORDER BY 3
"""


@pytest.mark.parametrize("order", ["key", "total"])
def test_inboxes_of_one_call_are_as_those_of_one_call_each(connect: Connect, order: Order) -> None:
    connection = connect()
    create_inbox(connection, "alone", ["order.paid"], max_attempts=7, order=order)
    names = [*(f"i{nth}" for nth in range(25)), "null", "i3", "alone"]
    connection.execute("SET lock_timeout = '7s'")
    create_inbox(connection, names, ["order.sent", "order.paid"], max_attempts=7, order=order)
    assert connection.execute("SHOW lock_timeout").fetchone() == ("7s",)
    expected = connection.execute(OF_INBOX, {"name": "alone"}).fetchall()
    assert len(expected) == 3 + (order == "total")
    for name in ("i0", "i19", "i20", "i24", "null"):  # at both ends of what is made in one trip
        assert connection.execute(OF_INBOX, {"name": name}).fetchall() == expected
    registered = connection.execute('SELECT name, max_attempts, "order" FROM mailroom.inbox_registry').fetchall()
    assert sorted(registered) == sorted((name, 7, order) for name in set(names))
    topics = connection.execute("SELECT inbox, topic FROM mailroom.subscription").fetchall()
    assert sorted(topics) == sorted((name, topic) for name in set(names) for topic in ("order.paid", "order.sent"))


def test_many_inboxes_take_few_trips(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand were made in as many sessions, and then one by one: each had a dozen trips to the server."""
    trips = 0

    def counted(*args: Any, **options: Any) -> list[Any]:
        nonlocal trips
        trips += 1
        return _psycopg_step(*args, **options)

    monkeypatch.setattr("mailroom.sql.runner._psycopg_step", counted)
    create_inbox(connect(), [f"i{nth}" for nth in range(60)], ["order.paid"])
    assert trips <= 12


def test_one_of_several_inboxes_that_cannot_be_leaves_all_as_they_were(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, ["ledger"], order="total")
    connection.execute("CREATE TABLE mailroom.inbox_taken (id int)")
    names = ["first", "ledger", "taken", "last"]
    with pytest.raises(SchemaError, match="Inbox 'taken' cannot be created"):
        create_inbox(connection, names, ["order.paid"])
    names.remove("taken")
    with pytest.raises(ConfigurationError, match="Inbox 'ledger' exists, and its order is total"):
        create_inbox(connection, names, ["order.paid"], order="key")
    with pytest.raises(ConfigurationError, match="Inbox 'ledger' has total order, and expire_s"):
        create_inbox(connection, names, ["order.paid"], expire_s=60)
    with pytest.raises(InvalidName, match="Last"):
        create_inbox(connection, ["first", "Last"], ["order.paid"])
    assert connection.execute("SELECT name FROM mailroom.inbox_registry").fetchall() == [("ledger",)]
    assert connection.execute("SELECT FROM mailroom.subscription").fetchall() == []


def test_inbox_that_exists_stays_as_it_is_and_gets_the_subscriptions_that_it_lacks(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping", ["order.paid"], backoff_s=2, backoff_max_s=30)
    create_inbox(connection, "shipping", ["order.paid", "order.sent"], backoff_s=2)
    create_inbox(connection, "shipping")
    with pytest.raises(ConfigurationError, match=r"backoff_s 2 -> 3.*mailroom inbox set shipping"):
        create_inbox(connection, ["billing", "shipping"], backoff_s=3)
    assert connection.execute("SELECT name, backoff_s, backoff_max_s FROM mailroom.inbox_registry").fetchall() == [
        ("shipping", 2.0, 30.0)
    ]
    topics = connection.execute("SELECT topic, inbox FROM mailroom.subscription ORDER BY topic").fetchall()
    assert topics == [("order.paid", "shipping"), ("order.sent", "shipping")]


def test_backoff_given_alone_moves_the_other_bound(connect: Connect) -> None:
    connection = connect()
    cases: list[tuple[dict[str, Any], tuple[float, float]]] = [
        ({}, (1, 3600)), ({"backoff_s": 5000}, (5000, 5000)), ({"backoff_max_s": 0.5}, (0.5, 0.5)),
    ]  # fmt: skip
    for given, kept in cases:
        for make in (create_inbox, create_inbox, set_inbox):
            make(connection, "shipping", **given)
            found = connection.execute("SELECT backoff_s, backoff_max_s FROM mailroom.inbox_registry").fetchall()
            assert found == [kept]
        connection.rollback()


NONSENSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"expire_s": -1}, ConfigurationError, "expire_s must be a number of seconds, 0 or more, at most 315,360,000"),
    ({"backoff_s": 2, "backoff_max_s": 1}, ConfigurationError, "backoff_max_s, the longest wait, is shorter"),
    ({"rate": 2_000_000}, ConfigurationError, "rate must be a number of messages per second, .*1,000,000"),
    ({"rat": 5}, TypeError, "An inbox has no setting 'rat': it has backoff_s"),
    ({"expire_s": True}, ConfigurationError, "expire_s must be .*, not bool"),
    ({"expire_s": 1e300}, ConfigurationError, "expire_s must be .*, not 1e\\+300"),
    ({"max_attempts": 0}, ConfigurationError, "max_attempts must be an int from 1 to 1,000,000, not 0"),
    ({"max_attempts": True}, ConfigurationError, "max_attempts must be .*, not bool"),
    ({"on_failure": "drop"}, ConfigurationError, "on_failure is 'drop'; give 'park' or 'skip'"),
]


def test_inbox_of_nonsense_settings_is_refused(connect: Connect) -> None:
    connection = connect()
    for given, error, told in NONSENSE:
        with pytest.raises(error, match=told):
            create_inbox(connection, "shipping", **given)


def test_rolled_back_inbox_leaves_nothing(dsn: str, connect: Connect) -> None:
    connection = connect()
    before = tables(dsn)
    create_inbox(connection, "shipping", ["order.paid"])
    connection.rollback()
    assert tables(dsn) == before
    assert (
        connection.execute("SELECT FROM mailroom.subscription UNION SELECT FROM mailroom.inbox_registry").rowcount == 0
    )


def test_inbox_in_a_missing_schema_names_the_command_and_spoils_nothing(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        with pytest.raises(SchemaError, match="mailroom migrate"):
            create_inbox(connection, "shipping")
        assert connection.execute("SELECT 1").fetchone() == (1,)


USERS_MIGRATION = """
from alembic import op
from mailroom import create_inbox, schema
revision, down_revision = "u1", None
def upgrade():
    op.execute("CREATE TABLE mine (a int)")
    schema.migrate(op.get_bind())
    create_inbox(op.get_bind(), "shipping", ["order.paid"])
    op.execute("CREATE TABLE also_mine (a int)")
def downgrade():
    schema.migrate(op.get_bind(), revision="base")
    op.execute("DROP TABLE mine, also_mine")
"""
USERS_ENV = """
from alembic import context
context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
"""


@pytest.mark.slow
def test_schema_and_inbox_are_made_and_removed_inside_a_users_own_migration(empty_dsn: str, tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "u1.py").write_text(USERS_MIGRATION)
    (tmp_path / "env.py").write_text(USERS_ENV)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    with begun(empty_dsn) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.rollback()
    assert tables(empty_dsn) | tables(empty_dsn, "public") == set()
    with begun(empty_dsn) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    assert tables(empty_dsn, "public") == {"alembic_version", "mine", "also_mine"}
    assert "inbox_shipping" in tables(empty_dsn)
    with begun(empty_dsn) as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert tables(empty_dsn, "public") == {"alembic_version"}


@pytest.mark.slow
def test_alembic_by_the_command_line_migrates_the_named_schema(empty_dsn: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "MAILROOM"))}
    subprocess.run(
        [sys.executable, "-m", "alembic.config", "-x", "schema=tenant_a", "upgrade", "head"],
        cwd=ROOT, env=environment | {DSN_VARIABLE: empty_dsn}, capture_output=True, check=True,
    )  # fmt: skip
    assert "outbox" in tables(empty_dsn, "tenant_a")
    run_alembic("-x", f"dsn={empty_dsn}", "-x", "schema=tenant_a", "downgrade", "base")
    assert "outbox" not in tables(empty_dsn, "tenant_a")


def test_alembic_by_the_command_line_without_a_database_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=DSN_VARIABLE):
        run_alembic("upgrade", "head")


# Reflected before it is left out.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Did not recognize type 'xid8'")
def test_autogenerate_of_a_user_leaves_our_tables_alone(dsn: str) -> None:
    with begun(dsn) as connection:
        create_inbox(connection, "shipping")
        connection.exec_driver_sql("CREATE TABLE gone (a int)")

        def differences(**options: object) -> list[str]:
            context = MigrationContext.configure(connection, opts={"include_schemas": True, **options})
            return [f"{change[0]} {change[1].schema}.{change[1].name}" for change in
                    compare_metadata(context, sa.MetaData()) if change[0] == "remove_table"]  # fmt: skip

        assert "remove_table mailroom.outbox" in differences()
        assert differences(include_object=schema.include_object) == ["remove_table None.gone"]


def test_missing_schema_names_the_command(empty_dsn: str) -> None:
    with begun(empty_dsn) as connection:
        with pytest.raises(SchemaError, match=r"no Mailroom schema 'mailroom'.*Run: mailroom migrate" + END):
            schema.check(connection)
        with pytest.raises(SchemaError, match=r"Run: mailroom migrate --schema tenant_a" + END):
            schema.check(connection, schema="tenant_a")


def test_schema_of_another_release_names_the_command(dsn: str) -> None:
    with begun(dsn) as connection:
        for revision, told in (
            ("0001", "Run: mailroom migrate"),
            ("0301", "too new for this program. Run: pip install -U pg-mailroom"),
        ):
            connection.exec_driver_sql(f"UPDATE mailroom.alembic_version SET version_num = '{revision}'")
            with pytest.raises(SchemaError, match=f"{revision}.*{told}"):
                schema.check(connection)


def test_schema_of_the_next_release_is_worked_on(dsn: str) -> None:
    with begun(dsn) as connection:
        connection.exec_driver_sql("UPDATE mailroom.alembic_version SET version_num = '0201'")
        schema.check(connection)


def test_every_table_column_and_function_has_a_comment(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    silent = connection.execute(
        """
        SELECT c.relname, a.attname FROM pg_class c
        LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND c.relkind IN ('r', 'p')
        WHERE c.relnamespace = 'mailroom'::regnamespace AND c.relname <> 'alembic_version'
        AND (c.relkind IN ('r', 'p') AND NOT c.relispartition AND obj_description(c.oid, 'pg_class') IS NULL
             OR a.attnum IS NOT NULL AND col_description(c.oid, a.attnum) IS NULL)
        UNION ALL SELECT proname, 'function' FROM pg_proc
        WHERE pronamespace = 'mailroom'::regnamespace AND obj_description(oid, 'pg_proc') IS NULL
        """
    )
    assert silent.fetchall() == []


def test_indexed_text_compares_by_bytes(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    others = connection.execute(
        """
        SELECT i.indexrelid::regclass::text, a.attname FROM pg_index i
        JOIN pg_attribute a ON a.attrelid = i.indexrelid JOIN pg_class c ON c.oid = i.indexrelid
        WHERE c.relnamespace = 'mailroom'::regnamespace AND c.relname NOT LIKE 'alembic_version%'
        AND a.atttypid IN ('text'::regtype, 'varchar'::regtype) AND a.attcollation <> '"C"'::regcollation
        """
    )
    assert others.fetchall() == []


def test_no_table_is_unlogged_and_every_hot_one_has_its_autovacuum(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    unlogged = "SELECT relname FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace AND relpersistence <> 'p'"
    assert connection.execute(unlogged).fetchall() == []
    settings = "SELECT reloptions FROM pg_class WHERE oid = ANY (%s::regclass[])"
    hot = connection.execute(settings, [["mailroom.outbox", "mailroom.inbox_shipping"]]).fetchall()
    assert all("autovacuum_vacuum_scale_factor=0" in options for (options,) in hot)
    assert len(hot) == 2


def test_partition_has_the_columns_defaults_and_keys_of_its_table(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    keys = connection.execute(
        "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'mailroom.inbox_shipping'::regclass "
        "ORDER BY indisprimary DESC"
    ).fetchall()
    assert [definition.partition(" USING ")[2] for (definition,) in keys] == [
        "btree (key, clock)",
        "btree (((clock + 0)))",
    ]


def test_transaction_id_stands_before_the_position(connect: Connect) -> None:
    # Defaults are evaluated in the order of the columns; the rule of the floor rests on it.
    order = connect().execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'mailroom.outbox'::regclass AND attnum > 0 ORDER BY attnum"
    )
    assert [name for (name,) in order.fetchall()[:2]] == ["xact", "position"]


@pytest.mark.slow
def test_alembic_is_the_library() -> None:
    assert not (ROOT / "alembic" / "__init__.py").exists()
    assert alembic.__file__ is not None
    assert not Path(alembic.__file__).is_relative_to(ROOT / "alembic")
    done = subprocess.run(
        [sys.executable, "-c", "import alembic.command; print(alembic.__version__)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == alembic.__version__
    assert importlib.util.find_spec("alembic.versions") is None
