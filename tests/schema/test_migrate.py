"""A node made, used and removed on every connection, within async migrations of users, and by printed SQL."""

from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.config import Config

from alembic import command
from inbox import AsyncInbox, Inbox
from mailroom import create_inbox, create_inbox_async, schema
from mailroom.errors import (
    ConfigurationError,
    ConnectionFailed,
    InvalidName,
    NotInTransaction,
    SchemaError,
    UnsupportedConnection,
)
from mailroom.node.status import status
from mailroom.schema import migration
from mailroom.testing import deliver, deliver_async
from outbox import AsyncOutbox, Outbox, Outgoing
from tests.support.command import alembic
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async, url
from tests.support.next_release import HEAD, NEXT, known_to_migrate
from tests.support.noted import END

pytestmark = pytest.mark.both_versions

ROOT = Path(__file__).parents[2]

# What the catalog tells of a node, without what differs by chance.
NODE = """
SELECT 'column', concat_ws(' ', c.oid::regclass, attname, format_type(atttypid, atttypmod), attnotnull, attcollation,
       pg_get_expr(adbin, adrelid), col_description(c.oid, attnum), obj_description(c.oid, 'pg_class'), c.reloptions)
FROM pg_class c JOIN pg_attribute ON attrelid = c.oid AND attnum > 0
LEFT JOIN pg_attrdef ON adrelid = c.oid AND adnum = attnum WHERE relnamespace = 'mailroom'::regnamespace
UNION ALL SELECT 'constraint', pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'mailroom'::regnamespace
UNION ALL SELECT 'trigger', pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
WHERE relnamespace = 'mailroom'::regnamespace
UNION ALL SELECT 'function', concat(pg_get_functiondef(oid), obj_description(oid, 'pg_proc')) FROM pg_proc
WHERE pronamespace = 'mailroom'::regnamespace
UNION ALL SELECT 'rule', definition FROM pg_rules WHERE schemaname = 'mailroom'
UNION ALL SELECT 'revision', version_num FROM mailroom.alembic_version
ORDER BY 1, 2
"""


def described(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(NODE).fetchall()


def tables(dsn: str, name: str = "mailroom") -> set[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [name])
        return {table for (table,) in rows}


@pytest.fixture
def expected(dsn: str) -> list[tuple[Any, ...]]:
    """The node that the tests' template was made with."""
    return described(dsn)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_node_goes_up_is_used_and_goes_down_on_every_connection(
    empty_dsn: str, kind: str, expected: list[tuple[Any, ...]]
) -> None:
    with opened(empty_dsn, kind) as connection:
        schema.migrate(connection)
        assert tables(empty_dsn) == set()  # not committed by us
        connection.commit()
    assert described(empty_dsn) == expected
    with opened(empty_dsn, kind) as connection:
        schema.migrate(connection)
        schema.check(connection)
        create_inbox(connection, "shipping", ["order.paid"])
        create_inbox(connection, ["null", "shipping", "billing"])
        Outbox().send(connection, "shipping", 1, key="k")
        Outbox().send_many(connection, [Outgoing("order.paid", 2, key="k")])
        assert status(connection).outbox_backlog == 2
        connection.commit()
        with pytest.raises(SchemaError, match=r"^Not removed: outbox still hold.*downgrade base\)\." + END):
            schema.migrate(connection, revision="base")
        assert deliver(connection) == 2
        assert [message.value for message in Inbox("shipping").reap(connection, "k")] == [1, 2]
        schema.migrate(connection, revision="base")
        assert schema.current_revision(connection) is None
        connection.rollback()
    assert {"inbox_shipping", "inbox_null", "inbox_billing"} <= tables(empty_dsn)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC[::-1])  # asyncpg first: it takes no two statements in one
async def test_node_goes_up_is_used_and_goes_down_on_every_async_connection(
    empty_dsn: str, kind: str, expected: list[tuple[Any, ...]]
) -> None:
    async with opened_async(empty_dsn, kind) as connection:
        await schema.migrate_async(connection)
        assert tables(empty_dsn) == set()  # not committed by us
        await connection.commit()
    assert described(empty_dsn) == expected
    async with opened_async(empty_dsn, kind) as connection:
        await schema.migrate_async(connection)
        await schema.check_async(connection)
        await create_inbox_async(connection, "shipping", ["order.paid"], max_attempts=7)
        await create_inbox_async(connection, ["null", "shipping", "billing"])
        await AsyncOutbox().send(connection, "shipping", 1, key="k")
        await AsyncOutbox().send_many(connection, [Outgoing("order.paid", 2, key="k")])
        await connection.commit()
        with pytest.raises(SchemaError, match=r"^Not removed: outbox still hold.*downgrade base\)\." + END):
            await schema.migrate_async(connection, revision="base")
        assert await deliver_async(connection) == 2
        assert [message.value for message in await AsyncInbox("shipping").reap(connection, "k")] == [1, 2]
        await schema.migrate_async(connection, revision="base", discard=True)
        with pytest.raises(SchemaError, match="no Mailroom schema"):
            await schema.check_async(connection)
        await connection.rollback()
    assert {"inbox_shipping", "inbox_null", "inbox_billing"} <= tables(empty_dsn)


ASYNC_ENV = """
import asyncio
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine

def run(connection):
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()

async def run_async():
    engine = create_async_engine(context.config.attributes["url"])
    async with engine.connect() as connection:
        await connection.run_sync(run)
        await connection.commit()
    await engine.dispose()

asyncio.run(run_async())
"""
MIGRATION = """
from alembic import op
from mailroom import create_inbox, create_inbox_async, schema
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


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_node_is_made_inside_the_async_migrations_of_a_user(empty_dsn: str, tmp_path: Path, driver: str) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "u1.py").write_text(MIGRATION)
    (tmp_path / "env.py").write_text(ASYNC_ENV)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.attributes["url"] = url(empty_dsn, driver)
    command.upgrade(config, "head")
    assert tables(empty_dsn, "public") == {"alembic_version", "mine", "also_mine"}
    assert "inbox_shipping" in tables(empty_dsn)
    command.downgrade(config, "base")
    assert tables(empty_dsn, "public") == {"alembic_version"}
    assert "outbox" not in tables(empty_dsn)


def printed(*arguments: str) -> str:
    """Return what `alembic ... --sql` prints, with no database in its environment."""
    return alembic(*arguments, "--sql")


def execute(dsn: str, script: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(script.encode())


@pytest.mark.slow
def test_printed_sql_makes_the_node_that_migrate_makes(empty_dsn: str, expected: list[tuple[Any, ...]]) -> None:
    script = printed("upgrade", "head")
    execute(empty_dsn, script)
    assert described(empty_dsn) == expected
    execute(empty_dsn, printed("downgrade", "head:base"))
    assert tables(empty_dsn) <= {"alembic_version"}
    execute(empty_dsn, script)
    assert described(empty_dsn) == expected


def printed_here(step: str) -> str:
    """Return what `alembic upgrade STEP --sql` prints with the migrations that are known in this process."""
    printed = StringIO()
    config = Config(output_buffer=printed)
    config.set_main_option("script_location", str(migration._migrations()))
    command.upgrade(config, step, sql=True)
    return printed.getvalue()


def test_printed_sql_between_revisions_goes_step_by_step(empty_dsn: str, dsn: str) -> None:
    with known_to_migrate():
        for step in (HEAD, f"{HEAD}:{NEXT}"):
            execute(empty_dsn, printed_here(step))
        schema.migrate(dsn, revision=NEXT)
    assert described(empty_dsn) == described(dsn)


# "order" is a word of SQL's own.
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["tenant_a", "order"])
def test_printed_sql_names_its_schema_and_no_other(empty_dsn: str, name: str) -> None:
    execute(empty_dsn, printed("-x", f"schema={name}", "upgrade", "head"))
    assert "outbox" in tables(empty_dsn, name)
    assert tables(empty_dsn) | tables(empty_dsn, "public") == set()
    with psycopg.connect(empty_dsn) as connection:
        schema.check(connection, schema=name)


def test_printed_sql_for_another_revision_changes_nothing(dsn: str) -> None:
    with known_to_migrate():
        schema.migrate(dsn, revision=NEXT)
        before = described(dsn)
        with pytest.raises(psycopg.Error, match=f"Schema mailroom is not at revision {HEAD}, where this script begins"):
            execute(dsn, printed_here(f"{HEAD}:{NEXT}"))
    with pytest.raises(psycopg.Error, match="Schema mailroom has a node by now"):
        execute(dsn, printed_here("head"))
    assert described(dsn) == before


@pytest.mark.slow
def test_printed_sql_going_down_refuses_messages_and_discards_when_told(dsn: str, connect: Connect) -> None:
    with connect() as connection:
        Outbox().send(connection, "shipping", 1)
    with pytest.raises(psycopg.Error, match="Not removed: outbox still hold messages"):
        execute(dsn, printed("downgrade", "head:base"))
    assert "outbox" in tables(dsn)
    execute(dsn, printed("-x", "discard=yes", "downgrade", "head:base"))
    assert tables(dsn) <= {"alembic_version"}


def test_staging_tables_of_spark_go_down_too(dsn: str) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "INSERT INTO mailroom.spark_staging (token, name, batch) VALUES (%s, 'n', 1), (gen_random_uuid(), 'n', 2)",
            [token],
        )
        connection.execute(f"CREATE TABLE mailroom.staging_{token} ()".encode())
        schema.migrate(connection, revision="base")
    assert tables(dsn) <= {"alembic_version"}


def test_staging_tables_in_another_schema_go_down_too(dsn: str) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "INSERT INTO mailroom.spark_staging (token, name, batch, schema) VALUES (%s, 'n', 1, 'landing')", [token]
        )
        connection.execute("CREATE SCHEMA landing")
        connection.execute(f"CREATE TABLE landing.staging_{token} ()".encode())
        schema.migrate(connection, revision="base")
        assert connection.execute("SELECT to_regclass(%s)", [f"landing.staging_{token}"]).fetchall() == [(None,)]


def test_failed_migration_leaves_a_transaction_of_psycopg_and_its_settings_as_they_were(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("SET LOCAL search_path = public")
        connection.execute("CREATE VIEW public.mine AS SELECT topic FROM mailroom.dead_letter")
        with pytest.raises(psycopg.errors.DependentObjectsStillExist):
            schema.migrate(connection, revision="base")
        assert connection.execute("SHOW search_path").fetchone() == ("public",)
        assert connection.execute("SHOW lock_timeout").fetchone() == ("0",)
        schema.check(connection)


def test_nothing_is_removed_where_nothing_is(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        schema.migrate(connection, revision="base")
        connection.commit()
        assert connection.execute("SELECT to_regnamespace('mailroom')").fetchone() == (None,)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["postgresql:", "postgresql+psycopg:"])
async def test_connection_string_is_taken_too(empty_dsn: str, expected: list[tuple[Any, ...]], scheme: str) -> None:
    text = empty_dsn.replace("postgresql:", scheme)
    schema.migrate(text)
    assert described(empty_dsn) == expected
    await schema.migrate_async(text, revision="base")
    assert tables(empty_dsn) <= {"alembic_version"}
    await schema.migrate_async(text)
    assert described(empty_dsn) == expected


async def test_connection_string_that_leads_nowhere_says_so() -> None:
    for text, error in (("no string", ConfigurationError), ("host=127.0.0.1 port=1", ConnectionFailed)):
        with pytest.raises(error):
            schema.migrate(text)
        with pytest.raises(error):
            await schema.migrate_async(text)


async def test_async_autocommit_connection_is_refused(empty_dsn: str) -> None:
    async with opened_async(empty_dsn, "psycopg", autocommit=True) as connection:
        with pytest.raises(NotInTransaction, match="autocommit"):
            await schema.migrate_async(connection)


async def test_what_works_is_named_where_something_else_is_given(empty_dsn: str) -> None:
    nothing: Any = None
    with pytest.raises(UnsupportedConnection, match=r"give a psycopg\.Connection, a SQLAlchemy Connection or Session"):
        schema.migrate(nothing)
    async with opened_async(empty_dsn, "AsyncSession asyncpg") as session:
        with pytest.raises(UnsupportedConnection, match=r"give a psycopg\.Connection, a SQLAlchemy Connection or"):
            create_inbox(session, "shipping")
    with pytest.raises(UnsupportedConnection, match=r"give a psycopg\.AsyncConnection, or an AsyncConnection or"):
        await create_inbox_async(nothing, "shipping")
    with pytest.raises(InvalidName):
        await create_inbox_async(nothing, "Shipping")
