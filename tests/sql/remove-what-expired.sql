-- EXPIRED in dispatcher/housekeeping/expiry.py
-- $1 rows
WITH registered AS MATERIALIZED (
    SELECT floor, clock_timestamp() - expire_s * interval '1 second' AS since FROM "mailroom".inbox_registry
    WHERE name = 'shipping' FOR NO KEY UPDATE SKIP LOCKED),
oldest AS MATERIALIZED (
    SELECT ctid AS place, key, clock, delivered_at FROM "mailroom".inbox_shipping
    WHERE (clock + 0) > greatest((SELECT floor FROM registered),
                                (SELECT max(upto) FROM "mailroom".spark_stream WHERE inbox = 'shipping'))
    ORDER BY (clock + 0) LIMIT $1::bigint),
old AS MATERIALIZED (SELECT place, key, clock FROM oldest WHERE delivered_at < (SELECT since FROM registered)),
head AS MATERIALIZED (
    SELECT l.key FROM (SELECT key, min(clock) AS clock FROM old GROUP BY key) AS o, LATERAL (
        SELECT key FROM "mailroom".inbox_shipping AS i
        WHERE i.key = o.key AND i.clock = o.clock
          AND (SELECT s.clock FROM "mailroom".key_state AS s
               WHERE s.inbox = 'shipping' AND s.key = o.key AND s.parked_at IS NOT NULL) IS NULL
          AND NOT EXISTS (SELECT FROM "mailroom".attempt AS a
                          WHERE a.inbox = 'shipping' AND a.key = o.key AND a.outcome = 'replay'
                            AND a.at > (SELECT since FROM registered))
        FOR UPDATE SKIP LOCKED) AS l),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING old
    WHERE i.ctid = old.place AND old.key IN (SELECT key FROM head) RETURNING 1),
counted AS (
    UPDATE "mailroom".inbox_registry SET expired = expired + (SELECT count(*) FROM gone)
    WHERE name = 'shipping' AND EXISTS (SELECT FROM gone))
SELECT count(*) FROM gone
