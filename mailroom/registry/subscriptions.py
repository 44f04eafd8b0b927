"""Subscriptions: which topics an inbox gets."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from mailroom.errors import ConfigurationError
from mailroom.message.topic import Topic, pattern_text
from mailroom.order.total import joining, leaving
from mailroom.order.traits import reading_traits
from mailroom.schema.acts import INBOX_SUBSCRIBE, INBOX_UNSUBSCRIBE
from mailroom.schema.audit import auditing, checked_actor
from mailroom.schema.checks import checking, finding
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import ALL, DEFAULT_SCHEMA, OWN, inbox_name, origin_name, schema_name

# What an inbox subscribes to: topics, each as a `Topic` or as text, and patterns.
Topics: TypeAlias = Topic[Any, Any] | str | Iterable[Topic[Any, Any] | str]


SUBSCRIBE = Sql(
    """
INSERT INTO {schema}.subscription (topic, inbox, origin, since)
SELECT t.topic, i.name, %(origin)s::text, i.since
FROM ROWS FROM (pg_catalog.unnest(%(inboxes)s::text[]), pg_catalog.unnest(%(since)s::bigint[])) AS i (name, since),
     pg_catalog.unnest(%(topics)s::text[]) AS t (topic)
ON CONFLICT DO NOTHING RETURNING inbox, topic
""",
    columns=("text", "text"),
)
UNSUBSCRIBE = Sql(
    """
DELETE FROM {schema}.subscription
WHERE inbox = '{inbox}' AND origin = %(origin)s::text AND topic = ANY (%(topics)s::text[]) RETURNING topic
""",
    columns=("text",),
)


def subscription(
    inbox: str,
    topics: Topics,
    *,
    schema: str = DEFAULT_SCHEMA,
    origin: str = OWN,
    actor: str | None = None,
    why: str | None = None,
) -> Operation[list[str]]:
    """Subscribe an inbox to a topic or to several; return those that it had not subscribed to.

    A topic is text or a `Topic`, and text may be a pattern. Dots divide words: `order.*` fits topics of `order` and one
    more word, `order.#` those that are or begin with `order`, and `#` all. There may be several `*`, but not beside a
    `#`, which is the last word. A pattern gets messages and events, never commands or replies. However many fit, the
    inbox gets a message once.

    `origin` says whose messages: those of this node (empty, the default), those of the node of that name, which this
    one reads over a link, or those of this node and of all that it reads (`*`).

    In the caller's transaction, also for users' own migrations. What is sent after its commit comes. What waits in the
    outbox comes too, unless its delivery had begun; what was delivered does not. From another node comes what that node
    delivers once this node's dispatcher has told it. For a total inbox and another node it takes the node's dispatch
    lock, so nothing is delivered until the caller's transaction ends. Repeating it is harmless. What is new goes into
    the table `audit`, with `actor` (user@host of this process) and `why`. Raises `UnknownInbox`, `InvalidName`, and
    `InvalidMessage` for a topic, `actor` or `why`.
    """
    return _subscribing(*_checked(inbox, topics, schema, origin), checked_actor(actor, why), why)


def _subscribing(
    schema: str, inbox: str, topics: list[str], origin: str, actor: str, why: str | None
) -> Operation[list[str]]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from finding(schema, inbox)
    if (yield from reading_traits(schema, inbox)).reads_log:
        raise ConfigurationError(
            f"Inbox {inbox!r} reads a log, and gets what the log gets: subscribe the log (mailroom log set NAME "
            "--subscribe TOPIC).",
            code="MR-log-inbox-subscribes",
        )
    since = 0 if origin == OWN else (yield from joining(schema, inbox, origin))
    changed = yield SUBSCRIBE.at(schema=schema)(inboxes=[inbox], since=[since], topics=topics, origin=origin)
    new = sorted(topic for _, topic in changed)
    if new:
        yield from auditing(schema, INBOX_SUBSCRIBE, [(inbox, None, 0)], actor, why, subscriptions_text(new, origin))
    return new


def unsubscription(
    inbox: str,
    topics: Topics,
    *,
    schema: str = DEFAULT_SCHEMA,
    origin: str = OWN,
    actor: str | None = None,
    why: str | None = None,
) -> Operation[list[str]]:
    """End an inbox's subscriptions to these topics and patterns, as they were given; return those that it had.

    This ends only those to messages of `origin`, as it was given: ending one to `*` leaves a separate one to a node.

    In the caller's transaction. What was delivered stays in the inbox. Repeating it is harmless. It is audited, and
    raises, as `subscribe`.
    """
    return _unsubscribing(*_checked(inbox, topics, schema, origin), checked_actor(actor, why), why)


def _unsubscribing(
    schema: str, inbox: str, topics: list[str], origin: str, actor: str, why: str | None
) -> Operation[list[str]]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from finding(schema, inbox)
    changed = yield UNSUBSCRIBE.at(schema=schema, inbox=inbox)(topics=topics, origin=origin)
    if changed and origin != OWN:
        yield from leaving(schema, inbox)
    ended = sorted(topic for (topic,) in changed)
    if ended:
        yield from auditing(
            schema, INBOX_UNSUBSCRIBE, [(inbox, None, 0)], actor, why, subscriptions_text(ended, origin)
        )
    return ended


def _checked(inbox: str, topics: Topics, schema: str, origin: str) -> tuple[str, str, list[str], str]:
    return schema_name(schema), inbox_name(inbox), topic_texts(topics), origin_name(origin)


subscribe, subscribe_async = on_connections("subscribe", subscription)
unsubscribe, unsubscribe_async = on_connections("unsubscribe", unsubscription)


def subscriptions_text(topics: Iterable[str], origin: str) -> str:
    """Return subscriptions as the audit and lists show them, such as `order.#, *.failed of lyon`."""
    return ", ".join(topics) + ("" if origin == OWN else " of every node" if origin == ALL else f" of {origin}")


def topic_texts(given: Topics) -> list[str]:
    """Return topics and patterns as texts. Raises `InvalidMessage`."""
    # Text is a topic: taken as an iterable, it would be a topic per letter.
    return [pattern_text(topic) for topic in ([given] if isinstance(given, str | Topic) else given)]
