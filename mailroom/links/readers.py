"""The source's side: who may read messages of this node."""

from collections.abc import Mapping
from typing import Any

from mailroom.errors import ConfigurationError
from mailroom.links.start import noting_place
from mailroom.links.unknown import unknown_link
from mailroom.order import clock
from mailroom.registry.subscriptions import Topics, topic_texts
from mailroom.schema import acts
from mailroom.schema.audit import auditing, differences
from mailroom.schema.node import beginning_act
from mailroom.schema.otherwise import check_same
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import node_name
from mailroom.values.numbers import TEN_YEARS_S, seconds, whole

KEEP_S = 172_800.0
MAX_ROWS = 2**62
LINK = ("topics", "keep_s", "max_rows")  # the settings of a link to a reader or a broker

ALLOW = Sql(
    """
INSERT INTO {schema}.link (name, keep_s, max_rows)
VALUES (%(name)s::text, %(keep_s)s::float8, nullif(%(max_rows)s::bigint, 0::bigint))
ON CONFLICT (name) DO NOTHING RETURNING number
""",
    columns=("bigint",),
)
HOLD = Sql("SELECT number FROM {schema}.link WHERE name = %(name)s::text FOR NO KEY UPDATE", columns=("bigint",))
CHANGE = Sql(
    """
UPDATE {schema}.link
SET keep_s = coalesce(%(keep_s)s::float8, keep_s),
    max_rows = nullif(coalesce(%(max_rows)s::bigint, max_rows), 0::bigint)
WHERE number = %(link)s::bigint
"""
)
BRIDGE = Sql(
    "SELECT EXISTS (SELECT FROM {schema}.link JOIN {schema}.bridge_out ON link = number WHERE name = %(name)s::text)",
    columns=("boolean",),
)
# A change of what readers may ask for, and a reader that asks, wait for each other; deliveries only read.
LOCK_TOPICS = Sql("LOCK TABLE {schema}.link_topic IN SHARE ROW EXCLUSIVE MODE")
LIMIT = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.link_allowed WHERE link = %(link)s::bigint AND topic <> ALL (%(topics)s::text[]))
INSERT INTO {schema}.link_allowed (link, topic) SELECT %(link)s::bigint, pg_catalog.unnest(%(topics)s::text[])
ON CONFLICT DO NOTHING
"""
)
# A link that has the commands of a topic keeps them; where none has, the oldest that is allowed it by name gets them.
GIVE = Sql(
    """
UPDATE {schema}.link_allowed AS a SET commands = true
WHERE fits IS NULL AND NOT EXISTS (SELECT FROM {schema}.link_allowed AS o WHERE o.topic = a.topic AND o.commands)
  AND link = (SELECT min(o.link) FROM {schema}.link_allowed AS o WHERE o.topic = a.topic)
"""
)
SETTLE = Sql(
    """
WITH gone AS (DELETE FROM {schema}.link_topic WHERE {schema}.link_allows(link, topic) IS NULL)
UPDATE {schema}.link_topic SET commands = {schema}.link_allows(link, topic)
WHERE commands <> {schema}.link_allows(link, topic)
"""
)


def settling(schema: str) -> Operation[None]:
    """Have the links carry what they are allowed now, after `LOCK_TOPICS`."""
    yield GIVE.at(schema=schema)()
    yield SETTLE.at(schema=schema)()


def link_settings(topics: Topics | None, keep_s: float | None, max_rows: int | None) -> dict[str, Any]:
    """Return which settings of a link to a reader or a broker are given. Raises `ConfigurationError`."""
    given: dict[str, Any] = {}
    if topics is not None:
        given["topics"] = sorted({*topic_texts(topics)})
        if not given["topics"]:
            raise ConfigurationError(
                "topics is empty; give topics or patterns, or '#' for all messages and events.",
                code="MR-invalid-argument",
            )
    if keep_s is not None:
        seconds(keep_s, "keep_s", TEN_YEARS_S, zero=True)
        given["keep_s"] = keep_s
    if max_rows is not None:
        given["max_rows"] = whole(max_rows, "max_rows", 0, MAX_ROWS, ConfigurationError)
    return given


def held(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given of a link as it has it: a limit of 0 rows is none."""
    return {name: given[name] or None if name == "max_rows" else given[name] for name in sorted(LINK) if name in given}


def allowing(schema: str, reader: str, given: Mapping[str, Any], *, actor: str, why: str | None) -> Operation[bool]:
    """`Links.allow` as an operation, with what is given of the settings."""
    name = node_name(reader)
    yield from beginning_act(schema, actor, why)
    [(is_bridge,)] = yield BRIDGE.at(schema=schema)(name=name)
    if is_bridge:
        raise ConfigurationError(
            f"{name} is a bridge of this node, so a reader needs another name.", code="MR-bridge-name-taken"
        )
    before = yield from reading_settings(schema, name)
    if before is None:
        if (yield from giving_link(schema, name, {"keep_s": KEEP_S, **given})) is not None:
            change = differences(None, (yield from reading_settings(schema, name)) or {})
            yield from auditing(schema, acts.LINK_ALLOW, [(None, name, 0)], actor, why, change)
            return True
        before = yield from reading_settings(schema, name)  # another session has just allowed it
    check_same(
        f"Reader {name}", before or {}, held(given), f"mailroom link set {name}, or Links.set", "MR-link-set-otherwise"
    )
    return False


def setting_reader(
    schema: str, reader: str, given: Mapping[str, Any], *, actor: str, why: str | None
) -> Operation[str]:
    """`Links.set` as an operation, for a node that reads this one."""
    link = yield from holding_link(schema, reader, given)
    before = yield from reading_settings(schema, reader)
    if link is None or before is None:
        raise (yield from unknown_link(schema, reader, f"No node {reader} may read this one.", ["reader"]))
    yield from changing_link(schema, link, given)
    if change := differences(before, held(given)):
        yield from auditing(schema, acts.LINK_SET, [(None, reader, 0)], actor, why, change)
    return change


SETTINGS = Sql(
    """
SELECT keep_s, max_rows::bigint,
       ARRAY(SELECT topic FROM {schema}.link_allowed WHERE link = number ORDER BY topic)::text[]
FROM {schema}.link WHERE name = %(name)s::text
""",
    columns={"keep_s": "float8", "max_rows": "bigint", "topics": "text[]"},
)


def reading_settings(schema: str, name: str) -> Operation[dict[str, Any] | None]:
    """Return what is set of a link to a reader or a bridge, None if there is none."""
    rows = SETTINGS.named((yield SETTINGS.at(schema=schema)(name=name)))
    return rows[0]._asdict() if rows else None


def giving_link(schema: str, name: str, given: Mapping[str, Any]) -> Operation[int | None]:
    """Make the link `name`; return its number, None if there is one of that name by now.

    Locks the topics of all links if any are given.
    """
    yield from noting_place(schema)
    yield from _locking_topics(schema, given)
    rows = yield ALLOW.at(schema=schema)(name=name, keep_s=given["keep_s"], max_rows=given.get("max_rows"))
    if not rows:
        return None
    [(link,)] = rows
    yield from _limiting(schema, link, given)
    return int(link)


def holding_link(schema: str, name: str, given: Mapping[str, Any]) -> Operation[int | None]:
    """Lock the link that gets these settings; return its number, None if there is none."""
    yield from _locking_topics(schema, given)
    rows = yield HOLD.at(schema=schema)(name=name)
    return int(rows[0][0]) if rows else None


def changing_link(schema: str, link: int, given: Mapping[str, Any]) -> Operation[None]:
    """Give a link that is locked these settings; the others stay."""
    yield CHANGE.at(schema=schema)(link=link, keep_s=given.get("keep_s"), max_rows=given.get("max_rows"))
    yield from _limiting(schema, link, given)


def _locking_topics(schema: str, given: Mapping[str, Any]) -> Operation[None]:
    if "topics" in given:
        yield LOCK_TOPICS.at(schema=schema)()


def _limiting(schema: str, link: int, given: Mapping[str, Any]) -> Operation[None]:
    if "topics" in given:
        yield LIMIT.at(schema=schema)(link=link, topics=given["topics"])
        yield from settling(schema)


WAITING = Sql(
    """
SELECT l.number, greatest(coalesce((SELECT seq FROM {schema}.transit WHERE link = l.number ORDER BY seq DESC LIMIT 1),
                                   0::bigint) - l.acked, 0::bigint)
FROM {schema}.link AS l WHERE l.name = %(name)s::text
""",
    columns=("bigint", "bigint"),
)
FORGET_ROWS = Sql("DELETE FROM {schema}.transit WHERE link = %(link)s::bigint")
FORGET = Sql(
    """
WITH topics AS (DELETE FROM {schema}.link_topic WHERE link = %(link)s::bigint),
allowed AS (DELETE FROM {schema}.link_allowed WHERE link = %(link)s::bigint),
known AS (DELETE FROM {schema}.bridge_known WHERE link = %(link)s::bigint),
parts AS (DELETE FROM {schema}.bridge_parts WHERE link = %(link)s::bigint),
lasts AS (DELETE FROM {schema}.bridge_last WHERE link = %(link)s::bigint),
done AS (DELETE FROM {schema}.bridge_done WHERE link = %(link)s::bigint),
bridge AS (DELETE FROM {schema}.bridge_out WHERE link = %(link)s::bigint)
DELETE FROM {schema}.link WHERE number = %(link)s::bigint
"""
)


def removing_reader(
    schema: str, reader: str, *, actor: str, why: str | None, dry_run: bool, act: acts.Act = acts.LINK_REMOVE
) -> Operation[int]:
    """Let a node read no longer, and delete what waits for it; return how many rows it had not acknowledged."""
    yield from beginning_act(schema, actor, why)
    rows = yield WAITING.at(schema=schema)(name=node_name(reader))
    if not rows:
        raise (yield from unknown_link(schema, reader, f"No node {reader} may read this one.", ["reader"]))
    [(link, waiting)] = rows
    if not dry_run:
        # Most of the rows go before the dispatch lock is had, for which deliveries wait; the rest after it, so that no
        # delivery that still knew the link leaves any. Code that locks both takes the dispatch lock first.
        yield FORGET_ROWS.at(schema=schema)(link=link)
        yield clock.DISPATCH_LOCK.at(schema=schema)()
        yield LOCK_TOPICS.at(schema=schema)()
        yield FORGET.at(schema=schema)(link=link)
        yield FORGET_ROWS.at(schema=schema)(link=link)
        yield from settling(schema)
        yield from auditing(schema, act, [(None, reader, waiting)], actor, why)
    return int(waiting)
