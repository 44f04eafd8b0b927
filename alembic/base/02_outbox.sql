-- Where a message begins: writers insert it here, in the transaction that changes their data.

-- `xact` comes first, so that a transaction has its id before it draws a position: pg_locks then shows the id of every
-- writer that holds a position. The floor depends on this.
-- D-doorbell-7: `xact` stands before `position` in the outbox.
CREATE TABLE outbox (  -- Where writers commit messages. Inserted once, deleted once by the dispatcher, never updated.
    xact         xid8        NOT NULL DEFAULT pg_current_xact_id(),  -- The writer's transaction. Writers do not set it.
    position     bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,  -- Order of sending within a transaction. Writers do not set it.
    message_id   uuid        NOT NULL DEFAULT gen_random_uuid(),  -- The message's id, which never changes; an idempotency key for effects outside the database.
    topic        text        COLLATE "C" NOT NULL,  -- What the message is addressed to.
    key          text        COLLATE "C" NOT NULL DEFAULT gen_random_uuid()::text,  -- Ordering key within an inbox. An unordered message has its id as key.
    kind         "char"      NOT NULL DEFAULT 'M',  -- M message, E event, C command, R reply.
    message_type "char"      NOT NULL DEFAULT 'U',  -- O object, D database, C collection, U user-defined.
    event_type   "char",                            -- C created, U updated, D deleted.
    value        bytea,                             -- The value as CBOR; exactly one of value and value_json is set.
    value_json   jsonb,                             -- The value as JSON, for writers that have no CBOR.
    headers      jsonb,                             -- Flat map of text to text.
    deliver_at   timestamptz,                       -- The message is not delivered before this time; until then it waits in `scheduled`.
    expires_at   timestamptz,                       -- If not delivered before this time, the message is dropped.
    after_clock  bigint,                            -- The stamp is later than this clock: that of a cause on another node.
    source       text        COLLATE "C" DEFAULT current_setting('application_name'),  -- Who sent it: the writer's application_name.
    sent_at      timestamptz NOT NULL DEFAULT clock_timestamp()  -- Physical time of the send; order never rests on it.
) WITH ({hot});

-- The trigger sends NOTIFY only while no dispatcher is awake, since NOTIFY takes a lock at commit that the whole
-- cluster shares. The check is one expression that releases at once what it locks, so nothing is held until commit. It
-- is not a WHEN of the trigger, which PostgreSQL parses again for each statement. Parentheses, since IF reads to the
-- first THEN. Without SET search_path, which takes as long as the rest; so it names the schema of everything.
-- D-doorbell-3: The check is in the trigger's function.
CREATE FUNCTION doorbell()  -- Wakes a sleeping dispatcher: NOTIFY mailroom:<oid of the table>.
RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE node CONSTANT integer := (tg_relid::bigint OPERATOR(pg_catalog.-) 2147483648)::integer;
BEGIN
    IF (coalesce(pg_catalog.current_setting('mailroom.notify', true), '') OPERATOR(pg_catalog.<>) 'off'
        AND CASE WHEN pg_catalog.pg_try_advisory_lock_shared(1835100524, node)
                 THEN pg_catalog.pg_advisory_unlock_shared(1835100524, node)
                 ELSE false END) THEN
        PERFORM pg_catalog.pg_notify(pg_catalog.concat('mailroom:', tg_relid), '');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER doorbell BEFORE INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION doorbell();

-- The rules are not CHECKs: PostgreSQL parses all CHECKs of a table again for each statement, which took three quarters
-- of the time of an insert, but compiles a function once per session. As in a CHECK, a rule that is null holds, and the
-- error is that of a CHECK, without the row. The topic's length is not part of its pattern: a bounded repetition
-- doubled the cost of the whole insert. Without SET search_path, which takes as long as all of the rest: the writer's
-- may put something else first, so the schema of all that a rule calls is named. Parentheses, since IF reads to the
-- first THEN.
--
-- `after_clock` comes last: so it alone is broken where it is, and mostly a clock that is not large is right. 2^32 is
-- within any node's reach, and so is the clock of a start, which takes no look at the node: mostly those are given.
-- Beyond, the node is asked, but not for replicated rows, which were sent before. A row that breaks no rule may be a
-- copy: one of another transaction.
-- D-execute-7: Triggers, not CHECKs, refuse invalid messages and executables.
CREATE FUNCTION check_message()  -- Refuses rows that are not valid messages.
RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    broken pg_catalog.text := CASE
        WHEN NOT (new.topic OPERATOR(pg_catalog.~) '^[A-Za-z][A-Za-z0-9_.-]*$'
                  AND pg_catalog.octet_length(new.topic) OPERATOR(pg_catalog.<=) 200) THEN 'topic'
        WHEN NOT (pg_catalog.octet_length(new.key) OPERATOR(pg_catalog.>=) 1
                  AND pg_catalog.octet_length(new.key) OPERATOR(pg_catalog.<=) 1024) THEN 'key'
        WHEN NOT (new.kind OPERATOR(pg_catalog.=) ANY ('{M,E,C,R}')) THEN 'kind'
        WHEN NOT (new.message_type OPERATOR(pg_catalog.=) ANY ('{O,D,C,U}')) THEN 'message_type'
        WHEN NOT (new.event_type OPERATOR(pg_catalog.=) ANY ('{C,U,D}')) THEN 'event_type'
        WHEN NOT (pg_catalog.num_nonnulls(new.value, new.value_json) OPERATOR(pg_catalog.=) 1) THEN 'one_value'
        WHEN NOT (pg_catalog.octet_length(new.value) OPERATOR(pg_catalog.<=) 16777216) THEN 'value'
        WHEN NOT (pg_catalog.octet_length(new.value_json::pg_catalog.text) OPERATOR(pg_catalog.<=) 16777216) THEN 'value_json'
        WHEN NOT (pg_catalog.jsonb_typeof(new.headers) OPERATOR(pg_catalog.=) 'object'
                  AND pg_catalog.octet_length(new.headers::pg_catalog.text) OPERATOR(pg_catalog.<=) 8192
                  AND NOT pg_catalog.jsonb_path_exists(new.headers, 'strict $.* ? (@.type() <> "string")')) THEN 'headers'
        WHEN NOT (new.deliver_at OPERATOR(pg_catalog.>=) '0001-01-01 00:00+00'
                  AND new.deliver_at OPERATOR(pg_catalog.<) '9999-01-01 00:00+00') THEN 'deliver_at'
        WHEN NOT (new.expires_at OPERATOR(pg_catalog.>=) '0001-01-01 00:00+00'
                  AND new.expires_at OPERATOR(pg_catalog.<) '9999-01-01 00:00+00') THEN 'expires_at'
        WHEN NOT (new.sent_at OPERATOR(pg_catalog.>=) '0001-01-01 00:00+00'
                  AND new.sent_at OPERATOR(pg_catalog.<) '9999-01-01 00:00+00') THEN 'sent_at'
        WHEN NOT (pg_catalog.octet_length(new.source) OPERATOR(pg_catalog.<=) 200) THEN 'source'
        WHEN NOT (new.after_clock OPERATOR(pg_catalog.>=) 0 AND new.after_clock OPERATOR(pg_catalog.<=) 4294967296) THEN 'after_clock' END;
BEGIN
    IF broken IS NULL THEN
        IF (new.xact OPERATOR(pg_catalog.<>) pg_catalog.pg_current_xact_id()) THEN
            PERFORM {schema}.raise_sequence('{schema}.outbox_position_seq', new.position);
        ELSIF (new.position OPERATOR(pg_catalog.<=) 1000) THEN
            PERFORM {schema}.refuse_without_node('{schema}.outbox_position_seq');
        END IF;
        RETURN new;
    END IF;
    IF (broken OPERATOR(pg_catalog.=) 'after_clock' AND new.after_clock OPERATOR(pg_catalog.>) 0
        AND new.after_clock OPERATOR(pg_catalog.<=) 4611686018427387904) THEN
        IF (16777216.0::pg_catalog.float8 OPERATOR(pg_catalog.*) least(15768000000.0::pg_catalog.float8,
                pg_catalog.date_part('epoch', pg_catalog.now()
                    OPERATOR(pg_catalog.-) '2026-01-01 00:00+00'::pg_catalog.timestamptz))
                OPERATOR(pg_catalog.>=) new.after_clock::pg_catalog.float8
            OR pg_catalog.current_setting('session_replication_role') OPERATOR(pg_catalog.=) 'replica'
            OR new.after_clock OPERATOR(pg_catalog.<=) {schema}.clock_reach()) THEN
            IF (new.xact OPERATOR(pg_catalog.<>) pg_catalog.pg_current_xact_id()) THEN
                PERFORM {schema}.raise_sequence('{schema}.outbox_position_seq', new.position);
            END IF;
            RETURN new;
        END IF;
        RAISE check_violation USING
            MESSAGE = pg_catalog.format('after_clock %s is more than 2^32 beyond the clock of this node',
                                        new.after_clock),
            HINT = 'Give the clock of the message that this one follows. If its node is so far ahead, an operator '
                   'lets this one follow: mailroom node advance CLOCK',
            SCHEMA = tg_table_schema, TABLE = tg_table_name, COLUMN = 'after_clock',
            CONSTRAINT = pg_catalog.concat(tg_table_name, '_after_clock');
    END IF;
    RAISE check_violation USING
        MESSAGE = pg_catalog.format(
            'new row for relation "%s" violates check constraint "outbox_%s"', tg_table_name, broken),
        SCHEMA = tg_table_schema, TABLE = tg_table_name, CONSTRAINT = pg_catalog.concat('outbox_', broken),
        COLUMN = pg_catalog.replace(broken, 'one_value', 'value');
END $$;

-- Triggers fire by name, and this one is to see what triggers of users have made of the row.
CREATE TRIGGER zz_checked BEFORE INSERT OR UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION check_message();
-- Also with session_replication_role = replica, and for rows that logical replication applies: as CHECKs do.
ALTER TABLE outbox ENABLE ALWAYS TRIGGER zz_checked;

CREATE TABLE scheduled (  -- Messages whose deliver_at lies ahead; they go back to the outbox when due.
    deliver_at   timestamptz NOT NULL,  -- When it is due.
    position     bigint      NOT NULL,  -- Its first position in the outbox.
    {message},
    PRIMARY KEY (deliver_at, position)
);
