"""How messages get into logs: the part of statements that deliver, receive and fan out on a node that has logs."""

from mailroom.order.total import RINGING
from mailroom.sql.operation import filled

# What {stamped} has for the logs among its {ways} (`mailroom.registry.routing.LOG_ROUTE`), and a tick for each log that
# gets something. In the order in which a lane is read: that keeps the rows of a lane together, and a claim reads few
# pages.
LOGGED = """
logged AS (
    INSERT INTO {schema}.log (log, segment, lane, clock, sent_clock, origin, {message})
    SELECT inbox, segment, {schema}.lane_of(key, lanes) AS lane, clock, sent_clock, origin, {message}
    FROM {stamped} JOIN {ways} USING (topic)
    WHERE lanes IS NOT NULL AND kind IN ('M', 'E')
    ORDER BY inbox, lane, clock
    RETURNING log, lane),
ticked AS (
    INSERT INTO {schema}.log_tick (log, clock, lanes, rows)
    SELECT log, {top}, pg_catalog.array_agg(lane ORDER BY lane), sum(rows)::bigint
    FROM (SELECT log, lane, count(*) AS rows FROM logged GROUP BY log, lane) AS l
    GROUP BY log
    RETURNING log, rows),"""
# The workers of inboxes that read what was written sleep on the log (`inbox.sessions.wakeup`). They are woken as those
# of inboxes that a message was delivered to.
WOKEN_BY_LOGS = filled(
    """
       + (SELECT {ringing} FROM (SELECT to_regclass('{schema}.log_' || log) AS partition FROM ticked) AS bell)""",
    ringing=RINGING,
)
# How many rows of logs that was.
LOGGED_ROWS = "(SELECT coalesce(sum(rows), 0)::bigint FROM ticked)"
# Whether a row of `LOG_ROUTE` is of an inbox.
IS_INBOX = "lanes IS NULL"
HAS_LOGS = "EXISTS (SELECT FROM {schema}.log_registry)"
