-- TRY in dispatcher/delivery/refusal.py
DO $sift$
DECLARE
    copies CURSOR FOR
        WITH asked AS MATERIALIZED (
            SELECT * FROM "mailroom".outbox WHERE position = ANY (current_setting('mailroom.asked')::bigint[])),
        pattern AS MATERIALIZED (SELECT fits, words, inbox FROM "mailroom".subscription
            WHERE fits IS NOT NULL AND (origin IN ('', '*')) IS TRUE),
sent_topic AS MATERIALIZED (
    SELECT topic, topic || '.' AS ended, pg_catalog.cardinality(pg_catalog.string_to_array(topic, '.')) AS words
    FROM asked WHERE EXISTS (SELECT FROM pattern) GROUP BY topic),
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
    FROM receiver AS r LEFT JOIN "mailroom".log_registry AS l ON l.name = r.inbox)
        SELECT r.inbox, r.lanes, r.segment, o.*, n.id AS origin
        FROM asked AS o JOIN route AS r ON r.topic = o.topic AND CASE kind WHEN 'M' THEN true WHEN 'E' THEN subscribed ELSE named END, "mailroom".node AS n
        ORDER BY o.position;
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
                    CONTINUE WHEN copy.position = skipped;
                    stamp := stamp + 1;
                    IF copy.lanes IS NOT NULL THEN
                        INSERT INTO "mailroom".log (log, segment, lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
                        VALUES (copy.inbox, copy.segment, "mailroom".lane_of(copy.key, copy.lanes), stamp, stamp, copy.origin,
                                copy.message_id, copy.topic, copy.key, copy.kind, copy.message_type, copy.event_type, copy.value, copy.value_json, copy.headers, copy.expires_at, copy.after_clock, copy.source, copy.sent_at);
                    ELSE
                    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
                    VALUES (copy.inbox, stamp, stamp, copy.origin, copy.message_id, copy.topic, copy.key, copy.kind, copy.message_type, copy.event_type, copy.value, copy.value_json, copy.headers, copy.expires_at, copy.after_clock, copy.source, copy.sent_at); END IF;
                END LOOP;
                EXIT;
            EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded OR plpgsql_error THEN
                GET STACKED DIAGNOSTICS of_state = RETURNED_SQLSTATE, of_constraint = CONSTRAINT_NAME,
                                        of_table = TABLE_NAME, of_column = COLUMN_NAME;
                skipped := copy.position;
                refused := array_append(
                    refused, json_build_array(skipped, of_state, of_constraint, of_table, of_column)::text);
            END;
        END LOOP;
        RAISE EXCEPTION USING ERRCODE = 'MR000';
    EXCEPTION WHEN SQLSTATE 'MR000' THEN NULL;
    END;
    PERFORM set_config('mailroom.refused', '[' || array_to_string(refused, ',') || ']', true);
END $sift$
