"""Subscriptions: which topics an inbox gets."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from mailroom.names import DEFAULT_SCHEMA, inbox_name, schema_name
from mailroom.schema.checks import checking, finding
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from mailroom.topic import Topic, pattern_text

# What an inbox subscribes to: topics, each as a `Topic` or as text, and patterns.
Topics: TypeAlias = Topic[Any, Any] | str | Iterable[Topic[Any, Any] | str]


def subscribe(connection: AnyConnection, inbox: str, topics: Topics, *, schema: str = DEFAULT_SCHEMA) -> list[str]:
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


def unsubscribe(connection: AnyConnection, inbox: str, topics: Topics, *, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """End an inbox's subscriptions to these topics and patterns, as they were given; return those that there were.

    In the caller's transaction. What was delivered stays in the inbox. Repeating it is harmless. Raises as `subscribe`.
    """
    return run(connection, _subscription(UNSUBSCRIBE, inbox, topics, schema))


async def unsubscribe_async(
    connection: AnyAsyncConnection, inbox: str, topics: Topics, *, schema: str = DEFAULT_SCHEMA
) -> list[str]:
    """`unsubscribe` on an async connection."""
    return await run_async(connection, _subscription(UNSUBSCRIBE, inbox, topics, schema))


SUBSCRIBE = Sql(
    """
INSERT INTO {schema}.subscription (topic, inbox) SELECT pg_catalog.unnest(%(topics)s::text[]), '{inbox}'
ON CONFLICT DO NOTHING RETURNING topic
""",
    columns=("text",),
)
UNSUBSCRIBE = Sql(
    """
DELETE FROM {schema}.subscription WHERE inbox = '{inbox}' AND topic = ANY (%(topics)s::text[]) RETURNING topic
""",
    columns=("text",),
)


def _subscription(statement: Sql, inbox: str, topics: Topics, schema: str) -> Operation[list[str]]:
    return _changing_subscription(statement, schema_name(schema), inbox_name(inbox), topic_texts(topics))


def _changing_subscription(statement: Sql, schema: str, inbox: str, topics: list[str]) -> Operation[list[str]]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from finding(schema, inbox)
    changed = yield statement.at(schema=schema, inbox=inbox)(topics=topics)
    return sorted(topic for (topic,) in changed)


def topic_texts(given: Topics) -> list[str]:
    """Return topics and patterns as texts. Raises `InvalidMessage`."""
    # Text is a topic: taken as an iterable, it would be a topic per letter.
    return [pattern_text(topic) for topic in ([given] if isinstance(given, str | Topic) else given)]
