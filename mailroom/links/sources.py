"""The reader's side: which nodes this one reads."""

from mailroom.errors import ConfigurationError
from mailroom.links.service import service_name
from mailroom.links.start import noting_place
from mailroom.links.unknown import unknown_link
from mailroom.names import node_name, schema_name
from mailroom.order import clock
from mailroom.order.total import guarding_order, raising_stable, starting_origin
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor, differences
from mailroom.schema.checks import checking
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql

BEFORE = Sql(
    """
SELECT o.reader, o.schema, o.service, o.link, n.name,
       EXISTS (SELECT FROM {schema}.bridge_in AS b WHERE b.origin = o.number)
FROM {schema}.node AS n
LEFT JOIN {schema}.origin AS o ON o.name = %(name)s::text
""",
    columns=("text", "text", "text", "bigint", "text", "boolean"),
)
ADD = Sql(
    """
INSERT INTO {schema}.origin AS o (name, service, schema, reader)
VALUES (%(name)s::text, %(service)s::text, %(there)s::text, %(reader)s::text)
ON CONFLICT (name) DO UPDATE SET service = excluded.service, schema = excluded.schema, reader = excluded.reader
RETURNING o.xmax::text = '0'
""",
    columns=("boolean",),
)


def adding(
    schema: str, source: str, *, service: str | None, reader: str | None, source_schema: str, actor: str,
    why: str | None,
) -> Operation[bool]:  # fmt: skip
    """`Links.add` as an operation."""
    check_actor(actor, why)
    name, there = node_name(source), schema_name(source_schema)
    if service is not None:
        service_name(service)
    if reader is not None:
        node_name(reader)
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from noting_place(schema)
    [(was, was_there, was_service, link, own, is_bridge)] = yield BEFORE.at(schema=schema)(name=name)
    if is_bridge:
        raise ConfigurationError(
            f"{name} is a bridge into this node, so a source needs another name.", code="MR-bridge-name-taken"
        )
    # The name that the node has now, since links keep theirs when it is renamed.
    known_as = reader or was or own
    # What was received is noted by the rows of this link, and another one has rows of its own.
    if link is not None and (known_as, there) != (was, was_there):
        raise ConfigurationError(
            f"{name} knows this node as {was}, in its schema {was_there}, and what came is noted by that link. To read "
            f"another one: mailroom link remove {name} --source, then mailroom link add {name}",
            code="MR-link-added-otherwise",
        )
    yield from guarding_order(schema)
    [(is_new,)] = yield ADD.at(schema=schema)(name=name, service=service, there=there, reader=known_as)
    yield from starting_origin(schema, name)
    before = None if is_new else {"service": was_service, "schema": was_there, "reader": was}
    change = differences(before, {"service": service, "schema": there, "reader": known_as})
    yield from auditing(schema, acts.LINK_ADD, [(None, name, 0)], actor, why, change)
    return bool(is_new)


HOLD = Sql(
    "SELECT number, state FROM {schema}.origin WHERE name = %(name)s::text FOR UPDATE", columns=("bigint", "text")
)


def _holding(schema: str, source: str) -> Operation[tuple[int, str]]:
    """Lock the source, after the transaction that receives now: the next one sees what is changed."""
    yield IN_TRANSACTION
    yield from checking(schema)
    yield clock.DISPATCH_LOCK.at(schema=schema)()
    rows = yield HOLD.at(schema=schema)(name=node_name(source))
    if not rows:
        raise (yield from unknown_link(schema, source, f"This node reads no node {source}.", ["source"]))
    [(number, state)] = rows
    return number, state


REMOVE = Sql(
    """
WITH receipts AS (DELETE FROM {schema}.receipt WHERE origin = %(number)s::bigint),
known AS (DELETE FROM {schema}.known WHERE origin = %(number)s::bigint),
positions AS (DELETE FROM {schema}.bridge_position WHERE origin = %(number)s::bigint),
marks AS (DELETE FROM {schema}.bridge_mark WHERE origin = %(number)s::bigint),
bridge AS (DELETE FROM {schema}.bridge_in WHERE origin = %(number)s::bigint)
DELETE FROM {schema}.origin WHERE number = %(number)s::bigint
"""
)


def removing_source(
    schema: str, source: str, *, actor: str, why: str | None, dry_run: bool, act: acts.Act = acts.LINK_REMOVE
) -> Operation[None]:
    """Read a node, or a broker, no longer, and forget what came from it. What is in inboxes stays there."""
    check_actor(actor, why)
    number, _ = yield from _holding(schema, source)
    if not dry_run:
        yield REMOVE.at(schema=schema)(number=number)
        yield from raising_stable(schema)
        yield from auditing(schema, act, [(None, source, 0)], actor, why)


STATE = Sql(
    """
UPDATE {schema}.origin
SET state = %(state)s::text, trouble = NULL, why = %(why)s::text,
    since = CASE WHEN %(why)s::text IS NOT NULL THEN clock_timestamp() END
WHERE number = %(number)s::bigint
"""
)


def excluding(schema: str, source: str, *, actor: str, why: str | None, dry_run: bool) -> Operation[bool]:
    """`Links.exclude` as an operation.

    Total inboxes no longer wait for it. Nodes may have received its messages up to different clocks: what this one
    lacks stays away from its total inboxes, even if the source is included again.
    """
    check_actor(actor, why)
    number, state = yield from _holding(schema, source)
    if state == "excluded":
        return False
    if not dry_run:
        told = f"excluded by {actor}" + ("" if why is None else f": {why}")
        yield STATE.at(schema=schema)(number=number, state="excluded", why=told)
        yield from raising_stable(schema)
        yield from auditing(schema, acts.LINK_EXCLUDE, [(None, source, 0)], actor, why)
    return True


def including(schema: str, source: str, *, actor: str, why: str | None) -> Operation[bool]:
    """`Links.include` as an operation.

    What it sent in the meantime and that stands before what total inboxes have given out goes to `dead_letter`.
    """
    check_actor(actor, why)
    number, state = yield from _holding(schema, source)
    if state != "excluded":
        return False
    yield STATE.at(schema=schema)(number=number, state="open", why=None)
    yield from auditing(schema, acts.LINK_INCLUDE, [(None, source, 0)], actor, why)
    return True
