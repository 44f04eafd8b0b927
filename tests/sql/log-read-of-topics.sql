-- READ_TOPICS in inbox/by_log/log_claim.py
-- $1 lanes, $2 first, $3 through, $4 per_lane, $5 end
WITH wanted_topic AS MATERIALIZED (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping'),
at AS MATERIALIZED (
    SELECT r.* FROM pg_catalog.unnest($1::bigint[]) AS l (lane), LATERAL (
        SELECT lane, epoch, clock FROM "mailroom".receipts_shipping AS r
        WHERE r.lane = l.lane::smallint ORDER BY r.epoch DESC, r.clock DESC LIMIT 1) AS r),
due AS MATERIALIZED (
    SELECT lane, epoch, clock FROM at WHERE clock >= $2::bigint - 1),
ahead AS MATERIALIZED (
    SELECT due.lane, due.epoch, o.*, row_number() OVER (ORDER BY due.lane, o.clock) AS nth FROM due, LATERAL (
        SELECT clock, key, CASE WHEN is_wanted THEN bytes ELSE 0 END AS bytes, CASE WHEN is_wanted THEN value_json END AS value_json, is_wanted FROM (
            SELECT *, count(*) FILTER (WHERE is_wanted) OVER (ORDER BY clock ROWS UNBOUNDED PRECEDING) AS so_many
            FROM (SELECT o.clock, o.key, octet_length(o.value) AS bytes, o.value_json, (NOT EXISTS (SELECT FROM wanted_topic AS p) OR EXISTS (
        SELECT FROM wanted_topic AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits))) AS is_wanted FROM "mailroom".log_orders AS o
        WHERE o.segment IN (1) AND o.lane = due.lane AND o.clock > due.clock ORDER BY o.clock LIMIT $3::bigint) AS o) AS o
        WHERE so_many - is_wanted::integer < $4::bigint) AS o),
picked AS MATERIALIZED (
    SELECT lane, epoch, clock, key, is_wanted FROM ahead WHERE nth < coalesce((
        SELECT nth FROM (SELECT nth, nth > 1 AND sum(coalesce(bytes, octet_length(value_json::text))) OVER so_far > 33554432 AS is_over
                         FROM ahead WINDOW so_far AS (ORDER BY nth ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY nth LIMIT 1), 9223372036854775807)),
sums AS MATERIALIZED (
    SELECT lane, epoch, max(clock) AS last, count(*) AS rows, count(*) FILTER (WHERE is_wanted) AS wanted FROM picked GROUP BY lane, epoch),
moved AS MATERIALIZED (
    SELECT lane, epoch, CASE WHEN NOT (rows >= $3::bigint OR wanted >= $4::bigint) AND NOT (SELECT count(*) FROM ahead) > (SELECT count(*) FROM picked) THEN greatest(last, $5::bigint - 1)
                      ELSE last END AS clock
    FROM sums
    UNION ALL SELECT lane, epoch, $5::bigint - 1 FROM due
    WHERE clock < $5::bigint - 1 AND lane NOT IN (SELECT lane FROM sums) AND NOT (SELECT count(*) FROM ahead) > (SELECT count(*) FROM picked)),
received AS (
    INSERT INTO "mailroom".receipts_shipping (inbox, lane, epoch, clock)
    SELECT 'shipping', lane, epoch, clock FROM moved),
apart AS MATERIALIZED (
    SELECT key FROM (SELECT DISTINCT key FROM picked WHERE is_wanted OFFSET 0) AS k WHERE (SELECT min(i.clock) FROM "mailroom".inbox_shipping AS i WHERE i.key = k.key) IS NOT NULL
       OR (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = k.key) IS NOT NULL),
diverted AS (
    INSERT INTO "mailroom".inbox_shipping (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM (SELECT lane, clock AS at FROM picked WHERE key IN (SELECT key FROM apart) AND is_wanted) AS p, LATERAL (
        SELECT 'shipping'::text AS inbox, o.clock, o.sent_clock, o.origin, o.delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".log_orders AS o
        WHERE o.segment IN (1) AND o.lane = p.lane
        AND o.clock = p.at) AS o
    ORDER BY key, clock RETURNING 1),
given AS MATERIALIZED (SELECT lane, clock AS at FROM picked WHERE key NOT IN (SELECT key FROM apart) AND is_wanted)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', NULL::boolean, NULL::bigint, NULL::bigint[], NULL::bigint[], NULL::bigint, NULL::bigint, NULL::boolean, NULL::bigint, NULL::boolean, NULL::bigint
FROM given AS p, LATERAL (
    SELECT o.clock, o.sent_clock, o.origin, o.delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".log_orders AS o
        WHERE o.segment IN (1) AND o.lane = p.lane AND o.clock = p.at) AS o
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, true, (SELECT count(*) FROM picked), CASE WHEN (SELECT count(*) FROM ahead) > (SELECT count(*) FROM picked) THEN $1::bigint[] ELSE ARRAY(SELECT lane::bigint FROM sums WHERE (rows >= $3::bigint OR wanted >= $4::bigint)) END,
       ARRAY(SELECT lane::bigint FROM sums), (SELECT min(clock) FROM at
        WHERE clock < $2::bigint - 1 OR clock >= $5::bigint - 1), NULL::bigint,
       EXISTS (SELECT FROM diverted) OR EXISTS (SELECT FROM "mailroom".my_key_state WHERE inbox = 'shipping')
       OR EXISTS (SELECT FROM "mailroom".inbox_shipping), (SELECT count(*) FROM diverted),
       (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (EXISTS (SELECT FROM given) AND "mailroom".hold_batch()), (SELECT count(*) FROM picked WHERE is_wanted)
ORDER BY clock
