"""A program that works on a node sees all rows of its tables, or gets an error that says so.

Row security hides rows in silence, and work on some of them would lose messages or overtake them. So what reads a node
asks before it begins (`seeing`, and `mailroom.schema.checks`). While it goes on, `row_security = off` has the server
refuse each statement whose rows a policy would choose: claims set it (`inbox.by_key.claim.PINNED`), and so do sessions
of our own (`mailroom.session.settings.SESSION`), but those in which code of users runs. A row that must exist and is
not seen is an error too, whatever the reason (`the_one`).
"""

from collections.abc import Sequence

from mailroom.errors import SchemaError
from mailroom.sql.operation import Operation, Row, Sql

NODE_ROW = "row in the table node"
# Owners, and the members of their role, are bound by policies only if that is forced.
ADVICE = (
    "Mailroom needs to see all rows of its tables: work as their owner or a member of that role (if it is bound too: "
    "ALTER TABLE ... NO FORCE ROW LEVEL SECURITY), or ALTER TABLE ... DISABLE ROW LEVEL SECURITY, or as a superuser "
    "ALTER ROLE ... BYPASSRLS."
)
# The tables of which row security may hide rows from this role. One that it may not read as a whole does not count:
# such as the outbox for a writer, who only inserts.
# D-statements-9: Rows are seen or refused.
HIDDEN = """
       (SELECT pg_catalog.string_agg(c.relname::text, ', '::text ORDER BY c.relname) FROM pg_catalog.pg_class AS c
        WHERE {tables} AND c.relrowsecurity AND row_security_active(c.oid) AND {readable})"""
READABLE = "has_table_privilege(c.oid, 'SELECT'::text)"
SEEN = Sql(
    f"SELECT current_user::text, {HIDDEN}",
    columns=("text", "text"),
    tables="c.relnamespace = '{schema}'::regnamespace AND c.relname = ANY(%(tables)s::text[]::name[])",
    readable="true",
)


def seeing(schema: str, *tables: str) -> Operation[None]:
    """Raise `SchemaError` if row security may hide rows of these tables of the node from this role."""
    [(role, hidden)] = yield SEEN.at(schema=schema)(tables=list(tables))
    refuse_hidden(schema, role, hidden)


def refuse_hidden(schema: str, role: str, hidden: str | None) -> None:
    """Raise `SchemaError` if there are tables in `hidden`, the answer of `HIDDEN`."""
    if hidden:
        raise SchemaError(
            f"Row security hides rows of schema {schema!r} from role {role!r}: {hidden}. {ADVICE}",
            code="MR-row-security",
        )


def the_one(rows: Sequence[Row], what: str, schema: str) -> Row:
    """Return the one row that must exist. Raises `SchemaError` if it is not seen, whatever the reason."""
    if not rows:
        raise unseen(what, schema)
    return rows[0]


def unseen(what: str, schema: str) -> SchemaError:
    """Return the error of a row that must exist and is not seen."""
    return SchemaError(
        f"In schema {schema!r} this role sees no {what}. There always is one: either it was deleted, or it is hidden, "
        "such as by row security. Put it back from a backup, or show it to the role.",
        code="MR-row-missing",
    )
