-- REAP in inbox/total_order/total_claim.py
WITH bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL THEN r.sent_floor ELSE 9223372036854775807 END AS low, r.paused_at IS NULL AS is_open, r.keep_reaped_days IS NOT NULL AS keeps, (
        SELECT s.clock FROM "mailroom".stable AS s WHERE s.inbox = 'shipping' ORDER BY s.clock DESC LIMIT 1) AS top
    FROM "mailroom".inbox_registry AS r WHERE r.name = 'shipping'),
picked AS MATERIALIZED (
    SELECT place, row_number() OVER (ORDER BY sent_clock, origin) AS clock, bytes, value_json FROM (
        SELECT ctid AS place, sent_clock, origin, octet_length(value) AS bytes, value_json
        FROM "mailroom".inbox_shipping
        WHERE (sent_clock + 0) > (SELECT low FROM bound) AND (sent_clock + 0) <= (SELECT top FROM bound)
        ORDER BY (sent_clock + 0), origin LIMIT CASE WHEN (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = '' AND (0 = 0 OR s.retry_at > (SELECT clock_timestamp()))) IS NULL THEN 100 ELSE 0 END) AS i),
fitting AS MATERIALIZED (
    SELECT place FROM picked WHERE clock < coalesce((
        SELECT clock FROM (SELECT clock, row_number() OVER oldest > 1 AND sum(coalesce(bytes, octet_length(value_json::text))) OVER oldest > 33554432 AS is_over
                           FROM picked WINDOW oldest AS (ORDER BY clock ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY clock LIMIT 1), 9223372036854775807)),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*),
healed AS (
    UPDATE "mailroom".my_key_state AS s SET deleted = true
    WHERE s.inbox = 'shipping' AND s.key = '' AND s.suspect_to <= (SELECT max(sent_clock) FROM gone) AND (s.clock IN (SELECT clock FROM gone)
         OR NOT EXISTS (SELECT FROM "mailroom".inbox_shipping WHERE (clock + 0) = s.clock)))
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::float8, NULL::boolean FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, (SELECT count(*) = 100 OR count(*) > (SELECT count(*) FROM gone) FROM picked),
       (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_key_state
        WHERE inbox = 'shipping' AND key = '' AND retry_at < 'infinity'),
       (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (EXISTS (SELECT FROM gone) AND "mailroom".hold_batch())
ORDER BY sent_clock, origin
