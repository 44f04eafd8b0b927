-- REAP_ANY in inbox/by_key/claim.py
-- $1 depth, $2 but, $3 cursor, $4 mine
WITH RECURSIVE bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL AND keep_reaped_days IS NULL THEN floor ELSE 9223372036854775807 END AS floor, CASE WHEN paused_at IS NULL AND keep_reaped_days IS NULL THEN greatest(floor, healthy_floor) ELSE 9223372036854775807 END AS healthy, paused_at IS NULL AND keep_reaped_days IS NULL AS is_open, keep_reaped_days IS NULL AS fits,
           EXISTS (SELECT FROM "mailroom".my_key_state WHERE inbox = 'shipping') AS has_failing
    FROM "mailroom".inbox_registry WHERE name = 'shipping'),
due_next AS MATERIALIZED (SELECT (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_due WHERE inbox = 'shipping' AND retry_at < 'infinity' LIMIT 1) AS in_s FROM bound WHERE is_open AND has_failing),
due AS MATERIALIZED (
    SELECT l.key, l.clock, l.xmax FROM (
        SELECT key FROM "mailroom".my_due
        WHERE inbox = 'shipping' AND retry_at <= (SELECT clock_timestamp() FROM bound WHERE is_open)
        ORDER BY retry_at, key) AS d, LATERAL (
        SELECT key, clock, xmax FROM "mailroom".inbox_shipping AS i
        WHERE i.key = d.key AND i.clock = (SELECT min(clock) FROM "mailroom".inbox_shipping
                                           WHERE key = d.key AND clock > (SELECT floor FROM bound))
        FOR UPDATE SKIP LOCKED) AS l
    LIMIT 1),
oldest AS MATERIALIZED (
    SELECT *, row_number() OVER (PARTITION BY key ORDER BY clock) AS nth FROM (
        SELECT key, clock, ctid AS place, octet_length(value) AS bytes FROM "mailroom".inbox_shipping
        WHERE (clock + 0) > (SELECT healthy FROM bound) ORDER BY (clock + 0) LIMIT 10) AS o),
wanted AS MATERIALIZED (
    SELECT least(1, ceil(1::float8 / CASE WHEN is_full THEN greatest(rows, $1::float8)
                                                     ELSE rows END))::bigint - (SELECT count(*) FROM due) AS keys,
           rows, heads, is_full
    FROM (SELECT sum(CASE WHEN nth <= 1 THEN 1 END)::float8 / sum(CASE WHEN nth = 1 THEN 1 END)::float8 AS rows,
                 sum(CASE WHEN nth = 1 THEN 1 END) AS heads, count(*) = 10 AS is_full
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
    SELECT CASE WHEN is_full AND keys > 2 * found AND 1 > 2 * (SELECT messages FROM seen) THEN keys - found
                ELSE 0 END AS keys
    FROM wanted, (SELECT count(*) AS found FROM near) AS n),
walk (key, clock, is_healthy, found, step) AS (
    (SELECT n.key, n.clock, n.found = 1, n.found, 1 FROM missing AS m, LATERAL (
        SELECT key, clock, ((SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = i.key) IS NULL)::integer AS found FROM (
            SELECT key, clock FROM "mailroom".inbox_shipping
            WHERE key >= $3::text AND clock > (SELECT healthy FROM bound) ORDER BY key, clock LIMIT 1) AS i OFFSET 0) AS n
     WHERE m.keys > 0)
    UNION ALL
    SELECT n.key, n.clock, n.found = 1, w.found + n.found, w.step + 1 FROM walk AS w, LATERAL (
        SELECT key, clock, ((SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = i.key) IS NULL)::integer AS found FROM (
            SELECT key, clock FROM "mailroom".inbox_shipping
            WHERE key > w.key AND clock > (SELECT healthy FROM bound) ORDER BY key, clock LIMIT 1) AS i OFFSET 0) AS n
    WHERE w.found < (SELECT keys FROM missing) AND w.step < 10000),
far AS MATERIALIZED (
    SELECT l.key, l.clock, l.xmax FROM (
        SELECT * FROM walk
        WHERE is_healthy AND key NOT IN (SELECT key FROM near) AND key <> ALL ($2::text[])) AS h, LATERAL (
        SELECT key, clock, xmax FROM "mailroom".inbox_shipping AS i WHERE i.key = h.key AND i.clock = h.clock
        FOR UPDATE SKIP LOCKED) AS l),
locked AS MATERIALIZED (
    SELECT * FROM near UNION ALL SELECT key, clock, xmax, true FROM due
    UNION ALL SELECT key, clock, xmax, false FROM far),
failing AS MATERIALIZED (
    SELECT key, retry_at FROM "mailroom".failing_keys(
        'shipping', ARRAY(SELECT key FROM locked), ARRAY(SELECT key FROM locked WHERE false), $4::uuid[])),
granted AS MATERIALIZED (
    SELECT key, clock FROM locked AS l
    WHERE NOT EXISTS (SELECT FROM failing AS s
                      WHERE s.key = l.key AND (NOT l.is_due OR s.retry_at > clock_timestamp()))),
asked AS MATERIALIZED (
    SELECT least(1, ceil(1::float8 / given))::bigint AS most, given, true AS by_key,
           keys, heads, is_full
    FROM (SELECT nullif(count(*), 0)::float8 AS given FROM granted) AS g, wanted),
picked AS MATERIALIZED (
    SELECT i.* FROM granted AS h, LATERAL (
        SELECT ctid AS place, clock, octet_length(value) AS bytes, value_json FROM "mailroom".inbox_shipping
        WHERE key = h.key AND clock >= h.clock ORDER BY clock LIMIT (SELECT most FROM asked)) AS i
    WHERE (SELECT by_key FROM asked)
    ORDER BY clock LIMIT 1),
plain AS MATERIALIZED (
    SELECT keys <= 0
           AND (1 = 0 OR NOT EXISTS (SELECT FROM "mailroom".my_due
                                         WHERE inbox = 'shipping' AND retry_at <= (SELECT clock_timestamp())))
           AND (SELECT coalesce(sum(CASE WHEN value_json IS NULL THEN bytes
             WHEN pg_catalog.pg_column_size(value_json) < 2000 THEN octet_length(value_json::text)
             ELSE 67108864 END), 0) <= 33554432 FROM picked) AS is_plain
    FROM missing),
fitting AS MATERIALIZED (
    SELECT place FROM picked WHERE clock < coalesce((
        SELECT clock FROM (SELECT clock, row_number() OVER oldest > 1 AND sum(coalesce(bytes, octet_length(value_json::text))) OVER oldest > 33554432 AS is_over
                           FROM picked WINDOW oldest AS (ORDER BY clock ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY clock LIMIT 1), 9223372036854775807)),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i
    WHERE ctid = ANY (ARRAY(SELECT place FROM fitting)) RETURNING i.*),
healed AS (
    UPDATE "mailroom".my_key_state s SET deleted = true
    FROM (SELECT key, max(clock) AS clock FROM gone GROUP BY key) AS g
    WHERE s.inbox = 'shipping' AND s.key = g.key AND s.clock <= g.clock AND s.alone_to <= g.clock
      AND s.paused_at IS NULL)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::boolean, NULL::text AS cursor, NULL::bigint, NULL::boolean,
       NULL::float8 AS due_in_s, NULL::boolean, NULL::boolean
FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, CASE WHEN EXISTS (SELECT FROM bound) THEN is_plain END,
       is_full OR keys = (SELECT count(*) FROM near) AND keys < heads
       OR (SELECT count(*) FROM gone) < (SELECT messages FROM seen) OR EXISTS (SELECT FROM due),
       
       (SELECT CASE WHEN m.keys <= 0 THEN $3::text
                    WHEN coalesce(max(walk.found), 0) < m.keys AND coalesce(max(walk.step), 0) < 10000 THEN ''
                    ELSE max(walk.key) || chr(1) END
        FROM missing AS m LEFT JOIN walk ON true GROUP BY m.keys), CASE WHEN is_full THEN given::bigint END, by_key,
       (SELECT in_s FROM due_next), (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (false AND "mailroom".hold_batch()), (SELECT fits FROM bound)
FROM asked, plain
ORDER BY clock
