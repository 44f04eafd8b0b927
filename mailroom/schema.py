"""The schema of a node: migrate it, check it, add inboxes, and hide it from users' Alembic autogenerate."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from mailroom import locks, settings
from mailroom.errors import ConfigurationError, SchemaError, UnknownInbox
from mailroom.names import DEFAULT_SCHEMA, count, inbox_name, schema_name
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, Statement
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from mailroom.sql.sqlstate import primary_message, sqlstate
from mailroom.topic import Topic, pattern_text

if TYPE_CHECKING:
    from alembic.runtime.environment import EnvironmentContext
    from alembic.runtime.migration import MigrationContext
    from sqlalchemy import Connection

__all__ = [
    "check",
    "check_async",
    "create_inbox",
    "create_inbox_async",
    "current_revision",
    "include_object",
    "migrate",
    "migrate_async",
    "revisions",
    "subscribe",
    "subscribe_async",
    "unsubscribe",
    "unsubscribe_async",
]

# Revisions are RRNN: release, then number. This release's code needs HEAD and also runs on the next release's schema.
RELEASE = 1
HEAD = "0116"

LONGEST_KEEP_S = 3_650 * 86_400

# What an inbox subscribes to: topics, each as a `Topic` or as text, and patterns.
Topics: TypeAlias = Topic[Any, Any] | str | Iterable[Topic[Any, Any] | str]


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
    async with await settings.connect_async(settings.dsn(connection), "migrate") as session, session.transaction():
        return await run_async(session, operation)


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
    statements = _script(schema, (yield from _revision(schema)), revision, discard)
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


def current_revision(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> str | None:
    """Return the revision of the node's schema, or None if there is no such node."""
    return run(connection, _revision(schema_name(schema)))


def revisions() -> list[str]:
    """Return the revisions that this release knows, in order."""
    from alembic.script import ScriptDirectory

    return sorted(script.revision for script in ScriptDirectory(str(_migrations())).walk_revisions())


def check(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> None:
    """Raise `SchemaError`, which names the command to run, unless this release can work on the schema."""
    run(connection, checking(schema_name(schema)))


async def check_async(connection: AnyAsyncConnection, schema: str = DEFAULT_SCHEMA) -> None:
    """`check` on an async connection."""
    await run_async(connection, checking(schema_name(schema)))


def checking(schema: str) -> Operation[None]:
    """`check` as an operation."""
    found = yield from _revision(schema)
    option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
    if found is None:
        raise SchemaError(f"There is no Mailroom schema {schema!r} in this database. Run: mailroom migrate{option}")
    if found < HEAD:
        raise SchemaError(
            f"Schema {schema!r} is at revision {found}, this release needs {HEAD}. Run: mailroom migrate{option}"
        )
    if int(found) // 100 > RELEASE + 1:
        raise SchemaError(
            f"Schema {schema!r} is at revision {found}, which is too new for this program. "
            "Run: pip install -U pg-mailroom"
        )


VERSION_TABLE = Sql("SELECT to_regclass('{schema}.alembic_version') IS NOT NULL", columns=("boolean",))
VERSION = Sql("SELECT version_num FROM {schema}.alembic_version", columns=("text",))


def _revision(schema: str) -> Operation[str | None]:
    # Look it up first: a failed SELECT would abort the caller's transaction.
    [(migrated,)] = yield VERSION_TABLE.at(schema=schema)()
    if not migrated:
        return None
    rows = yield VERSION.at(schema=schema)()
    return str(rows[0][0]) if rows else None


def create_inbox(
    connection: AnyConnection,
    name: str,
    subscribe: Topics = (),
    *,
    schema: str = DEFAULT_SCHEMA,
    backoff_s: float | None = None,
    backoff_max_s: float | None = None,
    max_attempts: int | None = None,
    on_failure: Literal["park", "skip"] | None = None,
    keep_s: float | None = None,
) -> None:
    """Create an inbox with its subscriptions. An existing inbox stays; settings that are given replace its own.

    A failing key waits `backoff_s` seconds (1), and twice as long after each further failure, up to `backoff_max_s`
    (3600). If only one of the two is given, the other is adjusted to it. After `max_attempts` failed attempts (16, at
    least 1) `on_failure` (park) decides: `park` parks the key, which holds its later messages too; `skip` moves only
    that message to `dead_letter`. By default the attempts are spread over about three hours, long enough for most
    outages of a service that the handler calls. `subscribe` holds topics and patterns, as for `subscribe`. With
    `keep_s` the janitor drops messages that wait there for more seconds than that, but none that a transaction holds,
    and none of parked keys: for replies that nobody waits for any more (`Requests`). By default it drops none.

    Users' own migrations may call it: everything happens in the caller's transaction. A concurrent delivery goes on; if
    it was planned before the partition existed, it fails once and is tried again. Raises `InvalidName`,
    `InvalidMessage` for a `max_attempts` below 1, `ConfigurationError` for another `on_failure` or a `keep_s` that is
    not above 0, and `SchemaError` if something else in the schema has the name of the partition, `inbox_<name>`; then
    nothing has changed.
    """
    run(connection, _creation(name, subscribe, schema, backoff_s, backoff_max_s, max_attempts, on_failure, keep_s))


async def create_inbox_async(
    connection: AnyAsyncConnection,
    name: str,
    subscribe: Topics = (),
    *,
    schema: str = DEFAULT_SCHEMA,
    backoff_s: float | None = None,
    backoff_max_s: float | None = None,
    max_attempts: int | None = None,
    on_failure: Literal["park", "skip"] | None = None,
    keep_s: float | None = None,
) -> None:
    """`create_inbox` on an async connection."""
    operation = _creation(name, subscribe, schema, backoff_s, backoff_max_s, max_attempts, on_failure, keep_s)
    await run_async(connection, operation)


def _creation(
    name: str, subscribe: Topics, schema: str, backoff_s: float | None, backoff_max_s: float | None,
    max_attempts: int | None, on_failure: str | None, keep_s: float | None,
) -> Operation[None]:  # fmt: skip
    topics = _topics(subscribe)
    if max_attempts is not None:
        count(max_attempts, "max_attempts")
    if on_failure not in (None, "park", "skip"):
        raise ConfigurationError(f"on_failure is {on_failure!r}; give 'park' or 'skip'.")
    if keep_s is not None:
        _check_keep_s(keep_s)
    return creating_inbox(
        schema_name(schema), inbox_name(name), topics, backoff_s, backoff_max_s, max_attempts, on_failure, keep_s
    )


def _check_keep_s(keep_s: float) -> None:
    if isinstance(keep_s, bool) or not isinstance(keep_s, int | float) or not 0 < keep_s <= LONGEST_KEEP_S:
        raise ConfigurationError(f"keep_s is {keep_s!r}; give seconds above 0, at most {LONGEST_KEEP_S:,} (ten years).")


# The index on this expression finds the oldest messages of an inbox; the primary key (key, clock) finds those of a key.
# An index on the plain column could be used for both. While an inbox is small, the planner would choose it to find a
# key, and that cached plan would later scan the whole inbox. Seen on PostgreSQL 15 and 18.
BY_CLOCK = "(clock + 0)"

# Find what has the partition's name: tables, and types, since each table has a type of its name. In a statement of its
# own after the lock, so that it sees what another session has just created.
FIND = Sql(
    """
WITH parent AS (SELECT oid, relnamespace FROM pg_catalog.pg_class WHERE oid = '{schema}.inbox'::regclass::oid)
SELECT EXISTS (SELECT FROM pg_catalog.pg_inherits AS i
               WHERE i.inhrelid = c.oid AND i.inhparent = p.oid AND NOT i.inhdetachpending
                 AND pg_catalog.pg_get_expr(c.relpartbound, c.oid) = 'FOR VALUES IN (''{inbox}'')')
FROM parent AS p JOIN pg_catalog.pg_class AS c ON c.relnamespace = p.relnamespace AND c.relname = 'inbox_{inbox}'
UNION ALL
SELECT false FROM parent AS p JOIN pg_catalog.pg_type AS t ON t.typnamespace = p.relnamespace
WHERE t.typname = 'inbox_{inbox}' AND t.typrelid = 0::oid
""",
    columns=("boolean",),
)
PREPARE = Sql(
    "SELECT current_setting('lock_timeout'), set_config('lock_timeout', '3s', true)", columns=("text", "text")
)
# Not PARTITION OF, which blocks behind every open delivery; ATTACH does not. The names of the indexes do not begin with
# inbox_, since they could be names of partitions: an inbox may be called wall_pkey.
PARTITION = (
    Sql("CREATE TABLE {schema}.inbox_{inbox} (LIKE {schema}.inbox INCLUDING DEFAULTS INCLUDING COMMENTS)"),
    Sql(
        """
ALTER TABLE {schema}.inbox_{inbox} ADD CONSTRAINT key_of_{inbox} PRIMARY KEY (key, clock), SET (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000)
"""
    ),
    Sql(
        "CREATE INDEX clock_of_{inbox} ON {schema}.inbox_{inbox} ({by_clock})",
        by_clock=BY_CLOCK,
    ),
    Sql("ALTER TABLE {schema}.inbox ATTACH PARTITION {schema}.inbox_{inbox} FOR VALUES IN ('{inbox}')"),
)
RESTORE = Sql("SELECT set_config('lock_timeout', %(before)s::text, true)", columns=("text",))
REGISTER = Sql(
    """
INSERT INTO {schema}.inbox_registry AS r (name, backoff_s, backoff_max_s, max_attempts, on_failure, keep_s)
VALUES ('{inbox}', coalesce(%(backoff_s)s::float8, least(1, %(backoff_max_s)s::float8)),
        coalesce(%(backoff_max_s)s::float8, greatest(3600, %(backoff_s)s::float8)),
        coalesce(%(max_attempts)s::bigint, 16), coalesce(%(on_failure)s::text, 'park'), %(keep_s)s::float8)
ON CONFLICT (name) DO UPDATE SET
    backoff_s = coalesce(%(backoff_s)s::float8, least(r.backoff_s, %(backoff_max_s)s::float8)),
    backoff_max_s = coalesce(%(backoff_max_s)s::float8, greatest(r.backoff_max_s, %(backoff_s)s::float8)),
    max_attempts = coalesce(%(max_attempts)s::bigint, r.max_attempts),
    on_failure = coalesce(%(on_failure)s::text, r.on_failure),
    keep_s = coalesce(%(keep_s)s::float8, r.keep_s)
"""
)
SUBSCRIBE = Sql(
    """
INSERT INTO {schema}.subscription (topic, inbox) SELECT pg_catalog.unnest(%(topics)s::text[]), '{inbox}'
ON CONFLICT DO NOTHING RETURNING topic
""",
    columns=("text",),
)


def creating_inbox(
    schema: str, name: str, topics: list[str], backoff_s: float | None, backoff_max_s: float | None,
    max_attempts: int | None = None, on_failure: str | None = None, keep_s: float | None = None,
) -> Operation[None]:  # fmt: skip
    """`create_inbox` as an operation."""
    yield IN_TRANSACTION
    yield from checking(schema)
    names = {"schema": schema, "inbox": name}
    yield LOCK.at(lock=str(locks.DDL), node=schema)()
    found = yield FIND.at(**names)()
    if (False,) in found:
        raise SchemaError(
            f"Inbox {name!r} cannot be created: its table would be {schema}.inbox_{name}, and something else has that "
            "name. Choose another name for the inbox, or rename what is there."
        )
    if not found:
        [(lock_timeout, _)] = yield PREPARE.at()()
        for statement in PARTITION:
            yield statement.at(**names)()
        yield RESTORE.at()(before=lock_timeout)
    yield REGISTER.at(**names)(
        backoff_s=backoff_s,
        backoff_max_s=backoff_max_s,
        max_attempts=max_attempts,
        on_failure=on_failure,
        keep_s=keep_s,
    )
    yield SUBSCRIBE.at(**names)(topics=topics)


def subscribe(
    connection: AnyConnection, inbox: str, topics: Topics, *, schema: str = DEFAULT_SCHEMA
) -> list[str]:
    """Subscribe an inbox to a topic or to several; return those that it had not subscribed to.

    A topic is text or a `Topic`, and text may be a pattern. Dots part words: `order.*` fits the topics of `order` and
    one more word, `order.#` those that are or begin with `order`, `#` all. There may be several `*`, but not beside a
    `#`, which is the last word. A pattern gets messages and events, never commands or replies. However many fit, the
    inbox gets a message once.

    In the caller's transaction, also for users' own migrations. Once it is committed, what is sent comes; what waits in
    the outbox comes too, unless a delivery had begun with it, and what was delivered does not. Repeating it is
    harmless. Raises `UnknownInbox`, `InvalidName`, and `InvalidMessage` for a topic.
    """
    return run(connection, _subscription(SUBSCRIBE, inbox, topics, schema))


async def subscribe_async(
    connection: AnyAsyncConnection, inbox: str, topics: Topics, *, schema: str = DEFAULT_SCHEMA
) -> list[str]:
    """`subscribe` on an async connection."""
    return await run_async(connection, _subscription(SUBSCRIBE, inbox, topics, schema))


def unsubscribe(
    connection: AnyConnection, inbox: str, topics: Topics, *, schema: str = DEFAULT_SCHEMA
) -> list[str]:
    """End an inbox's subscriptions to these topics and patterns, as they were given; return those that there were.

    In the caller's transaction. What was delivered stays in the inbox. Repeating it is harmless. Raises as `subscribe`.
    """
    return run(connection, _subscription(UNSUBSCRIBE, inbox, topics, schema))


async def unsubscribe_async(
    connection: AnyAsyncConnection, inbox: str, topics: Topics, *, schema: str = DEFAULT_SCHEMA
) -> list[str]:
    """`unsubscribe` on an async connection."""
    return await run_async(connection, _subscription(UNSUBSCRIBE, inbox, topics, schema))


def _topics(given: Topics) -> list[str]:
    # Text is a topic: taken as an iterable, it would be a topic per letter.
    return [pattern_text(topic) for topic in ([given] if isinstance(given, str | Topic) else given)]


def _subscription(statement: Sql, inbox: str, topics: Topics, schema: str) -> Operation[list[str]]:
    return _changing_subscription(statement, schema_name(schema), inbox_name(inbox), _topics(topics))


UNSUBSCRIBE = Sql(
    """
DELETE FROM {schema}.subscription WHERE inbox = '{inbox}' AND topic = ANY (%(topics)s::text[]) RETURNING topic
""",
    columns=("text",),
)


def _changing_subscription(statement: Sql, schema: str, inbox: str, topics: list[str]) -> Operation[list[str]]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from finding(schema, inbox)
    changed = yield statement.at(schema=schema, inbox=inbox)(topics=topics)
    return sorted(topic for (topic,) in changed)


KNOWN = Sql("SELECT to_regclass('{schema}.inbox_{inbox}') IS NOT NULL", columns=("boolean",))


def finding(schema: str, inbox: str) -> Operation[None]:
    """Raise `UnknownInbox` unless there is such an inbox."""
    [(found,)] = yield KNOWN.at(schema=schema, inbox=inbox)()
    if not found:
        option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
        raise UnknownInbox(
            f"There is no inbox {inbox!r} in schema {schema!r}. Create it: mailroom inbox create {inbox}{option}; "
            f"or list the inboxes: mailroom inbox list{option}"
        )


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
    package = Path(__file__).parent
    installed = package / "_migrations"
    return installed if installed.is_dir() else package.parent / "alembic"
