-- PASS in dispatcher/housekeeping/healthy_floor.py
-- $1 rows
WITH oldest AS MATERIALIZED (
    SELECT key, clock FROM "mailroom".inbox_shipping
    WHERE (clock + 0) > (SELECT greatest(floor, healthy_floor) FROM "mailroom".inbox_registry WHERE name = 'shipping')
    ORDER BY (clock + 0) LIMIT $1::bigint),
healthy AS MATERIALIZED (
    SELECT clock FROM (SELECT * FROM oldest) AS o
    WHERE (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = o.key) IS NULL
    ORDER BY clock LIMIT 1),
held AS MATERIALIZED (
    SELECT s.key FROM (
        SELECT DISTINCT key FROM oldest
        WHERE clock < coalesce((SELECT clock FROM healthy), 9223372036854775807)) AS o, LATERAL (
        SELECT key FROM "mailroom".key_state AS k WHERE k.inbox = 'shipping' AND k.key = o.key
        FOR NO KEY UPDATE SKIP LOCKED) AS s),
stop AS MATERIALIZED (
    SELECT min(clock) AS clock FROM oldest WHERE NOT EXISTS (SELECT FROM held WHERE held.key = oldest.key)),
passed AS MATERIALIZED (
    SELECT key, max(clock) AS clock FROM oldest
    WHERE clock < coalesce((SELECT clock FROM stop), 9223372036854775807) GROUP BY key),
marked AS (
    UPDATE "mailroom".key_state AS s SET alone_to = p.clock FROM passed AS p
    WHERE s.inbox = 'shipping' AND s.key = p.key AND s.alone_to < p.clock)
UPDATE "mailroom".inbox_registry SET healthy_floor = reached.clock
FROM (SELECT coalesce((SELECT clock FROM stop) - 1, (SELECT max(clock) FROM oldest)) AS clock) AS reached
WHERE name = 'shipping' AND healthy_floor < reached.clock
RETURNING (SELECT clock FROM stop) IS NULL AND (SELECT count(*) FROM oldest) = $1::bigint
