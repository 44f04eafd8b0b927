"""Steps of statements that look at many readers of one log at once, and which readers each of them looks at.

One statement for each reader would plan the log's segments anew for each of them.
"""

from collections.abc import Collection, Mapping
from itertools import groupby

from mailroom.sql.locked import LockedTable
from mailroom.sql.operation import Operation, Sql

# D-logs-15: Figures look at many readers of a log in one statement.
# So many readers. It locks the positions of all of them, and each look at one comes by those of the others.
TOGETHER = 50
# The inboxes that read logs, and the tables of which one that is locked keeps their figures from being read.
READERS = Sql(
    """
SELECT r.name, l.name, l.lanes::text,
       ARRAY['log', 'log_receipt', 'receipts_' || r.name, 'log_topic', 'log_' || l.name]
       OPERATOR(pg_catalog.||) ARRAY(
           SELECT 'log_' || s.segment::text FROM {schema}.log_segment AS s WHERE s.log = l.name)
FROM {schema}.inbox_registry AS r JOIN {schema}.log_registry AS l ON l.name = r.log ORDER BY l.name, r.name
""",
    columns=("text", "text", "text", "text[]"),
)
# How far each lane of each reader was read: one probe of an index. The names are in the text twice, so that the plan
# locks their positions only.
AT = """reader AS MATERIALIZED (
    SELECT r.name AS inbox, r.paused_at IS NOT NULL AS is_paused, r.lost, r.lost_since, r.lost_at,
           EXISTS (SELECT FROM {schema}.log_topic AS p WHERE p.inbox = r.name) AS has_topics
    FROM {schema}.inbox_registry AS r WHERE r.name IN ('{names}')),
at AS MATERIALIZED (
    SELECT i.inbox, i.has_topics, l.lane::smallint AS lane, r.clock
    FROM reader AS i, pg_catalog.generate_series(0, {lanes} - 1) AS l (lane), LATERAL (
        SELECT r.clock FROM {schema}.log_receipt AS r
        WHERE r.inbox = i.inbox AND r.inbox IN ('{names}') AND r.lane = l.lane::smallint
        ORDER BY r.epoch DESC, r.clock DESC LIMIT 1) AS r)"""
# The segments, of the step `part`, that may have messages after a clock. The first one with any is found without a look
# at newer ones, and a reader that keeps up has the newest one only.
LATER = "(SELECT s.segment FROM part AS s WHERE s.ended > {above} + 1 OR s.ended IS NULL ORDER BY s.segment OFFSET 0)"


def grouping(
    schema: str, locked: Collection[LockedTable], only: Collection[str] | None = None
) -> Operation[list[Mapping[str, str]]]:
    """Return the names in each statement about readers of one log: of all, or of those in `only`.

    Those that cannot be read now are left out.
    """
    tables = {each.table for each in locked}
    found = [
        (log, lanes, inbox)
        for inbox, log, lanes, needed in (yield READERS.at(schema=schema)())
        if tables.isdisjoint(needed) and (only is None or inbox in only)
    ]
    groups: list[Mapping[str, str]] = []
    for (log, lanes), of_log in groupby(found, key=lambda each: each[:2]):
        names = [inbox for *_, inbox in of_log]
        for first in range(0, len(names), TOGETHER):
            listed = "', '".join(names[first : first + TOGETHER])
            groups.append({"schema": schema, "log": log, "lanes": lanes, "names": listed})
    return groups
