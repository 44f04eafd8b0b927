-- MESSAGES in inbox/by_key/parked_keys.py
-- $1 key, $2 limit
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC' FROM (
    SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".parked WHERE inbox = 'shipping' AND key = $1::text
    UNION ALL SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".inbox WHERE inbox = 'shipping' AND key = $1::text) AS held
WHERE EXISTS (SELECT FROM "mailroom".key_state
              WHERE inbox = 'shipping' AND key = $1::text AND parked_at IS NOT NULL)
ORDER BY clock LIMIT $2::bigint
