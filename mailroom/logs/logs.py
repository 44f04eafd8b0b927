"""Logs: each is an entry in the registry, segments, and subscriptions."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mailroom.errors import ConfigurationError, SchemaError
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.registry.subscriptions import SUBSCRIBE, Topics, subscriptions_text, topic_texts
from mailroom.schema.acts import LOG_CREATE
from mailroom.schema.audit import auditing, checked_actor
from mailroom.schema.checks import checking
from mailroom.sql import locks
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, OWN, inbox_name, schema_name
from mailroom.values.numbers import whole

LANES = 64
MOST_LANES = 256
MOST_DAYS = 366


@dataclass(frozen=True, slots=True)
class LogState:
    """A log: how many lanes it has, how many days it keeps a message, its subscriptions, and since when it exists."""

    name: str
    lanes: int
    keep_days: int
    drop_unread: bool
    created_at: datetime
    topics: tuple[str, ...]
    segments: int


LIST = Sql(
    """
SELECT name, lanes::bigint, keep_days::bigint, drop_unread, created_at,
       ARRAY(SELECT topic FROM {schema}.subscription WHERE inbox = l.name ORDER BY topic),
       (SELECT count(*) FROM {schema}.log_segment AS s WHERE s.log = l.name)
FROM {schema}.log_registry AS l ORDER BY name
""",
    into=LogState,
)
TAKEN = Sql("SELECT EXISTS (SELECT FROM {schema}.inbox_registry WHERE name = '{log}')", columns=("boolean",))
SCHEMA_LOCK = Sql("SELECT pg_advisory_xact_lock({lock}, hashtext('{node}')) IS NULL", columns=("boolean",))
REGISTER = Sql(
    """
INSERT INTO {schema}.log_registry (name, lanes, keep_days, drop_unread)
VALUES ('{log}', %(lanes)s::integer, %(keep_days)s::integer, %(drop_unread)s::boolean)
"""
)
SEGMENT = Sql(
    "SELECT {schema}.make_log_segment('{log}', coalesce(%(now)s::timestamptz, statement_timestamp()))",
    columns=("bigint",),
)


def creation(
    name: str,
    subscribe: Topics = (),
    *,
    keep_days: int = 7,
    lanes: int = LANES,
    drop_unread: bool = False,
    schema: str = DEFAULT_SCHEMA,
    actor: str | None = None,
    why: str | None = None,
) -> Operation[None]:
    """Create a log, which keeps the messages and events of its topics and patterns for `keep_days` days (1 to 366)."""
    topics = topic_texts(subscribe)
    whole(keep_days, "keep_days", 1, MOST_DAYS, ConfigurationError)
    whole(lanes, "lanes", 1, MOST_LANES, ConfigurationError)
    settings = {"keep_days": keep_days, "lanes": lanes, "drop_unread": drop_unread}
    return _creating(schema_name(schema), inbox_name(name), topics, settings, checked_actor(actor, why), why)


def _creating(
    schema: str, log: str, topics: list[str], settings: dict[str, Any], actor: str, why: str | None
) -> Operation[None]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield SCHEMA_LOCK.at(lock=str(locks.DDL), node=schema)()
    names = {"schema": schema, "log": log}
    if (yield TAKEN.at(**names)()) == [(True,)]:
        raise SchemaError(f"There is an inbox {log!r}: give the log another name.", code="MR-log-name-taken")
    yield REGISTER.at(**names)(**settings)
    yield DISPATCH_LOCK.at(schema=schema)()
    yield SEGMENT.at(**names)(now=None)
    yield SUBSCRIBE.at(schema=schema)(inboxes=[log], since=[0], topics=topics, origin=OWN)
    change = f"keeps {settings['keep_days']} days, {settings['lanes']} lanes"
    told = f", subscribed to {subscriptions_text(topics, OWN)}" if topics else ""
    yield from auditing(schema, LOG_CREATE, [(log, None, 0)], actor, why, change + told)


create_log, create_log_async = on_connections("create_log", creation)
