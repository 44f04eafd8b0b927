"""What pages read that no command lists: pages of rows, each beginning where the one before ended.

All of it is bounded, whatever waits: by an index and a limit. None reads a value, so the role of an auditor is enough.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict
from uuid import UUID

from mailroom.figures.failing_keys import COUNTED
from mailroom.figures.keys import FIELDS, IN_TROUBLE, IS_PARKED
from mailroom.node.dead_letter import COUNT as LETTERS
from mailroom.node.dead_letter import DeadLetterContent, Stage, content_of
from mailroom.registry.routing import CARRIES, FITS, GETS, LINK_ROUTE, LOG_ROUTE, OF_THIS_NODE
from mailroom.schema import finding
from mailroom.sql.operation import Operation, Sql, filled

PAGE_ROWS = 50


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key that is failing, parked or paused."""

    inbox: str
    key: str
    state: str
    attempts: int
    since: datetime | None
    retry_at: datetime | None
    error: str | None
    paused_by: str | None
    is_parked: bool


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message of an inbox, without its value. `is_parked`: it was moved to the parked ones."""

    id: UUID
    topic: str
    key: str
    clock: int
    kind: str
    sent_at: datetime
    delivered_at: datetime
    is_parked: bool


KEY_FIELDS = f"{FIELDS}, last_error, paused_by, {filled(IS_PARKED, row='key_state')}"
OF_A_KEY = filled(IN_TROUBLE, row="key_state")
KEYS = Sql(
    """
SELECT {fields} FROM {schema}.key_state
WHERE inbox = '{inbox}' AND key > %(after)s::text AND {in_trouble} ORDER BY key LIMIT {rows} + 1
""",
    into=KeyState,
    fields=KEY_FIELDS,
    in_trouble=OF_A_KEY,
    rows=PAGE_ROWS,
)
KEY = Sql(
    "SELECT {fields} FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = %(key)s::text AND {in_trouble}",
    into=KeyState,
    fields=KEY_FIELDS,
    in_trouble=OF_A_KEY,
)
HELD_FIELDS = "message_id, topic, key, clock, kind::text, sent_at, delivered_at"
HELD_COLUMNS = ("uuid", "text", "text", "bigint", "text", "timestamptz", "timestamptz", "boolean")
OF_KEY = Sql(
    """
SELECT * FROM (
    (SELECT {fields}, true FROM {schema}.parked
     WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock > %(after)s::bigint ORDER BY clock LIMIT {rows} + 1)
    UNION ALL
    (SELECT {fields}, false FROM {schema}.inbox
     WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock > %(after)s::bigint ORDER BY clock LIMIT {rows} + 1)
) AS held ORDER BY clock LIMIT {rows} + 1
""",
    columns=HELD_COLUMNS,
    fields=HELD_FIELDS,
    rows=PAGE_ROWS,
)
# From the floor, above dead rows, in the order of the index on (clock + 0).
OLDEST = Sql(
    """
SELECT {fields}, false FROM {schema}.inbox
WHERE inbox = '{inbox}' AND clock + 0 > (SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}')
ORDER BY clock + 0 LIMIT 10
""",
    columns=HELD_COLUMNS,
    fields=HELD_FIELDS,
)


@dataclass(frozen=True, slots=True)
class LastFailure:
    """A failed attempt: of which message, with which text, what followed, and who recorded it."""

    at: datetime
    inbox: str
    key: str
    message_id: UUID
    error: str | None
    attempt: int
    outcome: str
    worker: str


# Replays are in the history too: a hundred of its rows are read, whatever they are.
FAILURES = Sql(
    """
SELECT a.at, a.inbox, a.key, a.message_id, a.error, a.attempt::bigint, a.outcome, a.worker
FROM (SELECT * FROM {schema}.attempt ORDER BY id DESC LIMIT 100) AS a
WHERE a.outcome <> 'replay' ORDER BY a.id DESC LIMIT 8
""",
    into=LastFailure,
)


def reading_failures(schema: str) -> Operation[list[LastFailure]]:
    """Return the last eight failed attempts."""
    found: list[LastFailure] = FAILURES.named((yield FAILURES.at(schema=schema)()))
    return found


def reading_keys(schema: str, inbox: str, after: str) -> Operation[list[KeyState]]:
    """Return the keys in trouble of an inbox above `after`, one more than a page has, without counts."""
    yield from finding(schema, inbox)
    return [KeyState(*row) for row in (yield KEYS.at(schema=schema, inbox=inbox)(after=after))]


def reading_key(schema: str, inbox: str, key: str) -> Operation[KeyState | None]:
    """Return the state of a key; None if it is well, or has nothing."""
    yield from finding(schema, inbox)
    rows = yield KEY.at(schema=schema, inbox=inbox)(key=key)
    return KeyState(*rows[0]) if rows else None


def reading_of_key(schema: str, inbox: str, key: str, after: int) -> Operation[list[HeldMessage]]:
    """Return the messages of a key above a clock, parked or not; one more than a page."""
    return [HeldMessage(*row) for row in (yield OF_KEY.at(schema=schema, inbox=inbox)(key=key, after=after))]


def reading_oldest(schema: str, inbox: str) -> Operation[list[HeldMessage]]:
    """Return the ten messages of an inbox with the lowest clocks."""
    return [HeldMessage(*row) for row in (yield OLDEST.at(schema=schema, inbox=inbox)())]


# -- What waits outside of inboxes ------------------------------------------------------------------------------------


class LetterFilter(TypedDict):
    """Which dead letters are meant: of a stage, of an inbox, whose reason contains a text; None is any."""

    stage: Stage | None
    inbox: str | None
    matching: str | None


def counting_letters(schema: str, *, stage: Stage | None, inbox: str | None, matching: str | None) -> Operation[int]:
    """Return how many dead letters there are, 100,001 if more than 100,000."""
    [(number,)] = yield LETTERS.at(schema=schema)(
        ids=None, matching=matching, stage=stage, inbox=inbox, after=0, limit=COUNTED + 1
    )
    return int(number)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A message that is to be delivered later."""

    position: int
    id: UUID
    topic: str
    key: str
    kind: str
    deliver_at: datetime
    sent_at: datetime


SCHEDULED = Sql(
    """
SELECT position, message_id, topic, key, kind::text, deliver_at, sent_at FROM {schema}.scheduled
WHERE (deliver_at, position) > (coalesce(%(at)s::timestamptz, '-infinity'::timestamptz), %(after)s::bigint)
ORDER BY deliver_at, position LIMIT {rows} + 1
""",
    columns=("bigint", "uuid", "text", "text", "text", "timestamptz", "timestamptz"),
    rows=PAGE_ROWS,
)


def reading_scheduled(schema: str, at: datetime | None, after: int) -> Operation[list[Scheduled]]:
    """Return scheduled messages, the next due first; one more than a page."""
    return [Scheduled(*row) for row in (yield SCHEDULED.at(schema=schema)(at=at, after=after))]


@dataclass(frozen=True, slots=True)
class WaitingExecutable:
    """An executable that waits for the executor."""

    position: int
    id: UUID
    target: str
    operation: str
    key: str
    sent_at: datetime


EXECUTABLES = Sql(
    """
SELECT position, message_id, target, operation, key, sent_at FROM {schema}.outbox_executable
WHERE position > %(after)s::bigint ORDER BY position LIMIT {rows} + 1
""",
    columns=("bigint", "uuid", "text", "text", "text", "timestamptz"),
    rows=PAGE_ROWS,
)


def reading_executables(schema: str, after: int) -> Operation[list[WaitingExecutable]]:
    """Return executables that wait, in their order; one more than a page."""
    return [WaitingExecutable(*row) for row in (yield EXECUTABLES.at(schema=schema)(after=after))]


# -- Routes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """Who gets a topic: an inbox, or the node or broker at the end of a link. `because` are its subscriptions.

    It gets messages, and `events` and `commands` (and replies) if it says so. `receivers` get the topic, and of those
    `getting_commands` get its commands.
    """

    name: str
    is_link: bool
    messages: bool
    events: bool
    commands: bool
    because: list[str]
    receivers: int
    getting_commands: int


@dataclass(frozen=True, slots=True)
class Subscription:
    """What an inbox subscribes to, and whose messages: empty for this node's."""

    topic: str
    inbox: str
    origin: str


# By the rule of deliveries, of which each part says why.
ROUTES = Sql(
    """
WITH sent AS MATERIALIZED (SELECT %(topic)s::text AS topic, 'M'::text AS kind),
{route},
{link_route},
kinds AS MATERIALIZED (SELECT u.kind FROM pg_catalog.unnest(ARRAY['M', 'E', 'C']) AS u (kind)),
t AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM sent),
shown_receiver AS MATERIALIZED (
    SELECT r.inbox AS name, false AS is_link, NULL::bigint AS link, bool_or(kind = 'M' AND ({gets})) AS messages,
           bool_or(kind = 'E' AND ({gets})) AS events, bool_or(kind = 'C' AND ({gets})) AS commands
    FROM route AS r, kinds WHERE r.topic = %(topic)s::text GROUP BY r.inbox
    UNION ALL
    SELECT l.name, true, r.link, bool_or(kind = 'M' AND ({carries})), bool_or(kind = 'E' AND ({carries})),
           bool_or(kind = 'C' AND ({carries}))
    FROM link_route AS r JOIN {schema}.link AS l ON l.number = r.link, kinds
    WHERE r.topic = %(topic)s::text GROUP BY l.name, r.link)
SELECT name, is_link, messages, events, commands,
       CASE WHEN is_link
            THEN ARRAY(SELECT p.topic FROM {schema}.link_topic AS p, t
                       WHERE p.link = shown.link AND CASE WHEN p.fits IS NULL THEN p.topic = t.topic ELSE {fits} END
                       ORDER BY p.topic)
            ELSE pg_catalog.array_cat(
                ARRAY(SELECT p.topic FROM {schema}.subscription AS p, t
                      WHERE p.inbox = shown.name AND {of_this_node}
                        AND CASE WHEN p.fits IS NULL THEN p.topic = t.topic ELSE {fits} END ORDER BY p.topic),
                CASE WHEN shown.name = %(topic)s::text THEN ARRAY['its own name'] ELSE '{}'::text[] END)
       END,
       receivers, getting_commands
FROM (SELECT *, (SELECT count(*) FROM shown_receiver) AS receivers,
             (SELECT count(*) FROM shown_receiver WHERE commands) AS getting_commands
      FROM shown_receiver WHERE (is_link, name) > (%(after_link)s::boolean, %(after)s::text)
      ORDER BY is_link, name LIMIT {rows} + 1) AS shown
ORDER BY is_link, name
""",
    columns=("text", "boolean", "boolean", "boolean", "boolean", "text[]", "bigint", "bigint"),
    rows=PAGE_ROWS,
    route=LOG_ROUTE,
    link_route=LINK_ROUTE,
    sent="sent",
    gets=GETS,
    carries=CARRIES,
    fits=FITS,
    of_this_node=OF_THIS_NODE,
)
SUBSCRIPTIONS = Sql(
    """
SELECT topic, inbox, origin FROM {schema}.subscription
WHERE (topic, inbox, origin) > (%(topic)s::text, %(inbox)s::text, %(origin)s::text)
ORDER BY topic, inbox, origin LIMIT {rows} + 1
""",
    columns=("text", "text", "text"),
    rows=PAGE_ROWS,
)


def reading_routes(schema: str, topic: str, after: tuple[bool, str]) -> Operation[list[Route]]:
    """Return who gets a topic that this node sends: inboxes, then links; one more than a page."""
    after_link, name = after
    rows = yield ROUTES.at(schema=schema)(topic=topic, after_link=after_link, after=name)
    return [Route(*row) for row in rows]


def reading_subscriptions(schema: str, after: tuple[str, str, str]) -> Operation[list[Subscription]]:
    """Return subscriptions by topic; one more than a page."""
    topic, inbox, origin = after
    rows = yield SUBSCRIPTIONS.at(schema=schema)(topic=topic, inbox=inbox, origin=origin)
    return [Subscription(*row) for row in rows]


# -- What a message says, for those who may see it --------------------------------------------------------------------

CONTENT = "headers::text, value, value_json::text"
CONTENT_COLUMNS = ("text", "bytea", "text")
OF_PLACE = Sql(
    "SELECT {content} FROM {schema}.{table} WHERE message_id = %(id)s::uuid LIMIT 1",
    columns=CONTENT_COLUMNS,
    content=CONTENT,
)
OF_INBOX = Sql(
    """
SELECT {content} FROM {schema}.{table}
WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock = %(clock)s::bigint LIMIT 1
""",
    columns=CONTENT_COLUMNS,
    content=CONTENT,
)


def reading_content(
    schema: str, table: str, id: UUID, inbox: str | None = None, key: str = "", clock: int | None = None
) -> Operation[DeadLetterContent | None]:
    """Return the headers and the value of a message in a table, None if it has left it."""
    rows: list[Any]
    if inbox is not None and clock is not None:
        rows = yield OF_INBOX.at(schema=schema, table=table, inbox=inbox)(key=key, clock=clock)
    else:
        rows = yield OF_PLACE.at(schema=schema, table=table)(id=id)
    return content_of(*rows[0]) if rows else None
