"""Where a message is now, by its id, and where its causes and its effects are."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from mailroom.figures.keys import IS_PARKED, NEXT_TRY
from mailroom.order.traits import chosen
from mailroom.schema import checking
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Execute, Operation, Sql, filled
from mailroom.values.names import DEFAULT_SCHEMA, inbox_name, schema_name
from mailroom.values.numbers import count

__all__ = [
    "Location",
    "causes",
    "causes_async",
    "effects",
    "effects_async",
    "trace",
    "trace_async",
]

MAX_EFFECTS = 1_000

Where: TypeAlias = Literal[
    "outbox", "outbox_executable", "scheduled", "inbox", "parked", "dead_letter", "transit", "reaped", "log"
]


@dataclass(frozen=True, slots=True)
class Location:
    """One place where a message is.

    `since` is when it came there; for `scheduled`, when it is due; for `parked`, since when its key is parked; for
    `reaped`, when it was taken out of `inbox`, which keeps what is reaped (`keep_reaped_days`): it is done, or, if
    there is a `reason`, an operator discarded it. For `log`, `inbox` is the name of the log, whatever has read it
    there. `clock` is its clock in an inbox. `ahead` counts the messages before it: in an outbox all of them, in an
    inbox those of its key, which are reaped first, and in one that is one queue (`is_one_queue`) all that stand before
    it. The topic of an executable is its target and operation, such as store.put. If the key is failing, or the whole
    inbox of total order, `attempts`, `retry_at` and `reason` describe that; what is parked has no `retry_at`. For a
    dead letter `reason` says why it is one, and `inbox` which inbox skipped it. `id` is the message's, and `causation`
    that of its cause, if it has one. For `transit`, `link` is the name of the node that is to read it and has not
    acknowledged it, `clock` its clock here, and `ahead` counts what is read before it.
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
    id: UUID
    causation: UUID | None
    link: str | None = None
    is_one_queue: bool = False


FIELDS = fields(Location)
# The reason of a message of the archive, if no consumer was handed it.
DISCARDED = "CASE WHEN discarded THEN 'discarded by hand'::text END"
# The parts of `PLACES` about the inbox and the key of a message.
OF_A_KEY: dict[str, Any] = {
    "is_one_queue": chosen("r", parks_one=False),
    "is_parked": filled(IS_PARKED, row="k"),
    "next_try": filled(NEXT_TRY, row="k"),
    "discarded": DISCARDED,
}

# One statement is one snapshot: a message that moves between tables is in exactly one of them. The tables are scanned,
# because an index on message ids would cost every message; only the archive has one, since who keeps no messages there
# does not pay for it. What is before a message in an inbox is counted afterwards (`AHEAD`), where the inbox is a
# constant: here the server would plan that for all inboxes, and of a thousand that takes longer than the rest.
# Inboxes that are not to be read stand in the text, so that the plan locks their tables neither.
# All messages of a parked key count as parked, whether they were already moved to `parked` or not;
# and those of a total inbox that is parked, which is noted under the key ''. Of `transit` only what is not acknowledged
# is read, by its primary key. What is still to be fanned out counts as in the outbox.
PLACES = """
SELECT 'outbox', NULL::text, topic, key, sent_at, sent_at, NULL::bigint, {before_in_outbox},
       NULL::bigint, NULL::timestamptz, NULL::text, message_id, headers ->> 'causation'::text, NULL::text, false,
       NULL::bigint, NULL::uuid
FROM {schema}.outbox AS o WHERE {wanted}
UNION ALL
SELECT 'outbox', NULL, topic, key, sent_at, sent_at, NULL, NULL, NULL, NULL, NULL, message_id,
       headers ->> 'causation'::text, NULL, false, NULL, NULL
FROM {schema}.fan_out WHERE {wanted}
UNION ALL
SELECT 'outbox_executable', NULL, target || '.' || operation, coalesce(nullif(key, ''), message_id::text), sent_at,
       sent_at, NULL, {before_in_outbox_executable}, NULL, NULL, NULL, message_id, headers ->> 'causation'::text,
       NULL, false, NULL, NULL
FROM {schema}.outbox_executable AS o WHERE {wanted}
UNION ALL
SELECT 'scheduled', NULL, topic, key, sent_at, deliver_at, NULL, NULL, NULL, NULL, NULL, message_id,
       headers ->> 'causation'::text, NULL, false, NULL, NULL
FROM {schema}.scheduled WHERE {wanted}
UNION ALL
SELECT CASE WHEN {is_parked} THEN 'parked' ELSE 'inbox' END, h.inbox, topic, h.key, sent_at,
       coalesce(k.parked_at, delivered_at), h.clock, NULL,
       k.attempts::bigint, {next_try}, k.last_error, h.message_id, h.headers ->> 'causation'::text,
       NULL, coalesce({is_one_queue}, false), h.sent_clock, h.origin
FROM (SELECT message_id, inbox, key, clock, sent_clock, origin, topic, sent_at, delivered_at, headers
      FROM {schema}.inbox WHERE inbox NOT IN ('', {but}) AND {wanted}
      UNION ALL
      SELECT message_id, inbox, key, clock, NULL, NULL, topic, sent_at, delivered_at, headers
      FROM {schema}.parked WHERE {wanted}) AS h
LEFT JOIN {schema}.inbox_registry AS r ON r.name = h.inbox
LEFT JOIN {schema}.key_state AS k ON k.inbox = h.inbox AND k.key IN (h.key, '')
UNION ALL
SELECT 'dead_letter', inbox, topic, key, sent_at, failed_at, clock, NULL, attempts::bigint, NULL, reason, message_id,
       headers ->> 'causation'::text, NULL, false, NULL, NULL
FROM {schema}.dead_letter WHERE {wanted}
UNION ALL
SELECT 'transit', NULL, topic, key, sent_at, stamped_at, sent_clock, seq - acked - 1::bigint, NULL, NULL, NULL,
       message_id, headers ->> 'causation'::text, name, false, NULL, NULL
FROM {schema}.link JOIN {schema}.transit ON link = number AND seq > acked WHERE {wanted}
UNION ALL
SELECT 'reaped', inbox, topic, key, sent_at, reaped_at, clock, NULL, NULL, NULL,
       {discarded}, message_id,
       headers ->> 'causation'::text, NULL, false, NULL, NULL
FROM {schema}.reaped WHERE {wanted}
UNION ALL
SELECT 'log', log, topic, key, sent_at, delivered_at, clock, NULL, NULL, NULL, NULL, message_id,
       headers ->> 'causation'::text, NULL, false, NULL, NULL
FROM {schema}.log WHERE {wanted}
"""
# The fields of `Location`, `causation` as it stands in the header; then what `AHEAD_OF_ALL` compares.
FOUND_COLUMNS = {
    **dict.fromkeys(("where", "inbox", "topic", "key"), "text"),
    **dict.fromkeys(("sent_at", "since"), "timestamptz"),
    **dict.fromkeys(("clock", "ahead", "attempts"), "bigint"),
    "retry_at": "timestamptz",
    "reason": "text",
    "id": "uuid",
    "causation": "text",
    "link": "text",
    "is_one_queue": "boolean",
    "sent_clock": "bigint",
    "origin": "uuid",
}
TRACE = Sql(
    PLACES,
    columns=FOUND_COLUMNS,
    **OF_A_KEY,
    wanted="message_id = ANY (%(ids)s::uuid[])",
    before_in_outbox="(SELECT count(*) FROM {schema}.outbox AS b WHERE b.position < o.position)",
    before_in_outbox_executable="(SELECT count(*) FROM {schema}.outbox_executable AS b WHERE b.position < o.position)",
)
AHEAD = Sql(
    """
SELECT (SELECT count(*) FROM {schema}.inbox
        WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock < %(clock)s::bigint)
       + (SELECT count(*) FROM {schema}.parked
          WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock < %(clock)s::bigint)
""",
    columns=("bigint",),
)
AHEAD_OF_ALL = Sql(
    """
SELECT count(*) FROM {schema}.inbox
WHERE inbox = '{inbox}' AND (sent_clock, origin) < (%(sent_clock)s::bigint, %(origin)s::uuid)
""",
    columns=("bigint",),
)
# For many messages, those before each are not counted: that would read the tables once for each.
CAUSED = Sql(
    PLACES + "ORDER BY 5 LIMIT %(most)s::bigint",
    columns=FOUND_COLUMNS,
    **OF_A_KEY,
    wanted="(headers ->> 'causation'::text) COLLATE pg_catalog.\"C\" = ANY (%(causes)s::text[])",  # as the index
    before_in_outbox="NULL::bigint",
    before_in_outbox_executable="NULL::bigint",
)


def tracing(id: UUID, *, but: Collection[str] = (), schema: str = DEFAULT_SCHEMA) -> Operation[list[Location]]:
    """Return where the message `id` is: several places if several inboxes get it.

    Inboxes in `but` are not looked at: those that another session has locked would have to be waited for.

    The list is empty if it is nowhere: it was reaped from an inbox that does not keep that (or no longer), it expired,
    it was an event without subscribers, the nodes that it went to have received it, or its transaction has not
    committed. This reads the node's tables from end to end, but for the archive, and waits for no lock.
    """
    return _tracing(schema_name(schema), id, _listed(but))


def _listed(inboxes: Collection[str]) -> str:
    return ", ".join(f"'{inbox_name(each)}'" for each in inboxes) or "''"


def _tracing(schema: str, id: UUID, but: str) -> Operation[list[Location]]:
    yield from checking(schema)
    return (yield from _standing(schema, [id], but))


def _standing(schema: str, ids: list[UUID], but: str) -> Operation[list[Location]]:
    """Return where these messages are, with what is before them."""
    rows = TRACE.named((yield TRACE.at(schema=schema, but=but)(ids=ids)))
    counted = []
    for row in rows:
        if row.where in ("inbox", "parked"):
            [(ahead,)] = yield _ahead(schema, row)
            row = row._replace(ahead=ahead)
        counted.append(row)
    return _places(counted)


def _ahead(schema: str, row: Any) -> Execute:
    names = {"schema": schema, "inbox": row.inbox}
    if row.is_one_queue and row.sent_clock is not None:
        return AHEAD_OF_ALL.at(**names)(sent_clock=row.sent_clock, origin=row.origin)
    return AHEAD.at(**names)(key=row.key, clock=row.clock)


def finding_causes(id: UUID, *, but: Collection[str] = (), schema: str = DEFAULT_SCHEMA) -> Operation[list[Location]]:
    """Return where the causes of the message `id` are: its cause, the cause of that, and so on.

    The cause of a message is the one whose handler sent it, by its header `causation`. A reaped message is gone from
    the node, and its cause is no longer known, unless its inbox keeps it. Inboxes in `but` are not looked at.
    """
    return _finding_causes(schema_name(schema), id, but)


def _finding_causes(schema: str, id: UUID, but: Collection[str]) -> Operation[list[Location]]:
    places = yield from _tracing(schema, id, _listed(but))
    return (yield from following_causes(schema, id, places, but))


def following_causes(
    schema: str, id: UUID, places: list[Location], but: Collection[str] = ()
) -> Operation[list[Location]]:
    """Return where the causes of a message are, given where it is: what `finding_causes` does after it has looked."""
    found: list[Location] = []
    known = {id}
    while ids := {place.causation for place in places if place.causation is not None} - known:
        places = yield from _standing(schema, list(ids), _listed(but))
        found += places
        known |= ids  # by hand anything can be written as a cause, even a circle
    return found


def finding_effects(
    id: UUID, *, limit: int = MAX_EFFECTS, but: Collection[str] = (), schema: str = DEFAULT_SCHEMA
) -> Operation[list[Location]]:
    """Return where the effects of the message `id` are, the oldest first; the message itself may be gone.

    These are the messages that its handlers sent, then the effects of those, as far as they are on the node; at most
    `limit` places. `Location.ahead` is None. Executables count as messages. Inboxes in `but` are not looked at.
    """
    return _finding_effects(schema_name(schema), id, count(limit, "limit"), _listed(but))


def _finding_effects(schema: str, id: UUID, limit: int, but: str) -> Operation[list[Location]]:
    yield from checking(schema)
    found: list[Location] = []
    known, ids = {id}, {id}
    while ids and len(found) < limit:
        most = limit - len(found)
        rows = yield CAUSED.at(schema=schema, but=but)(causes=[str(each) for each in ids], most=most)
        places = [place for place in _places(CAUSED.named(rows)) if place.id != id]
        found += places
        ids = {place.id for place in places} - known
        known |= ids
    return found


def _places(rows: list[Any]) -> list[Location]:
    return [Location(*row._replace(causation=cause_id(row.causation))[: len(FIELDS)]) for row in rows]


def cause_id(text: str | None) -> UUID | None:
    """Return the id in a header `causation`."""
    try:
        return None if text is None else UUID(text)
    except ValueError:  # written by hand, and not shown: it could be anything
        return None


# What users call: each of these on a sync and on an async connection.
trace, trace_async = on_connections("trace", tracing)
causes, causes_async = on_connections("causes", finding_causes)
effects, effects_async = on_connections("effects", finding_effects)
