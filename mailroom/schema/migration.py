"""Migrate a node's schema, also within users' own migrations, and keep it out of what Alembic generates for them."""

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg

from mailroom.errors import SchemaError
from mailroom.order.sequences import Numbers, raising_sequences
from mailroom.schema.acts import MIGRATE
from mailroom.schema.audit import checked_actor, person
from mailroom.schema.checks import reading_revision
from mailroom.schema.lock_phase import IN_USE, alone_phase, lock_phase, locked_by
from mailroom.session import settings
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, Statement
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async, run_in_transaction
from mailroom.sql.sqlstate import primary_message, sqlstate
from mailroom.values.names import DEFAULT_SCHEMA, schema_name
from mailroom.values.numbers import seconds

if TYPE_CHECKING:
    from alembic.runtime.environment import EnvironmentContext
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Connection


logger = logging.getLogger("mailroom.schema")

LOCK_TIMEOUT_S = 60.0
LONGEST_LOCK_TIMEOUT_S = 10**9


def migrate(
    connection: "AnyConnection | str",
    *,
    schema: str = DEFAULT_SCHEMA,
    revision: str = "head",
    discard: bool = False,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    actor: str | None = None,
    why: str | None = None,
) -> None:
    """Migrate the node named `schema` to `revision` in the caller's transaction; `base` removes it.

    At `head`, sequences that are behind their rows are raised beyond them: the rows were copied here without them. With
    a connection string instead of a connection, this opens a session of its own and commits. Programs may keep running:
    the tables that change are locked first, in short tries between which programs go on, until `lock_timeout_s` seconds
    have passed. Then it raises `SchemaError`, which says who uses which table. Until then the server says so by
    notices, which are logged as warnings if the session is Mailroom's own.

    A downgrade raises `SchemaError` while a table that it drops holds messages, unless `discard` is true. A migration
    that fails leaves the transaction as it was. Raises `NotInTransaction` on an autocommit connection outside a
    transaction, `ConfigurationError` for a `lock_timeout_s` below 0, and `InvalidMessage` for a wrong `actor` (by
    default user@host of this process) or `why`, which go into the table `audit`.
    """
    operation = migrating(schema_name(schema), revision, discard, lock_timeout_s, actor, why)
    if not isinstance(connection, str):
        run(connection, operation)
        return
    with settings.connect(settings.dsn(connection), "migrate") as session:
        session.add_notice_handler(telling(logger.warning))
        run(session, operation)


async def migrate_async(
    connection: "AnyAsyncConnection | str",
    *,
    schema: str = DEFAULT_SCHEMA,
    revision: str = "head",
    discard: bool = False,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    actor: str | None = None,
    why: str | None = None,
) -> None:
    """`migrate` on an async connection, or with a connection string."""
    operation = migrating(schema_name(schema), revision, discard, lock_timeout_s, actor, why)
    if not isinstance(connection, str):
        await run_async(connection, operation)
        return
    async with await settings.connect_async(settings.dsn(connection), "migrate") as session:
        session.add_notice_handler(telling(logger.warning))
        await run_in_transaction(session, operation)


def telling(tell: Callable[[str], object]) -> Callable[[psycopg.errors.Diagnostic], None]:
    """Return a handler of psycopg's notices that reports which sessions a migration waits for."""

    def handle(notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "INFO":
            tell(str(notice.message_primary))

    return handle


SETTINGS = Sql(
    "SELECT current_setting('search_path'), current_setting('lock_timeout'), current_setting('statement_timeout'), "
    "current_setting('standard_conforming_strings'), current_setting('role')",
    columns=("text",) * 5,
)
SET_BACK = Sql(
    "SELECT set_config('search_path', %(path)s::text, true), set_config('lock_timeout', %(lock)s::text, true), "
    "set_config('statement_timeout', %(statement)s::text, true), "
    "set_config('standard_conforming_strings', %(strings)s::text, true), set_config('role', %(role)s::text, true)",
    columns=("text",) * 5,
)
# With wal_level = minimal a commit writes small new files into the log as they are. A sequence that was used in the
# same transaction says there that its next 32 numbers are logged. They are not: a crash would give them out again. Of
# files that are synced instead nothing is said. At any other level this changes nothing.
SYNC_NEW_FILES = Sql("SELECT set_config('wal_skip_threshold', '0', true)", columns=("text",))
SAVEPOINT = Sql("SAVEPOINT mailroom_migration")
FORGET = Sql("RELEASE SAVEPOINT mailroom_migration")
ROLL_BACK = Sql("ROLLBACK TO SAVEPOINT mailroom_migration")


def migrating(
    schema: str,
    revision: str,
    discard: bool,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    actor: str | None = None,
    why: str | None = None,
) -> Operation[list[Numbers]]:
    """`migrate` as an operation: the statements of alembic's offline mode, so that any connection can run them.

    Returns the sequences that were raised.
    """
    seconds(lock_timeout_s, "lock_timeout_s", LONGEST_LOCK_TIMEOUT_S, zero=True)
    by = _By(checked_actor(actor, why), why)
    return _migrating(schema, revision, discard, lock_timeout_s, by)


@dataclass(frozen=True, slots=True)
class _By:
    """Who migrates, and why, for the audit."""

    actor: str
    why: str | None = None


def _migrating(schema: str, revision: str, discard: bool, lock_timeout_s: float, by: _By) -> Operation[list[Numbers]]:
    yield IN_TRANSACTION
    [(path, lock, statement, strings, role)] = yield SETTINGS.at()()
    yield SYNC_NEW_FILES.at()()
    yield SAVEPOINT.at()()
    while True:
        try:
            for each in _alone(schema, lock_timeout_s):
                yield Statement(each, ())()
            current = yield from reading_revision(schema)
            _refuse_unknown(schema, current)
            for each in _script(schema, current, revision, discard, lock_timeout_s, by):
                yield Statement(each.replace("%", "%%"), ())()
            break
        except Exception as error:
            yield ROLL_BACK.at()()
            state = sqlstate(error)
            if code := REFUSALS.get(state):
                raise SchemaError(primary_message(error), code=code) from error
            if state != ELSEWHERE_BY_NOW:
                raise
    yield FORGET.at()()
    raised = (yield from raising_sequences(schema)) if revision == "head" else []
    yield SET_BACK.at()(path=path, lock=lock, statement=statement, strings=strings, role=role)
    return raised


def _refuse_unknown(schema: str, revision: str | None) -> None:
    """Raise `SchemaError` for a node at a revision that this release does not know."""
    known = revisions()
    if revision is None or revision in known:
        return
    if revision < known[0]:
        raise SchemaError(
            f"Schema {schema!r} is at revision {revision}, from before the first release, which begins at {known[0]}. "
            f"Make a new database; or check out the last commit that has migrations before {known[0]}, and run its "
            "mailroom migrate.",
            code="MR-schema-unreleased",
        )
    raise SchemaError(
        f"Schema {schema!r} is at revision {revision}, which this release does not know. "
        "Run: pip install -U pg-mailroom",
        code="MR-schema-too-new",
    )


class _Printed(StringIO):
    """Receives what alembic prints in its offline mode: one statement or one comment per call."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)

    @property
    def statements(self) -> list[str]:
        return [text.strip() for text in self.pieces if not text.startswith("--")]


def _script(
    schema: str, current: str | None, revision: str, discard: bool, lock_timeout_s: float, by: _By | None = None
) -> list[str]:
    """Return the statements that bring a node from one revision to another."""
    from alembic.config import Config

    from alembic import command

    if current is None and revision == "base":
        return []
    printed = _Printed()
    config = Config(output_buffer=printed)
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    # The caller owns the transaction.
    config.attributes.update(schema=schema, discard=discard, lock_timeout_s=lock_timeout_s, by=by)
    config.attributes["transactional_ddl"] = False
    way = revision if current is None else f"{current}:{revision}"
    with _outer_run_kept():
        if revision == "base" or (revision not in ("head", "heads") and revision < (current or "")):
            command.downgrade(config, way, sql=True)
        else:
            command.upgrade(config, way, sql=True)
    return printed.statements


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
    lock_timeout_s: float = context.config.attributes.get("lock_timeout_s", LOCK_TIMEOUT_S)
    seconds(lock_timeout_s, "lock_timeout_s", LONGEST_LOCK_TIMEOUT_S, zero=True)
    printed = _Printed()
    context.configure(
        connection=connection,
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # otherwise each % is doubled
        transactional_ddl=context.config.attributes.get("transactional_ddl"),
        version_table="alembic_version",
        version_table_schema=schema,
        output_buffer=printed,
    )
    with context.begin_transaction():
        for statement in _alone(schema, lock_timeout_s):
            context.execute(statement)
        begun = len(printed.pieces)
        if context.is_offline_mode():
            # A tuple would mean several branches; there is only one.
            current = cast("str | None", context.get_starting_revision_argument())
        else:
            current, names = _changed(context, schema)
            context.execute(lock_phase(schema, names, lock_timeout_s))
        for statement in (*_opening(schema), _starting(schema, current), _becoming_owner(schema)):
            context.execute(statement)
        context.run_migrations()
        context.execute(_audited(schema, current, context.config.attributes.get("by") or _By(person())))
    if context.is_offline_mode():
        names = locked_by(text for text in printed.pieces[begun:] if not text.startswith("--"))
        printed.pieces.insert(begun, f"{lock_phase(schema, names, lock_timeout_s)};\n\n")
        for text in printed.pieces:
            (context.config.output_buffer or sys.stdout).write(text)


def _changed(context: "EnvironmentContext", schema: str) -> tuple[str | None, list[str]]:
    """Return the database's revision, where the current alembic command begins, and what that will lock."""
    current = context.get_context().get_current_revision()
    try:
        target = context.get_revision_argument()
    except KeyError:  # a command that goes nowhere, such as `alembic current`
        return current, []
    _refuse_unknown(schema, current)
    target = str(target or "base")
    if target.startswith("+"):  # which offline mode does not know
        known = revisions()
        target = known[known.index(current) + int(target) if current in known else int(target) - 1]
    return current, locked_by(_script(schema, current, target, True, LOCK_TIMEOUT_S))


def _alone(schema: str, lock_timeout_s: float) -> tuple[str, ...]:
    """Of two concurrent migrations of one node, the second one waits and then finds nothing to do.

    It keeps no lock: what it waits for later would be held by those who wait for that lock. So `_starting` looks again.
    """
    return (
        f"""SELECT set_config('search_path', '"{schema}", pg_catalog, pg_temp', true)""",
        # The waits are short by themselves, and what follows them does not wait.
        "SELECT set_config('statement_timeout', '0', true)",
        alone_phase(schema, lock_timeout_s),
    )


def _opening(schema: str) -> tuple[str, ...]:
    return (
        # A statement that waits for a lock blocks all that come after it, so the wait is short.
        "SELECT set_config('lock_timeout', '5s', true)",
        "SELECT set_config('standard_conforming_strings', 'on', true)",
        f'CREATE SCHEMA IF NOT EXISTS "{schema}"',
    )


def _becoming_owner(schema: str) -> str:
    """Return the statement after which a member of the owner's role, or a superuser, makes what is the owner's.

    Not before the locks: the role of the login may see more of who holds them.
    """
    return f"""
SELECT set_config('role', pg_get_userbyid(c.relowner), true) FROM pg_class AS c
WHERE c.oid = to_regclass('"{schema}".node') AND pg_get_userbyid(c.relowner) <> current_user"""


def _starting(schema: str, revision: str | None) -> str:
    """Return the statement that fails unless the node is at the revision where a script begins.

    It runs under the locks: until then another migration may have been there.
    """
    if revision is not None:
        return f"""
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM alembic_version WHERE version_num = '{revision}') THEN
        RAISE EXCEPTION USING ERRCODE = '{ELSEWHERE_BY_NOW}',
            MESSAGE = 'Schema {schema} is not at revision {revision}, where this script begins.';
    END IF;
END $$"""
    # Alembic's empty table stays when a node is removed. If it is missing, look for our first table.
    return f"""
DO $$ BEGIN
    IF current_setting('server_encoding') = 'SQL_ASCII' THEN
        RAISE EXCEPTION USING ERRCODE = '{UNKNOWN_ENCODING}', MESSAGE = 'This database does not know the encoding of '
            'its text (SQL_ASCII), so it would accept keys that nobody can read. Create another one: '
            'CREATE DATABASE ... ENCODING ''UTF8'' TEMPLATE template0';
    END IF;
    IF to_regclass('"{schema}".alembic_version') IS NOT NULL THEN
        IF EXISTS (SELECT FROM "{schema}".alembic_version) THEN
            RAISE EXCEPTION USING ERRCODE = '{ELSEWHERE_BY_NOW}',
                MESSAGE = 'Schema {schema} has a node by now, and this script makes a new one.';
        END IF;
    END IF;
    DROP TABLE IF EXISTS "{schema}".alembic_version;
END $$"""


def _audited(schema: str, before: str | None, by: _By) -> str:
    """Return the statement that writes into the audit what was migrated; it is in scripts of alembic's, too."""
    actor, why = (f"'{text.replace(chr(39), 2 * chr(39))}'" if text else "NULL" for text in (by.actor, by.why))
    return f"""
DO $$ BEGIN
    IF to_regclass('"{schema}".audit') IS NOT NULL THEN
        INSERT INTO audit (actor, action, messages, change, reason)
        SELECT {actor}, '{MIGRATE.words}', 0, concat('{before or "none"} -> ', version_num), {why}
        FROM alembic_version WHERE version_num <> '{before or "none"}';
    END IF;
END $$"""


# SQLSTATEs of our own.
# D-schema-1: `migrate` is an operation.
HOLDS_MESSAGES = "MR001"
UNKNOWN_ENCODING = "MR002"
ELSEWHERE_BY_NOW = "MR004"
REFUSALS = {
    HOLDS_MESSAGES: "MR-schema-holds-messages",
    UNKNOWN_ENCODING: "MR-encoding-unknown",
    IN_USE: "MR-schema-in-use",
}


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


def refuse_to_drop_watches(context: "MigrationContext") -> None:
    """Fail if tables are watched, unless the run discards them."""
    if context.config is not None and context.config.attributes.get("discard"):
        return
    # Without this, the error would name functions and triggers, but no command.
    context.execute(f"""
DO $$
DECLARE
    watched text;
BEGIN
    SELECT string_agg(DISTINCT t.tgrelid::regclass::text, ', ') INTO watched FROM pg_trigger AS t
    WHERE t.tgfoid = 'watch()'::regprocedure AND t.tgparentid = 0;
    IF watched IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '{HOLDS_MESSAGES}', MESSAGE = concat('Not removed: watched are ', watched,
            '. End that first (mailroom unwatch TABLE), or have it ended: mailroom migrate --revision base --discard '
            '(alembic -x discard=yes downgrade base).');
    END IF;
END $$""")


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
