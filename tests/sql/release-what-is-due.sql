-- RELEASE in dispatcher/delivery/deliver.py
-- $1 now, $2 rows
WITH due AS MATERIALIZED (
    SELECT deliver_at, position FROM "mailroom".scheduled
    WHERE deliver_at <= coalesce($1::timestamptz, clock_timestamp())
    ORDER BY deliver_at, position LIMIT $2::bigint FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM "mailroom".scheduled s USING due WHERE (s.deliver_at, s.position) = (due.deliver_at, due.position)
    RETURNING s.*),
back AS (
    INSERT INTO "mailroom".outbox (message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at) SELECT message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM gone ORDER BY deliver_at, position RETURNING 1)
SELECT count(*) FROM back
