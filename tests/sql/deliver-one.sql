-- DELIVER_ONE in dispatcher/delivery/single.py
-- $1 start, $2 partitions
WITH oldest AS MATERIALIZED (
    SELECT position, topic, kind, after_clock, deliver_at IS NULL AND expires_at IS NULL AS is_due
    FROM "mailroom".outbox WHERE position > $1::bigint ORDER BY position LIMIT 2),
way AS MATERIALIZED (
    SELECT inbox FROM "mailroom".subscription WHERE topic = (SELECT topic FROM oldest LIMIT 1) AND (origin IN ('', '*')) IS TRUE
    UNION SELECT name FROM "mailroom".inbox_registry
          WHERE name = (SELECT topic FROM oldest WHERE kind <> 'E' LIMIT 1)
    UNION SELECT p.inbox FROM "mailroom".subscription AS p, (
              SELECT topic || '.' AS ended,
                     pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
              FROM oldest WHERE kind IN ('M', 'E')) AS t
          WHERE p.fits IS NOT NULL AND (origin IN ('', '*')) IS TRUE AND (p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits),
stamp AS MATERIALIZED (
    SELECT o.position, base + (o.position IS NOT NULL)::integer AS clock, n.clock_ceiling AS ceiling, n.id AS origin,
           (o.position IS NULL OR (
               is_due AND CASE kind WHEN 'C' THEN ways = 1 ELSE ways > 0 END AND ways <= coalesce($2::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32))
               AND NOT EXISTS (SELECT FROM oldest OFFSET 1)))
           AND NOT EXISTS (
               SELECT FROM "mailroom".link UNION ALL SELECT FROM "mailroom".fan_out
               UNION ALL SELECT FROM "mailroom".log_registry
               UNION ALL SELECT FROM "mailroom".inbox_registry WHERE "order" = 'total') AS is_plain
    FROM "mailroom".node AS n, (SELECT count(*) AS ways FROM way) AS w
         LEFT JOIN (SELECT * FROM oldest LIMIT 1) AS o ON true,
         LATERAL (SELECT greatest(last_value, after_clock) FROM "mailroom".clock) AS c (base)),
taken AS (
    DELETE FROM "mailroom".outbox
    WHERE position = (SELECT position FROM stamp WHERE is_plain AND clock <= ceiling)
    RETURNING message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at),
delivered AS (
    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, clock, clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM taken, stamp, way
    RETURNING inbox)
SELECT least(rows, 1), rows, CASE WHEN rows > 0 THEN position END,
       CASE WHEN rows > 0 THEN setval('"mailroom".clock'::regclass, clock) END,
       CASE WHEN is_plain AND clock > ceiling THEN clock END, woken, false, inboxes,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM "mailroom".outbox_position_seq),
       '{}'::text[], false, is_plain
FROM stamp, (SELECT count(*), coalesce(pg_catalog.array_agg(inbox), '{}'::text[]), pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer))
             FROM (SELECT inbox, to_regclass('"mailroom".inbox_' || inbox) AS partition FROM delivered) AS touched)
            AS d (rows, inboxes, woken)
