-- TAKE_OVER in inbox/worker/in_flight.py
-- $1 mine, $2 age_s, $3 silent, $4 dead
WITH ended AS MATERIALIZED (
    SELECT w.id, w.claimed_at, m.message_id
    FROM (SELECT id, claimed_at, keys[1] AS key, clocks[1] AS clock FROM "mailroom".my_worker
          WHERE inbox = 'shipping' AND id <> ALL ($1::uuid[])
          AND CASE WHEN process_number IS NULL THEN claimed_at < (SELECT clock_timestamp() - $2::float8 * interval '1 s')
                   WHEN messages > 1 THEN process_number = ANY ($3::integer[])
                   ELSE process_number = ANY ($4::integer[]) END) AS w
    LEFT JOIN LATERAL (
        SELECT message_id FROM "mailroom".inbox_shipping AS i WHERE i.key = w.key AND i.clock = w.clock
        FOR UPDATE SKIP LOCKED) AS m ON true
    WHERE m.message_id IS NOT NULL
       OR (SELECT clock FROM "mailroom".inbox_shipping AS i WHERE i.key = w.key AND i.clock = w.clock) IS NULL),
held AS MATERIALIZED (
    SELECT w.id, e.message_id FROM ended AS e, LATERAL (
        SELECT id FROM "mailroom".my_worker AS w WHERE w.id = e.id AND w.claimed_at = e.claimed_at
        FOR UPDATE SKIP LOCKED) AS w)
UPDATE "mailroom".my_worker AS w SET deleted = true FROM held WHERE w.id = held.id
RETURNING host, pid::bigint, claimed_at > pg_postmaster_start_time(), keys, clocks, messages::bigint, message_id
