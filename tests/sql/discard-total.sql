-- DISCARD in inbox/total_order/total_parked.py
-- $1 limit
WITH doomed AS MATERIALIZED (
    SELECT ctid AS place FROM "mailroom".inbox_shipping ORDER BY (sent_clock + 0), origin LIMIT $1::bigint),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING doomed WHERE i.ctid = doomed.place
    RETURNING i.*),
archived AS (
    INSERT INTO "mailroom".my_reaped (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, drop_on, discarded)
    SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, (
        SELECT d.day FROM "mailroom".inbox_registry AS r, "mailroom".reaped_day AS d
        WHERE r.name = 'shipping' AND d.emptied_at IS NULL
          AND d.day <= (statement_timestamp() AT TIME ZONE 'UTC'::text)::date + r.keep_reaped_days + 1
        ORDER BY d.day DESC LIMIT 1), true
    FROM gone WHERE EXISTS (SELECT FROM "mailroom".inbox_registry WHERE name = 'shipping' AND keep_reaped_days IS NOT NULL)),
freed AS (
    DELETE FROM "mailroom".key_state
    WHERE inbox = 'shipping' AND key = '' AND (SELECT count(*) FROM doomed) = (
        SELECT count(*) FROM "mailroom".inbox_shipping)
    RETURNING key)
SELECT '' AS key, count(*), EXISTS (SELECT FROM freed), NULL::bigint AS clock, NULL::uuid, NULL::text, NULL::text
FROM doomed
UNION ALL
SELECT key, NULL, NULL, clock, message_id, headers::text, (
    SELECT error_class FROM "mailroom".attempt AS a
    WHERE a.inbox = 'shipping' AND a.key = '' AND a.clock = gone.clock ORDER BY id DESC LIMIT 1)
FROM gone WHERE (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200)
ORDER BY key, clock
