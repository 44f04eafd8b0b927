-- REAP_ONE in inbox/by_key/claim.py
-- $1 mine
WITH bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL AND keep_reaped_days IS NULL THEN greatest(floor, healthy_floor) ELSE 9223372036854775807 END AS healthy, keep_reaped_days IS NULL AS fits,
           NOT EXISTS (SELECT FROM "mailroom".my_key_state WHERE inbox = 'shipping') AS is_well
    FROM "mailroom".inbox_registry WHERE name = 'shipping'),
oldest AS MATERIALIZED (
    SELECT ctid AS place FROM "mailroom".inbox_shipping
    WHERE (clock + 0) > (SELECT healthy FROM bound) ORDER BY (clock + 0) LIMIT 2),
head AS MATERIALIZED (
    SELECT l.place, l.key, l.xmax FROM oldest AS o, LATERAL (
        SELECT ctid AS place, key, xmax FROM "mailroom".inbox_shipping AS i
        WHERE i.ctid = o.place AND CASE WHEN value_json IS NULL THEN octet_length(value)
             WHEN pg_catalog.pg_column_size(value_json) < 2000 THEN octet_length(value_json::text)
             ELSE 67108864 END <= 33554432 FOR UPDATE SKIP LOCKED) AS l
    WHERE (SELECT is_well FROM bound) AND (SELECT count(*) FROM oldest) = 1),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i
    WHERE ctid = ANY (ARRAY(SELECT place FROM head WHERE NOT EXISTS (
        SELECT FROM "mailroom".failing_keys(
            'shipping', ARRAY(SELECT key FROM head), ARRAY(SELECT key FROM head WHERE false), $1::uuid[]))))
    RETURNING i.*)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::boolean, NULL::boolean FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp,
       CASE WHEN EXISTS (SELECT FROM bound)
            THEN (SELECT is_well FROM bound) AND (SELECT count(*) FROM oldest) = (SELECT count(*) FROM gone) END,
       (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (false AND "mailroom".hold_batch()), (SELECT fits FROM bound)
ORDER BY clock
