-- MESSAGES in inbox/total_order/total_parked.py
-- $1 limit
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC' FROM "mailroom".inbox_shipping
WHERE EXISTS (SELECT FROM "mailroom".key_state WHERE inbox = 'shipping' AND key = '' AND retry_at = 'infinity')
ORDER BY (sent_clock + 0), origin LIMIT $1::bigint
