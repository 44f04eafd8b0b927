-- REAP_PLAIN in inbox/by_key/claim.py
-- $1 depth, $2 but, $3 mine, $4 cursor
WITH RECURSIVE bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL AND keep_reaped_days IS NULL THEN floor ELSE 9223372036854775807 END AS floor, CASE WHEN paused_at IS NULL AND keep_reaped_days IS NULL THEN greatest(floor, healthy_floor) ELSE 9223372036854775807 END AS healthy, paused_at IS NULL AND keep_reaped_days IS NULL AS is_open, keep_reaped_days IS NULL AS fits
    FROM "mailroom".inbox_registry WHERE name = 'shipping'),
due_next AS MATERIALIZED (SELECT (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_due WHERE inbox = 'shipping' AND retry_at < 'infinity' LIMIT 1) AS in_s FROM bound WHERE is_open),
oldest AS MATERIALIZED (
    SELECT key, clock FROM "mailroom".inbox_shipping WHERE (clock + 0) > (SELECT healthy FROM bound)
    ORDER BY (clock + 0) LIMIT 100),
head AS MATERIALIZED (SELECT key, min(clock) AS clock, count(*) AS rows FROM oldest GROUP BY key),
wanted AS MATERIALIZED (
    SELECT least(1, ceil(1::float8 / CASE WHEN is_full THEN greatest(rows, $1::float8)
                                                     ELSE rows END))::bigint AS keys,
           is_full
    FROM (SELECT avg(least(rows, 1))::float8 AS rows, coalesce(sum(rows)::bigint, 0) = 100 AS is_full
          FROM head) AS h),
near AS MATERIALIZED (
    SELECT l.key, l.clock, l.xmax, h.rows
    FROM (SELECT * FROM (SELECT * FROM head ORDER BY clock OFFSET 0) AS head
          WHERE key <> ALL ($2::text[]) AND (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = head.key) IS NULL) AS h, LATERAL (
        SELECT key, clock, xmax FROM "mailroom".inbox_shipping AS i WHERE i.key = h.key AND i.clock = h.clock
        FOR UPDATE SKIP LOCKED) AS l
    LIMIT (SELECT greatest(keys, 0) FROM wanted)),
missing AS MATERIALIZED (
    SELECT CASE WHEN is_full THEN keys - (SELECT count(*) FROM near) ELSE 0 END AS keys FROM wanted),
locked AS MATERIALIZED (
    SELECT key, clock, xmax, false AS is_due FROM near),
failing AS MATERIALIZED (
    SELECT key, retry_at FROM "mailroom".failing_keys(
        'shipping', ARRAY(SELECT key FROM locked), ARRAY(SELECT key FROM locked WHERE false), $3::uuid[])),
granted AS MATERIALIZED (
    SELECT key, clock FROM locked AS l
    WHERE NOT EXISTS (SELECT FROM failing AS s
                      WHERE s.key = l.key AND (NOT l.is_due OR s.retry_at > clock_timestamp()))),
picked AS MATERIALIZED (
    SELECT i.* FROM granted AS h, LATERAL (
        SELECT ctid AS place, clock, octet_length(value) AS bytes, value_json FROM "mailroom".inbox_shipping
        WHERE key = h.key AND clock >= h.clock ORDER BY clock
        LIMIT (SELECT least(1, ceil(1::float8 / count(*)::float8))::bigint FROM granted)) AS i
    ORDER BY i.clock LIMIT 1),
plain AS MATERIALIZED (
    SELECT keys <= 0
           AND (1 = 0 OR NOT EXISTS (SELECT FROM "mailroom".my_due
                                         WHERE inbox = 'shipping' AND retry_at <= (SELECT clock_timestamp())))
           AND (SELECT coalesce(sum(
        CASE WHEN value_json IS NULL THEN bytes WHEN pg_catalog.pg_column_size(value_json) < 2000
             THEN octet_length(value_json::text) ELSE 67108864 END), 0) <= 33554432 FROM picked) AS is_plain
    FROM missing),
fitting AS MATERIALIZED (SELECT place FROM picked WHERE (SELECT is_plain FROM plain)),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::boolean, NULL::text AS cursor, NULL::bigint, NULL::float8 AS due_in_s,
       NULL::boolean, NULL::boolean
FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, CASE WHEN EXISTS (SELECT FROM bound) THEN (SELECT is_plain FROM plain) END,
       (SELECT is_full OR keys = (SELECT count(*) FROM near) AND keys < (SELECT count(*) FROM head)
               OR (SELECT count(*) FROM gone) < (SELECT sum(rows)::bigint FROM near) FROM wanted),
       $4::text,
       (SELECT count(*) FROM granted WHERE (SELECT is_full FROM wanted)),
       (SELECT in_s FROM due_next), (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (false AND "mailroom".hold_batch()), (SELECT fits FROM bound)
ORDER BY clock
