-- REAP_PLAIN in inbox/by_key/claim.py
-- $1 depth, $2 but, $3 mine, $4 cursor
WITH RECURSIVE bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL AND keep_reaped_days IS NOT NULL THEN floor ELSE 9223372036854775807 END AS floor, CASE WHEN paused_at IS NULL AND keep_reaped_days IS NOT NULL THEN greatest(floor, healthy_floor) ELSE 9223372036854775807 END AS healthy, paused_at IS NULL AND keep_reaped_days IS NOT NULL AS is_open, keep_reaped_days IS NOT NULL AS fits,
           EXISTS (SELECT FROM "mailroom".my_key_state WHERE inbox = 'shipping') AS has_failing
    FROM "mailroom".inbox_registry WHERE name = 'shipping'),
due_next AS MATERIALIZED (SELECT (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_due WHERE inbox = 'shipping' AND retry_at < 'infinity' LIMIT 1) AS in_s FROM bound WHERE is_open AND has_failing),
oldest AS MATERIALIZED (
    SELECT *, row_number() OVER (PARTITION BY key ORDER BY clock) AS nth FROM (
        SELECT key, clock, ctid AS place, octet_length(value) AS bytes FROM "mailroom".inbox_shipping
        WHERE (clock + 0) > (SELECT healthy FROM bound) ORDER BY (clock + 0) LIMIT 400) AS o),
wanted AS MATERIALIZED (
    SELECT least(100, ceil(100::float8 / CASE WHEN is_full THEN greatest(rows, $1::float8)
                                                     ELSE rows END))::bigint AS keys,
           rows, heads, is_full
    FROM (SELECT sum(CASE WHEN nth <= 10 THEN 1 END)::float8 / sum(CASE WHEN nth = 1 THEN 1 END)::float8 AS rows,
                 sum(CASE WHEN nth = 1 THEN 1 END) AS heads, count(*) = 400 AS is_full
          FROM oldest) AS h),
near AS MATERIALIZED (
    SELECT l.key, l.clock, l.xmax, false AS is_due
    FROM (SELECT * FROM (SELECT key, place FROM oldest WHERE nth = 1 ORDER BY clock OFFSET 0) AS head
          WHERE key <> ALL ($2::text[])
            AND CASE WHEN (SELECT has_failing FROM bound) THEN (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = head.key) IS NULL ELSE true END) AS h, LATERAL (
        SELECT key, clock, xmax FROM "mailroom".inbox_shipping AS i WHERE i.ctid = h.place FOR UPDATE SKIP LOCKED) AS l
    LIMIT (SELECT greatest(keys, 0) FROM wanted)),
seen AS MATERIALIZED (
    SELECT count(*) AS messages FROM oldest WHERE CASE WHEN key IN (SELECT key FROM near) THEN true END),
missing AS MATERIALIZED (
    SELECT CASE WHEN is_full AND keys > 2 * found AND 100 > 2 * (SELECT messages FROM seen) THEN keys - found
                ELSE 0 END AS keys
    FROM wanted, (SELECT count(*) AS found FROM near) AS n),
failing AS MATERIALIZED (
    SELECT key, retry_at FROM "mailroom".failing_keys(
        'shipping', ARRAY(SELECT key FROM near), ARRAY(SELECT key FROM near WHERE xmax <> '0'), $3::uuid[])),
granted AS MATERIALIZED (
    SELECT key, clock FROM near AS l
    WHERE NOT EXISTS (SELECT FROM failing AS s
                      WHERE s.key = l.key AND (NOT l.is_due OR s.retry_at > clock_timestamp()))),
asked AS MATERIALIZED (
    SELECT least(100, ceil(100::float8 / given))::bigint AS most, given, is_full AND least(100, 100::float8 / keys::float8) >= 1.2::float8 * rows AS by_key,
           keys, heads, is_full
    FROM (SELECT nullif(count(*), 0)::float8 AS given FROM granted) AS g, wanted),
picked AS MATERIALIZED (
    SELECT place, clock, coalesce(bytes, (
        SELECT CASE WHEN value_json IS NULL THEN octet_length(value)
             WHEN pg_catalog.pg_column_size(value_json) < 2000 THEN octet_length(value_json::text)
             ELSE 67108864 END FROM "mailroom".inbox_shipping AS i WHERE i.ctid = o.place)) AS light
    FROM oldest AS o
    WHERE nth <= (SELECT most FROM asked WHERE NOT by_key) AND CASE WHEN key IN (SELECT key FROM granted) THEN true END
    UNION ALL
    SELECT i.* FROM granted AS h, LATERAL (
        SELECT ctid AS place, clock, CASE WHEN value_json IS NULL THEN octet_length(value)
             WHEN pg_catalog.pg_column_size(value_json) < 2000 THEN octet_length(value_json::text)
             ELSE 67108864 END AS light FROM "mailroom".inbox_shipping
        WHERE key = h.key AND clock >= h.clock ORDER BY clock LIMIT (SELECT most FROM asked)) AS i
    WHERE (SELECT by_key FROM asked)
    ORDER BY clock LIMIT 100),
plain AS MATERIALIZED (
    SELECT keys <= 0
           AND (0 = 0 OR NOT EXISTS (SELECT FROM "mailroom".my_due
                                         WHERE inbox = 'shipping' AND retry_at <= (SELECT clock_timestamp())))
           AND (SELECT coalesce(sum(light), 0) <= 33554432 FROM picked) AS is_plain
    FROM missing),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i
    WHERE ctid = ANY (ARRAY(SELECT place FROM picked WHERE (SELECT is_plain FROM plain))) RETURNING i.*),
archived AS (
    INSERT INTO "mailroom".my_reaped (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, drop_on)
    SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, (
        SELECT d.day FROM "mailroom".inbox_registry AS r, "mailroom".reaped_day AS d
        WHERE r.name = 'shipping' AND d.emptied_at IS NULL
          AND d.day <= (statement_timestamp() AT TIME ZONE 'UTC'::text)::date + r.keep_reaped_days + 1
        ORDER BY d.day DESC LIMIT 1)
    FROM gone)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::boolean, NULL::text AS cursor, NULL::bigint, NULL::boolean,
       NULL::float8 AS due_in_s, NULL::boolean, NULL::boolean
FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, CASE WHEN EXISTS (SELECT FROM bound) THEN is_plain END,
       is_full OR keys = (SELECT count(*) FROM near) AND keys < heads
       OR (SELECT count(*) FROM gone) < (SELECT messages FROM seen),
       $4::text, CASE WHEN is_full THEN given::bigint END, by_key,
       (SELECT in_s FROM due_next), (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (EXISTS (SELECT FROM gone) AND "mailroom".hold_batch()), (SELECT fits FROM bound)
FROM asked, plain
ORDER BY clock
