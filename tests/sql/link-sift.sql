-- TRY in dispatcher/links/refusal.py
DO $sift$
DECLARE
    copies CURSOR FOR
        WITH source AS MATERIALIZED (
            SELECT id, name FROM "mailroom".origin WHERE number = current_setting('mailroom.asked_by')::bigint),
        came AS MATERIALIZED (
            SELECT seq AS seq, sent_clock AS sent_clock, stamped_at AS stamped_at, message_id AS message_id, topic AS topic, key AS key, kind::"char" AS kind, message_type::"char" AS message_type, event_type::"char" AS event_type, value AS value, value_json::jsonb AS value_json, headers::jsonb AS headers, expires_at AS expires_at, after_clock AS after_clock, source AS source, sent_at AS sent_at, nth FROM unnest(current_setting('mailroom.asked_seq')::bigint[], current_setting('mailroom.asked_sent_clock')::bigint[], current_setting('mailroom.asked_stamped_at')::timestamptz[], current_setting('mailroom.asked_message_id')::uuid[], current_setting('mailroom.asked_topic')::text[], current_setting('mailroom.asked_key')::text[], current_setting('mailroom.asked_kind')::text[], current_setting('mailroom.asked_message_type')::text[], current_setting('mailroom.asked_event_type')::text[], current_setting('mailroom.asked_value')::bytea[], current_setting('mailroom.asked_value_json')::text[], current_setting('mailroom.asked_headers')::text[], current_setting('mailroom.asked_expires_at')::timestamptz[], current_setting('mailroom.asked_after_clock')::bigint[], current_setting('mailroom.asked_source')::text[], current_setting('mailroom.asked_sent_at')::timestamptz[]) WITH ORDINALITY AS r (seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, nth)
            WHERE nth <= current_setting('mailroom.asked_rows')::bigint AND kind <> 'H'),
        pattern AS MATERIALIZED (
    SELECT fits, words, inbox, since FROM "mailroom".subscription
    WHERE fits IS NOT NULL AND origin IN ('*', (SELECT name FROM source))),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM came WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
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
    GROUP BY topic, inbox, is_bounded, lanes, segment)
        SELECT r.inbox, r.lanes, r.segment, c.*, (SELECT id FROM source) AS origin
        FROM came AS c JOIN route AS r ON r.topic = c.topic AND sent_clock > CASE WHEN kind IN ('M', 'E') THEN since ELSE named END
        WHERE is_bounded OR (expires_at > current_setting('mailroom.asked_at')::timestamptz) IS NOT FALSE
        ORDER BY nth;
    copy record;
    stamp bigint := (SELECT last_value FROM "mailroom".clock);
    skipped bigint;
    refused text[] := '{}';
    of_state text; of_constraint text; of_table text; of_column text;
BEGIN
    BEGIN
        OPEN copies;
        LOOP
            BEGIN
                LOOP
                    FETCH copies INTO copy;
                    EXIT WHEN NOT FOUND;
                    CONTINUE WHEN copy.nth = skipped;
                    stamp := stamp + 1;
                    IF copy.lanes IS NOT NULL THEN
                        INSERT INTO "mailroom".log (log, segment, lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
                        VALUES (copy.inbox, copy.segment, "mailroom".lane_of(copy.key, copy.lanes), stamp, copy.sent_clock, copy.origin,
                                copy.message_id, copy.topic, copy.key, copy.kind, copy.message_type, copy.event_type, copy.value, copy.value_json, copy.headers, copy.expires_at, copy.after_clock, copy.source, copy.sent_at);
                    ELSE
                    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
                    VALUES (copy.inbox, stamp, copy.sent_clock, copy.origin, copy.message_id, copy.topic, copy.key, copy.kind, copy.message_type, copy.event_type, copy.value, copy.value_json, copy.headers, copy.expires_at, copy.after_clock, copy.source, copy.sent_at); END IF;
                END LOOP;
                EXIT;
            EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded OR plpgsql_error THEN
                GET STACKED DIAGNOSTICS of_state = RETURNED_SQLSTATE, of_constraint = CONSTRAINT_NAME,
                                        of_table = TABLE_NAME, of_column = COLUMN_NAME;
                skipped := copy.nth;
                refused := array_append(
                    refused, json_build_array(skipped, of_state, of_constraint, of_table, of_column)::text);
            END;
        END LOOP;
        RAISE EXCEPTION USING ERRCODE = 'MR000';
    EXCEPTION WHEN SQLSTATE 'MR000' THEN NULL;
    END;
    PERFORM set_config('mailroom.refused', '[' || array_to_string(refused, ',') || ']', true);
END $sift$
