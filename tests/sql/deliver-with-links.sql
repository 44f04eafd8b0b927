-- DELIVER_FULL in dispatcher/delivery/deliver.py
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
           (SELECT count(*) FROM "mailroom".inbox_registry) + (SELECT count(*) FROM "mailroom".log_registry) > coalesce($7::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32)) AS has_many,
           EXISTS (SELECT FROM "mailroom".log_registry) AS has_logs
    FROM batch, "mailroom".node AS n,
         LATERAL (SELECT greatest(last_value, after_clock) FROM "mailroom".clock) AS c (base)),
taken AS (
    DELETE FROM "mailroom".outbox
    WHERE position > (SELECT position FROM start) AND position <= (
        SELECT CASE WHEN fits AND NOT waits THEN last END FROM stamp)
    RETURNING position, deliver_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at),
pattern AS MATERIALIZED (SELECT fits, words, inbox FROM "mailroom".subscription
            WHERE fits IS NOT NULL AND (origin IN ('', '*')) IS TRUE),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM taken WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
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
link_pattern AS MATERIALIZED (
    SELECT fits, words, link FROM "mailroom".link_topic JOIN "mailroom".link ON number = link
    WHERE fits IS NOT NULL AND state = 'open'),
linked_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM taken WHERE EXISTS (SELECT FROM link_pattern) GROUP BY topic),
link_route AS MATERIALIZED (
    SELECT topic, link, bool_or(named) AND topic NOT IN (SELECT topic FROM route WHERE named) AS named
    FROM (SELECT topic, link, commands FROM "mailroom".link_topic JOIN "mailroom".link ON number = link
          WHERE fits IS NULL AND state = 'open'
          UNION ALL SELECT t.topic, p.link, false FROM linked_topic AS t JOIN link_pattern AS p
                    ON (p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits)
         AS r (topic, link, named)
    GROUP BY topic, link),
reach AS MATERIALIZED (
    SELECT topic, count(*) AS ways, count(*) FILTER (WHERE subscribed) AS subscribers,
           count(*) FILTER (WHERE named) AS receivers,
           pg_catalog.array_agg(link) FILTER (WHERE link IS NOT NULL) AS links,
           pg_catalog.array_agg(link) FILTER (WHERE link IS NOT NULL AND named) AS named_links
    FROM (SELECT topic, subscribed, named, NULL::bigint FROM route
          UNION ALL SELECT topic, true, named, link FROM link_route) AS w (topic, subscribed, named, link) GROUP BY topic),
stamped AS MATERIALIZED (
    SELECT n.*, ways, receivers, CASE WHEN kind IN ('M', 'E') THEN links ELSE named_links END AS links,
           CASE WHEN expires_at <= now THEN 'expired'
                WHEN deliver_at > now THEN 'scheduled'
                WHEN kind = 'C' AND receivers > 1 THEN 'dead'
                WHEN CASE kind WHEN 'M' THEN ways WHEN 'E' THEN subscribers ELSE receivers END > 0 THEN 'delivered'
                WHEN kind = 'E' THEN 'unrouted'
                ELSE 'dead' END AS outcome
    FROM (SELECT t.*, base + row_number() OVER (ORDER BY position) AS clock, origin, now FROM taken t, stamp) AS n
    LEFT JOIN reach USING (topic)),
width AS MATERIALIZED (
    SELECT has_many AND (
        SELECT pg_catalog.count(DISTINCT inbox)
        FROM (SELECT DISTINCT topic, kind FROM stamped WHERE outcome = 'delivered') AS s JOIN route USING (topic)
        WHERE CASE kind WHEN 'M' THEN true WHEN 'E' THEN subscribed ELSE named END) > coalesce($7::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32)) AS is_wide
    FROM stamp),
fanned AS (
    INSERT INTO "mailroom".fan_out (clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT clock, clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM stamped
    WHERE outcome = 'delivered' AND (SELECT is_wide FROM width) ORDER BY clock
    RETURNING 1),
fanned_way AS (
    INSERT INTO "mailroom".fan_out_way (inbox, topic, messages_after, events_after, others_after)
    SELECT inbox, topic, 0, CASE WHEN subscribed THEN 0 END, CASE WHEN named THEN 0 END FROM route
    WHERE (SELECT is_wide FROM width) AND topic IN (SELECT topic FROM stamped WHERE outcome = 'delivered')
      AND lanes IS NULL
    ORDER BY inbox, topic),
delivered AS (
    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, clock, clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM stamped JOIN route USING (topic)
    WHERE outcome = 'delivered' AND CASE kind WHEN 'M' THEN true WHEN 'E' THEN subscribed ELSE named END AND lanes IS NULL AND NOT (SELECT is_wide FROM width)
    ORDER BY key, inbox, clock
    RETURNING inbox),
logged AS (
    INSERT INTO "mailroom".log (log, segment, lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, segment, "mailroom".lane_of(key, lanes) AS lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM (SELECT *, clock AS sent_clock FROM stamped WHERE outcome = 'delivered') AS s JOIN route USING (topic)
    WHERE lanes IS NOT NULL AND kind IN ('M', 'E')
    ORDER BY inbox, lane, clock
    RETURNING log, lane),
ticked AS (
    INSERT INTO "mailroom".log_tick (log, clock, lanes, rows)
    SELECT log, (SELECT max(clock) FROM stamped), pg_catalog.array_agg(lane ORDER BY lane), sum(rows)::bigint
    FROM (SELECT log, lane, count(*) AS rows FROM logged GROUP BY log, lane) AS l
    GROUP BY log
    RETURNING log, rows),
ends AS MATERIALIZED (
    SELECT link, coalesce((SELECT t.seq FROM "mailroom".transit AS t WHERE t.link = l.link ORDER BY t.seq DESC LIMIT 1),
                          0::bigint) AS seq
    FROM (SELECT DISTINCT pg_catalog.unnest(links) FROM stamped
          WHERE outcome = 'delivered' AND EXISTS (SELECT FROM link_route)) AS l (link)),
departure AS MATERIALIZED (SELECT clock_timestamp() AS at),
carried AS (
    INSERT INTO "mailroom".transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT link, seq + row_number() OVER (PARTITION BY link ORDER BY clock), clock, at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM (SELECT clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, pg_catalog.unnest(links) AS link FROM stamped
          WHERE outcome = 'delivered' AND EXISTS (SELECT FROM ends)) AS s JOIN ends USING (link) CROSS JOIN departure
    RETURNING link),
departed AS MATERIALIZED (
    SELECT link, count(*) AS rows, set_config('synchronous_commit', 'on', true) FROM carried GROUP BY link),
scheduled AS (
    INSERT INTO "mailroom".scheduled (deliver_at, position, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT deliver_at, position, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM stamped WHERE outcome = 'scheduled'),
dead AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'deliver', CASE WHEN receivers > 1
                           THEN pg_catalog.format('a command needs exactly one inbox, its topic has %s', receivers)
                           WHEN ways > 0 THEN 'no inbox gets this topic: patterns get no commands and no replies, nor do readers and bridges without the topic by its name (mailroom link allow, mailroom bridge out)'
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
SELECT taken, rows + (SELECT coalesce(sum(rows), 0)::bigint FROM ticked), outcomes.last, setval('"mailroom".clock'::regclass, clock), CASE WHEN NOT fits THEN top END,
       (SELECT pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)) FROM touched)
       + (SELECT pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)) FROM (SELECT to_regclass('"mailroom".log_' || log) AS partition FROM ticked) AS bell) + (SELECT pg_catalog.count(pg_notify('mailroom:' || '"mailroom".transit'::regclass::oid::text || ':' || (link)::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, ('"mailroom".transit'::regclass::oid::bigint - 2147483648)::integer)) FROM departed), coalesce(more, false), inboxes,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM "mailroom".outbox_position_seq),
       (SELECT running FROM start), EXISTS (SELECT FROM "mailroom".inbox_registry WHERE "order" = 'total'), outcomes.scheduled, outcomes.expired, unrouted, dead,
       has_links, has_many, waits OR EXISTS (SELECT FROM fanned), has_logs, (SELECT coalesce(sum(rows), 0)::bigint FROM departed), EXISTS (
    SELECT l.number, l.wanted_clock, coalesce(n.seq, 0) AS seq FROM "mailroom".link AS l LEFT JOIN LATERAL (
        SELECT t.seq, t.sent_clock FROM "mailroom".transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1) AS n
        ON true
    WHERE l.state = 'open' AND l.wanted_clock > coalesce(n.sent_clock, 0))
FROM outcomes, stamp, (SELECT coalesce(sum(rows), 0)::bigint, coalesce(pg_catalog.array_agg(inbox), '{}'::text[])
                       FROM touched) AS t (rows, inboxes)
