-- MOVE in inbox/by_key/parked_keys.py
-- $1 cursor, $2 keys, $3 rows
WITH checked AS MATERIALIZED (
    SELECT key FROM "mailroom".key_state
    WHERE inbox = 'shipping' AND retry_at = 'infinity' AND parked_at IS NOT NULL AND key > $1::text
    ORDER BY key LIMIT $2::bigint),
behind AS MATERIALIZED (
    SELECT l.key FROM checked AS l, LATERAL (SELECT FROM "mailroom".inbox_shipping WHERE key = l.key LIMIT 1) AS i),
held AS MATERIALIZED (
    SELECT s.key FROM (SELECT * FROM behind) AS b, LATERAL (
        SELECT key FROM "mailroom".key_state AS k
        WHERE k.inbox = 'shipping' AND k.key = b.key AND k.parked_at IS NOT NULL FOR UPDATE SKIP LOCKED) AS s),
picked AS MATERIALIZED (
    SELECT i.* FROM (SELECT * FROM held) AS h, LATERAL (
        SELECT ctid AS place, clock, coalesce(octet_length(value), pg_catalog.pg_column_size(value_json)) AS size
        FROM "mailroom".inbox_shipping
        WHERE key = h.key ORDER BY clock LIMIT $3::bigint FOR UPDATE SKIP LOCKED) AS i
    LIMIT $3::bigint),fitting AS MATERIALIZED (
    SELECT place FROM picked WHERE clock < coalesce((
        SELECT clock FROM (SELECT clock, row_number() OVER oldest > 1 AND sum(size) OVER oldest > 33554432 AS is_over
                           FROM picked WINDOW oldest AS (ORDER BY clock ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY clock LIMIT 1), 9223372036854775807)),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*),
moved AS (
    INSERT INTO "mailroom".parked (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at) SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM gone ORDER BY key, clock),
touched AS (
    UPDATE "mailroom".key_state SET parked_at = parked_at
    WHERE inbox = 'shipping' AND key = ANY (ARRAY(SELECT DISTINCT key FROM gone)))
SELECT (SELECT count(*) FROM gone),
       (SELECT CASE WHEN count(*) < $2::bigint THEN '' ELSE max(key) END FROM checked),
       (SELECT count(*) = $3::bigint OR count(*) > (SELECT count(*) FROM fitting) FROM picked)
