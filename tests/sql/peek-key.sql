-- PEEK_KEY in inbox/by_key/peek.py
-- $1 key, $2 limit
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC' FROM "mailroom".inbox_shipping WHERE key = $1::text ORDER BY clock LIMIT $2::bigint
