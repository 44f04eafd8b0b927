-- TRY in dispatcher/delivery/fan_out.py
DO $sift$
DECLARE
    copies CURSOR FOR
        WITH chosen AS MATERIALIZED (
            SELECT DISTINCT inbox FROM "mailroom".fan_out_way
            ORDER BY inbox LIMIT current_setting('mailroom.asked')::bigint)
        SELECT w.inbox, f.*
        FROM "mailroom".fan_out AS f JOIN "mailroom".fan_out_way AS w USING (topic)
        WHERE w.inbox <= (SELECT max(inbox) FROM chosen) AND sent_clock > CASE kind WHEN 'M' THEN messages_after WHEN 'E' THEN events_after ELSE others_after END ORDER BY f.clock, w.inbox;
    copy record;
    skipped record;
    refused text[] := '{}';
    of_state text; of_constraint text; of_table text; of_column text;
BEGIN
    SELECT '' AS inbox, 0::bigint AS clock INTO skipped;
    BEGIN
        OPEN copies;
        LOOP
            BEGIN
                LOOP
                    FETCH copies INTO copy;
                    EXIT WHEN NOT FOUND;
                    SELECT copy.inbox, copy.clock INTO skipped;
                    INSERT INTO "mailroom".inbox (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
                    VALUES (copy.inbox, copy.clock, copy.sent_clock, copy.origin, copy.message_id, copy.topic, copy.key, copy.kind, copy.message_type, copy.event_type, copy.value, copy.value_json, copy.headers, copy.expires_at, copy.after_clock, copy.source, copy.sent_at);
                END LOOP;
                EXIT;
            EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded OR plpgsql_error THEN
                GET STACKED DIAGNOSTICS of_state = RETURNED_SQLSTATE, of_constraint = CONSTRAINT_NAME,
                                        of_table = TABLE_NAME, of_column = COLUMN_NAME;
                refused := array_append(refused, json_build_array(
                    skipped.inbox, skipped.clock, of_state, of_constraint, of_table, of_column)::text);
            END;
        END LOOP;
        RAISE EXCEPTION USING ERRCODE = 'MR000';
    EXCEPTION WHEN SQLSTATE 'MR000' THEN NULL;
    END;
    PERFORM set_config('mailroom.refused', '[' || array_to_string(refused, ',') || ']', true);
END $sift$
