"""The reader's side: which nodes this one reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mailroom.errors import ConfigurationError
from mailroom.links.service import service_name
from mailroom.links.start import noting_place
from mailroom.links.unknown import unknown_link
from mailroom.order import clock
from mailroom.order.total import guarding_order, raising_stable, starting_origin
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor, differences
from mailroom.schema.checks import checking
from mailroom.schema.node import beginning_act
from mailroom.schema.otherwise import check_same
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, node_name, schema_name

BEFORE = Sql(
    """
SELECT o.reader, o.schema, o.service, o.link, n.name,
       EXISTS (SELECT FROM {schema}.bridge_in AS b WHERE b.origin = o.number)
FROM {schema}.node AS n
LEFT JOIN {schema}.origin AS o ON o.name = %(name)s::text
""",
    columns={
        "reader": "text",
        "source_schema": "text",
        "service": "text",
        "link": "bigint",
        "own": "text",
        "is_bridge": "boolean",
    },
)
ADD = Sql(
    """
INSERT INTO {schema}.origin (name, service, schema, reader)
VALUES (%(name)s::text, %(service)s::text, %(source_schema)s::text, %(reader)s::text)
ON CONFLICT (name) DO NOTHING RETURNING true
""",
    columns=("boolean",),
)
CHANGE = Sql(
    "UPDATE {schema}.origin SET service = %(service)s::text, schema = %(source_schema)s::text, "
    "reader = %(reader)s::text WHERE number = %(number)s::bigint"
)


def source_settings(service: str | None, reader: str | None, source_schema: str | None) -> dict[str, Any]:
    """Return which settings of a link to a source are given. Raises `ConfigurationError`."""
    checks = (("service", service, service_name), ("source_schema", source_schema, schema_name),
              ("reader", reader, node_name))  # fmt: skip
    given: dict[str, Any] = {}
    for name, value, check in checks:
        if value is not None:
            check(value)
            given[name] = value
    return given


@dataclass(frozen=True, slots=True)
class _Source:
    """A source, as it is: its settings, None if there is none; whether it was reached, and this node's own name."""

    settings: dict[str, Any] | None
    is_reached: bool
    own: str


def _finding(schema: str, name: str) -> Operation[_Source]:
    [was] = BEFORE.named((yield BEFORE.at(schema=schema)(name=name)))
    if was.is_bridge:
        raise ConfigurationError(
            f"{name} is a bridge into this node, so a source needs another name.", code="MR-bridge-name-taken"
        )
    given = {"service": was.service, "source_schema": was.source_schema, "reader": was.reader}
    return _Source(None if was.source_schema is None else given, was.link is not None, was.own)


def _changed(name: str, source: _Source, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a source and those it would have. Raises `ConfigurationError` for what cannot change."""
    before = source.settings or {}
    after = {**before, **given}
    # What was received is noted by the rows of this link, and another one has rows of its own.
    if source.is_reached and any(before[each] != after[each] for each in ("reader", "source_schema")):
        raise ConfigurationError(
            f"{name} knows this node as {before['reader']}, in its schema {before['source_schema']}, and what came is "
            f"noted by that link. To read another one: mailroom link remove {name} --source, then mailroom link add "
            f"{name}",
            code="MR-link-added-otherwise",
        )
    return before, after


def adding(schema: str, source: str, given: Mapping[str, Any], *, actor: str, why: str | None) -> Operation[bool]:
    """`Links.add` as an operation, with what is given of the settings."""
    name = node_name(source)
    yield from beginning_act(schema, actor, why)
    yield from noting_place(schema)
    found = yield from _finding(schema, name)
    if found.settings is None:
        # The name that the node has now, since links keep theirs when it is renamed.
        settings = {"service": None, "source_schema": DEFAULT_SCHEMA, "reader": found.own, **given}
        yield from guarding_order(schema)
        if (yield ADD.at(schema=schema)(name=name, **settings)):
            yield from starting_origin(schema, name)
            change = differences(None, settings)
            yield from auditing(schema, acts.LINK_ADD, [(None, name, 0)], actor, why, change)
            return True
        found = yield from _finding(schema, name)  # another session has just added it
    before, after = _changed(name, found, given)
    check_same(f"Source {name}", before, after, f"mailroom link set {name}, or Links.set", "MR-link-set-otherwise")
    return False


def setting_source(
    schema: str, source: str, given: Mapping[str, Any], *, actor: str, why: str | None
) -> Operation[str]:
    """`Links.set` as an operation, for a node that this one reads."""
    number, _ = yield from _holding(schema, source)
    before, after = _changed(source, (yield from _finding(schema, source)), given)
    if change := differences(before, after):
        yield CHANGE.at(schema=schema)(number=number, **after)
        yield from auditing(schema, acts.LINK_SET, [(None, source, 0)], actor, why, change)
    return change


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
