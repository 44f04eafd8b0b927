-- APPLY in dispatcher/executor/applying/guarded.py
DO '
#variable_conflict use_column
DECLARE
    g record;
    deadline timestamptz := clock_timestamp() + current_setting(''mailroom.left_s'')::float8 * interval ''1 second'';
    watched text := current_setting(''session_authorization'') || '' '' || current_setting(''role'') || '' '' || current_setting(''session_replication_role'') || '' '' || current_setting(''row_security'') || '' '' || current_setting(''search_path'') || '' '' || current_setting(''TimeZone'') || '' '' || current_setting(''statement_timeout'') || '' '' || current_setting(''lock_timeout'');
    touched bigint;
    applied bigint := 0;
BEGIN
    FOR g IN
        SELECT * FROM unnest(
            current_setting(''mailroom.writes'')::text[], current_setting(''mailroom.keys'')::text[],
            current_setting(''mailroom.are_there'')::boolean[], current_setting(''mailroom.old_values'')::bytea[],
            current_setting(''mailroom.old_numbers'')::bigint[], current_setting(''mailroom.new_values'')::bytea[],
            current_setting(''mailroom.new_numbers'')::bigint[]
        ) AS s (write, key, is_there, old_value, old_number, value, number)
    LOOP
        EXIT WHEN applied > 0 AND clock_timestamp() >= deadline;
        BEGIN
            CASE g.write
            WHEN ''insert'' THEN
                INSERT INTO "mailroom".store (key, value, number) VALUES (g.key::text, g.value, g.number::bigint)
                ON CONFLICT (key) DO NOTHING;
            WHEN ''update'' THEN
                UPDATE "mailroom".store AS t SET value = g.value, number = g.number::bigint WHERE t.key = g.key::text AND (t.value) IS NOT DISTINCT FROM g.old_value AND t.number::bigint IS NOT DISTINCT FROM g.old_number;
            WHEN ''delete'' THEN
                DELETE FROM "mailroom".store AS t WHERE t.key = g.key::text;
            ELSE
                PERFORM FROM "mailroom".store AS t
                WHERE t.key = g.key::text AND (NOT g.is_there OR (t.value) IS NOT DISTINCT FROM g.old_value AND t.number::bigint IS NOT DISTINCT FROM g.old_number);
            END CASE;
            GET DIAGNOSTICS touched = ROW_COUNT;
            SET CONSTRAINTS ALL IMMEDIATE;
            IF touched <> (g.is_there OR g.write = ''insert'')::integer OR current_setting(''session_authorization'') || '' '' || current_setting(''role'') || '' '' || current_setting(''session_replication_role'') || '' '' || current_setting(''row_security'') || '' '' || current_setting(''search_path'') || '' '' || current_setting(''TimeZone'') || '' '' || current_setting(''statement_timeout'') || '' '' || current_setting(''lock_timeout'') <> watched THEN
                RAISE EXCEPTION USING ERRCODE = ''MR000'';
            END IF;
        EXCEPTION WHEN OTHERS THEN
            EXIT;
        END;
        applied := applied + 1;
    END LOOP;
    PERFORM set_config(''mailroom.applied'', applied::text, true);
END
'
