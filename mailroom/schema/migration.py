"""Migrate a node's schema, also within users' own migrations, and keep it out of what Alembic generates for them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mailroom import locks, settings
from mailroom.errors import SchemaError
from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.schema.checks import reading_revision
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, Statement
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async, run_in_transaction
from mailroom.sql.sqlstate import primary_message, sqlstate

if TYPE_CHECKING:
    from alembic.runtime.environment import EnvironmentContext
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Connection


def migrate(
    connection: "AnyConnection | str", schema: str = DEFAULT_SCHEMA, revision: str = "head", *, discard: bool = False
) -> None:
    """Migrate the node named `schema` to `revision` in the caller's transaction; `base` removes it.

    With a connection string instead of a connection, this opens a session of its own and commits. A downgrade raises
    `SchemaError` while a table that it drops holds messages, unless `discard` is true. A migration that fails leaves
    the transaction as it was. Raises `NotInTransaction` on an autocommit connection outside a transaction.
    """
    operation = migrating(schema_name(schema), revision, discard)
    if not isinstance(connection, str):
        return run(connection, operation)
    with settings.connect(settings.dsn(connection), "migrate") as session:
        return run(session, operation)


async def migrate_async(
    connection: "AnyAsyncConnection | str",
    schema: str = DEFAULT_SCHEMA,
    revision: str = "head",
    *,
    discard: bool = False,
) -> None:
    """`migrate` on an async connection, or with a connection string."""
    operation = migrating(schema_name(schema), revision, discard)
    if not isinstance(connection, str):
        return await run_async(connection, operation)
    async with await settings.connect_async(settings.dsn(connection), "migrate") as session:
        return await run_in_transaction(session, operation)


# Of two concurrent migrations of one node, the second one waits and then finds nothing to do.
LOCK = Sql("SELECT pg_advisory_xact_lock({lock}, hashtext('{node}')) IS NULL", columns=("boolean",))
SETTINGS = Sql(
    "SELECT current_setting('search_path'), current_setting('lock_timeout'), "
    "current_setting('standard_conforming_strings')",
    columns=("text",) * 3,
)
SET_BACK = Sql(
    "SELECT set_config('search_path', %(path)s::text, true), set_config('lock_timeout', %(timeout)s::text, true), "
    "set_config('standard_conforming_strings', %(strings)s::text, true)",
    columns=("text",) * 3,
)
SAVEPOINT = Sql("SAVEPOINT mailroom_migration")
FORGET = Sql("RELEASE SAVEPOINT mailroom_migration")
ROLL_BACK = Sql("ROLLBACK TO SAVEPOINT mailroom_migration")


def migrating(schema: str, revision: str, discard: bool) -> Operation[None]:
    """`migrate` as an operation: the statements of alembic's offline mode, so that any connection can run them."""
    yield IN_TRANSACTION
    yield LOCK.at(lock=str(locks.DDL), node=schema)()
    [(path, timeout, strings)] = yield SETTINGS.at()()
    statements = _script(schema, (yield from reading_revision(schema)), revision, discard)
    yield SAVEPOINT.at()()
    try:
        for statement in statements:
            yield Statement(statement.replace("%", "%%"), ())()
    except Exception as error:
        yield ROLL_BACK.at()()
        if sqlstate(error) in (HOLDS_MESSAGES, UNKNOWN_ENCODING):
            raise SchemaError(primary_message(error)) from error
        raise
    yield FORGET.at()()
    yield SET_BACK.at()(path=path, timeout=timeout, strings=strings)


class _Statements(StringIO):
    """Receives what alembic prints in its offline mode: one statement or one comment per call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def write(self, text: str) -> int:
        if not text.startswith("--"):
            self.found.append(text.strip())
        return len(text)


def _script(schema: str, current: str | None, revision: str, discard: bool) -> list[str]:
    """Return the statements that bring a node from one revision to another."""
    from alembic.config import Config

    from alembic import command

    if current is None and revision == "base":
        return []
    statements = _Statements()
    config = Config(output_buffer=statements)
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    # The caller owns the transaction.
    config.attributes.update(schema=schema, discard=discard, transactional_ddl=False)
    way = revision if current is None else f"{current}:{revision}"
    with _outer_run_kept():
        if revision == "base" or (revision not in ("head", "heads") and revision < (current or "")):
            command.downgrade(config, way, sql=True)
        else:
            command.upgrade(config, way, sql=True)
    return statements.found


@contextmanager
def _outer_run_kept() -> Iterator[None]:
    # Alembic's `op` and `context` are global. A run inside a user's own migration would leave them empty.
    from alembic import context, op

    outer = [proxy for module in (op, context) if (proxy := getattr(module, "_proxy", None)) is not None]
    try:
        yield
    finally:
        for proxy in outer:
            proxy._install_proxy()


def run_migrations(context: "EnvironmentContext", connection: "Connection | None", schema: str) -> None:
    """Run the migrations that `context` asks for; without a connection, print them. Called by alembic's env.py only."""
    context.configure(
        connection=connection,
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # otherwise each % is doubled
        transactional_ddl=context.config.attributes.get("transactional_ddl"),
        version_table="alembic_version",
        version_table_schema=schema,
    )
    with context.begin_transaction():
        for statement in _opening(schema):
            context.execute(statement)
        if context.is_offline_mode():
            # A tuple would mean several branches; there is only one.
            context.execute(_starting(schema, cast("str | None", context.get_starting_revision_argument())))
        context.run_migrations()


def _opening(schema: str) -> tuple[str, ...]:
    return (
        LOCK.at(lock=str(locks.DDL), node=schema).sql,
        f"""SELECT set_config('search_path', '"{schema}", pg_catalog, pg_temp', true)""",
        # A statement that waits for a lock blocks everybody behind it, so the wait is short.
        "SELECT set_config('lock_timeout', '5s', true)",
        "SELECT set_config('standard_conforming_strings', 'on', true)",
        f'CREATE SCHEMA IF NOT EXISTS "{schema}"',
    )


def _starting(schema: str, revision: str | None) -> str:
    """Return the statement that fails unless the node is at the revision where a script begins."""
    if revision is None:
        # Alembic's empty table stays when a node is removed. If it is missing, look for our first table.
        return f"""
DO $$ BEGIN
    IF current_setting('server_encoding') = 'SQL_ASCII' THEN
        RAISE EXCEPTION USING ERRCODE = '{UNKNOWN_ENCODING}', MESSAGE = 'This database does not know the encoding of '
            'its text (SQL_ASCII), so it would accept keys that nobody can read. Create another one: '
            'CREATE DATABASE ... ENCODING ''UTF8'' TEMPLATE template0';
    END IF;
    DROP TABLE IF EXISTS "{schema}".alembic_version;
END $$"""
    return f"""
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM alembic_version WHERE version_num = '{revision}') THEN
        RAISE EXCEPTION 'Schema {schema} is not at revision {revision}, where this script begins.';
    END IF;
END $$"""


# SQLSTATEs of our own.
HOLDS_MESSAGES = "MR001"
UNKNOWN_ENCODING = "MR002"


def refuse_to_drop_messages(context: "MigrationContext", tables: Collection[str]) -> None:
    """Fail if any of the tables holds a row, unless the run discards them."""
    if context.config is not None and context.config.attributes.get("discard"):
        return
    checks = ", ".join(f"('{table}', EXISTS (SELECT FROM {table}))" for table in tables)
    # Lock before the check: otherwise the DROP would lose what a writer commits in between.
    context.execute(f"""
DO $$
DECLARE
    holding text;
BEGIN
    LOCK TABLE {", ".join(tables)};
    SELECT string_agg(name, ', ') INTO holding FROM (VALUES {checks}) AS t (name, holds) WHERE holds;
    IF holding IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '{HOLDS_MESSAGES}', MESSAGE = concat('Not removed: ', holding,
            ' still hold messages. Have them delivered and reaped first, or delete them for good: '
            'mailroom migrate --revision base --discard (alembic -x discard=yes downgrade base).');
    END IF;
END $$""")


def grants_moved(table: str, view: str) -> str:
    """Return the statement that gives the rights of roles that write `table` to `view`, and takes them from `table`.

    Roles that may deliver or keep others from it, as the dispatcher's and an operator's, keep theirs, and so do roles
    that only read.
    """
    return f"""
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role,
               string_agg(a.privilege_type, ', ') AS rights
        FROM pg_class AS c, aclexplode(c.relacl) AS a
        WHERE c.oid = '{table}'::regclass AND a.grantee <> c.relowner
          AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
          AND (a.grantee = 0 OR NOT has_table_privilege(a.grantee, 'dispatch_turn', 'UPDATE'))
        GROUP BY a.grantee HAVING bool_or(a.privilege_type <> 'SELECT')
    LOOP
        EXECUTE format('GRANT %s ON {view} TO %s', given.rights, given.role);
        EXECUTE format('REVOKE %s ON {table} FROM %s', given.rights, given.role);
    END LOOP;
END $$"""


def revisions() -> list[str]:
    """Return the revisions that this release knows, in order."""
    from alembic.script import ScriptDirectory

    return sorted(script.revision for script in ScriptDirectory(str(_migrations())).walk_revisions())


def include_object(
    object: object,
    name: str | None,
    type_: str,
    reflected: bool,
    compare_to: object,
    *,
    schemas: Collection[str] = (DEFAULT_SCHEMA,),
) -> bool:
    """Exclude a node's tables from the autogenerate of users' own migrations: `context.configure(include_object=...)`.

    For other schema names pass `functools.partial(include_object, schemas={"tenant_a", "tenant_b"})`.
    """
    table: Any = object if type_ == "table" else getattr(object, "table", None)
    return getattr(table, "schema", None) not in schemas


def _migrations() -> Path:
    """Return the directory of the migrations: in the installed package, or in the checkout of an editable install."""
    package = Path(__file__).parents[1]
    installed = package / "_migrations"
    return installed if installed.is_dir() else package.parent / "alembic"
