"""What `mailroom tail` reads of an inbox that reads a log: what goes past there, not what the inbox has diverted."""

from typing import Any

from inbox.by_log.log_claim import IN_LANE
from mailroom.message.columns import MESSAGE
from mailroom.message.message import COLUMNS, SELECTED
from mailroom.registry.log_topics import IS_WANTED
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Row, Sql, filled

TICKS = 100  # deliveries of one look
START = Sql(
    """
SELECT coalesce((SELECT clock FROM {schema}.log_tick
                 WHERE log = '{log}' AND (%(since_s)s::float8 IS NULL
                    OR at < clock_timestamp() - interval '1 s' * %(since_s)s::float8)
                 ORDER BY clock DESC LIMIT 1), 0), {channel}
FROM (SELECT '{schema}.log_{log}'::regclass AS t) AS named
""",
    columns=("bigint", "text"),
    channel=locks.channel("t"),
)
# Deliveries name their lanes, and all that is visible up to the last of them is all that there is. They are in segments
# from the one on that has the clock.
NEWS = Sql(
    """
SELECT upto, lanes, ARRAY(
    SELECT s.segment FROM {schema}.log_segment AS s
    WHERE s.log = '{log}' AND s.emptied_at IS NULL AND s.first_clock <= upto AND s.segment >= coalesce((
        SELECT n.segment FROM {schema}.log_segment AS n
        WHERE n.log = '{log}' AND n.first_clock <= %(clock)s::bigint + 1 ORDER BY n.segment DESC LIMIT 1), 0))
FROM (SELECT max(t.clock) AS upto, pg_catalog.array_agg(DISTINCT lane::bigint) AS lanes FROM (
          SELECT clock, lanes FROM {schema}.log_tick
          WHERE log = '{log}' AND clock > %(clock)s::bigint ORDER BY clock LIMIT {ticks}) AS t,
          pg_catalog.unnest(t.lanes) AS lane) AS news
WHERE upto IS NOT NULL
""",
    columns=("bigint", "bigint[]", "bigint[]"),
    ticks=TICKS,
)
NEXT = """
SELECT {selected}, extract(epoch FROM clock_timestamp() - sent_at)::float8,
       coalesce(octet_length(value), octet_length(value_json::text))::bigint
FROM pg_catalog.unnest(%(lanes)s::bigint[]) AS l (lane), LATERAL (
    SELECT o.clock, o.sent_clock, o.origin, o.delivered_at, {message} {in_lane}
    AND o.clock > %(clock)s::bigint AND o.clock <= %(upto)s::bigint AND {is_wanted}
    ORDER BY o.clock LIMIT %(limit)s::bigint) AS o
ORDER BY clock LIMIT %(limit)s::bigint
"""
PARTS: dict[str, Any] = {
    "message": MESSAGE,
    "in_lane": filled(IN_LANE, lane="l.lane::smallint"),
    "is_wanted": IS_WANTED,
}
SHORT = Sql(
    NEXT,
    columns=("bigint", "timestamp", "text", "text", "uuid", "float8", "bigint"),
    selected="clock, delivered_at AT TIME ZONE 'UTC', topic, key, message_id",
    **PARTS,
)
WHOLE = Sql(NEXT, columns=(*COLUMNS.values(), "float8", "bigint"), selected=SELECTED, **PARTS)


def starting_in_log(schema: str, log: str, since_s: float | None) -> Operation[tuple[int, str]]:
    """Return the clock after which to begin, and the channel of the log."""
    [(clock, channel)] = yield START.at(schema=schema, log=log)(since_s=since_s)
    return clock, channel


def reading_log(
    schema: str, inbox: str, log: str, clock: int, limit: int, whole: bool
) -> Operation[tuple[list[Row], int]]:
    """Return rows of what the inbox wants of the next messages after a clock, and up to which clock that is all."""
    for upto, lanes, segments in (yield NEWS.at(schema=schema, log=log)(clock=clock)):
        if not segments:
            return [], int(upto)
        statement = (WHOLE if whole else SHORT).at(
            schema=schema, inbox=inbox, log=log, segments=", ".join(map(str, segments))
        )
        rows = yield statement(lanes=lanes, clock=clock, upto=upto, limit=limit)
        return rows, int(rows[-1][0] if len(rows) == limit else upto)
    return [], clock
