-- INSERT in mailroom/message/outgoing.py
-- $1 message_id, $2 topic, $3 key, $4 kind, $5 message_type, $6 event_type, $7 value, $8 headers, $9 deliver_at, $10 expires_at, $11 after_clock
INSERT INTO "mailroom".outbox (message_id, topic, key, kind, message_type, event_type, value, headers, deliver_at, expires_at, after_clock) VALUES ($1::uuid, $2::text, $3::text, $4::text::"char", $5::text::"char", $6::text::"char", $7::bytea, $8::text::jsonb, $9::timestamptz, $10::timestamptz, $11::bigint)
