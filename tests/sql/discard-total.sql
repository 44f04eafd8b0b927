-- DISCARD in inbox/total_order/total_parked.py
-- $1 limit
WITH doomed AS MATERIALIZED (
    SELECT ctid AS place FROM "mailroom".inbox_shipping ORDER BY (sent_clock + 0), origin LIMIT $1::bigint),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING doomed WHERE i.ctid = doomed.place
    RETURNING i.key, i.clock, i.message_id, i.kind, i.headers),
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
