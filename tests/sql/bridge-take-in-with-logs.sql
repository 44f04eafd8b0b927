-- TAKE_IN_LOGS in dispatcher/links/receive.py
-- $1 now, $2 origin, $3 seq, $4 sent_clock, $5 kind, $6 rows, $7 most, $8 at_seq, $9 at_id, $10 at_time, $11 topic, $12 message_id, $13 stamped_at, $14 key, $15 message_type, $16 event_type, $17 value, $18 value_json, $19 headers, $20 expires_at, $21 after_clock, $22 source, $23 sent_at, $24 senders, $25 reasons, $26 partitions
WITH moment AS MATERIALIZED (SELECT coalesce($1::timestamptz, clock_timestamp()) AS now),
source AS MATERIALIZED (
    SELECT id, name FROM "mailroom".origin WHERE number = $2::bigint AND state = 'open' AND id IS NOT NULL),
newest AS MATERIALIZED (
    SELECT last, last_id, stamped_at FROM "mailroom".receipt WHERE origin = $2::bigint
    ORDER BY last DESC LIMIT 1),
came AS MATERIALIZED (
    SELECT pg_catalog.unnest($3::bigint[]) AS seq, pg_catalog.unnest($4::bigint[]) AS sent_clock,
           pg_catalog.unnest($5::text[]) AS kind,
           pg_catalog.generate_series(1::bigint, $6::bigint) AS nth),
furthest AS MATERIALIZED (SELECT greatest(2305843009213693952, advanced) + 1152921504606846976 + (greatest(0, least(
           extract(epoch FROM (SELECT now FROM moment) - '2026-01-01 00:00+00'::timestamptz), 15768000000)) * 16777216.0)::bigint AS clock FROM "mailroom".node),
batch AS MATERIALIZED (
    SELECT least($7::bigint, max(nth),
                 min(nth) FILTER (WHERE sent_clock > (SELECT clock FROM furthest)) - 1) AS taken,
           bool_and(seq = $8::bigint + nth) AS runs_on
    FROM came),
numbered AS MATERIALIZED (
    SELECT max(clock) AS top, pg_catalog.array_agg(clock ORDER BY nth) AS clocks
    FROM (SELECT nth, events + greatest((SELECT last_value FROM "mailroom".clock), max(shown) OVER received) AS clock
          FROM (SELECT nth, events, sent_clock - events + (kind <> 'H')::integer AS shown
                FROM (SELECT came.*, count(*) FILTER (WHERE kind <> 'H') OVER received AS events FROM came
                      WHERE nth <= (SELECT taken FROM batch)
                      WINDOW received AS (ORDER BY nth ROWS UNBOUNDED PRECEDING)) AS r) AS s
          WINDOW received AS (ORDER BY nth ROWS UNBOUNDED PRECEDING)) AS n),
stamp AS MATERIALIZED (
    SELECT top, CASE WHEN NOT EXISTS (SELECT FROM source) THEN 'closed'
                     WHEN EXISTS (SELECT FROM "mailroom".fan_out) THEN 'waits'
                     WHEN (SELECT (last, last_id, stamped_at) FROM newest) IS DISTINCT FROM
                          (SELECT ($8::bigint, $9::uuid, $10::timestamptz)
                           WHERE $8::bigint > 0) THEN 'elsewhere'
                     WHEN runs_on IS NOT true THEN 'hole'
                     WHEN taken = 0 THEN 'clock'
                     WHEN top > (SELECT clock_ceiling FROM "mailroom".node) THEN 'ceiling'
                     ELSE 'taken' END AS outcome
    FROM batch, numbered),
pattern AS MATERIALIZED (
    SELECT fits, words, inbox, since FROM "mailroom".subscription
    WHERE fits IS NOT NULL AND origin IN ('*', (SELECT name FROM source))),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM (SELECT pg_catalog.unnest($11::text[]) AS topic) AS came WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
route AS MATERIALIZED (
    SELECT topic, inbox, min(since) AS since, min(since) FILTER (WHERE is_exact AND lanes IS NULL) AS named, is_bounded, lanes, segment
    FROM (SELECT topic, inbox, since, true FROM "mailroom".subscription
          WHERE origin IN ('*', (SELECT name FROM source))
          UNION ALL SELECT t.topic, p.inbox, p.since, false FROM sent_topic AS t JOIN pattern AS p
                    ON (p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits)
         AS w (topic, inbox, since, is_exact)
         JOIN (
             SELECT name, "order" = 'total', NULL::integer, NULL::bigint FROM "mailroom".inbox_registry
             UNION ALL
             SELECT l.name, false, l.lanes, (
                 SELECT s.segment FROM "mailroom".log_segment AS s WHERE s.log = l.name ORDER BY s.segment DESC LIMIT 1)
             FROM "mailroom".log_registry AS l) AS r (inbox, is_bounded, lanes, segment) USING (inbox)
    GROUP BY topic, inbox, is_bounded, lanes, segment),
total AS MATERIALIZED (
    SELECT r.name AS inbox, coalesce((
        SELECT s.clock FROM "mailroom".stable AS s WHERE s.inbox = r.name ORDER BY s.clock DESC LIMIT 1), 0) AS stable
    FROM "mailroom".inbox_registry AS r WHERE r."order" = 'total'),
reach AS MATERIALIZED (
    SELECT topic, min(since) AS since, min(named) AS named, min(since) FILTER (WHERE is_bounded) AS bounded_since,
           min(named) FILTER (WHERE is_bounded) AS bounded_named,
           pg_catalog.array_agg(named) FILTER (WHERE named IS NOT NULL) AS each_named
    FROM route GROUP BY topic),
twin AS MATERIALIZED (
    SELECT message_id FROM "mailroom".known
    WHERE origin = $2::bigint AND message_id = ANY ($12::uuid[])
      AND EXISTS (SELECT FROM "mailroom".known WHERE origin = $2::bigint)),
stamped AS MATERIALIZED (
    SELECT w.*, CASE WHEN kind = 'H' THEN 'mark'
                     WHEN message_id IN (SELECT message_id FROM twin) THEN 'known'
                     WHEN is_expired AND NOT is_bounded_wanted THEN 'expired'
                     WHEN reason IS NOT NULL THEN 'refused'
                     WHEN receivers > 1 THEN 'dead'
                     WHEN is_wanted THEN 'delivered'
                     WHEN kind = 'E' THEN 'unrouted'
                     ELSE 'dead' END AS outcome
    FROM (SELECT n.*, since, named, CASE kind WHEN 'C' THEN (
    SELECT count(*) FROM pg_catalog.unnest(each_named) AS e (named) WHERE e.named < sent_clock) END AS receivers,
                 coalesce(expires_at <= (SELECT now FROM moment), false) AS is_expired,
                 coalesce(sent_clock > CASE WHEN kind IN ('M', 'E') THEN since ELSE named END, false) AS is_wanted,
                 coalesce(sent_clock > CASE WHEN kind IN ('M', 'E') THEN bounded_since ELSE bounded_named END, false) AS is_bounded_wanted
          FROM (
        SELECT seq AS seq, sent_clock AS sent_clock, stamped_at AS stamped_at, message_id AS message_id, topic AS topic, key AS key, kind::"char" AS kind, message_type::"char" AS message_type, event_type::"char" AS event_type, value AS value, value_json::jsonb AS value_json, headers::jsonb AS headers, expires_at AS expires_at, after_clock AS after_clock, source AS source, sent_at AS sent_at, sender, reason, clock, nth
        FROM (SELECT pg_catalog.unnest($3::bigint[]) AS seq, pg_catalog.unnest($4::bigint[]) AS sent_clock, pg_catalog.unnest($13::timestamptz[]) AS stamped_at, pg_catalog.unnest($12::uuid[]) AS message_id, pg_catalog.unnest($11::text[]) AS topic, pg_catalog.unnest($14::text[]) AS key, pg_catalog.unnest($5::text[]) AS kind, pg_catalog.unnest($15::text[]) AS message_type, pg_catalog.unnest($16::text[]) AS event_type, pg_catalog.unnest($17::bytea[]) AS value, pg_catalog.unnest($18::text[]) AS value_json, pg_catalog.unnest($19::text[]) AS headers, pg_catalog.unnest($20::timestamptz[]) AS expires_at, pg_catalog.unnest($21::bigint[]) AS after_clock, pg_catalog.unnest($22::text[]) AS source, pg_catalog.unnest($23::timestamptz[]) AS sent_at, pg_catalog.unnest($24::uuid[]) AS sender, pg_catalog.unnest($25::text[]) AS reason,
                     pg_catalog.unnest((SELECT clocks FROM numbered)) AS clock,
                     pg_catalog.generate_series(1::bigint, $6::bigint) AS nth) AS r
        WHERE nth <= (SELECT taken FROM batch)) AS n LEFT JOIN reach USING (topic)
          WHERE (SELECT outcome = 'taken' FROM stamp)) AS w),
width AS MATERIALIZED (
    SELECT CASE WHEN (SELECT count(*) FROM "mailroom".inbox_registry) > coalesce($26::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32))
                THEN (SELECT pg_catalog.count(DISTINCT inbox) FROM route
                      WHERE topic IN (SELECT topic FROM stamped WHERE outcome = 'delivered')) > coalesce($26::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32))
                ELSE false END AS is_wide),
fanned AS (
    INSERT INTO "mailroom".fan_out (clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT clock, sent_clock, coalesce(sender, (SELECT id FROM source)), message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM stamped
    WHERE outcome = 'delivered' AND NOT is_expired AND (SELECT is_wide FROM width) ORDER BY nth
    RETURNING 1),
fanned_way AS (
    INSERT INTO "mailroom".fan_out_way (inbox, topic, messages_after, events_after, others_after)
    SELECT inbox, topic, since, since, named FROM route
    WHERE NOT is_bounded AND (SELECT is_wide FROM width) AND lanes IS NULL
      AND topic IN (SELECT topic FROM stamped WHERE outcome = 'delivered')
    ORDER BY inbox, topic),
delivered AS (
    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT r.inbox, clock, sent_clock, coalesce(sender, (SELECT id FROM source)), message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM stamped JOIN (
        SELECT topic, inbox, since AS of_all, named AS of_named, is_bounded, coalesce(stable, 0) AS stable, lanes, segment
        FROM route LEFT JOIN total USING (inbox)) AS r USING (topic)
    WHERE outcome = 'delivered' AND sent_clock > CASE WHEN kind IN ('M', 'E') THEN of_all ELSE of_named END AND (is_bounded OR NOT (is_expired OR (SELECT is_wide FROM width))) AND sent_clock > stable AND lanes IS NULL
    ORDER BY r.inbox, key, clock
    RETURNING inbox),
logged AS (
    INSERT INTO "mailroom".log (log, segment, lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT inbox, segment, "mailroom".lane_of(key, lanes) AS lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM (SELECT *, coalesce(sender, (SELECT id FROM source)) AS origin FROM stamped WHERE outcome = 'delivered' AND NOT is_expired) AS s JOIN (SELECT topic, inbox, lanes, segment, since AS of_all FROM route) AS r USING (topic)
    WHERE lanes IS NOT NULL AND kind IN ('M', 'E') AND sent_clock > of_all
    ORDER BY inbox, lane, clock
    RETURNING log, lane),
ticked AS (
    INSERT INTO "mailroom".log_tick (log, clock, lanes, rows)
    SELECT log, (SELECT max(clock) FROM stamped), pg_catalog.array_agg(lane ORDER BY lane), sum(rows)::bigint
    FROM (SELECT log, lane, count(*) AS rows FROM logged GROUP BY log, lane) AS l
    GROUP BY log
    RETURNING log, rows),
late AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, inbox, clock, origin, sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'order', 'too late for the order of this inbox: later messages were given out already', r.inbox, clock, coalesce(sender, (SELECT id FROM source)), sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM stamped JOIN (
        SELECT topic, inbox, since AS of_all, named AS of_named, is_bounded, coalesce(stable, 0) AS stable, lanes, segment
        FROM route LEFT JOIN total USING (inbox)) AS r USING (topic)
    WHERE EXISTS (SELECT FROM total) AND outcome = 'delivered' AND sent_clock > CASE WHEN kind IN ('M', 'E') THEN of_all ELSE of_named END AND is_bounded AND sent_clock <= stable ORDER BY nth, r.inbox
    RETURNING 1),
dead AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, bridge, origin, sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'take in', coalesce(reason, CASE WHEN receivers > 1
    THEN pg_catalog.format('a command needs exactly one inbox, its topic has %s', receivers)
    WHEN since IS NULL THEN pg_catalog.concat('no inbox subscribes to this topic of ', (SELECT name FROM source))
    WHEN CASE WHEN kind IN ('M', 'E') THEN since ELSE named END IS NULL THEN 'no inbox gets this topic: patterns get no commands and no replies'
    ELSE pg_catalog.concat('no inbox subscribed to this topic of ', (SELECT name FROM source), ' as early as that') END), (SELECT name FROM source), coalesce(sender, (SELECT id FROM source)), sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM stamped WHERE outcome IN ('dead', 'refused') ORDER BY nth),
received AS (
    INSERT INTO "mailroom".receipt (origin, first, last, last_id, stamped_at, sent_clock, ids)
    SELECT $2::bigint, $8::bigint + 1, $8::bigint + taken, ($12::uuid[])[taken],
           ($13::timestamptz[])[taken], ($4::bigint[])[taken],
           ($12::uuid[])[1:taken]
    FROM batch WHERE (SELECT outcome = 'taken' FROM stamp)
    RETURNING last, last_id, stamped_at, sent_clock),
outcomes AS MATERIALIZED (
    SELECT count(*) AS rows, max(clock) AS clock, count(*) FILTER (WHERE outcome = 'mark') AS marks,
           count(*) FILTER (WHERE outcome = 'known') AS known,
           count(*) FILTER (WHERE outcome = 'expired') AS expired,
           count(*) FILTER (WHERE outcome = 'unrouted') AS unrouted,
           count(*) FILTER (WHERE outcome IN ('dead', 'refused')) AS dead,
           min(nth) FILTER (WHERE outcome = 'refused' AND is_bounded_wanted) AS barred
    FROM stamped),
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('"mailroom".inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT stamp.outcome, rows, marks, (SELECT coalesce(sum(rows), 0)::bigint FROM touched) + (SELECT coalesce(sum(rows), 0)::bigint FROM ticked), expired, unrouted,
       dead + (SELECT count(*) FROM late), known,
       CASE WHEN stamp.outcome = 'clock' THEN (SELECT sent_clock FROM came WHERE nth = 1)
            ELSE setval('"mailroom".clock'::regclass, clock) END,
       CASE WHEN stamp.outcome = 'ceiling' THEN top END, barred, (SELECT pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)) FROM touched)
       + (SELECT pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)) FROM (SELECT to_regclass('"mailroom".log_' || log) AS partition FROM ticked) AS bell),
       (SELECT coalesce(pg_catalog.array_agg(inbox), '{}'::text[]) FROM touched), EXISTS (SELECT FROM fanned),
       EXISTS (SELECT FROM total),
       (SELECT last FROM received), (SELECT last_id FROM received), (SELECT stamped_at FROM received),
       (SELECT sent_clock FROM received)
FROM stamp, outcomes
