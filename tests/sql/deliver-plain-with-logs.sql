-- DELIVER_PLAIN_LOGS in dispatcher/delivery/plain.py
-- $1 start, $2 gaps, $3 writers, $4 rows, $5 bytes, $6 partitions, $7 whole
WITH 
start AS MATERIALIZED (
    SELECT coalesce(min(gap) FILTER (WHERE has_ended), $1::bigint) AS position,
           coalesce(pg_catalog.array_agg(writer) FILTER (WHERE NOT has_ended), '{}'::text[]) AS running
    FROM (SELECT gap, writer, pg_visible_in_snapshot(writer::xid8, pg_current_snapshot()) AS has_ended
          FROM unnest($2::bigint[], $3::text[]) AS g (gap, writer)) AS g),
pattern AS MATERIALIZED (SELECT fits, words, inbox FROM "mailroom".subscription
            WHERE fits IS NOT NULL AND (origin IN ('', '*')) IS TRUE),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM (SELECT topic 
    FROM "mailroom".outbox WHERE position > (SELECT position FROM start) ORDER BY position LIMIT $4::bigint) AS s WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
receiver AS MATERIALIZED (
    SELECT topic, inbox, bool_or(subscribed) AS subscribed, bool_or(named) AS named
    FROM (SELECT topic, inbox, true, true FROM "mailroom".subscription WHERE (origin IN ('', '*')) IS TRUE
          UNION ALL SELECT name, name, false, true FROM "mailroom".inbox_registry WHERE log IS NULL
          UNION ALL SELECT t.topic, p.inbox, true, false FROM sent_topic AS t JOIN pattern AS p
                    ON (p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits)
         AS r (topic, inbox, subscribed, named)
    GROUP BY topic, inbox),
route AS MATERIALIZED (
    SELECT topic, inbox, subscribed, named AND l.name IS NULL AS named, l.lanes,
           (SELECT s.segment FROM "mailroom".log_segment AS s WHERE s.log = l.name ORDER BY s.segment DESC LIMIT 1)
           AS segment
    FROM receiver AS r LEFT JOIN "mailroom".log_registry AS l ON l.name = r.inbox),
reach AS MATERIALIZED (
    SELECT topic, count(*)::integer AS ways, count(*) FILTER (WHERE named) AS receivers,
           bool_or(subscribed) AS subscribed
    FROM route GROUP BY topic),
batch AS MATERIALIZED (
    SELECT max(position) AS last, count(*) AS messages, max(after_clock) AS after_clock,
           count(*) = $4::bigint AS more, bool_and((
        deliver_at IS NULL AND expires_at IS NULL
        AND CASE kind WHEN 'M' THEN receivers IS NOT NULL WHEN 'E' THEN subscribed
                      WHEN 'C' THEN receivers = 1 ELSE receivers > 0 END) IS TRUE) IS NOT FALSE
           AND (sum(bytes) <= $5::bigint) IS NOT FALSE AND NOT EXISTS (SELECT FROM "mailroom".link)
           AND NOT EXISTS (SELECT FROM "mailroom".fan_out)
           AND ((sum(ways) <= coalesce($6::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32))) IS NOT FALSE
                OR (SELECT true FROM (SELECT FROM "mailroom".inbox_registry UNION ALL SELECT FROM "mailroom".log_registry) AS r OFFSET coalesce($6::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32)) LIMIT 1) IS NULL) AS is_plain,
           EXISTS (SELECT FROM "mailroom".inbox_registry WHERE "order" = 'total') AS has_bounds
    FROM (SELECT position, topic, kind, deliver_at, expires_at, after_clock,
                 coalesce(octet_length(value), pg_catalog.pg_column_size(value_json)) AS bytes 
    FROM "mailroom".outbox WHERE position > (SELECT position FROM start) ORDER BY position LIMIT $4::bigint) AS o
         LEFT JOIN reach USING (topic)),
stamp AS MATERIALIZED (
    SELECT CASE WHEN is_plain AND base + messages <= n.clock_ceiling THEN last END AS last, is_plain, messages, more,
           base, base + messages AS top, base + messages <= n.clock_ceiling AS fits, has_bounds, n.id AS origin
    FROM (SELECT last, messages, after_clock, more, has_bounds,
                 is_plain AND NOT ($7::boolean AND has_bounds) AS is_plain FROM batch) AS b, "mailroom".node AS n,
         LATERAL (SELECT greatest(last_value, after_clock) FROM "mailroom".clock) AS c (base)),
taken AS (
    DELETE FROM "mailroom".outbox
    WHERE position > (SELECT position FROM start) AND position <= (SELECT last FROM stamp)
    RETURNING position),
delivered AS (
    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, clock, clock, (SELECT origin FROM stamp), message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM (SELECT message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, (SELECT base FROM stamp) + row_number() OVER (ORDER BY position) AS clock
          FROM "mailroom".outbox
          WHERE position > (SELECT position FROM start) AND position <= (SELECT last FROM stamp)) AS o
         JOIN route USING (topic)
    WHERE CASE kind WHEN 'M' THEN true WHEN 'E' THEN subscribed ELSE named END AND lanes IS NULL
    ORDER BY key, inbox, clock
    RETURNING inbox),
logged AS (
    INSERT INTO "mailroom".log (log, segment, lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, segment, "mailroom".lane_of(key, lanes) AS lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM (SELECT message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, clock, clock AS sent_clock, (SELECT origin FROM stamp) AS origin
          FROM (SELECT message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, (SELECT base FROM stamp) + row_number() OVER (ORDER BY position) AS clock
                FROM "mailroom".outbox
                WHERE position > (SELECT position FROM start) AND position <= (SELECT last FROM stamp)) AS o) AS o JOIN route USING (topic)
    WHERE lanes IS NOT NULL AND kind IN ('M', 'E')
    ORDER BY inbox, lane, clock
    RETURNING log, lane),
ticked AS (
    INSERT INTO "mailroom".log_tick (log, clock, lanes, rows)
    SELECT log, (SELECT top FROM stamp), pg_catalog.array_agg(lane ORDER BY lane), sum(rows)::bigint
    FROM (SELECT log, lane, count(*) AS rows FROM logged GROUP BY log, lane) AS l
    GROUP BY log
    RETURNING log, rows),
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('"mailroom".inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT taken, rows + (SELECT coalesce(sum(rows), 0)::bigint FROM ticked), t.last, CASE WHEN taken > 0 THEN setval('"mailroom".clock'::regclass, top) END,
       CASE WHEN is_plain AND NOT fits THEN top END, woken
       + (SELECT pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)) FROM (SELECT to_regclass('"mailroom".log_' || log) AS partition FROM ticked) AS bell), more, inboxes,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM "mailroom".outbox_position_seq),
       (SELECT running FROM start), has_bounds, EXISTS (SELECT FROM "mailroom".log_registry), is_plain
FROM stamp, (SELECT count(*), max(position) FROM taken) AS t (taken, last),
     (SELECT coalesce(sum(rows), 0)::bigint, coalesce(pg_catalog.array_agg(inbox), '{}'::text[]), pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer))
      FROM touched) AS d (rows, inboxes, woken)
