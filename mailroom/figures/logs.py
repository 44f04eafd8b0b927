"""How logs and their readers stand: what is unread, lanes that stand, disk, and which inbox holds it.

Nothing here costs what is unread: the oldest message of each lane is one probe of an index, counts end at
`mailroom.figures.statistics.EXACT`, and beyond that the statistics tell.
"""

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from mailroom.figures.log_readers import AT, LATER, grouping
from mailroom.figures.statistics import EXACT, estimated
from mailroom.registry.log_topics import IS_WANTED_OF_EACH
from mailroom.sql.locked import LockedTable
from mailroom.sql.operation import Operation, Sql, filled

TICKS = 1_000  # deliveries by which it is estimated how much each lane gets


class LogState(NamedTuple):
    """A log: its segments that have messages, how many messages (an estimate), and its size on disk.

    `since` is when its oldest segment was made. Segments that cannot be read now are left out of the size.
    """

    log: str
    lanes: int
    keep_days: int
    drop_unread: bool
    segments: int
    messages: int
    bytes: int
    since: datetime | None


class LogReading(NamedTuple):
    """An inbox that reads a log: what is unread, an estimate above 1,000, and for how long the oldest of that waits.

    Of an inbox that reads some topics, only messages of these are counted; the oldest may be of another one.
    `behind_s`: by so much another lane was read further than the oldest unread message, which is in `lane`; 0 where all
    lanes wait alike. `held_segments` are those that would go if the inbox had read them: `held_bytes` of disk, since
    `held_since`. `lost` counts the messages that its log dropped before it had read them, from `lost_since` to
    `lost_at`.
    """

    inbox: str
    log: str
    unread: int
    oldest_s: float
    behind_s: float
    lane: int | None
    held_segments: int
    held_bytes: int
    held_since: datetime | None
    is_paused: bool
    lost: int
    lost_since: datetime | None
    lost_at: datetime | None


LOGS = Sql(
    """
SELECT l.name, l.lanes::bigint, l.keep_days::bigint, l.drop_unread, pg_catalog.count(s.segment),
       coalesce(sum(pg_catalog.pg_stat_get_live_tuples(s.place)), 0::numeric)::bigint,
       coalesce(sum(pg_catalog.pg_total_relation_size(s.place)), 0::numeric)::bigint, min(s.opened_at)
FROM {schema}.log_registry AS l LEFT JOIN (
    SELECT log, segment, opened_at,
           CASE WHEN pg_catalog.concat('log_', segment) <> ALL (%(but)s::text[])
                THEN pg_catalog.to_regclass(pg_catalog.concat('{schema}.log_', segment)) END AS place
    FROM {schema}.log_segment WHERE emptied_at IS NULL) AS s ON s.log = l.name
GROUP BY l.name ORDER BY l.name
""",
    into=LogState,
)
# What is known of each reader is gathered in arrays: its lanes with anything unread, and the first such message of
# each, the oldest first. An estimate goes by the clocks that a segment spans, and by how much the last deliveries
# brought to each lane: keys may be few. The time of a position is that of the last delivery up to it. A lane without
# anything unread holds nothing back. Which of the messages are wanted is asked of those that are counted.
READING = Sql(
    """
WITH {at},
part AS MATERIALIZED (
    SELECT s.segment, s.first_clock, lead(s.first_clock) OVER w AS ended,
           pg_catalog.to_regclass(pg_catalog.concat('{schema}.log_', s.segment)) AS place,
           coalesce(lead(s.first_clock) OVER w, (
               SELECT max(clock) + 1 FROM {schema}.log_tick WHERE log = '{log}'), s.first_clock) AS reached,
           CASE WHEN NOT l.drop_unread
                THEN lead(s.opened_at) OVER w + l.keep_days::float8 * interval '1 day' END AS over_at
    FROM {schema}.log_segment AS s JOIN {schema}.log_registry AS l ON l.name = s.log
    WHERE s.log = '{log}' AND s.emptied_at IS NULL WINDOW w AS (ORDER BY s.segment)),
share AS MATERIALIZED (
    SELECT lane, sum(rows) / sum(sum(rows)) OVER () AS of_all FROM (
        SELECT t.lanes, t.rows::float8 / pg_catalog.cardinality(t.lanes)::float8 AS rows FROM {schema}.log_tick AS t
        WHERE t.log = '{log}' ORDER BY t.clock DESC LIMIT {ticks}) AS t, pg_catalog.unnest(t.lanes) AS lane
    GROUP BY lane),
unread AS MATERIALIZED (
    SELECT i.inbox, i.has_topics, max(i.clock) AS furthest,
           pg_catalog.array_agg(n.lane ORDER BY n.clock) FILTER (WHERE n.clock IS NOT NULL) AS lanes,
           pg_catalog.array_agg(n.clock ORDER BY n.clock) FILTER (WHERE n.clock IS NOT NULL) AS clocks,
           (pg_catalog.array_agg(n.delivered_at ORDER BY n.clock))[1] AS delivered_at
    FROM at AS i LEFT JOIN LATERAL (
        SELECT i.lane, o.clock, o.delivered_at FROM {later} AS s, LATERAL (
            SELECT o.clock, o.delivered_at FROM {schema}.log AS o
            WHERE o.log = '{log}' AND o.segment = s.segment AND o.lane = i.lane AND o.clock > i.clock
            ORDER BY o.clock LIMIT 1) AS o
        ORDER BY s.segment LIMIT 1) AS n ON true
    GROUP BY i.inbox, i.has_topics)
SELECT i.inbox, few.seen, few.wanted, CASE WHEN few.seen = {most} THEN (
           SELECT coalesce(sum(pg_catalog.pg_stat_get_live_tuples(p.place)::float8 * s.of_all * least(
               greatest(p.reached - n.clock, 0)::float8 / greatest(p.reached - p.first_clock, 1)::float8, 1)), 0)
           FROM {next} JOIN share AS s ON s.lane = n.lane CROSS JOIN part AS p)::bigint ELSE 0::bigint END,
       coalesce(extract(epoch FROM {now} - i.delivered_at)::float8, 0),
       coalesce(extract(epoch FROM (
           SELECT t.at FROM {schema}.log_tick AS t
           WHERE t.log = '{log}' AND t.clock <= i.furthest ORDER BY t.clock DESC LIMIT 1) - i.delivered_at)::float8, 0),
       i.lanes[1]::bigint, h.segments, coalesce(h.bytes, 0::numeric)::bigint, h.since,
       r.is_paused, r.lost, r.lost_since, r.lost_at
FROM unread AS i JOIN reader AS r ON r.inbox = i.inbox, LATERAL (
    SELECT count(*) AS seen, count(*) FILTER (WHERE is_wanted) AS wanted FROM (
        SELECT {is_wanted} AS is_wanted FROM {next}, LATERAL {from_there} AS s, LATERAL (
            SELECT o.topic FROM {schema}.log AS o
            WHERE o.log = '{log}' AND o.segment = s.segment AND o.lane = n.lane AND o.clock >= n.clock
            LIMIT {most}) AS o LIMIT {most}) AS o) AS few, LATERAL (
    SELECT count(*) AS segments, sum(pg_catalog.pg_total_relation_size(p.place)) AS bytes, min(p.over_at) AS since
    FROM part AS p WHERE p.over_at < (SELECT {now}) AND EXISTS (
        SELECT FROM {next}, LATERAL (
            SELECT FROM {schema}.log AS o WHERE o.log = '{log}' AND o.segment = p.segment AND o.lane = n.lane
            AND o.clock >= n.clock LIMIT 1) AS o)) AS h
ORDER BY i.inbox
""",
    columns=(
        "text",
        "bigint",
        "bigint",
        "bigint",
        "float8",
        "float8",
        "bigint",
        "bigint",
        "bigint",
        "timestamptz",
        "boolean",
        "bigint",
        "timestamptz",
        "timestamptz",
    ),
    at=AT,
    later=filled(LATER, above="i.clock"),
    from_there=filled(LATER, above="n.clock - 1"),
    next="ROWS FROM (pg_catalog.unnest(i.lanes), pg_catalog.unnest(i.clocks)) AS n (lane, clock)",
    is_wanted=IS_WANTED_OF_EACH,
    now="coalesce(%(now)s::timestamptz, clock_timestamp())",
    ticks=TICKS,
    most=EXACT + 1,
)


def reading_logs(schema: str, locked: Collection[LockedTable]) -> Operation[list[LogState]]:
    """Return the logs by name. Nothing of tables that are `locked` is looked at."""
    return LOGS.named((yield LOGS.at(schema=schema)(but=[each.table for each in locked])))


def reading_readers(
    schema: str,
    locked: Collection[LockedTable],
    now: datetime | None = None,
    only: Collection[str] | None = None,
) -> Operation[list[LogReading]]:
    """Return the inboxes that read logs by name, or those of them in `only`; not those that cannot be read now.

    In autocommit each statement lets its locks go: it looks at some readers of one log. None is the database's clock.
    """
    found = []
    for names in (yield from grouping(schema, locked, only)):
        for inbox, seen, wanted, estimate, oldest_s, behind_s, *rest in (yield READING.at(**names)(now=now)):
            unread = _unread(seen, wanted, estimate)
            oldest_s = max(oldest_s, 0.0) if unread else 0.0
            found.append(LogReading(inbox, names["log"], unread, oldest_s, max(behind_s, 0.0), *rest))
    return sorted(found)


def _unread(seen: int, wanted: int, estimate: int) -> int:
    """Of more than are looked at, the others are taken to be like those; that none is wanted is not known then."""
    return wanted if seen <= EXACT else max(1, estimated(seen, estimate) * wanted // seen)
