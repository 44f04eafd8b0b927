-- REAP_KEY in inbox/by_key/claim.py
-- $1 key, $2 limit
WITH bound AS MATERIALIZED (SELECT CASE WHEN paused_at IS NULL AND keep_reaped_days IS NOT NULL THEN floor ELSE 9223372036854775807 END AS floor, keep_reaped_days IS NOT NULL AS fits FROM "mailroom".inbox_registry WHERE name = 'shipping'),
head AS MATERIALIZED (
    SELECT clock FROM "mailroom".inbox_shipping
    WHERE key = $1::text
      AND clock = (SELECT min(clock) FROM "mailroom".inbox_shipping
                   WHERE key = $1::text AND clock > (SELECT floor FROM bound))
      AND (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = $1::text AND s.retry_at > now()) IS NULL
    FOR UPDATE),
picked AS MATERIALIZED (
    SELECT i.* FROM head, LATERAL (
        SELECT ctid AS place, clock, octet_length(value) AS bytes, value_json FROM "mailroom".inbox_shipping
        WHERE key = $1::text AND clock >= head.clock ORDER BY clock LIMIT $2::bigint) AS i),
fitting AS MATERIALIZED (
    SELECT place FROM picked WHERE clock < coalesce((
        SELECT clock FROM (SELECT clock, row_number() OVER oldest > 1 AND sum(coalesce(bytes, octet_length(value_json::text))) OVER oldest > 33554432 AS is_over
                           FROM picked WINDOW oldest AS (ORDER BY clock ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY clock LIMIT 1), 9223372036854775807)),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i
    WHERE ctid = ANY (ARRAY(SELECT place FROM fitting)) RETURNING i.*),
archived AS (
    INSERT INTO "mailroom".my_reaped (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, drop_on)
    SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, (
        SELECT d.day FROM "mailroom".inbox_registry AS r, "mailroom".reaped_day AS d
        WHERE r.name = 'shipping' AND d.emptied_at IS NULL
          AND d.day <= (statement_timestamp() AT TIME ZONE 'UTC'::text)::date + r.keep_reaped_days + 1
        ORDER BY d.day DESC LIMIT 1)
    FROM gone),

healed AS (
    UPDATE "mailroom".my_key_state s SET deleted = true
    FROM (SELECT key, max(clock) AS clock FROM gone GROUP BY key) AS g
    WHERE s.inbox = 'shipping' AND s.key = g.key AND s.clock <= g.clock AND s.alone_to <= g.clock
      AND s.paused_at IS NULL)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::boolean FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL), (SELECT fits FROM bound)
ORDER BY clock
