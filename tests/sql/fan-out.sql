-- STEP in dispatcher/delivery/fan_out.py
-- $1 partitions, $2 inboxes, $3 clocks, $4 reasons
WITH chosen AS MATERIALIZED (
    SELECT DISTINCT inbox FROM "mailroom".fan_out_way ORDER BY inbox LIMIT coalesce($1::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32))),
gone AS (
    DELETE FROM "mailroom".fan_out_way WHERE inbox <= (SELECT max(inbox) FROM chosen) RETURNING *),
refused AS MATERIALIZED (
    SELECT * FROM unnest($2::text[], $3::bigint[], $4::text[]) AS r (inbox, clock, reason)),
copy AS MATERIALIZED (
    SELECT g.inbox, f.clock, r.reason
    FROM "mailroom".fan_out AS f JOIN gone AS g USING (topic)
         LEFT JOIN refused AS r ON r.inbox = g.inbox AND r.clock = f.clock
    WHERE sent_clock > CASE kind WHEN 'M' THEN messages_after WHEN 'E' THEN events_after ELSE others_after END),
delivered AS (
    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT copy.inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM copy JOIN "mailroom".fan_out USING (clock)
    WHERE reason IS NULL ORDER BY key, copy.inbox, clock
    RETURNING inbox),
dead AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, inbox, clock, origin, sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'deliver', reason, copy.inbox, clock, origin, sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at
    FROM copy JOIN "mailroom".fan_out USING (clock) WHERE reason IS NOT NULL ORDER BY clock, copy.inbox
    RETURNING 1),
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('"mailroom".inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT (SELECT count(*) FROM chosen) = coalesce($1::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32)), coalesce(sum(rows), 0)::bigint,
       coalesce(pg_catalog.array_agg(inbox), '{}'::text[]), pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)), (SELECT count(*) FROM dead)
FROM touched
