"""What waits in each inbox and on the way to it, and what holds it up."""

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from mailroom.figures.keys import PARKED, PAUSED, WAITS
from mailroom.registry.routing import GETS, ROUTE
from mailroom.schema.partitions import PARTITIONS
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
    route=ROUTE,
    sent="outgoing",
    gets=GETS,
)


def reading_coming(schema: str) -> Operation[dict[str, Coming]]:
    """Return what is on the way to each inbox; one to which nothing is has none."""
    return {each.inbox: each for each in COMING.named((yield COMING.at(schema=schema)()))}


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


def reading_inboxes(schema: str, but: Collection[str]) -> Operation[list[InboxBacklog]]:
    """Read the inboxes, as many per statement as one transaction may meet; in autocommit each lets its locks go."""
    found = yield NAMES.at(schema=schema)(partitions=None)
    names, most = [name for name, _ in found if name not in but], found[0][1] if found else 1
    inboxes: list[InboxBacklog] = []
    for first in range(0, len(names), most):
        listed = "', '".join(names[first : first + most])
        inboxes += INBOXES.named((yield INBOXES.at(schema=schema, names=listed)()))
    return inboxes
