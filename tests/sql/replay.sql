-- REPLAY in inbox/by_key/parked_keys.py
-- $1 keys, $2 why
WITH back AS (
    DELETE FROM "mailroom".parked WHERE inbox = 'shipping' AND key = ANY($1::text[]) RETURNING inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at),
placed AS (
    INSERT INTO "mailroom".inbox_shipping (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at) SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM back ORDER BY key, clock
    RETURNING key, clock),
first AS MATERIALIZED (SELECT key, count(*) AS messages, min(clock) AS clock FROM placed GROUP BY key),
restarted AS (
    INSERT INTO "mailroom".attempt (inbox, key, clock, message_id, attempt, outcome, error)
    SELECT 'shipping', f.key, f.clock, a.message_id, 0, 'replay', coalesce($2::text, 'replayed')
    FROM first AS f, LATERAL (
        SELECT message_id FROM "mailroom".attempt
        WHERE inbox = 'shipping' AND key = f.key AND clock = f.clock ORDER BY id DESC LIMIT 1) AS a),
freed AS (
    DELETE FROM "mailroom".key_state WHERE inbox = 'shipping' AND key = ANY($1::text[]) AND paused_at IS NULL),
paused AS (
    UPDATE "mailroom".key_state SET parked_at = NULL, clock = 0, attempts = 0, last_error = NULL, alone_to = 0, suspect_to = 0, resume_at = NULL
    WHERE inbox = 'shipping' AND key = ANY($1::text[]) AND paused_at IS NOT NULL)
SELECT c.key, coalesce(p.messages, 0) + h.messages, least(p.clock, h.clock)
FROM pg_catalog.unnest($1::text[]) AS c (key)
LEFT JOIN first AS p USING (key),
LATERAL (SELECT count(*) AS messages, min(clock) AS clock FROM "mailroom".inbox_shipping AS i
         WHERE i.key = c.key) AS h
ORDER BY c.key
