"""Where a message is now, by its id."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.schema import checking
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import AnyConnection, run

__all__ = [
    "Place",
    "trace",
]

Where: TypeAlias = Literal["outbox", "outbox_executable", "scheduled", "inbox", "parked", "dead_letter"]


@dataclass(frozen=True, slots=True)
class Place:
    """One place where a message is.

    `since` is when it came there; for `scheduled`, when it is due; for `parked`, since when its key is parked. `clock`
    is its clock in an inbox. `ahead` counts the messages before it: in an outbox all of them, in an inbox those of its
    key, which are reaped first. The topic of an executable is its target and operation, such as store.put. If the key
    is failing, `attempts`, `retry_at` and `reason` describe that; a parked key has no `retry_at`. For a dead letter
    `reason` says why it is one, and `inbox` which inbox skipped it.
    """

    where: Where
    inbox: str | None
    topic: str
    key: str
    sent_at: datetime
    since: datetime
    clock: int | None
    ahead: int | None
    attempts: int | None
    retry_at: datetime | None
    reason: str | None


# One statement is one snapshot: a message that moves between tables is in exactly one of them. The tables are scanned,
# because an index on message ids would cost every message. All messages of a parked key count as parked, whether they
# were already moved to `parked` or not.
TRACE = Sql(
    """
SELECT 'outbox', NULL::text, topic, key, sent_at, sent_at, NULL::bigint,
       (SELECT count(*) FROM {schema}.outbox AS b WHERE b.position < o.position),
       NULL::bigint, NULL::timestamptz, NULL::text
FROM {schema}.outbox AS o WHERE message_id = %(id)s::uuid
UNION ALL
SELECT 'outbox_executable', NULL, target || '.' || operation, coalesce(nullif(key, ''), message_id::text), sent_at,
       sent_at, NULL, (SELECT count(*) FROM {schema}.outbox_executable AS b WHERE b.position < o.position),
       NULL, NULL, NULL
FROM {schema}.outbox_executable AS o WHERE message_id = %(id)s::uuid
UNION ALL
SELECT 'scheduled', NULL, topic, key, sent_at, deliver_at, NULL, NULL, NULL, NULL, NULL
FROM {schema}.scheduled WHERE message_id = %(id)s::uuid
UNION ALL
SELECT CASE WHEN k.retry_at = 'infinity' THEN 'parked' ELSE 'inbox' END, h.inbox, topic, h.key, sent_at,
       CASE WHEN k.retry_at = 'infinity' THEN k.parked_at ELSE delivered_at END, h.clock,
       (SELECT count(*) FROM {schema}.inbox AS b WHERE b.inbox = h.inbox AND b.key = h.key AND b.clock < h.clock)
       + (SELECT count(*) FROM {schema}.parked AS b WHERE b.inbox = h.inbox AND b.key = h.key AND b.clock < h.clock),
       k.attempts::bigint, nullif(k.retry_at, 'infinity'), k.last_error
FROM (SELECT inbox, key, clock, topic, sent_at, delivered_at FROM {schema}.inbox WHERE message_id = %(id)s::uuid
      UNION ALL SELECT inbox, key, clock, topic, sent_at, delivered_at FROM {schema}.parked
      WHERE message_id = %(id)s::uuid) AS h
LEFT JOIN {schema}.key_state AS k ON k.inbox = h.inbox AND k.key = h.key
UNION ALL
SELECT 'dead_letter', inbox, topic, key, sent_at, failed_at, clock, NULL, attempts::bigint, NULL, reason
FROM {schema}.dead_letter WHERE message_id = %(id)s::uuid
""",
    columns=("text",) * 4 + ("timestamptz",) * 2 + ("bigint",) * 3 + ("timestamptz", "text"),
)


def trace(connection: AnyConnection, id: UUID, schema: str = DEFAULT_SCHEMA) -> list[Place]:
    """Return where the message `id` is: several places if several inboxes get it.

    The list is empty if it is nowhere: it was reaped, it expired, it was an event without subscribers, or its
    transaction has not committed. This reads the node's tables from end to end and waits for no lock.
    """
    return run(connection, tracing(schema_name(schema), id))


def tracing(schema: str, id: UUID) -> Operation[list[Place]]:
    """`trace` as an operation."""
    yield from checking(schema)
    rows = yield TRACE.at(schema=schema)(id=id)
    return [Place(*row) for row in rows]
