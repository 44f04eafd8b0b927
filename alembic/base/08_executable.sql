-- Executables: their outbox, the store, the books, and the tables and functions that were registered for them.

-- `xact` comes before `position`, as in the outbox: the floor depends on it.
CREATE TABLE outbox_executable (  -- Where writers commit executables. Inserted once, deleted once by the executor, never updated.
    xact        xid8        NOT NULL DEFAULT pg_current_xact_id(),  -- The writer's transaction. Writers do not set it.
    position    bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,  -- Order of execution. Writers do not set it.
    message_id  uuid        NOT NULL DEFAULT gen_random_uuid(),  -- The executable's id: the header `correlation` of its reply.
    version     smallint    NOT NULL DEFAULT 1,    -- Version of the format. An unknown version goes to dead_letter.
    operation   text        COLLATE "C" NOT NULL,  -- put, increment, delete, delete_range, account or call.
    target      text        COLLATE "C" NOT NULL DEFAULT 'store',  -- What it acts on: store, accounting, or a name in executable_target or executable_function.
    key         text        COLLATE "C" NOT NULL DEFAULT '',  -- The key; for delete_range the first one, empty for the lowest.
    end_key     text        COLLATE "C",           -- For delete_range: the end, exclusive; null for no upper bound.
    value       bytea,                             -- For put: the value.
    amount      bigint,                            -- For increment: by how much. For account: how many.
    bytes       bigint,                            -- For account: how many bytes.
    expected    bytea,                             -- For put: the value the key must hold; empty bytes: the key must be absent.
    arguments   jsonb,                             -- For call: the argument of the function.
    at          timestamptz,                       -- For account: when it happened; null for sent_at.
    row_limit   bigint,                            -- For delete_range: the greatest number of keys.
    notify      text        COLLATE "C",           -- The topic that gets the reply; null for no reply.
    headers     jsonb,                             -- Flat map of text to text. The reply has those that are carried, such as saga and user.
    after_clock bigint,                            -- The reply is stamped later than this clock.
    source      text        COLLATE "C" DEFAULT current_setting('application_name'),  -- Who sent it: the writer's application_name.
    sent_at     timestamptz NOT NULL DEFAULT clock_timestamp()  -- Physical time of the send; order never rests on it.
) WITH ({hot});

CREATE TRIGGER doorbell BEFORE INSERT ON outbox_executable FOR EACH STATEMENT EXECUTE FUNCTION doorbell();

-- Rows that break version 1 of the format are refused in the writer's transaction. Other versions are not known here;
-- the executor moves them to dead_letter. A trigger, since executables come one by one: PostgreSQL parses all CHECKs of
-- a table again for each statement, but compiles a function once per session. The error is that of a CHECK, without the
-- row. As in a CHECK, a rule that is null holds. A row that breaks none may be a copy: one of another transaction.
CREATE FUNCTION check_executable()  -- Refuses rows that are not valid executables.
RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE broken text;
BEGIN
    broken := CASE
        WHEN NOT (CASE WHEN new.version <> 1 THEN true ELSE CASE new.operation
            WHEN 'put' THEN new.key <> '' AND new.value IS NOT NULL
                AND num_nonnulls(new.end_key, new.amount, new.bytes, new.arguments, new.at, new.row_limit) = 0
            WHEN 'increment' THEN new.key <> '' AND new.amount IS NOT NULL AND num_nonnulls(
                new.end_key, new.value, new.bytes, new.expected, new.arguments, new.at, new.row_limit) = 0
            WHEN 'delete' THEN new.key <> '' AND num_nonnulls(
                new.end_key, new.value, new.amount, new.bytes, new.expected, new.arguments, new.at, new.row_limit) = 0
            WHEN 'delete_range' THEN num_nonnulls(
                new.value, new.amount, new.bytes, new.expected, new.arguments, new.at) = 0
            WHEN 'account' THEN new.key <> '' AND num_nonnulls(new.amount, new.bytes) = 2 AND new.target = 'accounting'
                AND num_nonnulls(new.end_key, new.value, new.expected, new.arguments, new.row_limit) = 0
            WHEN 'call' THEN num_nonnulls(
                new.end_key, new.value, new.amount, new.bytes, new.expected, new.at, new.row_limit) = 0
            ELSE false END END) THEN 'outbox_executable_operation'
        WHEN NOT (octet_length(new.operation) <= 41) THEN 'outbox_executable_length'
        WHEN NOT (new.target ~ '^[a-z][a-z0-9_]*$' AND octet_length(new.target) <= 41) THEN 'outbox_executable_target'
        WHEN NOT (octet_length(new.key) <= 1024) THEN 'outbox_executable_key'
        WHEN NOT (new.operation <> 'account' OR new.key !~ '^(?:[^/]*/){32}') THEN 'outbox_executable_levels'
        WHEN NOT (octet_length(new.end_key) BETWEEN 1 AND 1024) THEN 'outbox_executable_end_key'
        WHEN NOT (octet_length(new.value) <= 4194304) THEN 'outbox_executable_value'
        WHEN NOT (octet_length(new.expected) <= 4194304) THEN 'outbox_executable_expected'
        WHEN NOT (octet_length(new.arguments::text) <= 4194304) THEN 'outbox_executable_arguments'
        WHEN NOT (new.at >= '0001-01-01 UTC' AND new.at < '9999-01-01 UTC') THEN 'outbox_executable_at'
        WHEN NOT (new.row_limit >= 1) THEN 'outbox_executable_row_limit'
        WHEN NOT (new.notify ~ '^[A-Za-z][A-Za-z0-9_.-]*$' AND octet_length(new.notify) <= 200) THEN 'outbox_executable_notify'
        WHEN NOT (jsonb_typeof(new.headers) = 'object' AND octet_length(new.headers::text) <= 8192
                  AND NOT jsonb_path_exists(new.headers, 'strict $.* ? (@.type() <> "string")')) THEN 'outbox_executable_headers'
        WHEN NOT (new.after_clock BETWEEN 0 AND 4611686018427387904) THEN 'outbox_executable_after_clock'
        WHEN NOT (octet_length(new.source) <= 200) THEN 'outbox_executable_source'
        WHEN NOT (new.sent_at >= '0001-01-01 UTC' AND new.sent_at < '9999-01-01 UTC') THEN 'outbox_executable_sent_at' END;
    IF broken IS NULL THEN
        IF (new.xact OPERATOR(pg_catalog.<>) pg_catalog.pg_current_xact_id()) THEN
            PERFORM {schema}.raise_sequence('{schema}.outbox_executable_position_seq', new.position);
        ELSIF (new.position OPERATOR(pg_catalog.<=) 1000) THEN
            PERFORM {schema}.refuse_without_node('{schema}.outbox_executable_position_seq');
        END IF;
        RETURN new;
    END IF;
    RAISE check_violation USING
        MESSAGE = format('new row for relation "%s" violates check constraint "%s"', tg_table_name, broken),
        SCHEMA = tg_table_schema, TABLE = tg_table_name, CONSTRAINT = broken;
END $$;
CREATE TRIGGER checked BEFORE INSERT OR UPDATE ON outbox_executable FOR EACH ROW EXECUTE FUNCTION check_executable();

-- The executables' own rules stay in their function, whose trigger fires before this one, by its name.
CREATE FUNCTION check_executable_clock()  -- Refuses an after_clock that is too far beyond the node's clock.
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (new.after_clock OPERATOR(pg_catalog.<=) {schema}.clock_reach()) THEN RETURN new; END IF;
    RAISE check_violation USING
            MESSAGE = pg_catalog.format('after_clock %s is more than 2^32 beyond the clock of this node',
                                        new.after_clock),
            HINT = 'Give the clock of the message that this one follows. If its node is so far ahead, an operator '
                   'lets this one follow: mailroom node advance CLOCK',
            SCHEMA = tg_table_schema, TABLE = tg_table_name, COLUMN = 'after_clock',
            CONSTRAINT = pg_catalog.concat(tg_table_name, '_after_clock');
END $$;
CREATE TRIGGER checked_clock BEFORE INSERT OR UPDATE ON outbox_executable FOR EACH ROW
WHEN (new.after_clock > 4294967296) EXECUTE FUNCTION check_executable_clock();

CREATE TABLE store (  -- Values and counters by key, written by executables only.
    key    text   COLLATE "C" PRIMARY KEY,  -- The key.
    value  bytea,                           -- The value; null for a counter.
    number bigint,                          -- The counter; null for a value.
    CONSTRAINT store_one_value CHECK (num_nonnulls(value, number) = 1)
) WITH ({room});

CREATE TABLE accounting (  -- The books: how many, and how many bytes, for every successive prefix of a key, by the minute.
    key    text        COLLATE "C" NOT NULL,  -- A prefix of a key up to one of its slashes, or the whole key.
    minute timestamptz NOT NULL,              -- The start of the minute.
    count  bigint      NOT NULL,              -- How many.
    bytes  bigint      NOT NULL,              -- How many bytes.
    PRIMARY KEY (key, minute)
) WITH ({room});

CREATE TABLE executable_target (  -- Tables of the application that executables may write, by an administrator's registration.
    name          text        COLLATE "C" PRIMARY KEY  -- The target's name in executables.
        CHECK (name ~ '^[a-z][a-z0-9_]{0,40}$' AND name NOT IN ('store', 'accounting')),
    table_schema  text        NOT NULL,                -- The table's schema.
    table_name    text        NOT NULL,                -- The table.
    key_column    text        NOT NULL,                -- The key column, unique by itself.
    value_column  text,                                -- The column that put writes; null if there is none.
    number_column text,                                -- The column that increment changes; null if there is none.
    created_at    timestamptz NOT NULL DEFAULT now()   -- When it was registered.
);

CREATE TABLE executable_function (  -- Functions that executables may call, by an administrator's registration.
    name            text             COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9_]{0,40}$'),  -- The function's name in executables.
    function_schema text             NOT NULL,  -- The function's schema.
    function_name   text             NOT NULL,  -- The function; it takes one jsonb.
    timeout_s       double precision NOT NULL DEFAULT 10 CHECK (timeout_s > 0 AND timeout_s <= 300),  -- How long a call may take, in seconds.
    created_at      timestamptz      NOT NULL DEFAULT now()  -- When it was registered.
);

CREATE TABLE executable_cursor (  -- A large delete_range under way: how far it is.
    position bigint PRIMARY KEY,  -- The executable's position.
    reached  text   NOT NULL,     -- The last key reached.
    deleted  bigint NOT NULL      -- How many keys were deleted so far.
);
