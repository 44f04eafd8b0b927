-- DISCARD in inbox/by_key/parked_keys.py
-- $1 keys, $2 limit
WITH doomed AS MATERIALIZED (
    SELECT c.key, d.last, d.messages FROM pg_catalog.unnest($1::text[]) AS c (key), LATERAL (
        SELECT max(clock) AS last, count(*) AS messages
        FROM (SELECT clock FROM (
    SELECT clock FROM "mailroom".parked WHERE inbox = 'shipping' AND key = c.key
    UNION ALL SELECT clock FROM "mailroom".inbox WHERE inbox = 'shipping' AND key = c.key) AS held ORDER BY clock LIMIT $2::bigint) AS first) AS d),
parked AS (
    DELETE FROM "mailroom".parked AS p USING doomed AS d
    WHERE p.inbox = 'shipping' AND p.key = d.key AND p.clock <= d.last
    RETURNING p.*),
waiting AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING doomed AS d WHERE i.key = d.key AND i.clock <= d.last
    RETURNING i.*),
gone AS MATERIALIZED (SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM parked UNION ALL SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM waiting),
archived AS (
    INSERT INTO "mailroom".my_reaped (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, drop_on, discarded)
    SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, (
        SELECT d.day FROM "mailroom".inbox_registry AS r, "mailroom".reaped_day AS d
        WHERE r.name = 'shipping' AND d.emptied_at IS NULL
          AND d.day <= (statement_timestamp() AT TIME ZONE 'UTC'::text)::date + r.keep_reaped_days + 1
        ORDER BY d.day DESC LIMIT 1), true
    FROM gone WHERE EXISTS (SELECT FROM "mailroom".inbox_registry WHERE name = 'shipping' AND keep_reaped_days IS NOT NULL)),
emptied AS MATERIALIZED (
    SELECT d.key FROM doomed AS d
    WHERE NOT EXISTS (SELECT FROM "mailroom".parked AS p
                      WHERE p.inbox = 'shipping' AND p.key = d.key AND p.clock > d.last)
      AND NOT EXISTS (SELECT FROM "mailroom".inbox_shipping AS i WHERE i.key = d.key AND i.clock > d.last)),
freed AS (
    DELETE FROM "mailroom".key_state AS s USING emptied AS e
    WHERE s.inbox = 'shipping' AND s.key = e.key AND s.paused_at IS NULL),
paused AS (
    UPDATE "mailroom".key_state AS s SET parked_at = NULL, clock = 0, attempts = 0, last_error = NULL, alone_to = 0, suspect_to = 0, resume_at = NULL FROM emptied AS e
    WHERE s.inbox = 'shipping' AND s.key = e.key AND s.paused_at IS NOT NULL)
SELECT key, messages, EXISTS (SELECT FROM emptied AS e WHERE e.key = d.key), NULL::bigint AS clock,
       NULL::uuid, NULL::text, NULL::text
FROM doomed AS d
UNION ALL
SELECT key, NULL, NULL, clock, message_id, headers::text, (
    SELECT error_class FROM "mailroom".attempt AS a
    WHERE a.inbox = 'shipping' AND a.key = gone.key AND a.clock = gone.clock ORDER BY id DESC LIMIT 1)
FROM gone WHERE (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200)
ORDER BY key, clock
