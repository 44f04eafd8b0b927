"""The node itself: its name, and what only an operator can say about it.

That is that it is a copy, was moved or was put back, and how far its clock may go.
"""

from mailroom.links.restored import NewId, saying_copied, saying_moved, saying_restored
from mailroom.order.clock import advancing_clock
from mailroom.schema import acts, checking
from mailroom.schema.audit import auditing
from mailroom.schema.node import beginning_act
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.sight import NODE_ROW, the_one
from mailroom.values.names import DEFAULT_SCHEMA, node_name, schema_name

__all__ = [
    "NewId",
    "advance_clock",
    "advance_clock_async",
    "new_node_id",
    "new_node_id_async",
    "node_moved",
    "node_moved_async",
    "node_restored",
    "node_restored_async",
    "rename_node",
    "rename_node_async",
]

# In one statement with its old name, which FOR UPDATE makes the last one that was committed.
RENAME = Sql(
    """
WITH before AS MATERIALIZED (SELECT name FROM {schema}.node FOR UPDATE)
UPDATE {schema}.node AS n SET name = %(name)s::text FROM before RETURNING before.name
""",
    columns=("text",),
)


def _renaming(name: str, *, actor: str, why: str | None = None, schema: str = DEFAULT_SCHEMA) -> Operation[str]:
    """Give the node another name, in the caller's transaction, and return the one it had.

    A node's name is for people, and the node reads other nodes under it (`mailroom link add`). Existing links keep the
    old name. `actor` says who acts, and `why` the reason; both go into the audit. Raises `InvalidName`,
    `InvalidMessage` for an `actor` or `why` that cannot be stored, and `SchemaError`.
    """
    return _renaming_to(schema_name(schema), node_name(name), actor, why)


def _renaming_to(schema: str, name: str, actor: str, why: str | None) -> Operation[str]:
    yield from beginning_act(schema, actor, why)
    (before,) = the_one((yield RENAME.at(schema=schema)(name=name)), NODE_ROW, schema)
    if before != name:
        yield from auditing(schema, acts.NODE_RENAME, [(None, None, 0)], actor, why, f"{before} -> {name}")
    return str(before)


def _copied(
    *, actor: str, why: str | None = None, dry_run: bool = False, schema: str = DEFAULT_SCHEMA
) -> Operation[NewId]:
    """Turn a copy of a node that lives on into another node, in the caller's transaction.

    It gets an id of its own, and loses its links: they, and what was stamped for their readers, belong
    to the node that was copied. Everything else stays. With `dry_run` nothing changes, and the result says what would
    be given up. `actor` says who acts, and `why` the reason; both go into the audit. Nothing is delivered before the
    caller commits.
    """
    schema = schema_name(schema)
    return _checked(schema, saying_copied(schema, actor=actor, why=why, dry_run=dry_run))


def _moved(
    *, actor: str, why: str | None = None, dry_run: bool = False, schema: str = DEFAULT_SCHEMA
) -> Operation[bool]:
    """Let readers in again after the node was moved to another database or server, if it lives only there.

    In the caller's transaction; its clock jumps ahead, and each reader compares again. Returns False, and does nothing,
    if the node is where it was. With `dry_run` it only returns which.
    """
    schema = schema_name(schema)
    return _checked(schema, saying_moved(schema, actor=actor, why=why, dry_run=dry_run))


def _restored(
    *, actor: str, above: int = 0, why: str | None = None, dry_run: bool = False, schema: str = DEFAULT_SCHEMA
) -> Operation[int]:
    """Say that the node was put back to an earlier time, if Mailroom cannot know it; in the caller's transaction.

    That is so after a snapshot of a running machine, a dump restored into the same database, or changes by hand. The
    node takes a new incarnation, beyond `above` (one that its readers have seen), and each reader finds out what it has
    that the node lost. Returns the incarnation; with `dry_run` nothing changes. Raises `MailroomError` for a node in
    another database or server: `node_moved` comes first.
    """
    schema = schema_name(schema)
    return _checked(schema, saying_restored(schema, above=above, actor=actor, why=why, dry_run=dry_run))


def _advancing(
    clock: int, *, actor: str, why: str | None = None, dry_run: bool = False, schema: str = DEFAULT_SCHEMA
) -> Operation[int]:
    """Let the node's clock go on after `clock`, in the caller's transaction; return what it had reached before.

    For a node that is to follow another one, whose clock is further ahead than a send or a message may raise this one
    at once: then what was refused is taken. A clock that is beyond `clock` stays, and no clock ever goes back. With
    `dry_run` nothing changes. `actor` says who acts, and `why` the reason; both go into the audit. Nothing is delivered
    before the caller commits. Raises `ConfigurationError` for a clock that is not from 0 to 2^62 + 2^61.
    """
    return _advancing_to(schema_name(schema), clock, actor, why, dry_run)


def _advancing_to(schema: str, clock: int, actor: str, why: str | None, dry_run: bool) -> Operation[int]:
    yield from beginning_act(schema, actor, why)
    before = yield from advancing_clock(schema, clock, dry_run=dry_run)
    if not dry_run:
        yield from auditing(schema, acts.NODE_ADVANCE, [(None, None, 0)], actor, why, f"{before} -> {clock}")
    return before


rename_node, rename_node_async = on_connections("rename_node", _renaming)
new_node_id, new_node_id_async = on_connections("new_node_id", _copied)
node_moved, node_moved_async = on_connections("node_moved", _moved)
node_restored, node_restored_async = on_connections("node_restored", _restored)
advance_clock, advance_clock_async = on_connections("advance_clock", _advancing)


def _checked(schema: str, operation: Operation[T]) -> Operation[T]:
    yield from checking(schema)
    return (yield from operation)
