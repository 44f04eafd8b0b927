-- outbox_jdbc: the outbox for writers that may write the same row twice.
--
-- A view to insert into. An INSERT into it becomes, by a rule, one INSERT into the outbox of those rows whose id was
-- not there yet. By a rule and not by a row trigger: each statement on the outbox reads its constraints anew, which
-- costs more than all else, so that a trigger with a statement for each row took 19 times as long as the plain insert
-- of many rows; the rule takes 3 times as long. COPY knows no rules, so for COPY alone there is a trigger.

-- Each row is deleted a week after it was written. Vacuum reads the whole primary key, which has a week's ids in random
-- order. So its threshold is a share of the rows, not a fixed number as for the small tables.
CREATE TABLE outbox_jdbc_id (  -- Ids of the messages that came through outbox_jdbc, or by a bridge from a queue, kept for seven days.
    id uuid        PRIMARY KEY,                        -- The message_id, or what is made of the bridge and it; written in the transaction that wrote the message.
    at timestamptz NOT NULL DEFAULT clock_timestamp()  -- When it was written.
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 20000);
CREATE INDEX outbox_jdbc_id_at ON outbox_jdbc_id (at);

-- Returns the id if it is new, otherwise no row. The INSERT waits for a running transaction that has written the same
-- id: once that has ended, its message is there or never will be. It runs with the caller's rights, or anybody could
-- use up ids.
CREATE FUNCTION outbox_jdbc_take(message_id uuid)  -- Returns a message_id that is new, and remembers it; no row if it was known.
RETURNS SETOF uuid LANGUAGE plpgsql ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF message_id IS NULL THEN
        RAISE not_null_violation USING
            MESSAGE = 'a row for outbox_jdbc has no message_id',
            HINT = 'Give each message a UUID that is the same whenever its row is computed again, such as the md5 of '
                   'its business key. Rows that need none go into outbox, which keeps a row as often as it is written.',
            TABLE = 'outbox_jdbc', COLUMN = 'message_id';
    END IF;
    INSERT INTO {schema}.outbox_jdbc_id (id) VALUES (message_id) ON CONFLICT DO NOTHING;
    IF FOUND THEN RETURN NEXT message_id; END IF;
END $$;

-- Text where the outbox has uuid, "char" and jsonb, so that JDBC's strings fit without further settings. The view has
-- no rows, but Spark reads its columns before it writes.
CREATE VIEW outbox_jdbc AS SELECT  -- The outbox for writers that may write a row twice: it takes the first row of each message_id.
    NULL::text        AS message_id,    -- A UUID that is the same whenever the row is written again. Required.
    NULL::text        AS topic,         -- What the message is addressed to. Required.
    NULL::text        AS key,           -- Ordering key within an inbox; null for a key of its own.
    NULL::text        AS kind,          -- M message (null), E event, C command, R reply.
    NULL::text        AS message_type,  -- O object, D database, C collection, U user-defined (null).
    NULL::text        AS event_type,    -- C created, U updated, D deleted.
    NULL::bytea       AS value,         -- The value as CBOR; exactly one of value and value_json is given.
    NULL::text        AS value_json,    -- The value as the text of a JSON.
    NULL::text        AS headers,       -- Flat map of text to text, as the text of a JSON object.
    NULL::timestamptz AS deliver_at,    -- The message is not delivered before this time.
    NULL::timestamptz AS expires_at,    -- If not delivered before this time, the message is dropped.
    NULL::bigint      AS after_clock    -- The stamp is later than this clock.
WHERE false;

-- The function is in the select list, where an empty set drops the row. In a WHERE it could run before the joins and
-- conditions of the INSERT's own SELECT, for rows that are then dropped or doubled: their ids would be known without a
-- message. message_id occurs once, since its expression, such as gen_random_uuid(), is computed for each occurrence. A
-- cast to "char" truncates: Event would become E, and Refund a reply.
-- D-spark-16: `outbox_jdbc` is a rule.
CREATE RULE once AS ON INSERT TO outbox_jdbc DO INSTEAD
INSERT INTO outbox (message_id, topic, key, kind, message_type, event_type, value, value_json, headers, deliver_at,
                    expires_at, after_clock)
SELECT outbox_jdbc_take(NEW.message_id::uuid), NEW.topic, coalesce(NEW.key, gen_random_uuid()::text),
       CASE WHEN octet_length(NEW.kind) > 1 THEN '?' ELSE coalesce(NEW.kind, 'M') END::"char",
       CASE WHEN octet_length(NEW.message_type) > 1 THEN '?' ELSE coalesce(NEW.message_type, 'U') END::"char",
       CASE WHEN octet_length(NEW.event_type) > 1 THEN '?' ELSE NEW.event_type END::"char",
       NEW.value, NEW.value_json::jsonb, NEW.headers::jsonb, NEW.deliver_at, NEW.expires_at, NEW.after_clock;

CREATE FUNCTION outbox_jdbc_copy()  -- Turns rows that COPY brings into outbox_jdbc into INSERTs.
RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.outbox_jdbc SELECT NEW.*;
    RETURN NEW;
END $$;
CREATE TRIGGER copy INSTEAD OF INSERT ON outbox_jdbc FOR EACH ROW EXECUTE FUNCTION outbox_jdbc_copy();
