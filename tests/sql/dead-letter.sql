-- DEAD_LETTER in dispatcher/delivery/refusal.py
-- $1 positions, $2 reasons
WITH refused AS (
    SELECT * FROM unnest($1::bigint[], $2::text[]) AS r (position, reason)),
gone AS (
    DELETE FROM "mailroom".outbox WHERE position = ANY ($1::bigint[]) RETURNING position, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at),
dead AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'deliver', reason, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM gone JOIN refused USING (position) ORDER BY position)
SELECT count(*) FROM gone
