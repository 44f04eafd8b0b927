"""What waits in each inbox and on the way to it, and what holds it up."""

from datetime import datetime
from typing import NamedTuple

from mailroom.figures.keys import PARKED, PAUSED, WAITS
from mailroom.figures.log_readers import AT, LATER, grouping
from mailroom.registry.log_topics import IS_WANTED_OF_EACH
from mailroom.registry.routing import GETS, LOG_ROUTE
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql.locked import LockedTable, locked_inboxes
from mailroom.sql.operation import Operation, Sql, filled


class Coming(NamedTuple):
    """What the outbox holds for an inbox: how many messages, and how long ago the first of them was sent."""

    inbox: str
    messages: int
    lag_s: float | None


class InboxBacklog(NamedTuple):
    """An inbox: its messages, and how long ago the oldest was sent and delivered, None if there is none; its troubles.

    `waiting_keys` wait for their next attempt. `paused_keys` may be parked as well. The breaker's columns are of all
    that are open, if it has one for each prefix of a key.
    """

    name: str
    backlog: int
    sent_s: float | None
    delivered_s: float | None
    waiting_keys: int
    parked_keys: int
    parked_messages: int
    expired: int
    paused_at: datetime | None
    paused_by: str | None
    paused_keys: int
    breaker_opened_at: datetime | None
    breaker_why: str | None


# The inboxes that read logs.
READERS = Sql(
    "SELECT name, log FROM {schema}.inbox_registry WHERE log IS NOT NULL ORDER BY name", columns=("text", "text")
)
# What the outbox holds for each inbox.
COMING = Sql(
    """
WITH outgoing AS MATERIALIZED (
    SELECT topic, kind, count(*) AS messages, min(sent_at) AS since FROM {schema}.outbox GROUP BY topic, kind),
{route}
SELECT inbox, sum(messages)::bigint, extract(epoch FROM clock_timestamp() - min(since))::float8
FROM outgoing JOIN route USING (topic) WHERE {gets} GROUP BY inbox
""",
    into=Coming,
    route=LOG_ROUTE,
    sent="outgoing",
    gets=GETS,
)


def reading_coming(schema: str) -> Operation[dict[str, Coming]]:
    """Return what is on the way to each inbox, or to the log that it reads; one to which nothing is has none."""
    coming: dict[str, Coming] = {each.inbox: each for each in COMING.named((yield COMING.at(schema=schema)()))}
    for reader, log in (yield READERS.at(schema=schema)()):
        coming.pop(reader, None)
        if log in coming:
            coming[reader] = coming[log]._replace(inbox=reader)
    return coming


NAMES = Sql(
    "SELECT name, {partitions} FROM {schema}.inbox_registry ORDER BY name",
    columns=("text", "bigint"),
    partitions=PARTITIONS,
)
# The counts start at the floor, above dead rows. The oldest message is found by its clock, through an index. The names
# are in the text twice: so the plan locks their partitions only, and not those of all inboxes.
INBOXES = Sql(
    """
SELECT r.name, i.messages, extract(epoch FROM clock_timestamp() - oldest.sent_at)::float8,
       extract(epoch FROM clock_timestamp() - oldest.delivered_at)::float8,
       (SELECT count(*) FROM {schema}.key_state AS k
        WHERE k.inbox = r.name AND {waits}),
       (SELECT count(*) FROM {schema}.key_state AS k
        WHERE k.inbox = r.name AND {parked}),
       (SELECT count(*) FROM {schema}.parked AS p WHERE p.inbox = r.name), r.expired, r.paused_at, r.paused_by,
       (SELECT count(*) FROM {schema}.key_state AS k
        WHERE k.inbox = r.name AND {paused}),
       b.opened_at, b.why
FROM {schema}.inbox_registry AS r
CROSS JOIN LATERAL (
    SELECT min(o.opened_at) AS opened_at,
           string_agg(o.why, '; ' ORDER BY o.nth) FILTER (WHERE o.nth <= 3)
           || CASE WHEN count(*) > 3 THEN pg_catalog.format('; and %%s more', count(*) - 3) ELSE '' END AS why
    FROM (SELECT u.opened_at, u.why, row_number() OVER (ORDER BY u.opened_at, u.why) AS nth
          FROM (SELECT opened_at, opened_why AS why FROM {schema}.limits
                WHERE inbox = r.name AND opened_at IS NOT NULL
                UNION ALL
                SELECT opened_at, pg_catalog.format('prefix %%s: %%s', prefix, opened_why)
                FROM {schema}.breaker WHERE inbox = r.name) AS u) AS o) AS b
CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM {schema}.inbox
    WHERE inbox = r.name AND inbox IN ('{names}') AND clock + 0 > r.floor) AS i
LEFT JOIN LATERAL (
    SELECT sent_at, delivered_at FROM {schema}.inbox
    WHERE inbox = r.name AND inbox IN ('{names}') AND clock + 0 > r.floor ORDER BY clock + 0 LIMIT 1) AS oldest ON true
WHERE r.name IN ('{names}') ORDER BY r.name
""",
    into=InboxBacklog,
    waits=filled(WAITS, row="k", now="clock_timestamp()"),
    parked=filled(PARKED, row="k"),
    paused=filled(PAUSED, row="k"),
)


class Unread(NamedTuple):
    """What an inbox has yet to read of its log, and how long ago the oldest of that was sent and delivered."""

    name: str
    messages: int
    sent_s: float | None
    delivered_s: float | None


UNREAD = Sql(
    """
WITH {at},
part AS MATERIALIZED (
    SELECT segment, lead(first_clock) OVER (ORDER BY segment) AS ended
    FROM {schema}.log_segment WHERE log = '{log}' AND emptied_at IS NULL)
SELECT i.inbox, coalesce(sum(n.messages), 0::numeric)::bigint,
       extract(epoch FROM clock_timestamp() - min(n.sent_at))::float8,
       extract(epoch FROM clock_timestamp() - min(n.delivered_at))::float8
FROM at AS i, LATERAL (
    SELECT count(*) AS messages, min(o.sent_at) AS sent_at, min(o.delivered_at) AS delivered_at
    FROM {later} AS s, LATERAL (
        SELECT o.sent_at, o.delivered_at FROM {schema}.log AS o
        WHERE o.log = '{log}' AND o.segment = s.segment AND o.lane = i.lane AND o.clock > i.clock AND {is_wanted}
        OFFSET 0) AS o) AS n
GROUP BY i.inbox
""",
    into=Unread,
    at=AT,
    later=filled(LATER, above="i.clock"),
    is_wanted=IS_WANTED_OF_EACH,
)


def reading_unread(schema: str, locked: list[LockedTable]) -> Operation[dict[str, Unread]]:
    """Return what each inbox that reads a log has yet to read of it; not of those that cannot be read now."""
    unread: dict[str, Unread] = {}
    for names in (yield from grouping(schema, locked)):
        unread |= {each.name: each for each in UNREAD.named((yield UNREAD.at(**names)()))}
    return unread


def _with(found: InboxBacklog, unread: Unread | None) -> InboxBacklog:
    if unread is None:
        return found
    return found._replace(
        backlog=found.backlog + unread.messages,
        sent_s=max(found.sent_s or 0.0, unread.sent_s or 0.0) if found.backlog + unread.messages else None,
        delivered_s=max(found.delivered_s or 0.0, unread.delivered_s or 0.0)
        if found.backlog + unread.messages
        else None,
    )


def reading_inboxes(schema: str, locked: list[LockedTable]) -> Operation[list[InboxBacklog]]:
    """Read the inboxes, as many per statement as one transaction may meet; in autocommit each lets its locks go.

    One whose table, log or positions cannot be read now is left out.
    """
    but = locked_inboxes(locked)
    found = yield NAMES.at(schema=schema)(partitions=None)
    names, most = [name for name, _ in found if name not in but], found[0][1] if found else 1
    inboxes: list[InboxBacklog] = []
    for first in range(0, len(names), most):
        listed = "', '".join(names[first : first + most])
        inboxes += INBOXES.named((yield INBOXES.at(schema=schema, names=listed)()))
    unread = yield from reading_unread(schema, locked)
    unknown = {reader for reader, _ in (yield READERS.at(schema=schema)())} - unread.keys()
    return [_with(each, unread.get(each.name)) for each in inboxes if each.name not in unknown]
