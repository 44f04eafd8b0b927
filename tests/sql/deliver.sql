-- DELIVER in dispatcher/delivery/deliver.py
-- $1 start, $2 gaps, $3 writers, $4 rows, $5 bytes, $6 now, $7 partitions
WITH 
start AS MATERIALIZED (
    SELECT coalesce(min(gap) FILTER (WHERE has_ended), $1::bigint) AS position,
           coalesce(pg_catalog.array_agg(writer) FILTER (WHERE NOT has_ended), '{}'::text[]) AS running
    FROM (SELECT gap, writer, pg_visible_in_snapshot(writer::xid8, pg_current_snapshot()) AS has_ended
          FROM unnest($2::bigint[], $3::text[]) AS g (gap, writer)) AS g),
batch AS MATERIALIZED (
    SELECT max(position) FILTER (WHERE fits) AS last, count(*) FILTER (WHERE fits) AS messages,
           max(after_clock) FILTER (WHERE fits) AS after_clock,
           count(*) = $4::bigint OR NOT bool_and(fits) AS more
    FROM (
    SELECT position, after_clock, deliver_at, expires_at, row_number() OVER oldest = 1 OR $5::bigint >=
           sum(coalesce(octet_length(value), pg_catalog.pg_column_size(value_json))) OVER oldest AS fits
    FROM "mailroom".outbox WHERE position > (SELECT position FROM start)
    WINDOW oldest AS (ORDER BY position ROWS UNBOUNDED PRECEDING)
    ORDER BY position LIMIT $4::bigint) AS o),
stamp AS MATERIALIZED (
    SELECT last, more, base, base + messages AS top, base + messages <= n.clock_ceiling AS fits, n.id AS origin,
           coalesce($6::timestamptz, clock_timestamp()) AS now, EXISTS (SELECT FROM "mailroom".link) AS has_links,
           EXISTS (SELECT FROM "mailroom".fan_out) AS waits,
           (SELECT count(*) FROM "mailroom".inbox_registry) > coalesce($7::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32)) AS has_many,
           EXISTS (SELECT FROM "mailroom".log_registry) AS has_logs
    FROM batch, "mailroom".node AS n,
         LATERAL (SELECT greatest(last_value, after_clock) FROM "mailroom".clock) AS c (base)),
taken AS (
    DELETE FROM "mailroom".outbox
    WHERE position > (SELECT position FROM start) AND position <= (
        SELECT CASE WHEN fits AND NOT waits AND NOT has_links AND NOT has_many AND NOT has_logs THEN last END FROM stamp)
    RETURNING position, deliver_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at),
pattern AS MATERIALIZED (SELECT fits, words, inbox FROM "mailroom".subscription
            WHERE fits IS NOT NULL AND (origin IN ('', '*')) IS TRUE),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM taken WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
route AS MATERIALIZED (
    SELECT topic, inbox, bool_or(subscribed) AS subscribed, bool_or(named) AS named
    FROM (SELECT topic, inbox, true, true FROM "mailroom".subscription WHERE (origin IN ('', '*')) IS TRUE
          UNION ALL SELECT name, name, false, true FROM "mailroom".inbox_registry
          UNION ALL SELECT t.topic, p.inbox, true, false FROM sent_topic AS t JOIN pattern AS p
                    ON (p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits)
         AS r (topic, inbox, subscribed, named)
    GROUP BY topic, inbox),
reach AS MATERIALIZED (
    SELECT topic, count(*) AS ways, count(*) FILTER (WHERE subscribed) AS subscribers,
           count(*) FILTER (WHERE named) AS receivers
    FROM route GROUP BY topic),
stamped AS MATERIALIZED (
    SELECT n.*, ways, receivers,
           CASE WHEN expires_at <= now THEN 'expired'
                WHEN deliver_at > now THEN 'scheduled'
                WHEN kind = 'C' AND receivers > 1 THEN 'dead'
                WHEN CASE kind WHEN 'M' THEN ways WHEN 'E' THEN subscribers ELSE receivers END > 0 THEN 'delivered'
                WHEN kind = 'E' THEN 'unrouted'
                ELSE 'dead' END AS outcome
    FROM (SELECT t.*, base + row_number() OVER (ORDER BY position) AS clock, origin, now FROM taken t, stamp) AS n
    LEFT JOIN reach USING (topic)),
delivered AS (
    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, clock, clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM stamped JOIN route USING (topic)
    WHERE outcome = 'delivered' AND CASE kind WHEN 'M' THEN true WHEN 'E' THEN subscribed ELSE named END
    ORDER BY key, inbox, clock
    RETURNING inbox),
scheduled AS (
    INSERT INTO "mailroom".scheduled (deliver_at, position, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT deliver_at, position, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM stamped WHERE outcome = 'scheduled'),
dead AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'deliver', CASE WHEN receivers > 1
                           THEN pg_catalog.format('a command needs exactly one inbox, its topic has %s', receivers)
                           WHEN ways > 0 THEN 'no inbox gets this topic: patterns get no commands and no replies'
                           ELSE 'no inbox gets this topic' END, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM stamped WHERE outcome = 'dead' ORDER BY clock),
outcomes AS MATERIALIZED (
    SELECT max(clock) AS clock, max(position) AS last, count(*) AS taken,
           count(*) FILTER (WHERE outcome = 'scheduled') AS scheduled,
           count(*) FILTER (WHERE outcome = 'expired') AS expired,
           count(*) FILTER (WHERE outcome = 'unrouted') AS unrouted, count(*) FILTER (WHERE outcome = 'dead') AS dead
    FROM stamped),
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('"mailroom".inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT taken, rows, outcomes.last, setval('"mailroom".clock'::regclass, clock), CASE WHEN NOT fits THEN top END,
       (SELECT pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)) FROM touched), coalesce(more, false), inboxes,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM "mailroom".outbox_position_seq),
       (SELECT running FROM start), EXISTS (SELECT FROM "mailroom".inbox_registry WHERE "order" = 'total'), outcomes.scheduled, outcomes.expired, unrouted, dead,
       has_links, has_many, waits, has_logs
FROM outcomes, stamp, (SELECT coalesce(sum(rows), 0)::bigint, coalesce(pg_catalog.array_agg(inbox), '{}'::text[])
                       FROM touched) AS t (rows, inboxes)
