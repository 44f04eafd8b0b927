-- READ_PLAIN_TOPICS in inbox/by_log/log_claim.py
-- $1 lanes, $2 first, $3 through, $4 per_lane, $5 end
WITH wanted_topic AS MATERIALIZED (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping'),
at AS MATERIALIZED (
    SELECT r.* FROM pg_catalog.unnest($1::bigint[]) AS l (lane), LATERAL (
        SELECT lane, epoch, clock FROM "mailroom".receipts_shipping AS r
        WHERE r.lane = l.lane::smallint ORDER BY r.epoch DESC, r.clock DESC LIMIT 1) AS r),
due AS MATERIALIZED (
    SELECT lane, epoch, clock FROM at WHERE clock >= $2::bigint - 1),
has AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM "mailroom".my_key_state WHERE inbox = 'shipping')
           OR EXISTS (SELECT FROM "mailroom".inbox_shipping) AS apart),
sums AS MATERIALIZED (
    SELECT due.lane, due.epoch, due.clock AS begun, o.last, o.rows, o.bytes, o.wanted FROM due, LATERAL (
        SELECT max(clock) AS last, count(*) AS rows, sum(light) AS bytes, count(*) FILTER (WHERE is_wanted) AS wanted
        FROM (
        SELECT clock, CASE WHEN is_wanted THEN light END AS light, is_wanted FROM (
            SELECT *, count(*) FILTER (WHERE is_wanted) OVER (ORDER BY clock ROWS UNBOUNDED PRECEDING) AS so_many
            FROM (SELECT o.clock, CASE WHEN value_json IS NULL THEN octet_length(value)
             WHEN pg_catalog.pg_column_size(value_json) < 2000 THEN octet_length(value_json::text)
             ELSE 67108864 END AS light, (NOT EXISTS (SELECT FROM wanted_topic AS p) OR EXISTS (
        SELECT FROM wanted_topic AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits))) AS is_wanted FROM "mailroom".log_orders AS o
        WHERE o.segment IN (1) AND o.lane = due.lane AND o.clock > due.clock ORDER BY o.clock LIMIT $3::bigint) AS o) AS o
        WHERE so_many - is_wanted::integer < $4::bigint) AS o) AS o
    WHERE o.rows > 0 AND NOT (SELECT apart FROM has)),
plain AS MATERIALIZED (
    SELECT coalesce(sum(bytes), 0::numeric)::bigint <= 33554432::bigint AND NOT (SELECT apart FROM has) AS is_plain,
           coalesce(sum(rows), 0)::bigint AS rows, coalesce(sum(wanted), 0)::bigint AS wanted
    FROM sums),
moved AS MATERIALIZED (
    SELECT lane, epoch, CASE WHEN NOT (rows >= $3::bigint OR wanted >= $4::bigint) AND (SELECT is_plain FROM plain) THEN greatest(last, $5::bigint - 1)
                      ELSE last END AS clock
    FROM sums WHERE (SELECT is_plain FROM plain)
    UNION ALL SELECT lane, epoch, $5::bigint - 1 FROM due
    WHERE clock < $5::bigint - 1 AND lane NOT IN (SELECT lane FROM sums) AND (SELECT is_plain FROM plain)),
received AS (
    INSERT INTO "mailroom".receipts_shipping (inbox, lane, epoch, clock)
    SELECT 'shipping', lane, epoch, clock FROM moved)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::bigint, NULL::bigint[], NULL::bigint[], NULL::bigint, NULL::bigint, NULL::boolean, NULL::bigint, NULL::boolean, NULL::bigint
FROM (SELECT * FROM sums WHERE (SELECT is_plain FROM plain)) AS s, LATERAL (
    SELECT o.clock, o.sent_clock, o.origin, o.delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".log_orders AS o
        WHERE o.segment IN (1) AND o.lane = s.lane
    AND o.clock > s.begun AND o.clock <= s.last AND (NOT EXISTS (SELECT FROM wanted_topic AS p) OR EXISTS (
        SELECT FROM wanted_topic AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits))) ORDER BY o.clock LIMIT $4::bigint) AS o
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, is_plain, rows, ARRAY(SELECT lane::bigint FROM sums WHERE (rows >= $3::bigint OR wanted >= $4::bigint)), ARRAY(SELECT lane::bigint FROM sums), (SELECT min(clock) FROM at
        WHERE clock < $2::bigint - 1 OR clock >= $5::bigint - 1), NULL::bigint,
       (SELECT apart FROM has), 0::bigint, (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (is_plain AND wanted > 0 AND "mailroom".hold_batch()), wanted
FROM plain
ORDER BY clock
