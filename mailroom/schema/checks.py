"""Check that a node's schema is there, and at a revision that this release can work on, and that an inbox is there."""

from mailroom.errors import SchemaError, UnknownInbox
from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async

# Revisions are RRNN: release, then number. This release's code needs HEAD and also runs on the next release's schema.
RELEASE = 1
HEAD = "0145"


def current_revision(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> str | None:
    """Return the revision of the node's schema, or None if there is no such node."""
    return run(connection, reading_revision(schema_name(schema)))


def check(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> None:
    """Raise `SchemaError`, which names the command to run, unless this release can work on the schema."""
    run(connection, checking(schema_name(schema)))


async def check_async(connection: AnyAsyncConnection, schema: str = DEFAULT_SCHEMA) -> None:
    """`check` on an async connection."""
    await run_async(connection, checking(schema_name(schema)))


def checking(schema: str) -> Operation[None]:
    """`check` as an operation."""
    found = yield from reading_revision(schema)
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


def reading_revision(schema: str) -> Operation[str | None]:
    """`current_revision` as an operation."""
    # Look it up first: a failed SELECT would abort the caller's transaction.
    [(migrated,)] = yield VERSION_TABLE.at(schema=schema)()
    if not migrated:
        return None
    rows = yield VERSION.at(schema=schema)()
    return str(rows[0][0]) if rows else None


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
