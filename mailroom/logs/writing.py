"""How messages get into logs: the part of statements that deliver, receive and fan out on a node that has logs."""

# What {stamped} has for the logs of `mailroom.registry.routing.LOG_ROUTE`, and a tick for each log that gets something.
# In the order in which a lane is read: that keeps the rows of a lane together, so that a claim reads few pages.
LOGGED = """
logged AS (
    INSERT INTO {schema}.log (segment, lane, clock, sent_clock, origin, {message})
    SELECT segment, {schema}.lane_of(key, lanes) AS lane, clock, sent_clock, origin, {message}
    FROM {stamped} JOIN route USING (topic)
    WHERE segment IS NOT NULL AND kind IN ('M', 'E'){narrow}
    ORDER BY segment, lane, clock
    RETURNING segment, lane),
ticked AS (
    INSERT INTO {schema}.log_tick (log, clock, lanes, rows)
    SELECT s.log, {top}, pg_catalog.array_agg(lane ORDER BY lane), sum(rows)::bigint
    FROM (SELECT segment, lane, count(*) AS rows FROM logged GROUP BY segment, lane) AS l
         JOIN {schema}.log_segment AS s USING (segment)
    GROUP BY s.log
    RETURNING rows),"""
# How many rows of logs that was.
LOGGED_ROWS = "(SELECT coalesce(sum(rows), 0)::bigint FROM ticked)"
# Whether a row of `LOG_ROUTE` is of an inbox.
IS_INBOX = "segment IS NULL"
HAS_LOGS = "EXISTS (SELECT FROM {schema}.log_registry)"
