-- PEEK in inbox/by_log/log_peek.py
-- $1 key, $2 limit
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC' FROM (
    SELECT clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".inbox_shipping
    WHERE ($1::text IS NULL OR key = $1::text)
    UNION ALL
    SELECT o.* FROM (
        SELECT DISTINCT ON (lane) lane, clock FROM "mailroom".receipts_shipping
        ORDER BY lane, epoch DESC, clock DESC) AS at, LATERAL (
        SELECT o.clock, o.sent_clock, o.origin, o.delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".log_orders AS o
        WHERE o.lane = at.lane AND o.clock > at.clock AND (NOT EXISTS (SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping') AS p) OR EXISTS (
        SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping') AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits))) AND ($1::text IS NULL OR key = $1::text) ORDER BY o.clock LIMIT $2::bigint) AS o) AS unread ORDER BY clock LIMIT $2::bigint
