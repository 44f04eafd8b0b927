-- TAKE in inbox/asking/replies.py
-- $1 keys
WITH wanted AS MATERIALIZED (
    SELECT l.place FROM pg_catalog.unnest($1::text[]) AS k (key), LATERAL (
        SELECT ctid AS place FROM "mailroom".inbox_shipping AS i
        WHERE i.key = k.key AND i.kind = 'R'::"char"
          AND (SELECT paused_at IS NULL FROM "mailroom".inbox_registry WHERE name = 'shipping')
        ORDER BY i.clock LIMIT 1 FOR UPDATE SKIP LOCKED) AS l),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING wanted WHERE i.ctid = wanted.place RETURNING i.*)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC' FROM gone ORDER BY clock
