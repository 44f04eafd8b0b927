"""Logs: each is a table of segments, an entry in the registry, and subscriptions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mailroom.errors import ConfigurationError, SchemaError
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.registry.subscriptions import SUBSCRIBE, UNSUBSCRIBE, Topics, subscriptions_text, topic_texts
from mailroom.schema.acts import LOG_CREATE, LOG_DROP, LOG_SET
from mailroom.schema.audit import auditing, check_actor, checked_actor, differences
from mailroom.schema.checks import checking
from mailroom.schema.otherwise import check_same
from mailroom.sql import locks
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, OWN, inbox_name, origin_name, schema_name
from mailroom.values.numbers import whole

LANES = 64
MOST_LANES = 256
KEEP_DAYS = 7
MOST_DAYS = 366


@dataclass(frozen=True, slots=True)
class Log:
    """A log: its lanes, how many days it keeps a message, its subscriptions, and the inboxes that read it.

    `topics_of` are those of other nodes, by origin. `drop_unread`: what is older goes though an inbox has not read it.
    `wanted` are the topics of readers that do not read all. `segments` counts its parts, one a day.
    """

    name: str
    lanes: int
    keep_days: int
    drop_unread: bool
    created_at: datetime
    topics: tuple[str, ...]
    topics_of: Mapping[str, list[str]]
    readers: tuple[str, ...]
    wanted: Mapping[str, list[str]]
    segments: int


LIST = Sql(
    """
SELECT name, lanes::bigint, keep_days::bigint, drop_unread, created_at,
       (SELECT pg_catalog.json_object_agg(origin, topics)::text
        FROM (SELECT origin, pg_catalog.json_agg(topic ORDER BY topic) AS topics FROM {schema}.subscription
              WHERE inbox = l.name GROUP BY origin) AS s),
       ARRAY(SELECT r.name FROM {schema}.inbox_registry AS r WHERE r.log = l.name ORDER BY r.name),
       (SELECT pg_catalog.json_object_agg(inbox, topics)::text
        FROM (SELECT t.inbox, pg_catalog.json_agg(t.topic ORDER BY t.topic) AS topics
              FROM {schema}.log_topic AS t JOIN {schema}.inbox_registry AS r ON r.name = t.inbox
              WHERE r.log = l.name GROUP BY t.inbox) AS w),
       (SELECT count(*) FROM {schema}.log_segment AS s WHERE s.log = l.name AND s.emptied_at IS NULL)
FROM {schema}.log_registry AS l
WHERE %(log)s::text IS NULL OR name = %(log)s::text ORDER BY name
""",
    columns=("text", "bigint", "bigint", "boolean", "timestamptz", "text", "text[]", "text", "bigint"),
)


def listing_logs(schema: str, log: str | None = None) -> Operation[list[Log]]:
    """Return the logs by name, or the one of that name if there is one."""
    return [_listed(*row) for row in (yield LIST.at(schema=schema)(log=log))]


def _listed(
    name: str, lanes: int, keep_days: int, drop_unread: bool, created_at: datetime, subscribed: str | None,
    readers: list[str], wanted: str | None, segments: int,
) -> Log:  # fmt: skip
    topics, of = json.loads(subscribed or "{}"), json.loads(wanted or "{}")
    own = tuple(topics.pop(OWN, ()))
    return Log(name, lanes, keep_days, drop_unread, created_at, own, topics, tuple(readers), of, segments)


def finding_log(schema: str, log: str) -> Operation[Log]:
    """Return a log. Raises `SchemaError` if there is none of that name."""
    found = yield from listing_logs(schema, log)
    if not found:
        raise SchemaError(
            f"There is no log {log!r}. `mailroom log list` shows those that there are.", code="MR-unknown-log"
        )
    return found[0]


def creation(
    name: str,
    subscribe: Topics = (),
    *,
    keep_days: int | None = None,
    lanes: int | None = None,
    drop_unread: bool | None = None,
    origin: str = OWN,
    schema: str = DEFAULT_SCHEMA,
    actor: str | None = None,
    why: str | None = None,
) -> Operation[None]:
    """Create a log with its subscriptions; one that exists stays as it is, and gets the subscriptions that it lacks.

    It keeps the messages and events of its topics and patterns for at least `keep_days` days (7; 1 to 366), whoever has
    read them, and until every inbox that reads it (`create_inbox(..., log=name)`) has passed them; with `drop_unread`
    it does not wait for inboxes. Commands and replies never enter a log. It has `lanes` (64; 1 to 256), which never
    change: a message's lane follows from its key, and one worker at a time reads a lane. `origin` says whose messages
    the topics are of, as for `subscribe`.

    In the caller's transaction, which has the node's dispatch lock until it ends: nothing is delivered meanwhile, so
    commit soon. What is new is written to the table `audit`, with `actor` (user@host of this process) and `why`.

    Raises `InvalidName`; `ConfigurationError` for a setting outside its bounds, and for other settings than a log has
    that exists, which `set_log` changes; `InvalidMessage` for a topic, `actor` or `why`; and `SchemaError` if an inbox
    or a table has the name.
    """
    settings = _checked(keep_days, lanes)
    if drop_unread is not None:
        settings["drop_unread"] = drop_unread
    return _creating(
        schema_name(schema), inbox_name(name), topic_texts(subscribe), origin_name(origin), settings,
        checked_actor(actor, why), why,
    )  # fmt: skip


def setting(
    name: str,
    *,
    keep_days: int | None = None,
    drop_unread: bool | None = None,
    subscribe: Topics = (),
    unsubscribe: Topics = (),
    origin: str = OWN,
    schema: str = DEFAULT_SCHEMA,
    actor: str | None = None,
    why: str | None = None,
) -> Operation[str]:
    """Change settings of a log; return what is different now, such as `keep_days 7 -> 14`, or an empty text.

    They are those of `create_log`; those that are not given stay. With fewer `keep_days` the janitor of a dispatcher
    drops what is older within minutes. Subscriptions, of messages of `origin`, count for what is delivered or received
    after the commit. In the caller's
    transaction. What has changed is written to the table `audit`, with `actor` (user@host of this process) and `why`.

    Raises `SchemaError` for an unknown log, `ConfigurationError` for a setting outside its bounds, and `InvalidMessage`
    for a topic, `actor` or `why`.
    """
    settings = _checked(keep_days, None)
    if drop_unread is not None:
        settings["drop_unread"] = drop_unread
    topics = topic_texts(subscribe), topic_texts(unsubscribe), origin_name(origin)
    return _setting(schema_name(schema), inbox_name(name), settings, *topics, checked_actor(actor, why), why)


def dropping(name: str, *, actor: str, why: str | None = None, schema: str = DEFAULT_SCHEMA) -> Operation[None]:
    """Drop a log with all that it holds, for good. Refuses while an inbox reads it.

    `actor` says who acts and `why` gives the reason; both are written to the table `audit`. In the caller's
    transaction, which has the node's dispatch lock until it ends: nothing is delivered meanwhile, so commit soon.

    Raises `SchemaError` for an unknown log and one that an inbox reads, and `InvalidMessage` for a wrong `actor` or
    `why`.
    """
    check_actor(actor, why)
    return _dropping(schema_name(schema), inbox_name(name), actor, why)


create_log, create_log_async = on_connections("create_log", creation)
set_log, set_log_async = on_connections("set_log", setting)
drop_log, drop_log_async = on_connections("drop_log", dropping)


def _checked(keep_days: int | None, lanes: int | None) -> dict[str, Any]:
    given = {"keep_days": (keep_days, MOST_DAYS), "lanes": (lanes, MOST_LANES)}
    return {
        name: whole(value, name, 1, most, ConfigurationError)
        for name, (value, most) in given.items()
        if value is not None
    }


TAKEN = Sql(
    """
SELECT EXISTS (SELECT FROM {schema}.inbox_registry WHERE name = '{log}'),
       to_regclass('{schema}.log_{log}') IS NOT NULL OR to_regtype('{schema}.log_{log}') IS NOT NULL
""",
    columns=("boolean", "boolean"),
)
SCHEMA_LOCK = Sql("SELECT pg_advisory_xact_lock({lock}, hashtext('{node}')) IS NULL", columns=("boolean",))
REGISTER = Sql(
    """
INSERT INTO {schema}.log_registry (name, lanes, keep_days, drop_unread)
VALUES ('{log}', %(lanes)s::integer, %(keep_days)s::integer, %(drop_unread)s::boolean)
"""
)
# It belongs to the owner of all logs, as partitions of inboxes do (`mailroom.registry.inboxes.PARTITIONS`).
TABLE = Sql(
    """
DO $$
DECLARE
    owner CONSTANT pg_catalog.name := (SELECT pg_catalog.pg_get_userbyid(relowner) FROM pg_catalog.pg_class
                                       WHERE oid = '{schema}.log'::regclass::oid);
BEGIN
    CREATE TABLE {schema}.log_{log} (LIKE {schema}.log INCLUDING DEFAULTS INCLUDING COMMENTS)
    PARTITION BY LIST (segment);
    IF owner <> current_user THEN
        EXECUTE pg_catalog.format('ALTER TABLE {schema}.log_{log} OWNER TO %%I', owner);
    END IF;
    ALTER TABLE {schema}.log ATTACH PARTITION {schema}.log_{log} FOR VALUES IN ('{log}');
END $$
"""
)
SEGMENT = Sql(
    "SELECT {schema}.make_log_segment('{log}', coalesce(%(now)s::timestamptz, statement_timestamp()))",
    columns=("bigint",),
)
CHANGE = Sql(
    """
UPDATE {schema}.log_registry SET keep_days = %(keep_days)s::integer, drop_unread = %(drop_unread)s::boolean
WHERE name = '{log}'
"""
)
DROP = Sql("DROP TABLE {schema}.log_{log}")
FORGET = Sql("DELETE FROM {schema}.{table} WHERE {column} = '{log}'")


def _held(settings: dict[str, Any]) -> dict[str, Any]:
    return {"lanes": LANES, "keep_days": KEEP_DAYS, "drop_unread": False} | settings


def _creating(
    schema: str, log: str, topics: list[str], origin: str, given: dict[str, Any], actor: str, why: str | None
) -> Operation[None]:
    yield from _alone(schema)
    names = {"schema": schema, "log": log}
    there = yield from listing_logs(schema, log)
    if there:
        if given.get("lanes", there[0].lanes) != there[0].lanes:
            raise ConfigurationError(
                f"Log {log!r} exists with {there[0].lanes} lanes, which never change. Create another log with the same "
                "topics.",
                code="MR-log-set-otherwise",
            )
        has = {name: (getattr(there[0], name), value) for name, value in given.items()}
        check_same(
            f"Log {log!r}", {name: old for name, (old, _) in has.items()}, given,
            f"mailroom log set {log}, or set_log", "MR-log-set-otherwise",
        )  # fmt: skip
    else:
        [(is_inbox, is_table)] = yield TAKEN.at(**names)()
        if is_inbox or is_table:
            what = f"an inbox {log!r}" if is_inbox else f"something of the name {schema}.log_{log}"
            raise SchemaError(f"There is {what}: give the log another name.", code="MR-log-name-taken")
        yield REGISTER.at(**names)(**_held(given))
        yield DISPATCH_LOCK.at(schema=schema)()
        yield TABLE.at(**names)()
        yield SEGMENT.at(**names)(now=None)
    added = yield SUBSCRIBE.at(schema=schema)(inboxes=[log], since=[0], topics=topics, origin=origin)
    told = f"subscribed to {subscriptions_text(sorted(topic for _, topic in added), origin)}"
    if there and added:
        yield from auditing(schema, LOG_SET, [(log, None, 0)], actor, why, told)
    elif not there:
        held = _held(given)
        made = f"keeps {held['keep_days']} days, {held['lanes']} lanes" + (f", {told}" if added else "")
        yield from auditing(schema, LOG_CREATE, [(log, None, 0)], actor, why, made)


def _setting(
    schema: str, log: str, given: dict[str, Any], subscribe: list[str], unsubscribe: list[str], origin: str,
    actor: str, why: str | None,
) -> Operation[str]:  # fmt: skip
    yield from _alone(schema)
    before = yield from finding_log(schema, log)
    old = {"keep_days": before.keep_days, "drop_unread": before.drop_unread}
    new = old | given
    yield CHANGE.at(schema=schema, log=log)(**new)
    added = yield SUBSCRIBE.at(schema=schema)(inboxes=[log], since=[0], topics=subscribe, origin=origin)
    ended = yield UNSUBSCRIBE.at(schema=schema, inbox=log)(topics=unsubscribe, origin=origin)
    told = [differences(old, new)]
    if added:
        told.append(f"subscribed to {subscriptions_text(sorted(topic for _, topic in added), origin)}")
    if ended:
        told.append(f"no longer to {subscriptions_text(sorted(topic for (topic,) in ended), origin)}")
    change = ", ".join(filter(None, told))
    if change:
        yield from auditing(schema, LOG_SET, [(log, None, 0)], actor, why, change)
    return change


def _dropping(schema: str, log: str, actor: str, why: str | None) -> Operation[None]:
    yield from _alone(schema)
    found = yield from finding_log(schema, log)
    if found.readers:
        raise SchemaError(
            f"Log {log!r} is read by {', '.join(found.readers)}. Drop those inboxes first (mailroom inbox drop).",
            code="MR-log-in-use",
        )
    names = {"schema": schema, "log": log}
    yield DISPATCH_LOCK.at(schema=schema)()
    for table, column in (
        ("subscription", "inbox"),
        ("log_segment", "log"),
        ("log_tick", "log"),
        ("log_registry", "name"),
    ):
        yield FORGET.at(table=table, column=column, **names)()
    yield DROP.at(**names)()
    yield from auditing(schema, LOG_DROP, [(log, None, 0)], actor, why)


def _alone(schema: str) -> Operation[None]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield SCHEMA_LOCK.at(lock=str(locks.DDL), node=schema)()
