-- TICKS in mailroom/logs/segments.py
-- $1 rows
WITH old AS MATERIALIZED (
    SELECT t.log, t.clock FROM "mailroom".log_registry AS l, LATERAL (
        SELECT t.log, t.clock FROM "mailroom".log_tick AS t
        WHERE t.log = l.name AND t.clock < (
            SELECT s.first_clock FROM "mailroom".log_segment AS s
            WHERE s.log = l.name AND s.emptied_at IS NULL ORDER BY s.segment LIMIT 1)
        ORDER BY t.clock LIMIT $1::bigint) AS t),
gone AS (
    DELETE FROM "mailroom".log_tick AS t USING old WHERE t.log = old.log AND t.clock = old.clock RETURNING 1)
SELECT count(*) FROM gone
