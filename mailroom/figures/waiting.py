"""How long the oldest of everything waits, and for whom: what only reading rows can tell."""

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from mailroom.figures.leaders import LEASE_OF
from mailroom.figures.statistics import EXACT
from mailroom.order.expressions import BY_CLOCK
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql.operation import Operation, Sql, filled

AT_ONCE = 50  # inboxes of one statement, which holds a snapshot and their locks
RECENT_S = 60


class OldestOutside(NamedTuple):
    """How long ago the first row of each outbox was sent, None if there is none; scheduled messages, if few.

    `live` is how many are scheduled by the statistics, and `at` the time of all this.
    """

    outbox_s: float | None
    executables_s: float | None
    scheduled: int
    live: int
    at: datetime


# By the primary keys: what is first in the outbox is next, whatever its sent_at.
OUTSIDE = Sql(
    """
SELECT extract(epoch FROM at.now - (SELECT sent_at FROM {schema}.outbox ORDER BY position LIMIT 1))::float8,
       extract(epoch FROM at.now - (SELECT sent_at FROM {schema}.outbox_executable ORDER BY position LIMIT 1))::float8,
       (SELECT count(*) FROM (SELECT FROM {schema}.scheduled LIMIT {most}) AS few),
       pg_catalog.pg_stat_get_live_tuples('{schema}.scheduled'::regclass), at.now
FROM (SELECT coalesce(%(now)s::timestamptz, clock_timestamp())) AS at (now)
""",
    into=OldestOutside,
    most=EXACT + 1,
)


def reading_outside(schema: str, now: datetime | None) -> Operation[OldestOutside]:
    """Return how long what is in no inbox waits. None is the database's clock."""
    found: OldestOutside = OUTSIDE.named((yield OUTSIDE.at(schema=schema)(now=now)))[0]
    # A sender may have given a sent_at in the future.
    return found._replace(outbox_s=max(found.outbox_s or 0.0, 0.0), executables_s=max(found.executables_s or 0.0, 0.0))


class Readable(NamedTuple):
    """An inbox, how many of them one transaction may meet, and whether this role may read its own table."""

    inbox: str
    at_once: int
    alone: bool


# Whether this role may read the inbox by itself: an inbox that was made after its grants it may not.
NAMES = Sql(
    """
SELECT name, {partitions}, coalesce(pg_catalog.has_table_privilege(
           pg_catalog.to_regclass(pg_catalog.concat('{schema}.inbox_', name))::oid, 'SELECT'), false)
FROM {schema}.inbox_registry ORDER BY name
""",
    into=Readable,
    partitions=PARTITIONS,
)


def reading_names(schema: str) -> Operation[list[Readable]]:
    """Return the inboxes, by name."""
    return NAMES.named((yield NAMES.at(schema=schema)(partitions=None)))


# Above the healthy floor there are hardly any messages of failing keys, or none; below it there are no others.
# OFFSET 0: row by row until a key is healthy, which is mostly the first one; in one piece, the keys of all messages are
# looked up. The inboxes stand in the text, in the same portions each time, so the server soon plans none of them any
# more: for 1,000 inboxes planning took most of the time. (SELECT ...) IS NULL stays an index probe, as in a claim.
# D-metrics-2: The oldest message is looked for in each inbox.
OLDEST_WHERE = filled(
    """(
    SELECT '{inbox}'::text, i.delivered_at FROM (
        SELECT key, delivered_at, {by_clock} AS clock FROM {schema}.{messages}
        WHERE {chosen}{by_clock} > (
            SELECT greatest(floor, healthy_floor) FROM {schema}.inbox_registry WHERE name = '{inbox}')
        ORDER BY {by_clock} OFFSET 0) AS i
    WHERE (SELECT s.clock FROM {schema}.key_state AS s WHERE s.inbox = '{inbox}' AND s.key = i.key) IS NULL
    ORDER BY i.clock LIMIT 1)""",
    by_clock=BY_CLOCK,
)
OLDEST_OF = filled(OLDEST_WHERE, messages="inbox_{inbox}", chosen="")
# It takes longer, but no right to each inbox: for what this role may read only as a part of all inboxes.
# D-metrics-7: `mailroom top` finds the oldest messages through the table of all inboxes.
OLDEST_THROUGH_PARENT = filled(OLDEST_WHERE, messages="inbox", chosen="inbox = '{inbox}' AND ")
OLDEST = Sql(
    """
SELECT inbox, extract(epoch FROM coalesce(%(now)s::timestamptz, clock_timestamp()) - delivered_at)::float8
FROM ({each}) AS oldest (inbox, delivered_at)
""",
    columns=("text", "float8"),
)


def reading_oldest(
    schema: str, inboxes: list[Readable], but: Collection[str], now: datetime | None
) -> Operation[dict[str, float]]:
    """Return how long the oldest message waits whose key does not fail, of each inbox that has one; not of those."""
    at_once = min(AT_ONCE, inboxes[0].at_once) if inboxes else AT_ONCE
    readable = [each for each in inboxes if each.inbox not in but]
    oldest: dict[str, float] = {}
    for first in range(0, len(readable), at_once):
        parts = "\nUNION ALL\n".join(
            filled(OLDEST_OF if each.alone else OLDEST_THROUGH_PARENT, inbox=each.inbox)
            for each in readable[first : first + at_once]
        )
        oldest |= dict((yield OLDEST.at(each=parts, schema=schema)(now=now)))
    return oldest


class LinkLag(NamedTuple):
    """How far this node is behind a node that it reads."""

    origin: str
    lag_s: float


class BridgeLag(NamedTuple):
    """How long a bridge out waits for its broker."""

    bridge: str
    lag_s: float


class PeriodicLate(NamedTuple):
    """How long a periodic message has been due."""

    periodic: str
    late_s: float


# A reader notes on its link since when it does not read, but may be gone itself. A batch that came a while
# ago says nothing of now: had something waited, it would have come since.
LINKS = Sql(
    """
SELECT o.name, greatest(
           extract(epoch FROM at.now - o.since)::float8,
           extract(epoch FROM at.now - coalesce(l.until, o.created_at))::float8,
           extract(epoch FROM r.received_at - r.stamped_at)::float8, 0::float8)
FROM (SELECT coalesce(%(now)s::timestamptz, clock_timestamp())) AS at (now) CROSS JOIN {schema}.origin AS o
{lease}
LEFT JOIN LATERAL (
    SELECT received_at, stamped_at FROM {schema}.receipt WHERE origin = o.number ORDER BY last DESC LIMIT 1) AS r
    ON r.received_at > at.now - {recent_s}::float8 * interval '1 s'
WHERE o.state <> 'excluded'
""",
    into=LinkLag,
    lease=filled(LEASE_OF, role="'links'"),
    recent_s=RECENT_S,
)
BRIDGES = Sql(
    """
SELECT l.name, coalesce(greatest(extract(
           epoch FROM coalesce(%(now)s::timestamptz, clock_timestamp()) - t.stamped_at)::float8, 0::float8), 0::float8)
FROM {schema}.bridge_out AS b JOIN {schema}.link AS l ON l.number = b.link LEFT JOIN LATERAL (
    SELECT stamped_at FROM {schema}.transit WHERE link = l.number AND seq > l.acked ORDER BY seq LIMIT 1) AS t ON true
WHERE l.state = 'open'
""",
    into=BridgeLag,
)
PERIODIC = Sql(
    """
SELECT name, greatest(
           extract(epoch FROM coalesce(%(now)s::timestamptz, clock_timestamp()) - next_at)::float8, 0::float8)
FROM {schema}.periodic WHERE NOT paused
""",
    into=PeriodicLate,
)


def reading_link_lags(schema: str, now: datetime | None) -> Operation[list[LinkLag]]:
    """Return how far this node is behind each node that it reads, by its own clock or at `now`."""
    return LINKS.named((yield LINKS.at(schema=schema)(now=now)))


def reading_bridge_lags(schema: str, now: datetime | None) -> Operation[list[BridgeLag]]:
    """Return how long each bridge out waits."""
    return BRIDGES.named((yield BRIDGES.at(schema=schema)(now=now)))


def reading_late(schema: str, now: datetime | None) -> Operation[list[PeriodicLate]]:
    """Return how long each periodic message has been due that is not paused."""
    return PERIODIC.named((yield PERIODIC.at(schema=schema)(now=now)))
