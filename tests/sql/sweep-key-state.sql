-- IDLE_KEYS in dispatcher/housekeeping/janitor.py
-- $1 rows
WITH due AS MATERIALIZED (
    SELECT key, greatest(clock, alone_to) AS clock, alone_to, retry_at FROM "mailroom".key_state
    WHERE inbox = 'shipping' AND retry_at <= clock_timestamp() AND key <> '' ORDER BY retry_at, key
    LIMIT $1::bigint),
idle AS MATERIALIZED (
    SELECT d.key, d.alone_to, d.retry_at FROM due AS d LEFT JOIN LATERAL (
        SELECT clock FROM "mailroom".inbox_shipping WHERE key = d.key AND clock <= d.clock LIMIT 1) AS i ON true
    WHERE i.clock IS NULL),
held AS MATERIALIZED (
    SELECT s.key FROM (SELECT * FROM idle) AS i, LATERAL (
        SELECT key FROM "mailroom".key_state AS k
        WHERE k.inbox = 'shipping' AND k.key = i.key AND k.retry_at = i.retry_at AND k.alone_to = i.alone_to
        FOR UPDATE SKIP LOCKED) AS s)
DELETE FROM "mailroom".key_state WHERE inbox = 'shipping' AND key = ANY (ARRAY(SELECT key FROM held))
