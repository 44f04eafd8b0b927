"""How logs and their readers stand: what is unread, lanes that stand, disk, and which inbox holds it.

Nothing here costs what is unread: the oldest message of each lane is one probe of an index, counts end at
`mailroom.figures.statistics.EXACT`, and beyond that the statistics tell.
"""

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from mailroom.figures.statistics import EXACT, estimated
from mailroom.sql.locked import LockedTable
from mailroom.sql.operation import Operation, Sql

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
# The inboxes that read logs, and the tables of which one that is locked keeps their figures from being read.
READERS = Sql(
    """
SELECT r.name, l.name, l.lanes::text,
       ARRAY['log', 'log_receipt', 'receipts_' || r.name, 'log_' || l.name]
       OPERATOR(pg_catalog.||) ARRAY(
           SELECT 'log_' || s.segment::text FROM {schema}.log_segment AS s WHERE s.log = l.name)
FROM {schema}.inbox_registry AS r JOIN {schema}.log_registry AS l ON l.name = r.log ORDER BY r.name
""",
    columns=("text", "text", "text", "text[]"),
)
# `next` is the first unread message of each lane. An estimate goes by the clocks that a segment spans, and by how much
# the last deliveries brought to each lane: keys may be few. The time of a position is that of the last delivery up to
# it. A lane without anything unread holds nothing back.
READER = Sql(
    """
WITH at AS MATERIALIZED (
    SELECT l.lane::smallint AS lane, r.clock FROM pg_catalog.generate_series(0, {lanes} - 1) AS l (lane), LATERAL (
        SELECT r.clock FROM {schema}.log_receipt AS r WHERE r.inbox = '{inbox}' AND r.lane = l.lane::smallint
        ORDER BY r.epoch DESC, r.clock DESC LIMIT 1) AS r),
next AS MATERIALIZED (
    SELECT at.lane, o.clock, o.delivered_at FROM at, LATERAL (
        SELECT o.clock, o.delivered_at FROM {schema}.log AS o
        WHERE o.log = '{log}' AND o.lane = at.lane AND o.clock > at.clock ORDER BY o.clock LIMIT 1) AS o),
oldest AS MATERIALIZED (SELECT lane, clock, delivered_at FROM next ORDER BY clock LIMIT 1),
part AS MATERIALIZED (
    SELECT s.segment, s.first_clock, pg_catalog.to_regclass(pg_catalog.concat('{schema}.log_', s.segment)) AS place,
           coalesce(lead(s.first_clock) OVER w, (
               SELECT max(clock) + 1 FROM {schema}.log_tick WHERE log = '{log}'), s.first_clock) AS ended,
           CASE WHEN NOT l.drop_unread
                THEN lead(s.opened_at) OVER w + l.keep_days::float8 * interval '1 day' END AS over_at
    FROM {schema}.log_segment AS s JOIN {schema}.log_registry AS l ON l.name = s.log
    WHERE s.log = '{log}' AND s.emptied_at IS NULL WINDOW w AS (ORDER BY s.segment)),
share AS MATERIALIZED (
    SELECT lane, sum(rows) / sum(sum(rows)) OVER () AS of_all FROM (
        SELECT t.lanes, t.rows::float8 / pg_catalog.cardinality(t.lanes)::float8 AS rows FROM {schema}.log_tick AS t
        WHERE t.log = '{log}' ORDER BY t.clock DESC LIMIT {ticks}) AS t, pg_catalog.unnest(t.lanes) AS lane
    GROUP BY lane),
held AS MATERIALIZED (
    SELECT count(*) AS segments, sum(pg_catalog.pg_total_relation_size(p.place)) AS bytes, min(p.over_at) AS since
    FROM part AS p WHERE p.over_at < (SELECT {now}) AND EXISTS (
        SELECT FROM next, LATERAL (
            SELECT FROM {schema}.log AS o WHERE o.log = '{log}' AND o.segment = p.segment AND o.lane = next.lane
            AND o.clock >= next.clock LIMIT 1) AS o))
SELECT (SELECT count(*) FROM (
           SELECT FROM next, LATERAL (
               SELECT FROM {schema}.log AS o WHERE o.log = '{log}' AND o.lane = next.lane AND o.clock >= next.clock
               LIMIT {most}) AS o LIMIT {most}) AS few),
       (SELECT coalesce(sum(pg_catalog.pg_stat_get_live_tuples(p.place)::float8 * s.of_all * least(
                   greatest(p.ended - n.clock, 0)::float8 / greatest(p.ended - p.first_clock, 1)::float8, 1)), 0)
        FROM next AS n JOIN share AS s ON s.lane = n.lane CROSS JOIN part AS p)::bigint,
       coalesce((SELECT extract(epoch FROM {now} - delivered_at) FROM oldest)::float8, 0),
       coalesce(extract(epoch FROM (
           SELECT t.at FROM {schema}.log_tick AS t
           WHERE t.log = '{log}' AND t.clock <= (SELECT max(clock) FROM at) ORDER BY t.clock DESC LIMIT 1)
           - (SELECT delivered_at FROM oldest))::float8, 0),
       (SELECT lane FROM oldest)::bigint, h.segments, coalesce(h.bytes, 0::numeric)::bigint, h.since,
       r.paused_at IS NOT NULL, r.lost, r.lost_since, r.lost_at
FROM held AS h, {schema}.inbox_registry AS r WHERE r.name = '{inbox}'
""",
    columns=(
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
    """Return the inboxes that read logs, or those of them in `only`; not those that cannot be read now.

    A statement each: in autocommit each lets its locks go. None is the database's clock.
    """
    tables, found = {each.table for each in locked}, []
    for inbox, log, lanes, needed in (yield READERS.at(schema=schema)()):
        if tables.isdisjoint(needed) and (only is None or inbox in only):
            rows = yield READER.at(schema=schema, inbox=inbox, log=log, lanes=lanes)(now=now)
            for counted, estimate, oldest_s, behind_s, *rest in rows:  # none if it was just dropped
                unread = estimated(counted, estimate)
                found.append(LogReading(inbox, log, unread, max(oldest_s, 0.0), max(behind_s, 0.0), *rest))
    return found
