-- Watched tables: the trigger function that sends what happens to the rows of users' tables, and what it calls.

-- A row as JSON; null if it has none, or more than a message may have. For instance json may hold \u0000, which jsonb
-- refuses, and no jsonb holds more than 256 MiB. Only a block with EXCEPTION survives that. It writes nothing, so its
-- subtransaction has no id. A cancelled statement is not among OTHERS.
CREATE FUNCTION watch_json(given record)  -- A row as JSON; null if it has none, or more than 16 MiB.
RETURNS jsonb LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE made jsonb;
BEGIN
    made := to_jsonb(given);
    RETURN CASE WHEN octet_length(made::text) <= 16777216 THEN made END;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- to_jsonb calls the cast to json that a type has, with the rights of its caller. The owner of a type can make
-- one at any moment, also while a statement is being told. So values of a type whose owner is not trusted are told as
-- text, whether there is a cast or not. Trusted are those who may become the owner of the trigger's function anyway,
-- and superusers, who own the types of extensions. Without a cast nothing changes: to_jsonb has the same text.
--
-- Arrays and rows have no cast that counts, but what is in them: rows are taken apart as far as needed, and an array of
-- such rows is told as the text that PostgreSQL has for it.
--
-- `concat` calls the output functions of types, which only superusers make; a cast to text might call a user's
-- function. IS DISTINCT FROM NULL calls no operator, and is true for a row of nulls.
-- D-watch-4: A row is measured before it is turned into JSON.
CREATE FUNCTION watch_told(given text, of_type oid)  -- What is told in place of a value whose type could run code of a user's; null if the value is.
RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE kind pg_type; parts text; is_same boolean;
BEGIN
    LOOP
        IF of_type < 16384 THEN RETURN NULL; END IF;
        SELECT * INTO kind FROM pg_type AS t WHERE t.oid = of_type;
        EXIT WHEN kind.typtype <> 'd';
        of_type := kind.typbasetype;
    END LOOP;
    IF kind.typsubscript = 'array_subscript_handler'::regproc THEN
        parts := {schema}.watch_told('e', kind.typelem);
        is_same := parts IS NULL;
        parts := concat('concat(', given, ')', CASE WHEN parts = 'CASE WHEN e IS DISTINCT FROM NULL THEN concat(e) END'
                                                         AND kind.typdelim = ',' THEN '::text[]' END);
    ELSIF kind.typtype = 'c' THEN
        SELECT concat('(SELECT r FROM (SELECT ', string_agg(
                   coalesce(a.told, a.name) || format(' AS %I', a.attname), ', ' ORDER BY a.attnum), ') AS r)'),
               coalesce(bool_and(a.told IS NULL), true)
        INTO parts, is_same
        FROM (SELECT n.name, a.attname, a.attnum, {schema}.watch_told(n.name, a.atttypid) AS told
              FROM pg_attribute AS a, LATERAL (SELECT format('(%s).%I', given, a.attname) AS name) AS n
              WHERE a.attrelid = kind.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS a;
    ELSE
        is_same := pg_has_role(kind.typowner, current_user, 'MEMBER') AND NOT EXISTS (
            SELECT FROM pg_cast AS c JOIN pg_proc AS p ON p.oid = c.castfunc
            WHERE c.castsource = of_type AND c.casttarget IN (114, 3802)
              AND NOT pg_has_role(p.proowner, current_user, 'MEMBER'));
        parts := concat('concat(', given, ')');
    END IF;
    RETURN CASE WHEN NOT is_same THEN concat('CASE WHEN ', given, ' IS DISTINCT FROM NULL THEN ', parts, ' END') END;
END $$;

-- The query over what a statement or a row's trigger has seen: key, row before, row after. It is made each time, since
-- tables change; and put together without a second `format`, since a column's name may hold a %.
--
-- The rows of the two transition tables are paired by key, and one that is in both is taken from both: what is left of
-- a key is what the statement did to it. The tables may have their rows in different orders, and a cascade onto the
-- same table may put a key there several times. A row that cannot be told has an array in its place, on each side
-- another, so that it is always taken to have changed.
--
-- The types are bytea, bpchar, varchar and text, whose size is known without reading what is stored apart; and those
-- that have a JSON whatever they hold: these, numbers, dates, times, uuid, inet, cidr and macaddr. No type of
-- PostgreSQL's own is worth a call of `watch_told`.
-- D-watch-2: The query of a watch is made at each call.
-- D-watch-3: Rows are paired by key as multisets.
CREATE FUNCTION watch_query(relid oid, hidden_as text, hidden text[], event text, is_row boolean)  -- The query over the changes that a trigger has seen.

RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    texts    CONSTANT oid[] := '{17,25,1042,1043}';
    plain    CONSTANT oid[] := texts || '{16,18,19,20,21,23,26,650,700,701,829,869,1082,1083,1114,1184,1186,1266,1700,
                                         2950}';
    watched  CONSTANT oid := coalesce(pg_partition_root(relid), relid);
    key text; columns text; size text; as_json text; reason text := 'too_large'; old_side text; new_side text;
BEGIN
    SELECT CASE count(*) WHEN 0 THEN NULL
                         WHEN 1 THEN concat('jsonb_build_array(', string_agg(c.name, ''), ') ->> 0')
                         ELSE concat('jsonb_build_array(', string_agg(c.name, ', ' ORDER BY c.nth), ')::text') END
    INTO key
    FROM (SELECT coalesce(CASE WHEN a.atttypid >= 16384 THEN
                                   {schema}.watch_told(format('n.%I', a.attname), a.atttypid) END,
                          format('n.%I', a.attname)) AS name, k.nth
          FROM pg_index AS i CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (attnum, nth)
          JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
          WHERE i.indrelid = relid AND i.indisprimary AND k.nth <= i.indnkeyatts) AS c;
    IF key IS NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('table %s is watched, but has no primary key any more', relid::regclass),
            HINT = 'It makes the keys of the messages. Add one, or end the watch: mailroom unwatch TABLE. To change '
                   'rows meanwhile without messages: SET LOCAL mailroom.watch = off.';
    END IF;
    -- Virtual columns are null in triggers.
    SELECT string_agg(coalesce(c.told || format(' AS %I', c.attname), c.name), ', ' ORDER BY c.attnum),
           concat_ws(' + ', '0::bigint', string_agg(
               format('coalesce(%s(%s), 0)',
                      CASE WHEN c.atttypid = ANY (texts) THEN 'octet_length' ELSE 'pg_column_size' END, c.name),
               ' + ') FILTER (WHERE c.attlen = -1)),
           CASE WHEN bool_and(c.atttypid = ANY (plain)) THEN 'to_jsonb' ELSE '{schema}.watch_json' END
    INTO columns, size, as_json
    FROM (SELECT format('n.%I', a.attname) AS name, a.attnum, a.attname, a.atttypid, a.attlen,
                 CASE WHEN a.atttypid >= 16384 THEN
                     {schema}.watch_told(format('n.%I', a.attname), a.atttypid) END AS told
          FROM pg_attribute AS a
          WHERE a.attrelid = relid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'
            AND a.attname <> ALL (hidden)) AS c;
    -- A hidden column may have another name now, or its name may be another column's: then nothing of the row is told.
    -- Numbers of columns change when a table is restored from a dump, and so does the table's.
    IF hidden <> '{}' AND (
        SELECT count(*) < cardinality(hidden) OR (hidden_as ^@ concat(watched, ':') AND hidden_as
                   <> concat(watched, ':', string_agg(a.attnum::text, ',' ORDER BY a.attnum)))
        FROM pg_attribute AS a
        WHERE a.attrelid = watched AND a.attname = ANY (hidden) AND a.attnum > 0 AND NOT a.attisdropped) THEN
        size := '16777217';
        reason := 'withheld';
    END IF;
    as_json := concat('coalesce(CASE WHEN ', size, ' <= 16777216 THEN ', as_json, '(r.*) END, ''["', reason, '", ');
    columns := concat(' AS n CROSS JOIN LATERAL (SELECT ', columns, ') AS r');
    old_side := concat(as_json, '"old"]'') AS value', CASE WHEN event = 'UPDATE' THEN ', -1' END,
                       CASE WHEN is_row THEN ' FROM (SELECT ($1).*)' ELSE ' FROM old_rows' END, columns);
    new_side := concat(as_json, '"new"]'') AS value', CASE WHEN event = 'UPDATE' THEN ', 1' END,
                       CASE WHEN is_row THEN ' FROM (SELECT ($2).*)' ELSE ' FROM new_rows' END, columns);
    RETURN CASE event
        WHEN 'INSERT' THEN concat('SELECT ', key, ', NULL::jsonb, ', new_side)
        WHEN 'DELETE' THEN concat('SELECT key, value, NULL::jsonb FROM (SELECT ', key, ' AS key, ', old_side, ') AS s')
        ELSE concat('SELECT key, (array_agg(value) FILTER (WHERE times < 0))[1], '
                    '(array_agg(value) FILTER (WHERE times > 0))[1] FROM (SELECT key, value, sum(times) AS times '
                    'FROM (SELECT (', key, ') COLLATE "C", ', old_side, ' UNION ALL SELECT ', key, ', ', new_side,
                    ') AS s (key, value, times) GROUP BY key, value HAVING sum(times) <> 0) AS t GROUP BY key') END;
END $$;

-- What is left of the query for the INSERT: another function can read a cursor, but not the transition tables.
CREATE FUNCTION watch_rest(changes refcursor)  -- What is left of a cursor over the changes of watched rows.
RETURNS TABLE (key text, before jsonb, after jsonb) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOOP
        FETCH changes INTO key, before, after;
        EXIT WHEN NOT FOUND;
        RETURN NEXT;
    END LOOP;
END $$;

-- The trigger's arguments are the topic, the prefix of keys, the oid of the table and the numbers of its hidden columns
-- (16400:3,5), and their names. It runs with its owner's rights: writers have none on the outbox. The settings beside
-- search_path decide how values are written. OFFSET 0 keeps a value from being computed again wherever it is used.
CREATE FUNCTION watch()  -- The trigger of watched tables: sends what happens to their rows.
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET TimeZone = 'UTC' SET
DateStyle = 'ISO, YMD' SET IntervalStyle = 'postgres' SET bytea_output = 'hex' SET extra_float_digits = 1 AS $$
DECLARE changes refcursor; first_key text; first_before jsonb; first_after jsonb;
BEGIN
    IF current_setting('mailroom.watch', true) = 'off' THEN RETURN NULL; END IF;
    IF tg_op = 'TRUNCATE' THEN
        INSERT INTO {schema}.outbox (topic, kind, message_type, event_type, value_json)
        VALUES (concat(tg_argv[0], '.truncated'), 'E', 'C', 'U', '{"old": null, "new": null, "changed": []}');
        RETURN NULL;
    END IF;
    OPEN changes FOR EXECUTE {schema}.watch_query(tg_relid, tg_argv[2], tg_argv[3:], tg_op, tg_level = 'ROW')
    USING OLD, NEW;
    FETCH changes INTO first_key, first_before, first_after;
    -- An INSERT of no rows would ring the doorbell.
    IF FOUND THEN
        INSERT INTO {schema}.outbox (topic, key, kind, message_type, event_type, value_json)
        SELECT concat(tg_argv[0], CASE m.event WHEN 'C' THEN '.created' WHEN 'U' THEN '.updated' ELSE '.deleted' END),
               concat(tg_argv[1], CASE WHEN octet_length(concat(tg_argv[1], m.key)) BETWEEN 1 AND 1024 THEN m.key
                                       ELSE md5(m.key) END),
               'E', 'O', m.event,
               CASE WHEN octet_length(m.value::text) <= 16777216 THEN m.value ELSE '{"too_large": true}' END
        FROM (SELECT e.key, e.event, CASE
                  WHEN jsonb_typeof(e.before) = 'array' THEN jsonb_build_object(e.before ->> 0, true)
                  WHEN jsonb_typeof(e.after) = 'array' THEN jsonb_build_object(e.after ->> 0, true)
                  ELSE jsonb_build_object('old', e.before, 'new', e.after, 'changed', CASE WHEN e.event <> 'U' THEN '[]'
                      ELSE (SELECT jsonb_agg(a.name) FROM jsonb_each(e.after) AS a (name, value)
                            WHERE a.value IS DISTINCT FROM e.before -> a.name) END) END AS value
              FROM (SELECT c.key, c.before, c.after, CASE WHEN c.before IS NULL THEN 'C' WHEN c.after IS NULL THEN 'D'
                                                          ELSE 'U' END::"char" AS event
                    FROM (SELECT first_key, first_before, first_after
                          UNION ALL SELECT * FROM {schema}.watch_rest(changes)) AS c (key, before, after)
                    OFFSET 0) AS e OFFSET 0) AS m;
    END IF;
    CLOSE changes;
    RETURN NULL;
END $$;

-- With the owner's rights, since who owns a table of their own need have no right on the audit.
CREATE FUNCTION watch_audit(act text, watched text, changed text, by_actor text, why text)  -- Writes into the audit that a table is watched, or no longer.
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.audit (actor, action, key, messages, change, reason)
    SELECT by_actor, act, watched, 0, changed, why WHERE act IN ('watch', 'unwatch');
END $$;

-- Otherwise the owner of any table could send anything.
REVOKE ALL ON FUNCTION watch, watch_query, watch_rest, watch_json, watch_told, watch_audit FROM PUBLIC;
