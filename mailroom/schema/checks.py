"""Check that a node's schema exists, that this release can work with it, and that all of it is seen; and an inbox."""

from mailroom.errors import SchemaError, UnknownInbox
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import HIDDEN, READABLE, refuse_hidden, the_one
from mailroom.values.names import DEFAULT_SCHEMA, meant, schema_name

# Revisions are RRNN: release, then number. This release's code needs HEAD and also runs on the next release's schema.
# D-schema-2: One base, then migrations.
RELEASE = 1
HEAD = "0152"


def checking(schema: str) -> Operation[None]:
    """`check` as an operation, of a checked name."""
    found = yield from reading_revision(schema)
    option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
    if found is None:
        raise SchemaError(
            f"There is no Mailroom schema {schema!r} in this database. Run: mailroom migrate{option}",
            code="MR-no-schema",
        )
    if found < HEAD:
        raise SchemaError(
            f"Schema {schema!r} is at revision {found}, this release needs {HEAD}. Run: mailroom migrate{option}",
            code="MR-schema-too-old",
        )
    if int(found) // 100 > RELEASE + 1:
        raise SchemaError(
            f"Schema {schema!r} is at revision {found}, which is too new for this program. "
            "Run: pip install -U pg-mailroom",
            code="MR-schema-too-new",
        )


# One statement, and before any other: a SELECT that fails would abort the caller's transaction.
# D-schema-4: Names are looked up in the catalog and compared as a whole.
VERSION_TABLE = Sql(
    f"SELECT to_regclass('{{schema}}.alembic_version') IS NOT NULL, to_regclass('{{schema}}.node') IS NOT NULL, "
    f"current_user::text, {HIDDEN}",
    columns=("boolean", "boolean", "text", "text"),
    tables="c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = '{named}'::name)",
    readable=READABLE,
)
VERSION = Sql("SELECT version_num FROM {schema}.alembic_version", columns=("text",))


def _revision(*, schema: str = DEFAULT_SCHEMA) -> Operation[str | None]:
    """Return the revision of the node's schema, or None if there is no such node.

    Raises `SchemaError` if row security hides rows of the node from this role.
    """
    return reading_revision(schema_name(schema))


def _check(*, schema: str = DEFAULT_SCHEMA) -> Operation[None]:
    """Raise `SchemaError`, which says what to do, unless this release and this role can work on the schema."""
    return checking(schema_name(schema))


current_revision, current_revision_async = on_connections("current_revision", _revision)
check, check_async = on_connections("check", _check)


def reading_revision(schema: str) -> Operation[str | None]:
    """`current_revision` as an operation, of a checked name."""
    [(has_table, has_node, role, hidden)] = yield VERSION_TABLE.at(schema=schema, named=schema)()
    refuse_hidden(schema, role, hidden)
    rows = (yield VERSION.at(schema=schema)()) if has_table else []
    if has_node:
        return str(the_one(rows, "row in the table alembic_version", schema)[0])
    return str(rows[0][0]) if rows else None


# What consumers of an inbox read.
READ = (
    *("inbox_{inbox}", "inbox_registry", "key_state", "parked", "attempt", "worker", "stable"),
    *("limits", "slot", "breaker"),
)
OF_THE_INBOX = ", ".join(f"to_regclass('{{schema}}.{table}')::oid" for table in READ)
KNOWN = Sql(
    f"SELECT to_regclass('{{schema}}.inbox_{{inbox}}') IS NOT NULL, current_user::text, {HIDDEN}",
    columns=("boolean", "text", "text"),
    tables=f"c.oid IN ({OF_THE_INBOX})",
    readable=READABLE,
)


# The catalog's, since a consumer may read no other inbox's row.
NAMES = Sql(
    """
SELECT substr(c.relname::text, 7) FROM pg_catalog.pg_inherits AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass('{schema}.inbox')::oid
""",
    columns=("text",),
)


def nearest_inbox(schema: str, name: str) -> Operation[str]:
    """Return the question whether another inbox was meant, as `meant` does."""
    return meant(name, [inbox for (inbox,) in (yield NAMES.at(schema=schema)())])


def finding(schema: str, inbox: str) -> Operation[None]:
    """Raise `UnknownInbox` unless there is such an inbox, and `SchemaError` if this role does not see it whole."""
    [(found, role, hidden)] = yield KNOWN.at(schema=schema, inbox=inbox)()
    if not found:
        option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
        raise UnknownInbox(
            f"There is no inbox {inbox!r} in schema {schema!r}.{(yield from nearest_inbox(schema, inbox))} Create it: "
            f"mailroom inbox create {inbox}{option}; or list the inboxes: mailroom inbox list{option}"
        )
    refuse_hidden(schema, role, hidden)
