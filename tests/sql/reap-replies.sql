-- TAKE in inbox/asking/replies.py
-- $1 keys
WITH bound AS MATERIALIZED (
    SELECT paused_at IS NULL AS is_open, keep_reaped_days IS NULL AS fits FROM "mailroom".inbox_registry WHERE name = 'shipping'),
wanted AS MATERIALIZED (
    SELECT l.place FROM pg_catalog.unnest($1::text[]) AS k (key), LATERAL (
        SELECT ctid AS place FROM "mailroom".inbox_shipping AS i
        WHERE i.key = k.key AND i.kind = 'R'::"char"
          AND (SELECT is_open AND fits FROM bound)
        ORDER BY i.clock LIMIT 1 FOR UPDATE SKIP LOCKED) AS l),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING wanted WHERE i.ctid = wanted.place RETURNING i.*)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, (SELECT fits FROM bound)
ORDER BY clock
