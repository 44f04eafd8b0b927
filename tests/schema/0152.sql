CREATE SCHEMA mailroom;

CREATE FUNCTION mailroom.acknowledged_less() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE left_over CONSTANT integer := (SELECT count(*) FROM unnest(new.acks) AS seq WHERE seq <= new.acked);
BEGIN
    new.acks := new.acks[1:left_over];
    new.acked_at := new.acked_at[1:left_over];
    RETURN new;
END $$;

COMMENT ON FUNCTION mailroom.acknowledged_less() IS 'Forgets when a reader had acknowledged what it has lost.';

CREATE FUNCTION mailroom.age_percentile(ages bigint[], share double precision) RETURNS double precision
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (SELECT CASE WHEN (b.upper IS NULL) THEN b.lower ELSE (b.lower + ((b.upper - b.lower) * ((1)::double precision - ((b.so_far - (age_percentile.share * b.total)) / (b.count)::double precision)))) END AS "case" FROM (SELECT t.n, t.count, t.bound AS upper, COALESCE(lag(t.bound) OVER (ORDER BY t.n), (0)::double precision) AS lower, (sum(t.count) OVER (ORDER BY t.n))::double precision AS so_far, (sum(t.count) OVER ())::double precision AS total FROM UNNEST(age_percentile.ages, ARRAY[(0.01)::double precision, (0.025)::double precision, (0.05)::double precision, (0.1)::double precision, (0.25)::double precision, (0.5)::double precision, (1)::double precision, (2.5)::double precision, (5)::double precision, (10)::double precision, (30)::double precision, (60)::double precision, (300)::double precision, (1800)::double precision, (7200)::double precision]) WITH ORDINALITY t(count, bound, n)) b WHERE ((b.count > 0) AND (b.so_far >= (age_percentile.share * b.total))) ORDER BY b.n LIMIT 1);

COMMENT ON FUNCTION mailroom.age_percentile(ages bigint[], share double precision) IS 'The age that this share of the messages does not exceed, in seconds; null of none.';

CREATE FUNCTION mailroom.bound_reader() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE reach CONSTANT bigint := "mailroom".clock_reach();
BEGIN
    IF new.claim_clock > reach THEN
        RAISE check_violation USING
            MESSAGE = format('claim_clock %s is more than 2^32 beyond the clock of this node', new.claim_clock),
            HINT = 'If this node has lost such clocks, let it go on after them: mailroom node advance CLOCK',
            SCHEMA = tg_table_schema, TABLE = tg_table_name, COLUMN = 'claim_clock', CONSTRAINT = 'link_claim_clock';
    END IF;
    new.wanted_clock := least(new.wanted_clock, reach);
    RETURN new;
END $$;

COMMENT ON FUNCTION mailroom.bound_reader() IS 'Bounds by how much a reader may raise the clock.';

CREATE FUNCTION mailroom.cbor_to_jsonb(cbor bytea) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET extra_float_digits TO '1'
    AS $_$
DECLARE
    -- Not `cbor` itself: it may be stored compressed or elsewhere, and each get_byte would then fetch all of it.
    raw       CONSTANT bytea   := cbor || ''::bytea;
    size      CONSTANT integer := octet_length(raw);
    -- Valid UTF-8 text as encode(.., 'escape') writes it. Other encodings have only some of these characters.
    legible   CONSTANT text := '^([^\\]|\\\\' || CASE getdatabaseencoding() WHEN 'UTF8' THEN
        '|\\000|(\\3(0[2-7]|[1-3].)|\\340\\2[4-7].|\\355\\2[0-3].|\\3(4[1-7]|5[0-467])\\2..'
        '|\\360\\2[2-7].\\2..|\\36[123]\\2..\\2..|\\364\\2[01].\\2..)\\2..' ELSE '' END || ')*$';
    position integer := 0; fault text; major integer; minor integer; width integer;
    argument  bigint;            -- the head's 64 bits, to be read as unsigned
    number    numeric;
    bits      integer;           -- of a float's fraction
    bias      integer;
    exponent  bigint;
    magnitude float8;            -- the number as a float
    tag       bigint;            -- the tag of the next item; -4 and -5: the two numbers within tag 4; -2 and -3: the
                                 -- bytes of the second of them if it needs more than 64 bits
    slice bytea; escaped text; piece text; pieces text[] := '{}';
    depth     integer := 0;      -- of the stack: per open list or map the items to come, and whether it is a map
    to_come   bigint[] := '{}';
    is_map    boolean[] := '{}';
    is_key    boolean := false;
    fresh     boolean := true;   -- no item before this one that needs a comma
BEGIN
    LOOP
        piece := NULL;
        fault := 'it ends too early'; EXIT WHEN position >= size;
        major := get_byte(raw, position) >> 5;
        minor := get_byte(raw, position) & 31;
        position := position + 1;
        width := 0;
        argument := minor;
        IF minor >= 24 THEN
            fault := 'a length is indefinite or reserved'; EXIT WHEN minor > 27;
            fault := 'it ends too early';
            width := 1 << (minor - 24);
            EXIT WHEN width > size - position;
            argument := 0;
            FOR nth IN position .. position + width - 1 LOOP
                argument := (argument << 8) | get_byte(raw, nth);
            END LOOP;
            position := position + width;
        END IF;
        is_key := depth > 0 AND is_map[depth] AND to_come[depth] % 2 = 0;

        IF major = 6 THEN
            fault := format('tag %s does not belong here', argument);
            IF tag = -5 THEN
                EXIT WHEN argument NOT IN (2, 3);
                tag := -argument;
                CONTINUE;
            END IF;
            EXIT WHEN tag IS NOT NULL OR argument NOT IN (0, 1, 4, 37, 1004);
            tag := argument;
            CONTINUE;
        END IF;
        fault := format('tag %s holds what it cannot', CASE WHEN tag < -3 THEN 4 ELSE abs(tag) END);
        EXIT WHEN CASE tag WHEN 0 THEN major <> 3 WHEN 1004 THEN major <> 3
                           WHEN 37 THEN major <> 2 OR argument <> 16
                           WHEN 1 THEN NOT (major IN (0, 1) OR major = 7 AND minor BETWEEN 25 AND 27)
                           WHEN 4 THEN major <> 4 OR argument <> 2
                           WHEN -4 THEN major > 1 OR argument NOT BETWEEN 0 AND 1000
                           WHEN -5 THEN major > 1
                           WHEN -2 THEN major <> 2
                           WHEN -3 THEN major <> 2 END;

        IF major <= 1 THEN
            number := argument + CASE WHEN argument < 0 THEN 18446744073709551616 ELSE 0 END;
            number := CASE major WHEN 0 THEN number ELSE -1 - number END;
            magnitude := number;
            IF tag = -4 THEN
                exponent := number;
                tag := -5;
                CONTINUE;
            END IF;
            piece := CASE tag WHEN -5 THEN number || 'E' || exponent ELSE number::text END;

        ELSIF major <= 3 THEN
            fault := 'it ends too early'; EXIT WHEN argument NOT BETWEEN 0 AND size - position;
            slice := substring(raw FROM position + 1 FOR argument::integer);
            position := position + argument;
            IF tag < 0 THEN
                number := 0;
                fault := 'a decimal has more than 1000 digits'; EXIT WHEN argument > 416;
                FOR nth IN 0 .. argument - 1 LOOP
                    number := number * 256 + get_byte(slice, nth);
                END LOOP;
                number := CASE tag WHEN -2 THEN number ELSE -1 - number END;
                EXIT WHEN abs(number) >= 1e1000;
                piece := number || 'E' || exponent;
            ELSIF tag = 37 THEN
                piece := to_json(encode(slice, 'hex')::uuid::text);
            ELSIF major = 2 THEN
                piece := to_json(translate(encode(slice, 'base64'), E'\n', ''));
            ELSE
                escaped := encode(slice, 'escape');
                IF strpos(escaped, '\') > 0 THEN
                    fault := format('a text is not UTF-8 that a database in %s can hold', getdatabaseencoding());
                    EXIT WHEN escaped !~ legible;
                    -- PostgreSQL has no NUL in text: it is shown as U+2400.
                    escaped := replace(replace(escaped, '\\', '\134'), '\000', '\342\220\200');
                    escaped := convert_from(decode(escaped, 'escape'), 'UTF8');
                END IF;
                piece := to_json(escaped);
            END IF;

        ELSIF major = 7 THEN
            IF width >= 2 THEN
                bits := CASE width WHEN 2 THEN 10 WHEN 4 THEN 23 ELSE 52 END;
                bias := CASE width WHEN 2 THEN 15 WHEN 4 THEN 127 ELSE 1023 END;
                exponent := (argument >> bits) & (2 * bias + 1);
                magnitude := argument & ((1::bigint << bits) - 1);
                IF exponent = 2 * bias + 1 THEN
                    magnitude := CASE magnitude WHEN 0 THEN 'Infinity' ELSE 'NaN' END;
                ELSIF exponent = 0 THEN
                    magnitude := magnitude * power(2::float8, 1 - bias - bits);
                ELSE
                    magnitude := (magnitude + power(2::float8, bits)) * power(2::float8, exponent - bias - bits);
                END IF;
                magnitude := CASE (argument >> (8 * width - 1)) & 1 WHEN 1 THEN -magnitude ELSE magnitude END;
                piece := to_json(magnitude);
            ELSE
                fault := 'it holds undefined or a simple value other than true, false and null';
                EXIT WHEN width > 0 OR minor NOT BETWEEN 20 AND 22;
                piece := CASE minor WHEN 20 THEN 'false' WHEN 21 THEN 'true' ELSE 'null' END;
            END IF;

        ELSIF tag = 4 THEN
            tag := -4;
            CONTINUE;
        ELSE
            fault := 'a key of a map is a list or a map'; EXIT WHEN is_key;
            IF argument = 0 THEN piece := CASE major WHEN 4 THEN '[]' ELSE '{}' END; END IF;
        END IF;

        IF tag = 1 THEN
            fault := 'a time lies outside the years 1 to 9999';
            EXIT WHEN magnitude NOT BETWEEN -62135596800 AND 253402300799;
            piece := to_json(to_json(to_timestamp(magnitude) AT TIME ZONE 'UTC') #>> '{}' || 'Z');
        END IF;
        tag := NULL;

        IF NOT fresh THEN
            pieces := pieces || CASE WHEN is_map[depth] AND NOT is_key THEN ':'::text ELSE ',' END;
        END IF;
        IF depth > 0 THEN to_come[depth] := to_come[depth] - 1; END IF;
        IF piece IS NULL THEN
            fault := 'it is nested more than 32 deep'; EXIT WHEN depth = 32;
            fault := 'it ends too early'; EXIT WHEN argument NOT BETWEEN 0 AND size - position;
            depth := depth + 1;
            to_come[depth] := (major - 3) * argument;
            is_map[depth] := major = 5;
            pieces := pieces || CASE major WHEN 4 THEN '['::text ELSE '{' END;
            fresh := true;
            CONTINUE;
        END IF;
        pieces := pieces || CASE WHEN is_key AND piece !~ '^"' THEN to_json(piece)::text ELSE piece END;
        fresh := false;
        WHILE depth > 0 AND to_come[depth] = 0 LOOP
            pieces := pieces || CASE WHEN is_map[depth] THEN '}'::text ELSE ']' END;
            depth := depth - 1;
        END LOOP;
        IF depth = 0 THEN
            fault := 'more bytes follow after its end'; EXIT WHEN position < size;
            RETURN array_to_string(pieces, '')::jsonb;
        END IF;
    END LOOP;
    RETURN to_jsonb(format('(not shown: %s; byte %s of %s)', fault, position, size));
END $_$;

COMMENT ON FUNCTION mailroom.cbor_to_jsonb(cbor bytea) IS 'Shows a value (CBOR, as in the column value) as JSON, for people: bytes as base64, times, dates and UUIDs as text, Infinity and NaN as text, U+2400 for a NUL. What is no value gives the text (not shown: why), no error.';

CREATE FUNCTION mailroom.check_executable() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
            PERFORM "mailroom".raise_sequence('"mailroom".outbox_executable_position_seq', new.position);
        ELSIF (new.position OPERATOR(pg_catalog.<=) 1000) THEN
            PERFORM "mailroom".refuse_without_node('"mailroom".outbox_executable_position_seq');
        END IF;
        RETURN new;
    END IF;
    RAISE check_violation USING
        MESSAGE = format('new row for relation "%s" violates check constraint "%s"', tg_table_name, broken),
        SCHEMA = tg_table_schema, TABLE = tg_table_name, CONSTRAINT = broken;
END $_$;

COMMENT ON FUNCTION mailroom.check_executable() IS 'Refuses rows that are not valid executables.';

CREATE FUNCTION mailroom.check_executable_clock() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF (new.after_clock OPERATOR(pg_catalog.<=) "mailroom".clock_reach()) THEN RETURN new; END IF;
    RAISE check_violation USING
            MESSAGE = pg_catalog.format('after_clock %s is more than 2^32 beyond the clock of this node',
                                        new.after_clock),
            HINT = 'Give the clock of the message that this one follows. If its node is so far ahead, an operator '
                   'lets this one follow: mailroom node advance CLOCK',
            SCHEMA = tg_table_schema, TABLE = tg_table_name, COLUMN = 'after_clock',
            CONSTRAINT = pg_catalog.concat(tg_table_name, '_after_clock');
END $$;

COMMENT ON FUNCTION mailroom.check_executable_clock() IS 'Refuses an after_clock that is too far beyond the node''s clock.';

CREATE FUNCTION mailroom.check_message() RETURNS trigger
    LANGUAGE plpgsql
    AS $_$
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
            PERFORM "mailroom".raise_sequence('"mailroom".outbox_position_seq', new.position);
        ELSIF (new.position OPERATOR(pg_catalog.<=) 1000) THEN
            PERFORM "mailroom".refuse_without_node('"mailroom".outbox_position_seq');
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
            OR new.after_clock OPERATOR(pg_catalog.<=) "mailroom".clock_reach()) THEN
            IF (new.xact OPERATOR(pg_catalog.<>) pg_catalog.pg_current_xact_id()) THEN
                PERFORM "mailroom".raise_sequence('"mailroom".outbox_position_seq', new.position);
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
END $_$;

COMMENT ON FUNCTION mailroom.check_message() IS 'Refuses rows that are not valid messages.';

CREATE FUNCTION mailroom.clock_of_rows() RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    partition regclass;
    found bigint;
    highest bigint := greatest(
        (SELECT max(clock) FROM "mailroom".parked), (SELECT max(clock) FROM "mailroom".dead_letter),
        (SELECT max(sent_clock) FROM "mailroom".transit), 0);
BEGIN
    FOR partition IN SELECT inhrelid FROM pg_inherits WHERE inhparent = '"mailroom".inbox'::regclass LOOP
        CONTINUE WHEN pg_relation_size(partition) = 0;
        BEGIN
            EXECUTE format('SELECT max(clock) FROM %s', partition) INTO found;
            RAISE SQLSTATE 'MR000';
        EXCEPTION
            WHEN SQLSTATE 'MR000' THEN highest := greatest(highest, found);
            WHEN undefined_table THEN NULL;  -- removed meanwhile
        END;
    END LOOP;
    RETURN highest;
END $$;

COMMENT ON FUNCTION mailroom.clock_of_rows() IS 'The largest clock that a row of this node has.';

CREATE SEQUENCE mailroom.clock
    START WITH 0
    INCREMENT BY 1
    MINVALUE 0
    NO MAXVALUE
    CACHE 1;

COMMENT ON SEQUENCE mailroom.clock IS 'The node''s Lamport clock. Only the holder of the dispatch lock moves it.';

CREATE TABLE mailroom.node (
    single boolean DEFAULT true NOT NULL,
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text DEFAULT "current_schema"() NOT NULL COLLATE pg_catalog."C",
    incarnation bigint DEFAULT 1 NOT NULL,
    clock_ceiling bigint DEFAULT 0 NOT NULL,
    tokens_swept uuid,
    wire smallint DEFAULT 1 NOT NULL,
    system_id bigint,
    database_oid bigint,
    timeline bigint,
    started_at timestamp with time zone,
    life uuid DEFAULT gen_random_uuid() NOT NULL,
    resumed bigint DEFAULT 1 NOT NULL,
    advanced bigint DEFAULT 0 NOT NULL,
    CONSTRAINT node_advanced_check CHECK (((advanced >= 0) AND (advanced <= '6917529027641081856'::bigint))),
    CONSTRAINT node_single_check CHECK (single)
);

COMMENT ON TABLE mailroom.node IS 'This node: one row, not touched in the hot path.';

COMMENT ON COLUMN mailroom.node.single IS 'Limits the table to one row.';

COMMENT ON COLUMN mailroom.node.id IS 'The node''s id: the `origin` of its messages.';

COMMENT ON COLUMN mailroom.node.name IS 'The node''s name, for people; at first that of its database.';

COMMENT ON COLUMN mailroom.node.incarnation IS 'Raised when history was lost, so that clocks of two histories are distinguishable.';

COMMENT ON COLUMN mailroom.node.clock_ceiling IS 'No clock above it is given out. It is raised durably before the clock passes it.';

COMMENT ON COLUMN mailroom.node.tokens_swept IS 'Commit tokens up to this one may have been deleted.';

COMMENT ON COLUMN mailroom.node.wire IS 'The version of the columns that cross a link.';

COMMENT ON COLUMN mailroom.node.system_id IS 'The server''s system identifier when a dispatcher last started.';

COMMENT ON COLUMN mailroom.node.database_oid IS 'The database''s oid then. With another one, this is a copy of the database.';

COMMENT ON COLUMN mailroom.node.timeline IS 'The server''s timeline then.';

COMMENT ON COLUMN mailroom.node.started_at IS 'When the server had started then. With another time, a crash may have lost something.';

COMMENT ON COLUMN mailroom.node.life IS 'Made anew whenever history may have been lost: the links that matched before are in doubt.';

COMMENT ON COLUMN mailroom.node.resumed IS 'The incarnation up to which total inboxes go on; a new one keeps them stopped until `link resume`.';

COMMENT ON COLUMN mailroom.node.advanced IS 'How far an operator has let the clock go (`mailroom node advance`); 0 for never.';

CREATE FUNCTION mailroom.clock_reach() RETURNS bigint
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    RETURN (SELECT GREATEST(c.last_value, LEAST(GREATEST('2305843009213693952'::bigint, n.advanced), ('4294967296'::bigint + LEAST('9223372032559808511'::bigint, GREATEST(c.last_value, n.clock_ceiling, ((LEAST(EXTRACT(epoch FROM (clock_timestamp() - '2026-01-01 00:00:00+00'::timestamp with time zone)), ('15768000000'::bigint)::numeric))::bigint * 16777216)))))) AS "greatest" FROM mailroom.clock c, mailroom.node n);

COMMENT ON FUNCTION mailroom.clock_reach() IS 'The largest clock to which one send may raise the node''s: 2^32 beyond its own.';

CREATE FUNCTION mailroom.delete_marked() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    CASE TG_TABLE_NAME
        WHEN 'worker' THEN DELETE FROM "mailroom".worker WHERE id = new.id;
        WHEN 'key_state' THEN DELETE FROM "mailroom".key_state WHERE inbox = new.inbox AND key = new.key;
        WHEN 'breaker' THEN DELETE FROM "mailroom".breaker WHERE inbox = new.inbox AND prefix = new.prefix;
        WHEN 'spark_stream' THEN DELETE FROM "mailroom".spark_stream WHERE inbox = new.inbox AND batch = new.batch;
        WHEN 'spark_staging' THEN DELETE FROM "mailroom".spark_staging WHERE token = new.token;
        WHEN 'spark_bulk' THEN DELETE FROM "mailroom".spark_bulk WHERE name = new.name AND batch = new.batch;
    END CASE;
    RETURN NULL;
END $$;

COMMENT ON FUNCTION mailroom.delete_marked() IS 'Deletes a row whose column deleted was set.';

CREATE FUNCTION mailroom.doorbell() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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

COMMENT ON FUNCTION mailroom.doorbell() IS 'Wakes a sleeping dispatcher: NOTIFY mailroom:<oid of the table>.';

CREATE FUNCTION mailroom.drop_log_segment(number bigint, at timestamp with time zone) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    DELETE FROM "mailroom".log_segment WHERE segment = number AND emptied_at < at - interval '1 minute';
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('DROP TABLE "mailroom".log_%s', number);
    RETURN true;
END $$;

COMMENT ON FUNCTION mailroom.drop_log_segment(number bigint, at timestamp with time zone) IS 'Drops a segment that was emptied more than a minute ago.';

CREATE FUNCTION mailroom.drop_reaped_day(over date, at timestamp with time zone) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    DELETE FROM "mailroom".reaped_day WHERE day = over AND emptied_at < at - interval '1 minute';
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('DROP TABLE "mailroom".reaped_%s', to_char(over, 'YYYYMMDD'));
    RETURN true;
END $$;

COMMENT ON FUNCTION mailroom.drop_reaped_day(over date, at timestamp with time zone) IS 'Drops the partition of a day that was emptied more than a minute ago.';

CREATE FUNCTION mailroom.empty_log_segment(number bigint, at timestamp with time zone) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    UPDATE "mailroom".log_segment AS s SET emptied_at = at
    WHERE segment = number AND emptied_at IS NULL
      AND EXISTS (SELECT FROM "mailroom".log_segment AS n WHERE n.log = s.log AND n.segment > s.segment)
      -- In their order: a log has everything since its oldest message, without a gap that nobody would see.
      AND NOT EXISTS (SELECT FROM "mailroom".log_segment AS o
                      WHERE o.log = s.log AND o.segment < s.segment AND o.emptied_at IS NULL);
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('TRUNCATE "mailroom".log_%s', number);
    RETURN true;
END $$;

COMMENT ON FUNCTION mailroom.empty_log_segment(number bigint, at timestamp with time zone) IS 'Empties a segment that is over: there is a newer one, and no older one that is not empty.';

CREATE FUNCTION mailroom.empty_reaped_day(over date, at timestamp with time zone) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    UPDATE "mailroom".reaped_day SET emptied_at = at
    WHERE day = over AND day < (at AT TIME ZONE 'UTC')::date AND emptied_at IS NULL;
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('TRUNCATE "mailroom".reaped_%s', to_char(over, 'YYYYMMDD'));
    RETURN true;
END $$;

COMMENT ON FUNCTION mailroom.empty_reaped_day(over date, at timestamp with time zone) IS 'Empties the partition of a day that is over.';

CREATE FUNCTION mailroom.failing_keys(of_inbox text, of_keys text[], of_tried text[] DEFAULT '{}'::text[], but uuid[] DEFAULT '{}'::uuid[]) RETURNS TABLE(key text, retry_at timestamp with time zone)
    LANGUAGE plpgsql ROWS 1
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    -- Mostly no key of the inbox is failing: one look says so for all of them.
    IF EXISTS (SELECT FROM "mailroom".my_key_state AS s WHERE s.inbox = of_inbox) THEN
        RETURN QUERY SELECT n.key, n.retry_at FROM pg_catalog.unnest(of_keys) AS k (key), LATERAL (
            SELECT s.key, s.retry_at FROM "mailroom".my_key_state AS s
            WHERE s.inbox = of_inbox AND s.key = k.key OFFSET 0) AS n;
    END IF;
    IF of_tried <> '{}' THEN
        RETURN QUERY SELECT o.key, 'infinity'::timestamptz FROM "mailroom".orphaned_keys(of_inbox, but) AS o (key)
                     WHERE o.key = ANY (of_tried);
    END IF;
END $$;

COMMENT ON FUNCTION mailroom.failing_keys(of_inbox text, of_keys text[], of_tried text[], but uuid[]) IS 'Which of these keys are failing, or orphaned if tried.';

CREATE FUNCTION mailroom.greeted() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    new.by_role := session_user;
    RETURN new;
END $$;

COMMENT ON FUNCTION mailroom.greeted() IS 'Notes which login has said hello.';

CREATE FUNCTION mailroom.hold_batch() RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    PERFORM set_config('default_transaction_read_only',
                       (NOT current_setting('default_transaction_read_only')::boolean)::text, true);
    EXECUTE 'DECLARE mailroom_batch NO SCROLL CURSOR WITH HOLD FOR SELECT "mailroom".refuse_commit()';
    RETURN true;
END $$;

COMMENT ON FUNCTION mailroom.hold_batch() IS 'Makes COMMIT fail until the cursor mailroom_batch is closed; reports the end of the transaction.';

CREATE FUNCTION mailroom.is_mine(inbox text) RETURNS boolean
    LANGUAGE sql STABLE
    RETURN COALESCE(has_table_privilege((to_regclass(('"mailroom".'::text || quote_ident(('inbox_'::text || inbox)))))::oid, 'DELETE'::text), false);

COMMENT ON FUNCTION mailroom.is_mine(inbox text) IS 'Whether the current role may take messages out of this inbox.';

CREATE FUNCTION mailroom.lane_of(key text, lanes integer) RETURNS smallint
    LANGUAGE sql STABLE
    RETURN ((((get_byte(sha256(convert_to(key, 'UTF8'::name)), 0) * 256) + get_byte(sha256(convert_to(key, 'UTF8'::name)), 1)) % lanes))::smallint;

COMMENT ON FUNCTION mailroom.lane_of(key text, lanes integer) IS 'The lane of a key in a log that has so many.';

CREATE FUNCTION mailroom.link_acknowledge(of_link bigint, by_run uuid, seq bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'off'
    AS $$
BEGIN
    UPDATE "mailroom".link AS l SET acked = seq, seen_at = clock_timestamp()
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user AND l.acked <> seq;
    RETURN FOUND OR EXISTS (
        SELECT FROM "mailroom".link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;

COMMENT ON FUNCTION mailroom.link_acknowledge(of_link bigint, by_run uuid, seq bigint) IS 'A reader has everything up to this seq durably; false if another daemon or login has the link.';

CREATE TABLE mailroom.link_allowed (
    link bigint NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    commands boolean DEFAULT false NOT NULL,
    fits text GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*#]'::text) THEN translate((regexp_replace(topic, '([\\_%])'::text, '\\\1'::text, 'g'::text) ||
    CASE
        WHEN (topic ~ '#$'::text) THEN ''::text
        ELSE '.'::text
    END), '*#'::text, '%%'::text)
    ELSE NULL::text
END) STORED COLLATE pg_catalog."C",
    words integer GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*]'::text) THEN cardinality(string_to_array(topic, '.'::text))
    ELSE NULL::integer
END) STORED,
    CONSTRAINT link_allowed_check CHECK (((NOT commands) OR (fits IS NULL))),
    CONSTRAINT link_allowed_topic CHECK (((octet_length(topic) <= 200) AND ((topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$'::text) OR (topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$'::text))))
);

COMMENT ON TABLE mailroom.link_allowed IS 'What a reader may ask for; without rows all messages and events.';

COMMENT ON COLUMN mailroom.link_allowed.link IS 'The link.';

COMMENT ON COLUMN mailroom.link_allowed.topic IS 'The topic, or a pattern of topics, as in subscription.';

COMMENT ON COLUMN mailroom.link_allowed.commands IS 'Whether commands and replies of it go to this reader, if to no inbox here.';

COMMENT ON COLUMN mailroom.link_allowed.fits IS 'Of a pattern: what a topic with a dot after it must be LIKE.';

COMMENT ON COLUMN mailroom.link_allowed.words IS 'Of a pattern with *: how many words the topic must have.';

CREATE FUNCTION mailroom.link_allows(of_link bigint, of_topic text) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    RETURN (SELECT CASE WHEN (count(*) = 0) THEN false WHEN bool_or(((a.topic = link_allows.of_topic) OR (((link_allows.of_topic || '.'::text) ~~ a.fits) AND ((a.words IS NULL) OR ((a.words = cardinality(string_to_array(link_allows.of_topic, '.'::text))) AND (link_allows.of_topic !~ '#'::text)))))) THEN bool_or(((a.topic = link_allows.of_topic) AND a.commands)) ELSE NULL::boolean END AS "case" FROM mailroom.link_allowed a WHERE (a.link = link_allows.of_link));

COMMENT ON FUNCTION mailroom.link_allows(of_link bigint, of_topic text) IS 'Whether a link that asks for this gets commands, too; null for nothing.';

CREATE FUNCTION mailroom.link_ask(of_link bigint, by_run uuid, topics text[]) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'off'
    AS $$
BEGIN
    PERFORM FROM "mailroom".link WHERE number = of_link AND run = by_run AND by_role = session_user FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN false; END IF;
    DELETE FROM "mailroom".link_topic WHERE link = of_link AND topic <> ALL (topics);
    INSERT INTO "mailroom".link_topic (topic, link) SELECT t.topic, of_link FROM unnest(topics) AS t (topic)
    ON CONFLICT DO NOTHING;
    RETURN true;
END $$;

COMMENT ON FUNCTION mailroom.link_ask(of_link bigint, by_run uuid, topics text[]) IS 'A reader asks for these topics, and no others; false if another daemon or login has the link.';

CREATE FUNCTION mailroom.link_claim(of_link bigint, by_run uuid, seq bigint, clock bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    UPDATE "mailroom".link AS l SET claim_seq = seq, claim_clock = clock
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user
      AND (l.claim_seq, l.claim_clock) IS DISTINCT FROM (seq, clock);
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM "mailroom".link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;

COMMENT ON FUNCTION mailroom.link_claim(of_link bigint, by_run uuid, seq bigint, clock bigint) IS 'A reader says what it has received that is not here.';

CREATE FUNCTION mailroom.link_hello(of_link bigint, id uuid, system_id bigint, database_oid bigint, origin bigint, by_run uuid) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'off'
    AS $$
BEGIN
    UPDATE "mailroom".link AS l SET reader_id = id, reader_system_id = system_id, reader_database_oid = database_oid,
        reader_origin = origin, run = by_run, seen_at = clock_timestamp()
    WHERE l.number = of_link AND coalesce(l.by_role = session_user, true) AND coalesce(l.reader_id = id, true);
    RETURN FOUND;
END $$;

COMMENT ON FUNCTION mailroom.link_hello(of_link bigint, id uuid, system_id bigint, database_oid bigint, origin bigint, by_run uuid) IS 'A reader says who it is, and has the link from then on; false if it is another''s.';

CREATE FUNCTION mailroom.link_hold(of_name text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'off'
    AS $$
BEGIN
    PERFORM FROM "mailroom".link WHERE name = of_name AND coalesce(by_role = session_user, true) FOR NO KEY UPDATE;
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM "mailroom".link WHERE name = of_name);
END $$;

COMMENT ON FUNCTION mailroom.link_hold(of_name text) IS 'Locks a link for the rest of the transaction; false if it is another login''s, null if there is none.';

CREATE FUNCTION mailroom.link_match(of_link bigint, by_run uuid) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    UPDATE "mailroom".link AS l SET matched = n.life, claim_seq = NULL, claim_clock = NULL FROM "mailroom".node AS n
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user
      AND (l.matched IS DISTINCT FROM n.life OR l.claim_seq IS NOT NULL);
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM "mailroom".link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;

COMMENT ON FUNCTION mailroom.link_match(of_link bigint, by_run uuid) IS 'A reader has found its position here.';

CREATE TABLE mailroom.transit (
    link bigint NOT NULL,
    seq bigint NOT NULL,
    sent_clock bigint NOT NULL,
    stamped_at timestamp with time zone NOT NULL,
    message_id uuid NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    kind "char" NOT NULL,
    message_type "char" NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.transit IS 'Messages stamped for other nodes, until these have received them. The newest row of a link stays.';

COMMENT ON COLUMN mailroom.transit.link IS 'The link.';

COMMENT ON COLUMN mailroom.transit.seq IS 'The number within the link, from 1 without gaps, in clock order.';

COMMENT ON COLUMN mailroom.transit.sent_clock IS 'Lamport clock of the send event on this node.';

COMMENT ON COLUMN mailroom.transit.stamped_at IS 'When it was stamped. With message_id it tells apart two histories that have the same seq.';

COMMENT ON COLUMN mailroom.transit.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.transit.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.transit.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.transit.kind IS 'M message, E event, C command, R reply; H a mark, which is not a message and only shows a clock.';

COMMENT ON COLUMN mailroom.transit.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.transit.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.transit.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.transit.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.transit.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.transit.expires_at IS 'If not received before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.transit.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.transit.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.transit.sent_at IS 'Physical time of the send; order never rests on it.';

CREATE FUNCTION mailroom.link_next(of_link bigint, behind bigint) RETURNS bigint
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'off'
    RETURN (SELECT t.seq FROM mailroom.transit t WHERE ((t.link = link_next.of_link) AND (t.seq > link_next.behind)) ORDER BY t.seq LIMIT 1);

COMMENT ON FUNCTION mailroom.link_next(of_link bigint, behind bigint) IS 'The next seq of a link, whatever policies hide; for the roles of readers.';

CREATE FUNCTION mailroom.link_topic_asked() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET row_security TO 'off'
    AS $$
BEGIN
    new.commands := "mailroom".link_allows(new.link, new.topic);
    RETURN CASE WHEN new.commands IS NOT NULL THEN new END;
END $$;

COMMENT ON FUNCTION mailroom.link_topic_asked() IS 'Passes over what the link is not allowed, and sets commands.';

CREATE FUNCTION mailroom.link_want(of_link bigint, by_run uuid, clock bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    UPDATE "mailroom".link AS l SET wanted_clock = clock
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user
      AND l.wanted_clock < least(clock, "mailroom".clock_reach());
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM "mailroom".link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;

COMMENT ON FUNCTION mailroom.link_want(of_link bigint, by_run uuid, clock bigint) IS 'A reader asks for a mark with a clock, or as far as it may.';

CREATE FUNCTION mailroom.lock_log_segment(number bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM "mailroom".log_segment WHERE segment = number AND emptied_at IS NULL) THEN
        RETURN false;
    END IF;
    EXECUTE format('LOCK TABLE "mailroom".log_%s', number);
    RETURN true;
END $$;

COMMENT ON FUNCTION mailroom.lock_log_segment(number bigint) IS 'Keeps readers out of a segment that is to be emptied though it is unread.';

CREATE FUNCTION mailroom.make_log_segment(of_log text, at timestamp with time zone) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
DECLARE
    number CONSTANT bigint := (SELECT coalesce(max(segment), 0) + 1 FROM "mailroom".log_segment);
BEGIN
    IF NOT EXISTS (SELECT FROM "mailroom".log_registry WHERE name = of_log) THEN RETURN NULL; END IF;
    EXECUTE format(
        'CREATE TABLE "mailroom".log_%s (LIKE "mailroom".log INCLUDING DEFAULTS INCLUDING COMMENTS) '
        'WITH (autovacuum_enabled = off)', number);
    EXECUTE format('CREATE UNIQUE INDEX log_%1$s_lane ON "mailroom".log_%1$s (lane, clock)', number);
    EXECUTE format(
        'ALTER TABLE "mailroom".log_%s ATTACH PARTITION "mailroom".log_%2$s FOR VALUES IN (%2$s)', of_log, number);
    INSERT INTO "mailroom".log_segment (segment, log, first_clock, opened_at)
    SELECT number, of_log, last_value + 1, at FROM "mailroom".clock;
    RETURN number;
END $_$;

COMMENT ON FUNCTION mailroom.make_log_segment(of_log text, at timestamp with time zone) IS 'Makes a new segment of a log, and returns its number.';

CREATE FUNCTION mailroom.make_reaped_days(at timestamp with time zone) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    today CONSTANT date := (at AT TIME ZONE 'UTC')::date;
    missing date;
    made bigint := 0;
BEGIN
    FOR missing IN
        SELECT today + n FROM generate_series(1, (SELECT max(keep_reaped_days) + 15 FROM "mailroom".inbox_registry)) AS n
        WHERE to_regclass(format('"mailroom".reaped_%s', to_char(today + n, 'YYYYMMDD'))) IS NULL ORDER BY n
    LOOP
        EXECUTE format(
            'CREATE TABLE "mailroom".reaped_%s (LIKE "mailroom".reaped INCLUDING DEFAULTS INCLUDING COMMENTS) '
            'WITH (autovacuum_vacuum_insert_threshold = -1)', to_char(missing, 'YYYYMMDD'));
        EXECUTE format(
            'ALTER TABLE "mailroom".reaped ATTACH PARTITION "mailroom".reaped_%s FOR VALUES FROM (%L) TO (%L)',
            to_char(missing, 'YYYYMMDD'), missing, missing + 1);
        INSERT INTO "mailroom".reaped_day (day) VALUES (missing) ON CONFLICT DO NOTHING;
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;

COMMENT ON FUNCTION mailroom.make_reaped_days(at timestamp with time zone) IS 'Makes the partitions of reaped that are missing ahead of a time, and returns how many.';

CREATE FUNCTION mailroom.orphaned_keys(of_inbox text, but uuid[]) RETURNS SETOF text
    LANGUAGE plpgsql ROWS 10
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RETURN QUERY SELECT pg_catalog.unnest(w.keys) FROM "mailroom".my_worker AS w
    WHERE w.inbox = of_inbox AND w.id <> ALL (but)
      AND CASE WHEN w.xact IS NULL THEN false
               WHEN w.xact >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint THEN true
               ELSE coalesce(pg_xact_status(w.xact::text::xid8), 'aborted') = 'aborted' END;
END $$;

COMMENT ON FUNCTION mailroom.orphaned_keys(of_inbox text, but uuid[]) IS 'The keys of batches that have ended and are not accounted for.';

CREATE FUNCTION mailroom.outbox_jdbc_copy() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO "mailroom".outbox_jdbc SELECT NEW.*;
    RETURN NEW;
END $$;

COMMENT ON FUNCTION mailroom.outbox_jdbc_copy() IS 'Turns rows that COPY brings into outbox_jdbc into INSERTs.';

CREATE FUNCTION mailroom.outbox_jdbc_take(message_id uuid) RETURNS SETOF uuid
    LANGUAGE plpgsql ROWS 1
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF message_id IS NULL THEN
        RAISE not_null_violation USING
            MESSAGE = 'a row for outbox_jdbc has no message_id',
            HINT = 'Give each message a UUID that is the same whenever its row is computed again, such as the md5 of '
                   'its business key. Rows that need none go into outbox, which keeps a row as often as it is written.',
            TABLE = 'outbox_jdbc', COLUMN = 'message_id';
    END IF;
    INSERT INTO "mailroom".outbox_jdbc_id (id) VALUES (message_id) ON CONFLICT DO NOTHING;
    IF FOUND THEN RETURN NEXT message_id; END IF;
END $$;

COMMENT ON FUNCTION mailroom.outbox_jdbc_take(message_id uuid) IS 'Returns a message_id that is new, and remembers it; no row if it was known.';

CREATE FUNCTION mailroom.raise_copied() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    PERFORM "mailroom".raise_sequence(
        pg_get_serial_sequence(format('"mailroom".%I', tg_argv[1]), tg_argv[0])::regclass,
        (to_jsonb(new) ->> tg_argv[0])::bigint);
    RETURN new;
END $$;

COMMENT ON FUNCTION mailroom.raise_copied() IS 'Raises the sequence of a table past a row that replication brings.';

CREATE FUNCTION mailroom.raise_sequence(sequence regclass, number bigint) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF number <= pg_sequence_last_value(sequence) THEN RETURN NULL; END IF;
    PERFORM FROM "mailroom".node FOR NO KEY UPDATE;
    IF number <= pg_sequence_last_value(sequence) THEN RETURN NULL; END IF;
    RETURN setval(sequence, least(number, 9223372036854775807 - 1000000) + 1000000);
END $$;

COMMENT ON FUNCTION mailroom.raise_sequence(sequence regclass, number bigint) IS 'Raises a sequence past a number that a row has, and returns its value.';

CREATE FUNCTION mailroom.raise_sequences(OUT "table" text, OUT "column" text, OUT value bigint) RETURNS SETOF record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE behind record;
BEGIN
    FOR behind IN SELECT * FROM "mailroom".sequences_behind() LOOP
        "table" := behind."table";
        "column" := behind."column";
        value := "mailroom".raise_sequence(behind.sequence, behind.highest);
        IF value IS NOT NULL THEN RETURN NEXT; END IF;
    END LOOP;
END $$;

COMMENT ON FUNCTION mailroom.raise_sequences(OUT "table" text, OUT "column" text, OUT value bigint) IS 'Raises each sequence that is behind its rows past them, and returns which.';

CREATE FUNCTION mailroom.refuse_commit() RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION 'only its worker may end the transaction of a batch' USING
        ERRCODE = 'invalid_transaction_termination',
        HINT = 'Leave COMMIT and ROLLBACK to the worker; for separate work open another connection.';
END $$;

COMMENT ON FUNCTION mailroom.refuse_commit() IS 'Fails the COMMIT of a batch that its worker has not allowed.';

CREATE FUNCTION mailroom.refuse_others() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE may boolean := "mailroom".is_mine(NEW.inbox);
BEGIN
    IF may AND TG_RELID OPERATOR(pg_catalog.=) '"mailroom".dead_letter'::pg_catalog.regclass THEN
        may := NEW.stage OPERATOR(pg_catalog.=) 'reap';
    END IF;
    IF may OR pg_catalog.has_table_privilege(TG_RELID, 'DELETE') THEN RETURN NEW; END IF;
    RAISE insufficient_privilege USING
        MESSAGE = pg_catalog.format('role %I may not write into %I for the inbox %L', current_user, TG_TABLE_NAME,
                                    NEW.inbox),
        HINT = 'That takes DELETE on the table of the inbox.';
END $$;

COMMENT ON FUNCTION mailroom.refuse_others() IS 'Refuses rows about an inbox that the current role may not take messages out of.';

CREATE FUNCTION mailroom.refuse_without_node(sequence regclass) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF EXISTS (SELECT FROM "mailroom".node) OR row_security_active('"mailroom".node') THEN RETURN; END IF;
    IF sequence IN ('"mailroom".outbox_position_seq'::regclass, '"mailroom".outbox_executable_position_seq'::regclass) THEN
        PERFORM setval(sequence, 1, false);
    END IF;
    RAISE object_not_in_prerequisite_state USING
        MESSAGE = 'schema "mailroom" has the tables of Mailroom and no node: it was copied without its rows, so no dispatcher would deliver this',
        HINT = 'Restore the rows too. Or make a new node: drop the schema, then run mailroom migrate.';
END $$;

COMMENT ON FUNCTION mailroom.refuse_without_node(sequence regclass) IS 'Raises an error if this schema has no node; a writer of its first positions calls it.';

CREATE FUNCTION mailroom.sequences_behind(OUT "table" text, OUT "column" text, OUT sequence regclass, OUT highest bigint) RETURNS SETOF record
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
DECLARE
    next bigint; place text[]; found bigint;
BEGIN
    FOR "table", "column", sequence IN
        SELECT t.relname, a.attname, s.oid
        FROM pg_class AS s
        JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = s.oid
            AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
        JOIN pg_class AS t ON t.oid = d.refobjid
        JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
        WHERE s.relnamespace = '"mailroom"'::regnamespace AND t.relnamespace = s.relnamespace AND s.relkind = 'S'
        ORDER BY 1, 2
    LOOP
        CONTINUE WHEN NOT has_sequence_privilege(sequence, 'SELECT');
        next := coalesce(pg_sequence_last_value(sequence) + 1, 1);
        highest := NULL;
        FOREACH place SLICE 1 IN ARRAY ARRAY[["table", "column"]] || CASE "table"
            WHEN 'outbox' THEN '{{scheduled,position}}'::text[] ELSE '{}' END
        LOOP
            CONTINUE WHEN NOT has_table_privilege(format('"mailroom".%I', place[1]), 'SELECT');
            EXECUTE format('SELECT max(%2$I) FROM "mailroom".%1$I WHERE %2$I >= $1', place[1], place[2])
            INTO found USING next;
            highest := greatest(highest, found);
        END LOOP;
        IF highest IS NOT NULL THEN RETURN NEXT; END IF;
    END LOOP;
END $_$;

COMMENT ON FUNCTION mailroom.sequences_behind(OUT "table" text, OUT "column" text, OUT sequence regclass, OUT highest bigint) IS 'The sequences that are behind the rows that they number, as after a copy of rows alone.';

CREATE FUNCTION mailroom.take_dispatch_turn() RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    LOCK TABLE ONLY "mailroom".dispatch_turn IN SHARE UPDATE EXCLUSIVE MODE;
END $$;

COMMENT ON FUNCTION mailroom.take_dispatch_turn() IS 'Waits until no other session delivers; until the transaction ends.';

CREATE FUNCTION mailroom.take_execute_turn() RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    LOCK TABLE ONLY "mailroom".execute_turn IN SHARE UPDATE EXCLUSIVE MODE;
END $$;

COMMENT ON FUNCTION mailroom.take_execute_turn() IS 'Waits until no other session executes; until the transaction ends.';

CREATE FUNCTION mailroom.watch() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    SET "DateStyle" TO 'ISO, YMD'
    SET "IntervalStyle" TO 'postgres'
    SET bytea_output TO 'hex'
    SET extra_float_digits TO '1'
    AS $$
DECLARE changes refcursor; first_key text; first_before jsonb; first_after jsonb;
BEGIN
    IF current_setting('mailroom.watch', true) = 'off' THEN RETURN NULL; END IF;
    IF tg_op = 'TRUNCATE' THEN
        INSERT INTO "mailroom".outbox (topic, kind, message_type, event_type, value_json)
        VALUES (concat(tg_argv[0], '.truncated'), 'E', 'C', 'U', '{"old": null, "new": null, "changed": []}');
        RETURN NULL;
    END IF;
    OPEN changes FOR EXECUTE "mailroom".watch_query(tg_relid, tg_argv[2], tg_argv[3:], tg_op, tg_level = 'ROW')
    USING OLD, NEW;
    FETCH changes INTO first_key, first_before, first_after;
    -- An INSERT of no rows would ring the doorbell.
    IF FOUND THEN
        INSERT INTO "mailroom".outbox (topic, key, kind, message_type, event_type, value_json)
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
                          UNION ALL SELECT * FROM "mailroom".watch_rest(changes)) AS c (key, before, after)
                    OFFSET 0) AS e OFFSET 0) AS m;
    END IF;
    CLOSE changes;
    RETURN NULL;
END $$;

COMMENT ON FUNCTION mailroom.watch() IS 'The trigger of watched tables: sends what happens to their rows.';

CREATE FUNCTION mailroom.watch_audit(act text, watched text, changed text, by_actor text, why text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO "mailroom".audit (actor, action, key, messages, change, reason)
    SELECT by_actor, act, watched, 0, changed, why WHERE act IN ('watch', 'unwatch');
END $$;

COMMENT ON FUNCTION mailroom.watch_audit(act text, watched text, changed text, by_actor text, why text) IS 'Writes into the audit that a table is watched, or no longer.';

CREATE FUNCTION mailroom.watch_json(given record) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE made jsonb;
BEGIN
    made := to_jsonb(given);
    RETURN CASE WHEN octet_length(made::text) <= 16777216 THEN made END;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

COMMENT ON FUNCTION mailroom.watch_json(given record) IS 'A row as JSON; null if it has none, or more than 16 MiB.';

CREATE FUNCTION mailroom.watch_query(relid oid, hidden_as text, hidden text[], event text, is_row boolean) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
                                   "mailroom".watch_told(format('n.%I', a.attname), a.atttypid) END,
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
           CASE WHEN bool_and(c.atttypid = ANY (plain)) THEN 'to_jsonb' ELSE '"mailroom".watch_json' END
    INTO columns, size, as_json
    FROM (SELECT format('n.%I', a.attname) AS name, a.attnum, a.attname, a.atttypid, a.attlen,
                 CASE WHEN a.atttypid >= 16384 THEN
                     "mailroom".watch_told(format('n.%I', a.attname), a.atttypid) END AS told
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
END $_$;

COMMENT ON FUNCTION mailroom.watch_query(relid oid, hidden_as text, hidden text[], event text, is_row boolean) IS 'The query over the changes that a trigger has seen.';

CREATE FUNCTION mailroom.watch_rest(changes refcursor) RETURNS TABLE(key text, before jsonb, after jsonb)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    LOOP
        FETCH changes INTO key, before, after;
        EXIT WHEN NOT FOUND;
        RETURN NEXT;
    END LOOP;
END $$;

COMMENT ON FUNCTION mailroom.watch_rest(changes refcursor) IS 'What is left of a cursor over the changes of watched rows.';

CREATE FUNCTION mailroom.watch_told(given text, of_type oid) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE kind pg_type; parts text; is_same boolean;
BEGIN
    LOOP
        IF of_type < 16384 THEN RETURN NULL; END IF;
        SELECT * INTO kind FROM pg_type AS t WHERE t.oid = of_type;
        EXIT WHEN kind.typtype <> 'd';
        of_type := kind.typbasetype;
    END LOOP;
    IF kind.typsubscript = 'array_subscript_handler'::regproc THEN
        parts := "mailroom".watch_told('e', kind.typelem);
        is_same := parts IS NULL;
        parts := concat('concat(', given, ')', CASE WHEN parts = 'CASE WHEN e IS DISTINCT FROM NULL THEN concat(e) END'
                                                         AND kind.typdelim = ',' THEN '::text[]' END);
    ELSIF kind.typtype = 'c' THEN
        SELECT concat('(SELECT r FROM (SELECT ', string_agg(
                   coalesce(a.told, a.name) || format(' AS %I', a.attname), ', ' ORDER BY a.attnum), ') AS r)'),
               coalesce(bool_and(a.told IS NULL), true)
        INTO parts, is_same
        FROM (SELECT n.name, a.attname, a.attnum, "mailroom".watch_told(n.name, a.atttypid) AS told
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

COMMENT ON FUNCTION mailroom.watch_told(given text, of_type oid) IS 'What is told in place of a value whose type could run code of a user''s; null if the value is.';

CREATE TABLE mailroom.accounting (
    key text NOT NULL COLLATE pg_catalog."C",
    minute timestamp with time zone NOT NULL,
    count bigint NOT NULL,
    bytes bigint NOT NULL
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE mailroom.accounting IS 'The books: how many, and how many bytes, for every successive prefix of a key, by the minute.';

COMMENT ON COLUMN mailroom.accounting.key IS 'A prefix of a key up to one of its slashes, or the whole key.';

COMMENT ON COLUMN mailroom.accounting.minute IS 'The start of the minute.';

COMMENT ON COLUMN mailroom.accounting.count IS 'How many.';

COMMENT ON COLUMN mailroom.accounting.bytes IS 'How many bytes.';

CREATE TABLE mailroom.alembic_version (
    version_num character varying(32) NOT NULL
);

CREATE TABLE mailroom.attempt (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    inbox text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    clock bigint NOT NULL,
    message_id uuid NOT NULL,
    attempt integer NOT NULL,
    outcome text NOT NULL COLLATE pg_catalog."C",
    error text NOT NULL,
    worker text DEFAULT current_setting('application_name'::text) NOT NULL,
    retry_at timestamp with time zone,
    error_class text COLLATE pg_catalog."C"
);

COMMENT ON TABLE mailroom.attempt IS 'The history of failed attempts and of replays, kept for a while; attempts are counted from it.';

COMMENT ON COLUMN mailroom.attempt.id IS 'Its number.';

COMMENT ON COLUMN mailroom.attempt.at IS 'When it was recorded.';

COMMENT ON COLUMN mailroom.attempt.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.attempt.key IS 'The key.';

COMMENT ON COLUMN mailroom.attempt.clock IS 'The message''s clock in the inbox.';

COMMENT ON COLUMN mailroom.attempt.message_id IS 'The message.';

COMMENT ON COLUMN mailroom.attempt.attempt IS 'The number of the attempt, from 1; 0 for a replay.';

COMMENT ON COLUMN mailroom.attempt.outcome IS 'The outcome: retry, park, skip or replay.';

COMMENT ON COLUMN mailroom.attempt.error IS 'Why it failed, truncated.';

COMMENT ON COLUMN mailroom.attempt.worker IS 'The worker that recorded it: its application_name, process id and host.';

COMMENT ON COLUMN mailroom.attempt.retry_at IS 'When the message may be tried again; null if it may not.';

COMMENT ON COLUMN mailroom.attempt.error_class IS 'The class of what was raised, or of what is known of it; null for a replay.';

ALTER TABLE mailroom.attempt ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME mailroom.attempt_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE mailroom.audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    actor text NOT NULL,
    role text DEFAULT SESSION_USER NOT NULL,
    action text NOT NULL COLLATE pg_catalog."C",
    inbox text COLLATE pg_catalog."C",
    key text COLLATE pg_catalog."C",
    messages bigint NOT NULL,
    change text,
    reason text
);

COMMENT ON TABLE mailroom.audit IS 'Who changed what by hand, and what the dispatcher did of its own accord.';

COMMENT ON COLUMN mailroom.audit.id IS 'Its number.';

COMMENT ON COLUMN mailroom.audit.at IS 'When.';

COMMENT ON COLUMN mailroom.audit.actor IS 'Who acted, as given by the caller.';

COMMENT ON COLUMN mailroom.audit.role IS 'The database role that did it.';

COMMENT ON COLUMN mailroom.audit.action IS 'What was done, by the words of the command; those of the dispatcher alone begin with its name.';

COMMENT ON COLUMN mailroom.audit.inbox IS 'In which inbox.';

COMMENT ON COLUMN mailroom.audit.key IS 'To which key, link, bridge, table or other thing of a name; null if to none.';

COMMENT ON COLUMN mailroom.audit.messages IS 'How many messages it affected.';

COMMENT ON COLUMN mailroom.audit.change IS 'What is different now, such as: rate 5 -> 10.';

COMMENT ON COLUMN mailroom.audit.reason IS 'Why, as given by the caller.';

ALTER TABLE mailroom.audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME mailroom.audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE mailroom.breaker (
    inbox text NOT NULL COLLATE pg_catalog."C",
    prefix text NOT NULL COLLATE pg_catalog."C",
    separator text NOT NULL COLLATE pg_catalog."C",
    opened_at timestamp with time zone NOT NULL,
    opened_why text NOT NULL,
    try_at timestamp with time zone NOT NULL,
    tries integer DEFAULT 0 NOT NULL,
    trying text COLLATE pg_catalog."C",
    deleted boolean DEFAULT false NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.breaker IS 'The open breakers of prefixes of keys; a closed one has no row.';

COMMENT ON COLUMN mailroom.breaker.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.breaker.prefix IS 'What its keys have before the first separator.';

COMMENT ON COLUMN mailroom.breaker.separator IS 'The separator: limits.breaker_by when it opened.';

COMMENT ON COLUMN mailroom.breaker.opened_at IS 'Since when it is open.';

COMMENT ON COLUMN mailroom.breaker.opened_why IS 'What share of attempts had failed.';

COMMENT ON COLUMN mailroom.breaker.try_at IS 'When the next message is tried.';

COMMENT ON COLUMN mailroom.breaker.tries IS 'How many were given to be tried.';

COMMENT ON COLUMN mailroom.breaker.trying IS 'The key that was given last to be tried; null once that has failed.';

COMMENT ON COLUMN mailroom.breaker.deleted IS 'Set to have the row deleted (delete_marked).';

CREATE TABLE mailroom.bridge_done (
    link bigint NOT NULL,
    seq bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.bridge_done IS 'Rows above what a bridge has acknowledged that need no publishing: they are published, or skipped by an operator.';

COMMENT ON COLUMN mailroom.bridge_done.link IS 'The link.';

COMMENT ON COLUMN mailroom.bridge_done.seq IS 'The row of transit.';

CREATE TABLE mailroom.bridge_in (
    origin bigint NOT NULL,
    settings jsonb NOT NULL,
    moves bigint DEFAULT 0 NOT NULL,
    lost text,
    history text,
    lacks_from timestamp with time zone,
    lacks_to timestamp with time zone
);

COMMENT ON TABLE mailroom.bridge_in IS 'Origins of which a broker is the source.';

COMMENT ON COLUMN mailroom.bridge_in.origin IS 'The number of the origin.';

COMMENT ON COLUMN mailroom.bridge_in.settings IS 'Which broker, and how records become messages.';

COMMENT ON COLUMN mailroom.bridge_in.moves IS 'How often its position was set by hand, or it was resumed after a loss: a reading daemon begins anew.';

COMMENT ON COLUMN mailroom.bridge_in.lost IS 'That records are lost at the broker, and what to do. Nothing is taken in before it is resumed; null while none are known to be.';

COMMENT ON COLUMN mailroom.bridge_in.history IS 'In which history of this node it has taken from a queue, which deletes what is taken; null: from none.';

COMMENT ON COLUMN mailroom.bridge_in.lacks_from IS 'If that was another one than now: when it had last taken in before, as far as is known.';

COMMENT ON COLUMN mailroom.bridge_in.lacks_to IS 'And until when it may have taken what this node has lost with that history.';

CREATE TABLE mailroom.bridge_known (
    link bigint NOT NULL,
    message_id uuid NOT NULL
);

COMMENT ON TABLE mailroom.bridge_known IS 'Messages that a bridge has published in a history which this node has lost. They are not published again.';

COMMENT ON COLUMN mailroom.bridge_known.link IS 'The link.';

COMMENT ON COLUMN mailroom.bridge_known.message_id IS 'The message.';

CREATE TABLE mailroom.bridge_last (
    link bigint NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    part bigint NOT NULL,
    last bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.bridge_last IS 'The last record that a broker has acknowledged to a bridge, of each partition: one below it tells that the broker has lost records.';

COMMENT ON COLUMN mailroom.bridge_last.link IS 'The link.';

COMMENT ON COLUMN mailroom.bridge_last.topic IS 'The topic at the broker, or its stream.';

COMMENT ON COLUMN mailroom.bridge_last.part IS 'The partition.';

COMMENT ON COLUMN mailroom.bridge_last.last IS 'The record''s number there.';

CREATE TABLE mailroom.bridge_mark (
    origin bigint NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    part bigint NOT NULL,
    sender uuid NOT NULL,
    link bigint NOT NULL,
    clock bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.bridge_mark IS 'Up to which clock the messages of a bridge of another node were taken in; repeats are not above it.';

COMMENT ON COLUMN mailroom.bridge_mark.origin IS 'The number of the origin.';

COMMENT ON COLUMN mailroom.bridge_mark.topic IS 'The topic at the broker, or its stream.';

COMMENT ON COLUMN mailroom.bridge_mark.part IS 'The partition.';

COMMENT ON COLUMN mailroom.bridge_mark.sender IS 'The id of the node that sent them.';

COMMENT ON COLUMN mailroom.bridge_mark.link IS 'The number of its link.';

COMMENT ON COLUMN mailroom.bridge_mark.clock IS 'The largest sent_clock of them.';

CREATE TABLE mailroom.bridge_out (
    link bigint NOT NULL,
    settings jsonb NOT NULL,
    state text DEFAULT 'open'::text NOT NULL COLLATE pg_catalog."C",
    trouble text COLLATE pg_catalog."C",
    why text,
    since timestamp with time zone,
    marked_at timestamp with time zone,
    marked bigint,
    lost text,
    tried text,
    skips bigint DEFAULT 0 NOT NULL,
    CONSTRAINT bridge_out_state_check CHECK ((state = ANY (ARRAY['open'::text, 'stopped'::text]))),
    CONSTRAINT bridge_out_trouble_check CHECK ((trouble = ANY (ARRAY['unreachable'::text, 'refused'::text, 'failing'::text])))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.bridge_out IS 'Links of which a broker is the reader.';

COMMENT ON COLUMN mailroom.bridge_out.link IS 'The link.';

COMMENT ON COLUMN mailroom.bridge_out.settings IS 'Which broker, and how messages become records.';

COMMENT ON COLUMN mailroom.bridge_out.state IS 'The state: open, or stopped (for the reason in why) until an operator acts; both are tried again.';

COMMENT ON COLUMN mailroom.bridge_out.trouble IS 'Why something is not published now: the broker is unreachable, messages are refused, or it is failing; null while neither.';

COMMENT ON COLUMN mailroom.bridge_out.why IS 'Why, and what to do.';

COMMENT ON COLUMN mailroom.bridge_out.since IS 'Since when nothing is published; null while it is.';

COMMENT ON COLUMN mailroom.bridge_out.marked_at IS 'When the mark at the broker was last set, if it keeps one.';

COMMENT ON COLUMN mailroom.bridge_out.marked IS 'The mark that it had then: the clock of the last message. One below it tells that the broker has lost records.';

COMMENT ON COLUMN mailroom.bridge_out.lost IS 'That the broker no longer has what it had acknowledged, and what to do. Nothing is published before it is resumed; null while that is not known.';

COMMENT ON COLUMN mailroom.bridge_out.tried IS 'What was sent last, and after which place of the broker''s log, if records may be deleted there.';

COMMENT ON COLUMN mailroom.bridge_out.skips IS 'How often a row was skipped by hand: a publishing daemon begins anew.';

CREATE TABLE mailroom.bridge_parts (
    link bigint NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    after bigint NOT NULL,
    parts bigint NOT NULL,
    CONSTRAINT bridge_parts_parts_check CHECK ((parts > 0))
);

COMMENT ON TABLE mailroom.bridge_parts IS 'Over how many partitions of a topic a bridge spreads what it publishes: a repeat goes where the first try went.';

COMMENT ON COLUMN mailroom.bridge_parts.link IS 'The link.';

COMMENT ON COLUMN mailroom.bridge_parts.topic IS 'The topic at the broker.';

COMMENT ON COLUMN mailroom.bridge_parts.after IS 'It holds for the rows of the link after this one, up to the next such row.';

COMMENT ON COLUMN mailroom.bridge_parts.parts IS 'How many partitions.';

CREATE TABLE mailroom.bridge_position (
    origin bigint NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    part bigint NOT NULL,
    next bigint NOT NULL,
    leader_epoch bigint,
    log text,
    last bigint,
    digest text COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.bridge_position IS 'Up to where the log of a broker was taken in: a row per partition of a topic.';

COMMENT ON COLUMN mailroom.bridge_position.origin IS 'The number of the origin.';

COMMENT ON COLUMN mailroom.bridge_position.topic IS 'The topic at the broker, or its stream.';

COMMENT ON COLUMN mailroom.bridge_position.part IS 'The partition.';

COMMENT ON COLUMN mailroom.bridge_position.next IS 'The offset of the next record.';

COMMENT ON COLUMN mailroom.bridge_position.leader_epoch IS 'The epoch of the partition''s leader with the record before it, by which a truncated log is noticed.';

COMMENT ON COLUMN mailroom.bridge_position.log IS 'Which log it is, where the broker tells: another one may get its name.';

COMMENT ON COLUMN mailroom.bridge_position.last IS 'The offset of the last record that was taken in; null if none was, or the position was set by hand.';

COMMENT ON COLUMN mailroom.bridge_position.digest IS 'A hash of that record: before the log is read on, it is looked whether the record is still there.';

CREATE TABLE mailroom.commit_token (
    token uuid NOT NULL,
    committed boolean NOT NULL
);

COMMENT ON TABLE mailroom.commit_token IS 'How transactions ended whose COMMIT may have lost its answer.';

COMMENT ON COLUMN mailroom.commit_token.token IS 'The transaction''s token; it begins with the time, in milliseconds.';

COMMENT ON COLUMN mailroom.commit_token.committed IS 'False: it was ruled out before it committed, and can commit no more.';

CREATE TABLE mailroom.dead_letter (
    id bigint NOT NULL,
    failed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    stage text NOT NULL COLLATE pg_catalog."C",
    reason text NOT NULL,
    message_id uuid NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    kind "char" NOT NULL,
    message_type "char" NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone NOT NULL,
    inbox text COLLATE pg_catalog."C",
    clock bigint,
    attempts integer,
    origin uuid,
    sent_clock bigint,
    bridge text COLLATE pg_catalog."C"
);

COMMENT ON TABLE mailroom.dead_letter IS 'Where single messages end that cannot be delivered.';

COMMENT ON COLUMN mailroom.dead_letter.id IS 'The number of the dead letter.';

COMMENT ON COLUMN mailroom.dead_letter.failed_at IS 'When it was inserted.';

COMMENT ON COLUMN mailroom.dead_letter.stage IS 'Where it failed.';

COMMENT ON COLUMN mailroom.dead_letter.reason IS 'Why.';

COMMENT ON COLUMN mailroom.dead_letter.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.dead_letter.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.dead_letter.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.dead_letter.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.dead_letter.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.dead_letter.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.dead_letter.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.dead_letter.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.dead_letter.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.dead_letter.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.dead_letter.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.dead_letter.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.dead_letter.sent_at IS 'Physical time of the send; order never rests on it.';

COMMENT ON COLUMN mailroom.dead_letter.inbox IS 'The inbox in which it was skipped; null if it was never delivered.';

COMMENT ON COLUMN mailroom.dead_letter.clock IS 'Its clock in that inbox.';

COMMENT ON COLUMN mailroom.dead_letter.attempts IS 'How often it was tried in that inbox.';

COMMENT ON COLUMN mailroom.dead_letter.origin IS 'The node that sent it; null for this one.';

COMMENT ON COLUMN mailroom.dead_letter.sent_clock IS 'Its clock there.';

COMMENT ON COLUMN mailroom.dead_letter.bridge IS 'The bridge that could not publish it, or by which it came; null for none.';

ALTER TABLE mailroom.dead_letter ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME mailroom.dead_letter_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE mailroom.dispatch_turn (
);

COMMENT ON TABLE mailroom.dispatch_turn IS 'Has no rows: the session that locks it may deliver. Takes UPDATE, DELETE or TRUNCATE on it.';

CREATE TABLE mailroom.executable_cursor (
    "position" bigint NOT NULL,
    reached text NOT NULL,
    deleted bigint NOT NULL
);

COMMENT ON TABLE mailroom.executable_cursor IS 'A large delete_range under way: how far it is.';

COMMENT ON COLUMN mailroom.executable_cursor."position" IS 'The executable''s position.';

COMMENT ON COLUMN mailroom.executable_cursor.reached IS 'The last key reached.';

COMMENT ON COLUMN mailroom.executable_cursor.deleted IS 'How many keys were deleted so far.';

CREATE TABLE mailroom.executable_function (
    name text NOT NULL COLLATE pg_catalog."C",
    function_schema text NOT NULL,
    function_name text NOT NULL,
    timeout_s double precision DEFAULT 10 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT executable_function_name_check CHECK ((name ~ '^[a-z][a-z0-9_]{0,40}$'::text)),
    CONSTRAINT executable_function_timeout_s_check CHECK (((timeout_s > (0)::double precision) AND (timeout_s <= (300)::double precision)))
);

COMMENT ON TABLE mailroom.executable_function IS 'Functions that executables may call, by an administrator''s registration.';

COMMENT ON COLUMN mailroom.executable_function.name IS 'The function''s name in executables.';

COMMENT ON COLUMN mailroom.executable_function.function_schema IS 'The function''s schema.';

COMMENT ON COLUMN mailroom.executable_function.function_name IS 'The function; it takes one jsonb.';

COMMENT ON COLUMN mailroom.executable_function.timeout_s IS 'How long a call may take, in seconds.';

COMMENT ON COLUMN mailroom.executable_function.created_at IS 'When it was registered.';

CREATE TABLE mailroom.executable_target (
    name text NOT NULL COLLATE pg_catalog."C",
    table_schema text NOT NULL,
    table_name text NOT NULL,
    key_column text NOT NULL,
    value_column text,
    number_column text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT executable_target_name_check CHECK (((name ~ '^[a-z][a-z0-9_]{0,40}$'::text) AND (name <> ALL (ARRAY['store'::text, 'accounting'::text]))))
);

COMMENT ON TABLE mailroom.executable_target IS 'Tables of the application that executables may write, by an administrator''s registration.';

COMMENT ON COLUMN mailroom.executable_target.name IS 'The target''s name in executables.';

COMMENT ON COLUMN mailroom.executable_target.table_schema IS 'The table''s schema.';

COMMENT ON COLUMN mailroom.executable_target.table_name IS 'The table.';

COMMENT ON COLUMN mailroom.executable_target.key_column IS 'The key column, unique by itself.';

COMMENT ON COLUMN mailroom.executable_target.value_column IS 'The column that put writes; null if there is none.';

COMMENT ON COLUMN mailroom.executable_target.number_column IS 'The column that increment changes; null if there is none.';

COMMENT ON COLUMN mailroom.executable_target.created_at IS 'When it was registered.';

CREATE TABLE mailroom.execute_turn (
);

COMMENT ON TABLE mailroom.execute_turn IS 'Has no rows: the session that locks it may execute. Takes UPDATE, DELETE or TRUNCATE on it.';

CREATE TABLE mailroom.fan_out (
    clock bigint NOT NULL,
    sent_clock bigint NOT NULL,
    origin uuid NOT NULL,
    message_id uuid NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    kind "char" NOT NULL,
    message_type "char" NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE mailroom.fan_out IS 'Messages that have their clocks and left the outbox, and that not all of their inboxes have yet.';

COMMENT ON COLUMN mailroom.fan_out.clock IS 'The clock at which it was stamped or received here.';

COMMENT ON COLUMN mailroom.fan_out.sent_clock IS 'The clock at which it was stamped at its origin.';

COMMENT ON COLUMN mailroom.fan_out.origin IS 'The id of the node that stamped it first.';

COMMENT ON COLUMN mailroom.fan_out.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.fan_out.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.fan_out.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.fan_out.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.fan_out.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.fan_out.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.fan_out.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.fan_out.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.fan_out.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.fan_out.expires_at IS 'If not received before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.fan_out.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.fan_out.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.fan_out.sent_at IS 'Physical time of the send; order never rests on it.';

CREATE TABLE mailroom.fan_out_way (
    inbox text NOT NULL COLLATE pg_catalog."C",
    topic text NOT NULL COLLATE pg_catalog."C",
    messages_after bigint,
    events_after bigint,
    others_after bigint
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE mailroom.fan_out_way IS 'The inboxes that have not got what is in fan_out yet; nothing else is delivered before.';

COMMENT ON COLUMN mailroom.fan_out_way.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.fan_out_way.topic IS 'The topic.';

COMMENT ON COLUMN mailroom.fan_out_way.messages_after IS 'It gets messages with a sent_clock above this; null for none.';

COMMENT ON COLUMN mailroom.fan_out_way.events_after IS 'The same for events.';

COMMENT ON COLUMN mailroom.fan_out_way.others_after IS 'The same for commands and replies.';

CREATE TABLE mailroom.inbox (
    inbox text NOT NULL COLLATE pg_catalog."C",
    clock bigint NOT NULL,
    sent_clock bigint NOT NULL,
    origin uuid NOT NULL,
    delivered_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    message_id uuid NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    kind "char" NOT NULL,
    message_type "char" NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone NOT NULL
)
PARTITION BY LIST (inbox);

COMMENT ON TABLE mailroom.inbox IS 'Delivered messages, one partition per inbox; a key is reaped in clock order.';

COMMENT ON COLUMN mailroom.inbox.inbox IS 'The inbox''s name.';

COMMENT ON COLUMN mailroom.inbox.clock IS 'Lamport clock of this node''s stamp: unique and rising.';

COMMENT ON COLUMN mailroom.inbox.sent_clock IS 'Lamport clock of the origin''s send event.';

COMMENT ON COLUMN mailroom.inbox.origin IS 'The node that sent it.';

COMMENT ON COLUMN mailroom.inbox.delivered_at IS 'Physical time of the delivery.';

COMMENT ON COLUMN mailroom.inbox.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.inbox.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.inbox.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.inbox.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.inbox.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.inbox.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.inbox.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.inbox.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.inbox.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.inbox.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.inbox.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.inbox.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.inbox.sent_at IS 'Physical time of the send; order never rests on it.';

CREATE TABLE mailroom.inbox_registry (
    name text NOT NULL COLLATE pg_catalog."C",
    backoff_s double precision DEFAULT 1 NOT NULL,
    backoff_max_s double precision DEFAULT 3600 NOT NULL,
    floor bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    on_failure text DEFAULT 'park'::text NOT NULL COLLATE pg_catalog."C",
    max_attempts integer DEFAULT 16 NOT NULL,
    healthy_floor bigint DEFAULT 0 NOT NULL,
    expire_s double precision,
    expired bigint DEFAULT 0 NOT NULL,
    "order" text DEFAULT 'key'::text NOT NULL COLLATE pg_catalog."C",
    sent_floor bigint DEFAULT 0 NOT NULL,
    paused_at timestamp with time zone,
    paused_by text,
    keep_reaped_days integer,
    log text COLLATE pg_catalog."C",
    epoch bigint DEFAULT 0 NOT NULL,
    lost bigint DEFAULT 0 NOT NULL,
    lost_to bigint DEFAULT 0 NOT NULL,
    lost_since timestamp with time zone,
    lost_at timestamp with time zone,
    CONSTRAINT inbox_registry_backoff_s_check CHECK ((backoff_s >= (0)::double precision)),
    CONSTRAINT inbox_registry_check CHECK ((backoff_max_s >= backoff_s)),
    CONSTRAINT inbox_registry_check1 CHECK ((("order" = 'log'::text) = (log IS NOT NULL))),
    CONSTRAINT inbox_registry_expire_s_check CHECK ((expire_s > (0)::double precision)),
    CONSTRAINT inbox_registry_keep_reaped_days_check CHECK ((keep_reaped_days >= 1)),
    CONSTRAINT inbox_registry_max_attempts_check CHECK ((max_attempts >= 1)),
    CONSTRAINT inbox_registry_name_check CHECK ((name ~ '^[a-z][a-z0-9_]{0,40}$'::text)),
    CONSTRAINT inbox_registry_on_failure_check CHECK ((on_failure = ANY (ARRAY['park'::text, 'skip'::text]))),
    CONSTRAINT inbox_registry_order_check CHECK (("order" = ANY (ARRAY['key'::text, 'total'::text, 'log'::text])))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.inbox_registry IS 'The inboxes and their settings.';

COMMENT ON COLUMN mailroom.inbox_registry.name IS 'The inbox''s name; its partition is inbox_<name>.';

COMMENT ON COLUMN mailroom.inbox_registry.backoff_s IS 'Wait after a key''s first failure, in seconds; each further failure doubles it.';

COMMENT ON COLUMN mailroom.inbox_registry.backoff_max_s IS 'The longest wait, in seconds.';

COMMENT ON COLUMN mailroom.inbox_registry.floor IS 'No message has a clock at or below it, so claims start their scans here. It only saves time.';

COMMENT ON COLUMN mailroom.inbox_registry.created_at IS 'When it was created.';

COMMENT ON COLUMN mailroom.inbox_registry.on_failure IS 'When no attempt is left: park the key, or skip the message into dead_letter.';

COMMENT ON COLUMN mailroom.inbox_registry.max_attempts IS 'How often a message is tried.';

COMMENT ON COLUMN mailroom.inbox_registry.healthy_floor IS 'All messages up to this clock are of failing keys, which stay failing up to it.';

COMMENT ON COLUMN mailroom.inbox_registry.expire_s IS 'How many seconds a delivered message may wait before the janitor removes it; null for ever.';

COMMENT ON COLUMN mailroom.inbox_registry.expired IS 'How many messages have expired here.';

COMMENT ON COLUMN mailroom.inbox_registry."order" IS 'The order in which messages are reaped: key, or total, by sent_clock and origin, or log, by the lanes of a log.';

COMMENT ON COLUMN mailroom.inbox_registry.sent_floor IS 'Of a total inbox: no message has a sent_clock at or below it, nor will have one. It saves time.';

COMMENT ON COLUMN mailroom.inbox_registry.paused_at IS 'Since when it is paused: claims give nothing, deliveries go on. Null if it is not.';

COMMENT ON COLUMN mailroom.inbox_registry.paused_by IS 'Who paused it, and why.';

COMMENT ON COLUMN mailroom.inbox_registry.keep_reaped_days IS 'How many days what was reaped is kept in `reaped`; null if it is not.';

COMMENT ON COLUMN mailroom.inbox_registry.log IS 'The log that it reads; null if messages are delivered to it.';

COMMENT ON COLUMN mailroom.inbox_registry.epoch IS 'Of an inbox that reads a log: another number once it was made anew, and a larger one once it was set back.';

COMMENT ON COLUMN mailroom.inbox_registry.lost IS 'How many messages its log dropped before it had read them (log_registry.drop_unread).';

COMMENT ON COLUMN mailroom.inbox_registry.lost_to IS 'No message with a larger clock was among them.';

COMMENT ON COLUMN mailroom.inbox_registry.lost_since IS 'When that was for the first time; null if it never was.';

COMMENT ON COLUMN mailroom.inbox_registry.lost_at IS 'When it was last.';

CREATE TABLE mailroom.key_state (
    inbox text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    clock bigint NOT NULL,
    attempts integer NOT NULL,
    retry_at timestamp with time zone NOT NULL,
    last_error text,
    parked_at timestamp with time zone,
    alone_to bigint DEFAULT 0 NOT NULL,
    suspect_to bigint DEFAULT 0 NOT NULL,
    paused_at timestamp with time zone,
    paused_by text,
    deleted boolean DEFAULT false NOT NULL,
    resume_at timestamp with time zone
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.key_state IS 'The failing keys: those with a message whose last attempt failed, or that was in a batch that failed. And the paused ones.';

COMMENT ON COLUMN mailroom.key_state.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.key_state.key IS 'The key.';

COMMENT ON COLUMN mailroom.key_state.clock IS 'Clock of the message that failed last.';

COMMENT ON COLUMN mailroom.key_state.attempts IS 'How often that message failed; 0 if only its batch failed.';

COMMENT ON COLUMN mailroom.key_state.retry_at IS 'The key waits until this time, infinity while it is parked or paused. Other keys go on.';

COMMENT ON COLUMN mailroom.key_state.last_error IS 'The last failure, truncated.';

COMMENT ON COLUMN mailroom.key_state.parked_at IS 'Since when the key is parked: its messages wait, in order, in `parked` until an operator acts.';

COMMENT ON COLUMN mailroom.key_state.alone_to IS 'Up to this clock the key is claimed by itself, and keeps this row.';

COMMENT ON COLUMN mailroom.key_state.suspect_to IS 'Up to this clock the key is tried one message at a time.';

COMMENT ON COLUMN mailroom.key_state.paused_at IS 'Since when the key is paused; null if it is not.';

COMMENT ON COLUMN mailroom.key_state.paused_by IS 'Who paused it, and why.';

COMMENT ON COLUMN mailroom.key_state.deleted IS 'Set to have the row deleted (delete_marked).';

COMMENT ON COLUMN mailroom.key_state.resume_at IS 'What retry_at would be if the key were not paused; null if the key is healthy.';

CREATE TABLE mailroom.known (
    origin bigint NOT NULL,
    message_id uuid NOT NULL,
    link bigint
);

COMMENT ON TABLE mailroom.known IS 'Messages that a source may send again though they were received. They are not taken twice.';

COMMENT ON COLUMN mailroom.known.origin IS 'The number of the origin.';

COMMENT ON COLUMN mailroom.known.message_id IS 'The message.';

COMMENT ON COLUMN mailroom.known.link IS 'The earlier link by which it came; null: it is of a history which the source has lost.';

CREATE TABLE mailroom.lease (
    role text NOT NULL COLLATE pg_catalog."C",
    holder uuid NOT NULL,
    epoch bigint NOT NULL,
    until timestamp with time zone NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    backend_pid integer NOT NULL,
    backend_from timestamp with time zone NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C",
    counts jsonb NOT NULL,
    set_back_at timestamp with time zone,
    set_back_by interval,
    brought_back bigint DEFAULT 0 NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.lease IS 'Who leads, by database time. Safety never rests on it.';

COMMENT ON COLUMN mailroom.lease.role IS 'The role: dispatcher or executor.';

COMMENT ON COLUMN mailroom.lease.holder IS 'The id of the process that holds it.';

COMMENT ON COLUMN mailroom.lease.epoch IS 'Raised by each takeover.';

COMMENT ON COLUMN mailroom.lease.until IS 'When the lease expires unless renewed.';

COMMENT ON COLUMN mailroom.lease.host IS 'The holder''s host.';

COMMENT ON COLUMN mailroom.lease.pid IS 'The holder''s process id.';

COMMENT ON COLUMN mailroom.lease.backend_pid IS 'The session that may hold the awake lock; a new leader terminates it.';

COMMENT ON COLUMN mailroom.lease.backend_from IS 'When that session began, so that no later session with the same process id is terminated.';

COMMENT ON COLUMN mailroom.lease.state IS 'The holder''s state at the last renewal: awake or asleep.';

COMMENT ON COLUMN mailroom.lease.counts IS 'The holder''s totals.';

COMMENT ON COLUMN mailroom.lease.set_back_at IS 'When it was noticed last that the server''s clock had been set back; NULL if never.';

COMMENT ON COLUMN mailroom.lease.set_back_by IS 'By how much, at least.';

COMMENT ON COLUMN mailroom.lease.brought_back IS 'How many keys would have waited for as long, and were brought back.';

CREATE TABLE mailroom.limits (
    inbox text NOT NULL COLLATE pg_catalog."C",
    rate_per_s double precision,
    burst integer DEFAULT 1 NOT NULL,
    concurrency integer,
    breaker_percent integer,
    breaker_by text COLLATE pg_catalog."C",
    tokens double precision DEFAULT 0 NOT NULL,
    filled_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    opened_at timestamp with time zone,
    opened_why text,
    try_at timestamp with time zone,
    tries integer DEFAULT 0 NOT NULL,
    CONSTRAINT limits_breaker_by_check CHECK ((breaker_by ~ '^[!-~]$'::text)),
    CONSTRAINT limits_breaker_percent_check CHECK (((breaker_percent >= 1) AND (breaker_percent <= 100))),
    CONSTRAINT limits_burst_check CHECK ((burst >= 1)),
    CONSTRAINT limits_concurrency_check CHECK ((concurrency >= 1)),
    CONSTRAINT limits_rate_per_s_check CHECK ((rate_per_s > (0)::double precision))
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.limits IS 'Limits of the workers of an inbox, and how they stand. An inbox that never had any has no row.';

COMMENT ON COLUMN mailroom.limits.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.limits.rate_per_s IS 'How many messages a second all its workers may claim; null for no limit.';

COMMENT ON COLUMN mailroom.limits.burst IS 'How many tokens the bucket holds, each for a message.';

COMMENT ON COLUMN mailroom.limits.concurrency IS 'How many batches all its workers may have in hand; null for no limit.';

COMMENT ON COLUMN mailroom.limits.breaker_percent IS 'The breaker opens when this share of attempts fails; null for none.';

COMMENT ON COLUMN mailroom.limits.breaker_by IS 'There is a breaker for each prefix of a key, up to the first of this character; null for one of the whole inbox.';

COMMENT ON COLUMN mailroom.limits.tokens IS 'Tokens in the bucket at filled_at.';

COMMENT ON COLUMN mailroom.limits.filled_at IS 'When tokens were taken last.';

COMMENT ON COLUMN mailroom.limits.opened_at IS 'Since when the breaker is open: workers claim nothing. Null if it is closed.';

COMMENT ON COLUMN mailroom.limits.opened_why IS 'What share of attempts had failed.';

COMMENT ON COLUMN mailroom.limits.try_at IS 'When one message is tried while the breaker is open.';

COMMENT ON COLUMN mailroom.limits.tries IS 'How many of these have failed.';

CREATE TABLE mailroom.link (
    number bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    reader_id uuid,
    reader_system_id bigint,
    reader_database_oid bigint,
    reader_origin bigint,
    run uuid,
    acked bigint DEFAULT 0 NOT NULL,
    matched uuid,
    wanted_clock bigint DEFAULT 0 NOT NULL,
    claim_seq bigint,
    claim_clock bigint,
    seen_at timestamp with time zone,
    keep_s double precision DEFAULT 172800 NOT NULL,
    max_rows bigint,
    state text DEFAULT 'open'::text NOT NULL COLLATE pg_catalog."C",
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    acks bigint[] DEFAULT '{}'::bigint[] NOT NULL,
    acked_at timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[] NOT NULL,
    by_role text,
    CONSTRAINT link_keep_s_check CHECK ((keep_s >= (0)::double precision)),
    CONSTRAINT link_max_rows_check CHECK ((max_rows > 0)),
    CONSTRAINT link_name_check CHECK ((name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$'::text)),
    CONSTRAINT link_state_check CHECK ((state = ANY (ARRAY['open'::text, 'cut'::text]))),
    CONSTRAINT link_wanted_clock_check CHECK ((wanted_clock >= 0))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.link IS 'Who reads messages of this node: a row per reader.';

COMMENT ON COLUMN mailroom.link.number IS 'The link''s number; never used again.';

COMMENT ON COLUMN mailroom.link.name IS 'The reader''s name.';

COMMENT ON COLUMN mailroom.link.reader_id IS 'The reader''s node id, from its first hello on.';

COMMENT ON COLUMN mailroom.link.reader_system_id IS 'The system identifier of the reader''s server.';

COMMENT ON COLUMN mailroom.link.reader_database_oid IS 'The oid of the reader''s database.';

COMMENT ON COLUMN mailroom.link.reader_origin IS 'The number that the reader gives this node. With a higher one it has forgotten the old.';

COMMENT ON COLUMN mailroom.link.run IS 'Which daemon of the reader has the link: the one that said hello last.';

COMMENT ON COLUMN mailroom.link.acked IS 'Up to this seq the reader has received everything durably.';

COMMENT ON COLUMN mailroom.link.matched IS 'The life of this node in which the reader last found its own position here.';

COMMENT ON COLUMN mailroom.link.wanted_clock IS 'The reader wants a mark with at least this clock.';

COMMENT ON COLUMN mailroom.link.claim_seq IS 'What a reader that has diverged has received of this node: the last seq.';

COMMENT ON COLUMN mailroom.link.claim_clock IS 'The largest sent_clock of it.';

COMMENT ON COLUMN mailroom.link.seen_at IS 'When the reader was last here.';

COMMENT ON COLUMN mailroom.link.keep_s IS 'How many seconds rows of transit are kept after they were acknowledged.';

COMMENT ON COLUMN mailroom.link.max_rows IS 'With more rows than that waiting in transit the link is cut; null for no limit.';

COMMENT ON COLUMN mailroom.link.state IS 'The state: open, or cut, when nothing is stamped for it any more.';

COMMENT ON COLUMN mailroom.link.created_at IS 'When it was allowed.';

COMMENT ON COLUMN mailroom.link.acks IS 'Some of what acked has been, ascending: rows below one of them stay for keep_s after its acked_at.';

COMMENT ON COLUMN mailroom.link.acked_at IS 'For each of acks, a time by which the reader had acknowledged it.';

COMMENT ON COLUMN mailroom.link.by_role IS 'The login that said hello last.';

ALTER TABLE mailroom.link ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME mailroom.link_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE mailroom.link_topic (
    topic text NOT NULL COLLATE pg_catalog."C",
    link bigint NOT NULL,
    fits text GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*#]'::text) THEN translate((regexp_replace(topic, '([\\_%])'::text, '\\\1'::text, 'g'::text) ||
    CASE
        WHEN (topic ~ '#$'::text) THEN ''::text
        ELSE '.'::text
    END), '*#'::text, '%%'::text)
    ELSE NULL::text
END) STORED COLLATE pg_catalog."C",
    words integer GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*]'::text) THEN cardinality(string_to_array(topic, '.'::text))
    ELSE NULL::integer
END) STORED,
    commands boolean DEFAULT false NOT NULL,
    CONSTRAINT link_topic_topic CHECK (((octet_length(topic) <= 200) AND ((topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$'::text) OR (topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$'::text))))
);

COMMENT ON TABLE mailroom.link_topic IS 'What each reader wants, written by the reader from its subscriptions.';

COMMENT ON COLUMN mailroom.link_topic.topic IS 'The topic, or a pattern of topics, as in subscription.';

COMMENT ON COLUMN mailroom.link_topic.link IS 'The link.';

COMMENT ON COLUMN mailroom.link_topic.fits IS 'Of a pattern: what a topic with a dot after it must be LIKE.';

COMMENT ON COLUMN mailroom.link_topic.words IS 'Of a pattern with *: how many words the topic must have.';

COMMENT ON COLUMN mailroom.link_topic.commands IS 'Whether the reader gets commands and replies of it, too, if no inbox here does.';

CREATE TABLE mailroom.log (
    log text NOT NULL COLLATE pg_catalog."C",
    segment bigint NOT NULL,
    lane smallint NOT NULL,
    clock bigint NOT NULL,
    sent_clock bigint NOT NULL,
    origin uuid NOT NULL,
    delivered_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    message_id uuid NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    kind "char" NOT NULL,
    message_type "char" NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone NOT NULL
)
PARTITION BY LIST (log);

COMMENT ON TABLE mailroom.log IS 'Messages of logs: a partition per log, and in that one per segment.';

COMMENT ON COLUMN mailroom.log.log IS 'The log.';

COMMENT ON COLUMN mailroom.log.segment IS 'The segment.';

COMMENT ON COLUMN mailroom.log.lane IS 'The lane, which the key decides (lane_of).';

COMMENT ON COLUMN mailroom.log.clock IS 'Lamport clock of this node''s stamp: unique in the log, and rising.';

COMMENT ON COLUMN mailroom.log.sent_clock IS 'Lamport clock of the origin''s send event.';

COMMENT ON COLUMN mailroom.log.origin IS 'The node that sent it.';

COMMENT ON COLUMN mailroom.log.delivered_at IS 'Physical time of the delivery.';

COMMENT ON COLUMN mailroom.log.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.log.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.log.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.log.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.log.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.log.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.log.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.log.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.log.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.log.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.log.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.log.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.log.sent_at IS 'Physical time of the send; order never rests on it.';

CREATE TABLE mailroom.log_lane (
    inbox text NOT NULL COLLATE pg_catalog."C",
    lane smallint NOT NULL
)
PARTITION BY LIST (inbox);

COMMENT ON TABLE mailroom.log_lane IS 'The lanes of each inbox that reads a log. A claim locks the rows of the lanes that it reads; they never change.';

COMMENT ON COLUMN mailroom.log_lane.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.log_lane.lane IS 'The lane.';

CREATE TABLE mailroom.log_receipt (
    inbox text NOT NULL COLLATE pg_catalog."C",
    lane smallint NOT NULL,
    epoch bigint NOT NULL,
    clock bigint NOT NULL
)
PARTITION BY LIST (inbox);

COMMENT ON TABLE mailroom.log_receipt IS 'How far each inbox has read each lane: the largest clock of the largest epoch counts.';

COMMENT ON COLUMN mailroom.log_receipt.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.log_receipt.lane IS 'The lane.';

COMMENT ON COLUMN mailroom.log_receipt.epoch IS 'inbox_registry.epoch by then.';

COMMENT ON COLUMN mailroom.log_receipt.clock IS 'All messages of the lane up to this clock were handed out, or diverted into the inbox''s own table.';

CREATE TABLE mailroom.log_registry (
    name text NOT NULL COLLATE pg_catalog."C",
    lanes integer NOT NULL,
    keep_days integer NOT NULL,
    drop_unread boolean DEFAULT false NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT log_registry_keep_days_check CHECK (((keep_days >= 1) AND (keep_days <= 366))),
    CONSTRAINT log_registry_lanes_check CHECK (((lanes >= 1) AND (lanes <= 256))),
    CONSTRAINT log_registry_name_check CHECK ((name ~ '^[a-z][a-z0-9_]{0,40}$'::text))
);

COMMENT ON TABLE mailroom.log_registry IS 'The logs and their settings. No inbox has the name of one.';

COMMENT ON COLUMN mailroom.log_registry.name IS 'The log''s name; its table is log_<name>.';

COMMENT ON COLUMN mailroom.log_registry.lanes IS 'How many lanes it has. It never changes, since it decides the lane of a key.';

COMMENT ON COLUMN mailroom.log_registry.keep_days IS 'How many days a message is kept at least.';

COMMENT ON COLUMN mailroom.log_registry.drop_unread IS 'Whether what is older goes though an inbox has not read it.';

COMMENT ON COLUMN mailroom.log_registry.created_at IS 'When it was created.';

CREATE TABLE mailroom.log_segment (
    segment bigint NOT NULL,
    log text NOT NULL COLLATE pg_catalog."C",
    first_clock bigint NOT NULL,
    opened_at timestamp with time zone NOT NULL,
    emptied_at timestamp with time zone
);

COMMENT ON TABLE mailroom.log_segment IS 'The segments of logs; the partition is log_<segment>.';

COMMENT ON COLUMN mailroom.log_segment.segment IS 'Its number.';

COMMENT ON COLUMN mailroom.log_segment.log IS 'The log.';

COMMENT ON COLUMN mailroom.log_segment.first_clock IS 'No message here has a smaller clock, and none of an older segment a larger one.';

COMMENT ON COLUMN mailroom.log_segment.opened_at IS 'When it was made: what is in older segments was delivered before.';

COMMENT ON COLUMN mailroom.log_segment.emptied_at IS 'When the janitor emptied it, since it was over; null before.';

CREATE TABLE mailroom.log_tick (
    log text NOT NULL COLLATE pg_catalog."C",
    clock bigint NOT NULL,
    lanes smallint[] NOT NULL,
    rows bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

COMMENT ON TABLE mailroom.log_tick IS 'What each delivery wrote into a log: where there is news, and which clock belongs to a time.';

COMMENT ON COLUMN mailroom.log_tick.log IS 'The log.';

COMMENT ON COLUMN mailroom.log_tick.clock IS 'No message of the delivery has a larger clock, and none of a later one a smaller.';

COMMENT ON COLUMN mailroom.log_tick.lanes IS 'The lanes that got messages.';

COMMENT ON COLUMN mailroom.log_tick.rows IS 'How many messages.';

COMMENT ON COLUMN mailroom.log_tick.at IS 'When it was.';

CREATE TABLE mailroom.log_topic (
    inbox text NOT NULL COLLATE pg_catalog."C",
    topic text NOT NULL COLLATE pg_catalog."C",
    fits text GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*#]'::text) THEN translate((regexp_replace(topic, '([\\_%])'::text, '\\\1'::text, 'g'::text) ||
    CASE
        WHEN (topic ~ '#$'::text) THEN ''::text
        ELSE '.'::text
    END), '*#'::text, '%%'::text)
    ELSE NULL::text
END) STORED COLLATE pg_catalog."C",
    words integer GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*]'::text) THEN cardinality(string_to_array(topic, '.'::text))
    ELSE NULL::integer
END) STORED,
    CONSTRAINT log_topic_topic CHECK (((octet_length(topic) <= 200) AND ((topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$'::text) OR (topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$'::text))))
);

COMMENT ON TABLE mailroom.log_topic IS 'Which topics an inbox reads of its log, where it does not read all.';

COMMENT ON COLUMN mailroom.log_topic.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.log_topic.topic IS 'The topic, or a pattern of topics as a subscription has it.';

COMMENT ON COLUMN mailroom.log_topic.fits IS 'Of a pattern: what a topic with a dot after it must be LIKE.';

COMMENT ON COLUMN mailroom.log_topic.words IS 'Of a pattern with *: how many words the topic must have.';

CREATE VIEW mailroom.my_attempt WITH (security_barrier='true') AS
 SELECT id,
    at,
    inbox,
    key,
    clock,
    message_id,
    attempt,
    outcome,
    error,
    worker,
    retry_at,
    error_class
   FROM mailroom.attempt
  WHERE mailroom.is_mine(inbox)
  ORDER BY inbox, key, clock, id DESC;

COMMENT ON VIEW mailroom.my_attempt IS 'The rows of attempt about inboxes that the current role may take messages out of.';

CREATE VIEW mailroom.my_breaker WITH (security_barrier='true') AS
 SELECT inbox,
    prefix,
    separator,
    opened_at,
    opened_why,
    try_at,
    tries,
    trying,
    deleted
   FROM mailroom.breaker
  WHERE mailroom.is_mine(inbox)
  WITH CASCADED CHECK OPTION;

COMMENT ON VIEW mailroom.my_breaker IS 'The rows of breaker about inboxes that the current role may take messages out of.';

CREATE VIEW mailroom.my_due WITH (security_barrier='true') AS
 SELECT inbox,
    key,
    clock,
    attempts,
    retry_at,
    last_error,
    parked_at,
    alone_to,
    suspect_to,
    paused_at,
    paused_by,
    deleted,
    resume_at
   FROM mailroom.key_state
  WHERE mailroom.is_mine(inbox)
  ORDER BY inbox, retry_at, key;

COMMENT ON VIEW mailroom.my_due IS 'The rows of key_state about inboxes that the current role may take messages out of, in the order of retry_at.';

CREATE VIEW mailroom.my_key_state WITH (security_barrier='true') AS
 SELECT inbox,
    key,
    clock,
    attempts,
    retry_at,
    last_error,
    parked_at,
    alone_to,
    suspect_to,
    paused_at,
    paused_by,
    deleted,
    resume_at
   FROM mailroom.key_state
  WHERE mailroom.is_mine(inbox);

COMMENT ON VIEW mailroom.my_key_state IS 'The rows of key_state about inboxes that the current role may take messages out of.';

CREATE VIEW mailroom.my_limit WITH (security_barrier='true') AS
 SELECT inbox,
    rate_per_s,
    burst,
    concurrency,
    breaker_percent,
    breaker_by,
    tokens,
    filled_at,
    opened_at,
    opened_why,
    try_at,
    tries
   FROM mailroom.limits
  WHERE mailroom.is_mine(inbox);

COMMENT ON VIEW mailroom.my_limit IS 'The rows of limits about inboxes that the current role may take messages out of.';

CREATE TABLE mailroom.parked (
    inbox text CONSTRAINT inbox_inbox_not_null NOT NULL COLLATE pg_catalog."C",
    clock bigint CONSTRAINT inbox_clock_not_null NOT NULL,
    sent_clock bigint CONSTRAINT inbox_sent_clock_not_null NOT NULL,
    origin uuid CONSTRAINT inbox_origin_not_null NOT NULL,
    delivered_at timestamp with time zone DEFAULT clock_timestamp() CONSTRAINT inbox_delivered_at_not_null NOT NULL,
    message_id uuid CONSTRAINT inbox_message_id_not_null NOT NULL,
    topic text CONSTRAINT inbox_topic_not_null NOT NULL COLLATE pg_catalog."C",
    key text CONSTRAINT inbox_key_not_null NOT NULL COLLATE pg_catalog."C",
    kind "char" CONSTRAINT inbox_kind_not_null NOT NULL,
    message_type "char" CONSTRAINT inbox_message_type_not_null NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone CONSTRAINT inbox_sent_at_not_null NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE mailroom.parked IS 'Messages of parked keys, with the clocks they had; replayed in that order.';

COMMENT ON COLUMN mailroom.parked.inbox IS 'The inbox''s name.';

COMMENT ON COLUMN mailroom.parked.clock IS 'Lamport clock of this node''s stamp: unique and rising.';

COMMENT ON COLUMN mailroom.parked.sent_clock IS 'Lamport clock of the origin''s send event.';

COMMENT ON COLUMN mailroom.parked.origin IS 'The node that sent it.';

COMMENT ON COLUMN mailroom.parked.delivered_at IS 'Physical time of the delivery.';

COMMENT ON COLUMN mailroom.parked.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.parked.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.parked.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.parked.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.parked.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.parked.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.parked.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.parked.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.parked.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.parked.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.parked.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.parked.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.parked.sent_at IS 'Physical time of the send; order never rests on it.';

CREATE VIEW mailroom.my_parked WITH (security_barrier='true') AS
 SELECT inbox,
    clock,
    sent_clock,
    origin,
    delivered_at,
    message_id,
    topic,
    key,
    kind,
    message_type,
    event_type,
    value,
    value_json,
    headers,
    expires_at,
    after_clock,
    source,
    sent_at
   FROM mailroom.parked
  WHERE mailroom.is_mine(inbox);

COMMENT ON VIEW mailroom.my_parked IS 'The rows of parked about inboxes that the current role may take messages out of.';

CREATE TABLE mailroom.reaped (
    inbox text CONSTRAINT inbox_inbox_not_null NOT NULL COLLATE pg_catalog."C",
    clock bigint CONSTRAINT inbox_clock_not_null NOT NULL,
    sent_clock bigint CONSTRAINT inbox_sent_clock_not_null NOT NULL,
    origin uuid CONSTRAINT inbox_origin_not_null NOT NULL,
    delivered_at timestamp with time zone DEFAULT clock_timestamp() CONSTRAINT inbox_delivered_at_not_null NOT NULL,
    message_id uuid CONSTRAINT inbox_message_id_not_null NOT NULL,
    topic text CONSTRAINT inbox_topic_not_null NOT NULL COLLATE pg_catalog."C",
    key text CONSTRAINT inbox_key_not_null NOT NULL COLLATE pg_catalog."C",
    kind "char" CONSTRAINT inbox_kind_not_null NOT NULL,
    message_type "char" CONSTRAINT inbox_message_type_not_null NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone CONSTRAINT inbox_sent_at_not_null NOT NULL,
    reaped_at timestamp with time zone DEFAULT statement_timestamp() NOT NULL,
    drop_on date NOT NULL,
    discarded boolean DEFAULT false NOT NULL
)
PARTITION BY RANGE (drop_on);

COMMENT ON TABLE mailroom.reaped IS 'Messages that were reaped or discarded, of inboxes that keep them; a partition per day.';

COMMENT ON COLUMN mailroom.reaped.inbox IS 'The inbox''s name.';

COMMENT ON COLUMN mailroom.reaped.clock IS 'Lamport clock of this node''s stamp: unique and rising.';

COMMENT ON COLUMN mailroom.reaped.sent_clock IS 'Lamport clock of the origin''s send event.';

COMMENT ON COLUMN mailroom.reaped.origin IS 'The node that sent it.';

COMMENT ON COLUMN mailroom.reaped.delivered_at IS 'Physical time of the delivery.';

COMMENT ON COLUMN mailroom.reaped.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.reaped.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.reaped.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.reaped.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.reaped.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.reaped.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.reaped.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.reaped.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.reaped.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.reaped.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.reaped.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.reaped.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.reaped.sent_at IS 'Physical time of the send; order never rests on it.';

COMMENT ON COLUMN mailroom.reaped.reaped_at IS 'When it was taken, in the transaction that reaped it.';

COMMENT ON COLUMN mailroom.reaped.drop_on IS 'The day, in UTC, at whose end it may be gone.';

COMMENT ON COLUMN mailroom.reaped.discarded IS 'Whether an operator discarded it: then nobody was handed it.';

CREATE VIEW mailroom.my_reaped WITH (security_barrier='true') AS
 SELECT inbox,
    clock,
    sent_clock,
    origin,
    delivered_at,
    message_id,
    topic,
    key,
    kind,
    message_type,
    event_type,
    value,
    value_json,
    headers,
    expires_at,
    after_clock,
    source,
    sent_at,
    reaped_at,
    drop_on,
    discarded
   FROM mailroom.reaped
  WHERE mailroom.is_mine(inbox)
  WITH CASCADED CHECK OPTION;

COMMENT ON VIEW mailroom.my_reaped IS 'The rows of reaped about inboxes that the current role may take messages out of.';

CREATE TABLE mailroom.slot (
    inbox text NOT NULL COLLATE pg_catalog."C",
    slot integer NOT NULL
);

COMMENT ON TABLE mailroom.slot IS 'Slots of the batches that workers have in hand, of an inbox with limits.';

COMMENT ON COLUMN mailroom.slot.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.slot.slot IS 'Its number, from 1; 0 is the one for the message that is tried while the breaker is open.';

CREATE VIEW mailroom.my_slot WITH (security_barrier='true') AS
 SELECT inbox,
    slot
   FROM mailroom.slot
  WHERE mailroom.is_mine(inbox);

COMMENT ON VIEW mailroom.my_slot IS 'The rows of slot about inboxes that the current role may take messages out of.';

CREATE TABLE mailroom.spark_stream (
    inbox text NOT NULL COLLATE pg_catalog."C",
    checkpoint text NOT NULL COLLATE pg_catalog."C",
    batch bigint NOT NULL,
    above bigint NOT NULL,
    upto bigint NOT NULL,
    message_id text NOT NULL,
    messages bigint NOT NULL,
    digest bigint NOT NULL,
    read int8multirange DEFAULT '{}'::int8multirange NOT NULL,
    deleted boolean DEFAULT false NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    number bigint,
    used bigint,
    CONSTRAINT spark_stream_check CHECK ((upto > above))
);

COMMENT ON TABLE mailroom.spark_stream IS 'The batches that Spark''s stream of an inbox has given out and not all deleted, and the last one.';

COMMENT ON COLUMN mailroom.spark_stream.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.spark_stream.checkpoint IS 'The id that the stream''s checkpoint got when it began. One for all rows of an inbox.';

COMMENT ON COLUMN mailroom.spark_stream.batch IS 'The number of the batch of that checkpoint, from 1.';

COMMENT ON COLUMN mailroom.spark_stream.above IS 'The clock above which it begins.';

COMMENT ON COLUMN mailroom.spark_stream.upto IS 'The clock of its last message; of a log the one up to which it goes.';

COMMENT ON COLUMN mailroom.spark_stream.message_id IS 'The id of its last message; of a log its lane, clock and id.';

COMMENT ON COLUMN mailroom.spark_stream.messages IS 'How many messages it has.';

COMMENT ON COLUMN mailroom.spark_stream.digest IS 'The hashes of its messages'' clocks and ids, combined by exclusive or.';

COMMENT ON COLUMN mailroom.spark_stream.read IS 'The clocks that tasks have read, of a log the lanes: all that was planned of them.';

COMMENT ON COLUMN mailroom.spark_stream.deleted IS 'Set to have the row deleted (delete_marked).';

COMMENT ON COLUMN mailroom.spark_stream.at IS 'When it was first given out.';

COMMENT ON COLUMN mailroom.spark_stream.number IS 'The number of Spark''s under which it was first read.';

COMMENT ON COLUMN mailroom.spark_stream.used IS 'The last number of Spark''s that is known to be used: for it, or after it without data of this inbox.';

CREATE VIEW mailroom.my_spark_stream WITH (security_barrier='true') AS
 SELECT inbox,
    checkpoint,
    batch,
    above,
    upto,
    message_id,
    messages,
    digest,
    read,
    deleted,
    at,
    number,
    used
   FROM mailroom.spark_stream
  WHERE mailroom.is_mine(inbox);

COMMENT ON VIEW mailroom.my_spark_stream IS 'The rows of spark_stream about inboxes that the current role may take messages out of.';

CREATE TABLE mailroom.stat_minute (
    minute timestamp with time zone NOT NULL,
    inbox text NOT NULL COLLATE pg_catalog."C",
    delivered bigint NOT NULL,
    reaped bigint NOT NULL,
    failed bigint NOT NULL,
    parked bigint NOT NULL,
    skipped bigint NOT NULL,
    batches bigint NOT NULL,
    handle_s double precision NOT NULL,
    ages integer[] NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.stat_minute IS 'What happened in each minute, of all processes that keep statistics; 48 hours of it.';

COMMENT ON COLUMN mailroom.stat_minute.minute IS 'The minute, by the database''s clock.';

COMMENT ON COLUMN mailroom.stat_minute.inbox IS 'The inbox; '''' for what the dispatcher delivered in the whole node.';

COMMENT ON COLUMN mailroom.stat_minute.delivered IS 'Messages that were delivered, copies counted each; 0 for an inbox.';

COMMENT ON COLUMN mailroom.stat_minute.reaped IS 'Messages of committed batches.';

COMMENT ON COLUMN mailroom.stat_minute.failed IS 'Failed attempts of messages.';

COMMENT ON COLUMN mailroom.stat_minute.parked IS 'Those of them that parked their key.';

COMMENT ON COLUMN mailroom.stat_minute.skipped IS 'Those of them that skipped their message.';

COMMENT ON COLUMN mailroom.stat_minute.batches IS 'Committed batches.';

COMMENT ON COLUMN mailroom.stat_minute.handle_s IS 'How long handlers took together, in seconds.';

COMMENT ON COLUMN mailroom.stat_minute.ages IS 'How many of the reaped messages fell below each bound of age_percentile, from send to commit; one more has no bound.';

CREATE VIEW mailroom.my_stat_minute WITH (security_barrier='true') AS
 SELECT minute,
    inbox,
    delivered,
    reaped,
    failed,
    parked,
    skipped,
    batches,
    handle_s,
    ages
   FROM mailroom.stat_minute
  WHERE mailroom.is_mine(inbox);

COMMENT ON VIEW mailroom.my_stat_minute IS 'The rows of stat_minute about inboxes that the current role may take messages out of.';

CREATE TABLE mailroom.worker (
    id uuid NOT NULL,
    inbox text NOT NULL COLLATE pg_catalog."C",
    host text NOT NULL,
    pid integer NOT NULL,
    claimed_at timestamp with time zone NOT NULL,
    messages integer NOT NULL,
    keys text[] NOT NULL COLLATE pg_catalog."C",
    clocks bigint[] NOT NULL,
    process_number integer,
    deleted boolean DEFAULT false NOT NULL,
    xact bigint
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.worker IS 'In-flight entries: each loop of a worker has one. If its messages are not locked, the loop died.';

COMMENT ON COLUMN mailroom.worker.id IS 'The loop.';

COMMENT ON COLUMN mailroom.worker.inbox IS 'Its inbox.';

COMMENT ON COLUMN mailroom.worker.host IS 'The worker''s host.';

COMMENT ON COLUMN mailroom.worker.pid IS 'The worker''s process id.';

COMMENT ON COLUMN mailroom.worker.claimed_at IS 'When the batch was claimed.';

COMMENT ON COLUMN mailroom.worker.messages IS 'Messages of the batch.';

COMMENT ON COLUMN mailroom.worker.keys IS 'Keys of the batch.';

COMMENT ON COLUMN mailroom.worker.clocks IS 'The last clock of each key in the batch.';

COMMENT ON COLUMN mailroom.worker.process_number IS 'The number of the worker process, which holds the lock of it while it is alive; null if it has none.';

COMMENT ON COLUMN mailroom.worker.deleted IS 'Set to have the row deleted (delete_marked).';

COMMENT ON COLUMN mailroom.worker.xact IS 'The full id of the batch''s transaction; null if unknown, or lost while its worker lives.';

CREATE VIEW mailroom.my_worker WITH (security_barrier='true') AS
 SELECT id,
    inbox,
    host,
    pid,
    claimed_at,
    messages,
    keys,
    clocks,
    process_number,
    deleted,
    xact
   FROM mailroom.worker
  WHERE mailroom.is_mine(inbox)
  WITH CASCADED CHECK OPTION;

COMMENT ON VIEW mailroom.my_worker IS 'The rows of worker about inboxes that the current role may take messages out of.';

CREATE TABLE mailroom.origin (
    number bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    service text,
    schema text DEFAULT 'mailroom'::text NOT NULL COLLATE pg_catalog."C",
    reader text COLLATE pg_catalog."C",
    id uuid,
    incarnation bigint,
    system_id bigint,
    timeline bigint,
    link bigint,
    shown bigint DEFAULT 0 NOT NULL,
    state text DEFAULT 'open'::text NOT NULL COLLATE pg_catalog."C",
    why text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    keep_s double precision DEFAULT 172800 NOT NULL,
    trouble text COLLATE pg_catalog."C",
    since timestamp with time zone,
    told uuid[] DEFAULT '{}'::uuid[] NOT NULL,
    refused uuid[] DEFAULT '{}'::uuid[] NOT NULL,
    CONSTRAINT origin_keep_s_check CHECK ((keep_s >= (0)::double precision)),
    CONSTRAINT origin_name_check CHECK ((name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$'::text)),
    CONSTRAINT origin_schema_check CHECK ((schema ~ '^[a-z][a-z0-9_]{0,40}$'::text)),
    CONSTRAINT origin_state_check CHECK ((state = ANY (ARRAY['open'::text, 'stopped'::text, 'excluded'::text]))),
    CONSTRAINT origin_trouble_check CHECK ((trouble = ANY (ARRAY['unreachable'::text, 'failing'::text])))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.origin IS 'The nodes that this one reads: a row per link, on the reader''s side.';

COMMENT ON COLUMN mailroom.origin.number IS 'Its number here; never used again.';

COMMENT ON COLUMN mailroom.origin.name IS 'The source''s name.';

COMMENT ON COLUMN mailroom.origin.service IS 'The entry of libpq''s service file that leads there; null: the environment says it. No password.';

COMMENT ON COLUMN mailroom.origin.schema IS 'The source''s schema there.';

COMMENT ON COLUMN mailroom.origin.reader IS 'The name under which the source knows this node; null: the node''s own name.';

COMMENT ON COLUMN mailroom.origin.id IS 'The source''s node id, pinned at the first hello: the origin of its messages.';

COMMENT ON COLUMN mailroom.origin.incarnation IS 'The source''s incarnation of which messages were received last.';

COMMENT ON COLUMN mailroom.origin.system_id IS 'The system identifier of the source''s server.';

COMMENT ON COLUMN mailroom.origin.timeline IS 'The highest timeline seen of that server.';

COMMENT ON COLUMN mailroom.origin.link IS 'The link''s number at the source.';

COMMENT ON COLUMN mailroom.origin.shown IS 'Everything of the source up to this clock is here, or will never be wanted; see also receipt.';

COMMENT ON COLUMN mailroom.origin.state IS 'The state: open, stopped (for the reason in why), or excluded by hand.';

COMMENT ON COLUMN mailroom.origin.why IS 'Why it is not read, and what to do.';

COMMENT ON COLUMN mailroom.origin.created_at IS 'When it was added.';

COMMENT ON COLUMN mailroom.origin.keep_s IS 'How many seconds the source keeps rows that were acknowledged, as it said at the last hello.';

COMMENT ON COLUMN mailroom.origin.trouble IS 'Why it is not read now, though it is tried again: unreachable, or failing; null while neither.';

COMMENT ON COLUMN mailroom.origin.since IS 'Since when it is not read; null while it is.';

COMMENT ON COLUMN mailroom.origin.told IS 'The subscriptions that the source has, by their ids.';

COMMENT ON COLUMN mailroom.origin.refused IS 'The subscriptions that the source was told of and does not allow.';

ALTER TABLE mailroom.origin ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME mailroom.origin_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE mailroom.outbox (
    xact xid8 DEFAULT pg_current_xact_id() NOT NULL,
    "position" bigint NOT NULL,
    message_id uuid DEFAULT gen_random_uuid() NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text DEFAULT (gen_random_uuid())::text NOT NULL COLLATE pg_catalog."C",
    kind "char" DEFAULT 'M'::"char" NOT NULL,
    message_type "char" DEFAULT 'U'::"char" NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    deliver_at timestamp with time zone,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text DEFAULT current_setting('application_name'::text) COLLATE pg_catalog."C",
    sent_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.outbox IS 'Where writers commit messages. Inserted once, deleted once by the dispatcher, never updated.';

COMMENT ON COLUMN mailroom.outbox.xact IS 'The writer''s transaction. Writers do not set it.';

COMMENT ON COLUMN mailroom.outbox."position" IS 'Order of sending within a transaction. Writers do not set it.';

COMMENT ON COLUMN mailroom.outbox.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.outbox.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.outbox.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.outbox.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.outbox.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.outbox.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.outbox.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.outbox.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.outbox.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.outbox.deliver_at IS 'The message is not delivered before this time; until then it waits in `scheduled`.';

COMMENT ON COLUMN mailroom.outbox.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.outbox.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.outbox.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.outbox.sent_at IS 'Physical time of the send; order never rests on it.';

CREATE TABLE mailroom.outbox_executable (
    xact xid8 DEFAULT pg_current_xact_id() NOT NULL,
    "position" bigint NOT NULL,
    message_id uuid DEFAULT gen_random_uuid() NOT NULL,
    version smallint DEFAULT 1 NOT NULL,
    operation text NOT NULL COLLATE pg_catalog."C",
    target text DEFAULT 'store'::text NOT NULL COLLATE pg_catalog."C",
    key text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    end_key text COLLATE pg_catalog."C",
    value bytea,
    amount bigint,
    bytes bigint,
    expected bytea,
    arguments jsonb,
    at timestamp with time zone,
    row_limit bigint,
    notify text COLLATE pg_catalog."C",
    headers jsonb,
    after_clock bigint,
    source text DEFAULT current_setting('application_name'::text) COLLATE pg_catalog."C",
    sent_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.outbox_executable IS 'Where writers commit executables. Inserted once, deleted once by the executor, never updated.';

COMMENT ON COLUMN mailroom.outbox_executable.xact IS 'The writer''s transaction. Writers do not set it.';

COMMENT ON COLUMN mailroom.outbox_executable."position" IS 'Order of execution. Writers do not set it.';

COMMENT ON COLUMN mailroom.outbox_executable.message_id IS 'The executable''s id: the header `correlation` of its reply.';

COMMENT ON COLUMN mailroom.outbox_executable.version IS 'Version of the format. An unknown version goes to dead_letter.';

COMMENT ON COLUMN mailroom.outbox_executable.operation IS 'put, increment, delete, delete_range, account or call.';

COMMENT ON COLUMN mailroom.outbox_executable.target IS 'What it acts on: store, accounting, or a name in executable_target or executable_function.';

COMMENT ON COLUMN mailroom.outbox_executable.key IS 'The key; for delete_range the first one, empty for the lowest.';

COMMENT ON COLUMN mailroom.outbox_executable.end_key IS 'For delete_range: the end, exclusive; null for no upper bound.';

COMMENT ON COLUMN mailroom.outbox_executable.value IS 'For put: the value.';

COMMENT ON COLUMN mailroom.outbox_executable.amount IS 'For increment: by how much. For account: how many.';

COMMENT ON COLUMN mailroom.outbox_executable.bytes IS 'For account: how many bytes.';

COMMENT ON COLUMN mailroom.outbox_executable.expected IS 'For put: the value the key must hold; empty bytes: the key must be absent.';

COMMENT ON COLUMN mailroom.outbox_executable.arguments IS 'For call: the argument of the function.';

COMMENT ON COLUMN mailroom.outbox_executable.at IS 'For account: when it happened; null for sent_at.';

COMMENT ON COLUMN mailroom.outbox_executable.row_limit IS 'For delete_range: the greatest number of keys.';

COMMENT ON COLUMN mailroom.outbox_executable.notify IS 'The topic that gets the reply; null for no reply.';

COMMENT ON COLUMN mailroom.outbox_executable.headers IS 'Flat map of text to text. The reply has those that are carried, such as saga and user.';

COMMENT ON COLUMN mailroom.outbox_executable.after_clock IS 'The reply is stamped later than this clock.';

COMMENT ON COLUMN mailroom.outbox_executable.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.outbox_executable.sent_at IS 'Physical time of the send; order never rests on it.';

ALTER TABLE mailroom.outbox_executable ALTER COLUMN "position" ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME mailroom.outbox_executable_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW mailroom.outbox_jdbc AS
 SELECT NULL::text AS message_id,
    NULL::text AS topic,
    NULL::text AS key,
    NULL::text AS kind,
    NULL::text AS message_type,
    NULL::text AS event_type,
    NULL::bytea AS value,
    NULL::text AS value_json,
    NULL::text AS headers,
    NULL::timestamp with time zone AS deliver_at,
    NULL::timestamp with time zone AS expires_at,
    NULL::bigint AS after_clock
  WHERE false;

COMMENT ON VIEW mailroom.outbox_jdbc IS 'The outbox for writers that may write a row twice: it takes the first row of each message_id.';

COMMENT ON COLUMN mailroom.outbox_jdbc.message_id IS 'A UUID that is the same whenever the row is written again. Required.';

COMMENT ON COLUMN mailroom.outbox_jdbc.topic IS 'What the message is addressed to. Required.';

COMMENT ON COLUMN mailroom.outbox_jdbc.key IS 'Ordering key within an inbox; null for a key of its own.';

COMMENT ON COLUMN mailroom.outbox_jdbc.kind IS 'M message (null), E event, C command, R reply.';

COMMENT ON COLUMN mailroom.outbox_jdbc.message_type IS 'O object, D database, C collection, U user-defined (null).';

COMMENT ON COLUMN mailroom.outbox_jdbc.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.outbox_jdbc.value IS 'The value as CBOR; exactly one of value and value_json is given.';

COMMENT ON COLUMN mailroom.outbox_jdbc.value_json IS 'The value as the text of a JSON.';

COMMENT ON COLUMN mailroom.outbox_jdbc.headers IS 'Flat map of text to text, as the text of a JSON object.';

COMMENT ON COLUMN mailroom.outbox_jdbc.deliver_at IS 'The message is not delivered before this time.';

COMMENT ON COLUMN mailroom.outbox_jdbc.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.outbox_jdbc.after_clock IS 'The stamp is later than this clock.';

CREATE TABLE mailroom.outbox_jdbc_id (
    id uuid NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='20000');

COMMENT ON TABLE mailroom.outbox_jdbc_id IS 'Ids of the messages that came through outbox_jdbc, or by a bridge from a queue, kept for seven days.';

COMMENT ON COLUMN mailroom.outbox_jdbc_id.id IS 'The message_id, or what is made of the bridge and it; written in the transaction that wrote the message.';

COMMENT ON COLUMN mailroom.outbox_jdbc_id.at IS 'When it was written.';

ALTER TABLE mailroom.outbox ALTER COLUMN "position" ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME mailroom.outbox_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE mailroom.periodic (
    name text NOT NULL COLLATE pg_catalog."C",
    cron text NOT NULL,
    time_zone text NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text COLLATE pg_catalog."C",
    kind "char" NOT NULL,
    value bytea NOT NULL,
    headers jsonb,
    missed text NOT NULL COLLATE pg_catalog."C",
    jitter_s double precision NOT NULL,
    due_at timestamp with time zone NOT NULL,
    next_at timestamp with time zone NOT NULL,
    last_at timestamp with time zone,
    paused boolean DEFAULT false NOT NULL,
    last_error text,
    CONSTRAINT periodic_jitter CHECK (((jitter_s >= (0)::double precision) AND (jitter_s <= (3600)::double precision))),
    CONSTRAINT periodic_kind CHECK ((kind = ANY (ARRAY['M'::"char", 'E'::"char", 'C'::"char"]))),
    CONSTRAINT periodic_missed CHECK ((missed = ANY (ARRAY['skip'::text, 'once'::text, 'all'::text]))),
    CONSTRAINT periodic_name CHECK ((name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$'::text))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.periodic IS 'Messages that are sent at the times of a cron expression, a row each.';

COMMENT ON COLUMN mailroom.periodic.name IS 'Its name; a part of the ids of its messages.';

COMMENT ON COLUMN mailroom.periodic.cron IS 'The cron expression: five fields, or a name such as @daily.';

COMMENT ON COLUMN mailroom.periodic.time_zone IS 'The time zone of its times, by its name.';

COMMENT ON COLUMN mailroom.periodic.topic IS 'The topic of its messages.';

COMMENT ON COLUMN mailroom.periodic.key IS 'Their key; null for a key of its own for each of them.';

COMMENT ON COLUMN mailroom.periodic.kind IS 'Their kind: M message, E event, C command.';

COMMENT ON COLUMN mailroom.periodic.value IS 'Their value as CBOR.';

COMMENT ON COLUMN mailroom.periodic.headers IS 'Their headers, to which `periodic` and `due` are added.';

COMMENT ON COLUMN mailroom.periodic.missed IS 'What is sent for times at which no dispatcher ran: skip, once or all.';

COMMENT ON COLUMN mailroom.periodic.jitter_s IS 'The longest random delay of a send, in seconds.';

COMMENT ON COLUMN mailroom.periodic.due_at IS 'The next time for which a message is to be sent.';

COMMENT ON COLUMN mailroom.periodic.next_at IS 'When it is to be sent: due_at, delayed by the jitter. It is late once this has passed.';

COMMENT ON COLUMN mailroom.periodic.last_at IS 'The last time for which a message was sent.';

COMMENT ON COLUMN mailroom.periodic.paused IS 'Whether an operator has paused it.';

COMMENT ON COLUMN mailroom.periodic.last_error IS 'Why the last try to send failed; null if it did not.';

CREATE TABLE mailroom.reaped_day (
    day date NOT NULL,
    emptied_at timestamp with time zone
);

COMMENT ON TABLE mailroom.reaped_day IS 'The partitions of `reaped`.';

COMMENT ON COLUMN mailroom.reaped_day.day IS 'The partition is reaped_<YYYYMMDD>.';

COMMENT ON COLUMN mailroom.reaped_day.emptied_at IS 'When the janitor emptied it, since its day was over; null before.';

CREATE TABLE mailroom.receipt (
    origin bigint NOT NULL,
    last bigint NOT NULL,
    first bigint NOT NULL,
    last_id uuid NOT NULL,
    stamped_at timestamp with time zone NOT NULL,
    sent_clock bigint NOT NULL,
    received_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    ids uuid[] NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');
ALTER TABLE ONLY mailroom.receipt ALTER COLUMN ids SET STORAGE EXTERNAL;

COMMENT ON TABLE mailroom.receipt IS 'What was received: a row per batch. The newest row of an origin is the position, and stays.';

COMMENT ON COLUMN mailroom.receipt.origin IS 'The number of the origin.';

COMMENT ON COLUMN mailroom.receipt.last IS 'The last seq of the batch.';

COMMENT ON COLUMN mailroom.receipt.first IS 'The first seq of the batch.';

COMMENT ON COLUMN mailroom.receipt.last_id IS 'The message_id of the last row.';

COMMENT ON COLUMN mailroom.receipt.stamped_at IS 'The stamped_at of the last row.';

COMMENT ON COLUMN mailroom.receipt.sent_clock IS 'The sent_clock of the last row.';

COMMENT ON COLUMN mailroom.receipt.received_at IS 'When it was received.';

COMMENT ON COLUMN mailroom.receipt.ids IS 'The message ids of the batch, by seq; emptied after a while.';

CREATE TABLE mailroom.scheduled (
    deliver_at timestamp with time zone NOT NULL,
    "position" bigint NOT NULL,
    message_id uuid NOT NULL,
    topic text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    kind "char" NOT NULL,
    message_type "char" NOT NULL,
    event_type "char",
    value bytea,
    value_json jsonb,
    headers jsonb,
    expires_at timestamp with time zone,
    after_clock bigint,
    source text COLLATE pg_catalog."C",
    sent_at timestamp with time zone NOT NULL
);

COMMENT ON TABLE mailroom.scheduled IS 'Messages whose deliver_at lies ahead; they go back to the outbox when due.';

COMMENT ON COLUMN mailroom.scheduled.deliver_at IS 'When it is due.';

COMMENT ON COLUMN mailroom.scheduled."position" IS 'Its first position in the outbox.';

COMMENT ON COLUMN mailroom.scheduled.message_id IS 'The message''s id, which never changes; an idempotency key for effects outside the database.';

COMMENT ON COLUMN mailroom.scheduled.topic IS 'What the message is addressed to.';

COMMENT ON COLUMN mailroom.scheduled.key IS 'Ordering key within an inbox. An unordered message has its id as key.';

COMMENT ON COLUMN mailroom.scheduled.kind IS 'M message, E event, C command, R reply.';

COMMENT ON COLUMN mailroom.scheduled.message_type IS 'O object, D database, C collection, U user-defined.';

COMMENT ON COLUMN mailroom.scheduled.event_type IS 'C created, U updated, D deleted.';

COMMENT ON COLUMN mailroom.scheduled.value IS 'The value as CBOR; exactly one of value and value_json is set.';

COMMENT ON COLUMN mailroom.scheduled.value_json IS 'The value as JSON, for writers that have no CBOR.';

COMMENT ON COLUMN mailroom.scheduled.headers IS 'Flat map of text to text.';

COMMENT ON COLUMN mailroom.scheduled.expires_at IS 'If not delivered before this time, the message is dropped.';

COMMENT ON COLUMN mailroom.scheduled.after_clock IS 'The stamp is later than this clock: that of a cause on another node.';

COMMENT ON COLUMN mailroom.scheduled.source IS 'Who sent it: the writer''s application_name.';

COMMENT ON COLUMN mailroom.scheduled.sent_at IS 'Physical time of the send; order never rests on it.';

CREATE TABLE mailroom.spark_batch (
    name text NOT NULL COLLATE pg_catalog."C",
    batch bigint NOT NULL,
    query text COLLATE pg_catalog."C",
    messages bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    digest bytea,
    CONSTRAINT spark_batch_digest_check CHECK ((octet_length(digest) = 16)),
    CONSTRAINT spark_batch_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 100)))
);

COMMENT ON TABLE mailroom.spark_batch IS 'What Spark has committed: each batch once, in the transaction that sent its messages.';

COMMENT ON COLUMN mailroom.spark_batch.name IS 'The stream''s name, or its query''s id; the idempotency key of a job.';

COMMENT ON COLUMN mailroom.spark_batch.batch IS 'The number of the micro-batch; -1 for a job.';

COMMENT ON COLUMN mailroom.spark_batch.query IS 'The id of the streaming query; a new checkpoint brings a new one.';

COMMENT ON COLUMN mailroom.spark_batch.messages IS 'How many messages it sent. Their source is mailroom spark <name> <batch>.';

COMMENT ON COLUMN mailroom.spark_batch.at IS 'When.';

COMMENT ON COLUMN mailroom.spark_batch.digest IS 'The sum of its rows'' hashes, their ids left out, whatever their order.';

CREATE TABLE mailroom.spark_bulk (
    name text NOT NULL COLLATE pg_catalog."C",
    batch bigint NOT NULL,
    source text NOT NULL,
    constants jsonb NOT NULL,
    messages bigint NOT NULL,
    moved bigint DEFAULT 0 NOT NULL,
    first bigint,
    last bigint,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    deleted boolean DEFAULT false NOT NULL
);

COMMENT ON TABLE mailroom.spark_bulk IS 'Large batches of Spark that are decided, and of which messages are still to be moved into the outbox.';

COMMENT ON COLUMN mailroom.spark_bulk.name IS 'The batch''s name in spark_batch.';

COMMENT ON COLUMN mailroom.spark_bulk.batch IS 'The batch''s number in spark_batch.';

COMMENT ON COLUMN mailroom.spark_bulk.source IS 'The source of its messages.';

COMMENT ON COLUMN mailroom.spark_bulk.constants IS 'Common to all of its messages: topic, kind, message_type, event_type.';

COMMENT ON COLUMN mailroom.spark_bulk.messages IS 'How many messages it has.';

COMMENT ON COLUMN mailroom.spark_bulk.moved IS 'How many of them were moved into the outbox.';

COMMENT ON COLUMN mailroom.spark_bulk.first IS 'The position of the first message of its last chunk.';

COMMENT ON COLUMN mailroom.spark_bulk.last IS 'The position of the last message of its last chunk.';

COMMENT ON COLUMN mailroom.spark_bulk.at IS 'When it was decided, or its last chunk was moved.';

COMMENT ON COLUMN mailroom.spark_bulk.deleted IS 'Set to have the row deleted (delete_marked).';

CREATE TABLE mailroom.spark_drain (
    inbox text NOT NULL COLLATE pg_catalog."C",
    shard integer NOT NULL,
    segment bigint DEFAULT 0 NOT NULL,
    file text,
    directory text NOT NULL,
    finished boolean DEFAULT true NOT NULL,
    messages bigint DEFAULT 0 NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT spark_drain_shard_check CHECK (((shard >= 0) AND (shard <= 999)))
);

COMMENT ON TABLE mailroom.spark_drain IS 'How far inboxes have been drained into files: a row per shard, locked by the drainer of the shard.';

COMMENT ON COLUMN mailroom.spark_drain.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.spark_drain.shard IS 'The number of the drain, of those that run side by side.';

COMMENT ON COLUMN mailroom.spark_drain.segment IS 'The last segment: one transaction and one file with its messages.';

COMMENT ON COLUMN mailroom.spark_drain.file IS 'The hidden name of that file before it is finished.';

COMMENT ON COLUMN mailroom.spark_drain.directory IS 'The directory of that file.';

COMMENT ON COLUMN mailroom.spark_drain.finished IS 'Whether the file has its final name. If not, the next drain renames it.';

COMMENT ON COLUMN mailroom.spark_drain.messages IS 'How many messages the shard has drained in total.';

COMMENT ON COLUMN mailroom.spark_drain.at IS 'When the last segment was committed.';

CREATE TABLE mailroom.spark_staging (
    token uuid NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    batch bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    schema text COLLATE pg_catalog."C",
    part integer,
    messages bigint,
    moved bigint DEFAULT 0 NOT NULL,
    deleted boolean DEFAULT false NOT NULL,
    CONSTRAINT spark_staging_schema_check CHECK ((schema ~ '^[a-z][a-z0-9_]*$'::text))
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='500');

COMMENT ON TABLE mailroom.spark_staging IS 'Staging tables of Spark''s tasks that are not dropped yet: staging_<token>.';

COMMENT ON COLUMN mailroom.spark_staging.token IS 'The task attempt''s token; it begins with the time, in milliseconds.';

COMMENT ON COLUMN mailroom.spark_staging.name IS 'The batch''s name in spark_batch.';

COMMENT ON COLUMN mailroom.spark_staging.batch IS 'The batch''s number in spark_batch.';

COMMENT ON COLUMN mailroom.spark_staging.at IS 'When it was created.';

COMMENT ON COLUMN mailroom.spark_staging.schema IS 'The schema that its table stands in, if that is not this one.';

COMMENT ON COLUMN mailroom.spark_staging.part IS 'Its place in a decided large batch that still moves; otherwise null.';

COMMENT ON COLUMN mailroom.spark_staging.messages IS 'How many messages that part has.';

COMMENT ON COLUMN mailroom.spark_staging.moved IS 'How many of them were moved into the outbox: those with the numbers up to this.';

COMMENT ON COLUMN mailroom.spark_staging.deleted IS 'Set to have the row deleted (delete_marked).';

CREATE TABLE mailroom.stable (
    inbox text NOT NULL COLLATE pg_catalog."C",
    clock bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000');

COMMENT ON TABLE mailroom.stable IS 'How far a total inbox may be given out; the newest row counts.';

COMMENT ON COLUMN mailroom.stable.inbox IS 'The inbox.';

COMMENT ON COLUMN mailroom.stable.clock IS 'Every message with a sent_clock up to this one has been received.';

CREATE VIEW mailroom.statistics AS
 SELECT n.name AS node,
    s.inbox,
    s.minute,
    s.delivered,
    s.reaped,
    s.failed,
    s.parked,
    s.skipped,
    s.batches,
    s.handle_s,
    mailroom.age_percentile((s.ages)::bigint[], (0.5)::double precision) AS age_p50_s,
    mailroom.age_percentile((s.ages)::bigint[], (0.99)::double precision) AS age_p99_s
   FROM (mailroom.stat_minute s
     CROSS JOIN mailroom.node n);

COMMENT ON VIEW mailroom.statistics IS 'The rows of stat_minute with the ages below which half and 99 % of the messages are.';

CREATE TABLE mailroom.store (
    key text NOT NULL COLLATE pg_catalog."C",
    value bytea,
    number bigint,
    CONSTRAINT store_one_value CHECK ((num_nonnulls(value, number) = 1))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE mailroom.store IS 'Values and counters by key, written by executables only.';

COMMENT ON COLUMN mailroom.store.key IS 'The key.';

COMMENT ON COLUMN mailroom.store.value IS 'The value; null for a counter.';

COMMENT ON COLUMN mailroom.store.number IS 'The counter; null for a value.';

CREATE TABLE mailroom.subscription (
    topic text NOT NULL COLLATE pg_catalog."C",
    inbox text NOT NULL COLLATE pg_catalog."C",
    fits text GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*#]'::text) THEN translate((regexp_replace(topic, '([\\_%])'::text, '\\\1'::text, 'g'::text) ||
    CASE
        WHEN (topic ~ '#$'::text) THEN ''::text
        ELSE '.'::text
    END), '*#'::text, '%%'::text)
    ELSE NULL::text
END) STORED COLLATE pg_catalog."C",
    words integer GENERATED ALWAYS AS (
CASE
    WHEN (topic ~ '[*]'::text) THEN cardinality(string_to_array(topic, '.'::text))
    ELSE NULL::integer
END) STORED,
    origin text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    since bigint DEFAULT 0 NOT NULL,
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    CONSTRAINT subscription_origin CHECK ((origin ~ '^([A-Za-z][A-Za-z0-9_.-]{0,62}|[*]|)$'::text)),
    CONSTRAINT subscription_topic CHECK (((octet_length(topic) <= 200) AND ((topic ~ '^([A-Za-z][A-Za-z0-9_-]*|[*])([.]([A-Za-z0-9_-]*|[*]))*$'::text) OR (topic ~ '^([A-Za-z][A-Za-z0-9_.-]*[.])?#$'::text))))
);

COMMENT ON TABLE mailroom.subscription IS 'Which inbox gets which topic, beside the inbox of the topic''s own name.';

COMMENT ON COLUMN mailroom.subscription.topic IS 'The topic, or a pattern of topics: * is one word, a last word # any number of words.';

COMMENT ON COLUMN mailroom.subscription.inbox IS 'The inbox that gets it.';

COMMENT ON COLUMN mailroom.subscription.fits IS 'Of a pattern: what a topic with a dot after it must be LIKE.';

COMMENT ON COLUMN mailroom.subscription.words IS 'Of a pattern with *: how many words the topic must have.';

COMMENT ON COLUMN mailroom.subscription.origin IS 'Whose messages: empty for this node, a name of origin, or * for this node and all origins.';

COMMENT ON COLUMN mailroom.subscription.since IS 'Only messages with a later sent_clock.';

COMMENT ON COLUMN mailroom.subscription.id IS 'Which subscription it is: another one when one is ended and made again.';

ALTER TABLE ONLY mailroom.accounting
    ADD CONSTRAINT accounting_pkey PRIMARY KEY (key, minute);

ALTER TABLE ONLY mailroom.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);

ALTER TABLE ONLY mailroom.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY (id);

ALTER TABLE ONLY mailroom.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);

ALTER TABLE ONLY mailroom.breaker
    ADD CONSTRAINT breaker_pkey PRIMARY KEY (inbox, prefix);

ALTER TABLE ONLY mailroom.bridge_done
    ADD CONSTRAINT bridge_done_pkey PRIMARY KEY (link, seq);

ALTER TABLE ONLY mailroom.bridge_in
    ADD CONSTRAINT bridge_in_pkey PRIMARY KEY (origin);

ALTER TABLE ONLY mailroom.bridge_known
    ADD CONSTRAINT bridge_known_pkey PRIMARY KEY (link, message_id);

ALTER TABLE ONLY mailroom.bridge_last
    ADD CONSTRAINT bridge_last_pkey PRIMARY KEY (link, topic, part);

ALTER TABLE ONLY mailroom.bridge_mark
    ADD CONSTRAINT bridge_mark_pkey PRIMARY KEY (origin, topic, part, sender, link);

ALTER TABLE ONLY mailroom.bridge_out
    ADD CONSTRAINT bridge_out_pkey PRIMARY KEY (link);

ALTER TABLE ONLY mailroom.bridge_parts
    ADD CONSTRAINT bridge_parts_pkey PRIMARY KEY (link, topic, after);

ALTER TABLE ONLY mailroom.bridge_position
    ADD CONSTRAINT bridge_position_pkey PRIMARY KEY (origin, topic, part);

ALTER TABLE ONLY mailroom.commit_token
    ADD CONSTRAINT commit_token_pkey PRIMARY KEY (token);

ALTER TABLE ONLY mailroom.dead_letter
    ADD CONSTRAINT dead_letter_pkey PRIMARY KEY (id);

ALTER TABLE ONLY mailroom.executable_cursor
    ADD CONSTRAINT executable_cursor_pkey PRIMARY KEY ("position");

ALTER TABLE ONLY mailroom.executable_function
    ADD CONSTRAINT executable_function_pkey PRIMARY KEY (name);

ALTER TABLE ONLY mailroom.executable_target
    ADD CONSTRAINT executable_target_pkey PRIMARY KEY (name);

ALTER TABLE ONLY mailroom.fan_out
    ADD CONSTRAINT fan_out_pkey PRIMARY KEY (clock);

ALTER TABLE ONLY mailroom.fan_out_way
    ADD CONSTRAINT fan_out_way_pkey PRIMARY KEY (inbox, topic);

ALTER TABLE ONLY mailroom.inbox_registry
    ADD CONSTRAINT inbox_registry_pkey PRIMARY KEY (name);

ALTER TABLE ONLY mailroom.key_state
    ADD CONSTRAINT key_state_pkey PRIMARY KEY (inbox, key);

ALTER TABLE ONLY mailroom.known
    ADD CONSTRAINT known_pkey PRIMARY KEY (origin, message_id);

ALTER TABLE ONLY mailroom.lease
    ADD CONSTRAINT lease_pkey PRIMARY KEY (role);

ALTER TABLE ONLY mailroom.limits
    ADD CONSTRAINT limits_pkey PRIMARY KEY (inbox);

ALTER TABLE ONLY mailroom.link_allowed
    ADD CONSTRAINT link_allowed_pkey PRIMARY KEY (link, topic);

ALTER TABLE ONLY mailroom.link
    ADD CONSTRAINT link_name_key UNIQUE (name);

ALTER TABLE ONLY mailroom.link
    ADD CONSTRAINT link_pkey PRIMARY KEY (number);

ALTER TABLE ONLY mailroom.link
    ADD CONSTRAINT link_reader_id_key UNIQUE (reader_id);

ALTER TABLE ONLY mailroom.link_topic
    ADD CONSTRAINT link_topic_pkey PRIMARY KEY (topic, link);

ALTER TABLE ONLY mailroom.log_registry
    ADD CONSTRAINT log_registry_pkey PRIMARY KEY (name);

ALTER TABLE ONLY mailroom.log_segment
    ADD CONSTRAINT log_segment_pkey PRIMARY KEY (segment);

ALTER TABLE ONLY mailroom.log_tick
    ADD CONSTRAINT log_tick_pkey PRIMARY KEY (log, clock);

ALTER TABLE ONLY mailroom.log_topic
    ADD CONSTRAINT log_topic_pkey PRIMARY KEY (inbox, topic);

ALTER TABLE ONLY mailroom.node
    ADD CONSTRAINT node_pkey PRIMARY KEY (single);

ALTER TABLE ONLY mailroom.origin
    ADD CONSTRAINT origin_name_key UNIQUE (name);

ALTER TABLE ONLY mailroom.origin
    ADD CONSTRAINT origin_pkey PRIMARY KEY (number);

ALTER TABLE ONLY mailroom.outbox_executable
    ADD CONSTRAINT outbox_executable_pkey PRIMARY KEY ("position");

ALTER TABLE ONLY mailroom.outbox_jdbc_id
    ADD CONSTRAINT outbox_jdbc_id_pkey PRIMARY KEY (id);

ALTER TABLE ONLY mailroom.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY ("position");

ALTER TABLE ONLY mailroom.parked
    ADD CONSTRAINT parked_pkey PRIMARY KEY (inbox, key, clock);

ALTER TABLE ONLY mailroom.periodic
    ADD CONSTRAINT periodic_pkey PRIMARY KEY (name);

ALTER TABLE ONLY mailroom.reaped_day
    ADD CONSTRAINT reaped_day_pkey PRIMARY KEY (day);

ALTER TABLE ONLY mailroom.receipt
    ADD CONSTRAINT receipt_pkey PRIMARY KEY (origin, last);

ALTER TABLE ONLY mailroom.scheduled
    ADD CONSTRAINT scheduled_pkey PRIMARY KEY (deliver_at, "position");

ALTER TABLE ONLY mailroom.slot
    ADD CONSTRAINT slot_pkey PRIMARY KEY (inbox, slot);

ALTER TABLE ONLY mailroom.spark_batch
    ADD CONSTRAINT spark_batch_pkey PRIMARY KEY (name, batch);

ALTER TABLE ONLY mailroom.spark_bulk
    ADD CONSTRAINT spark_bulk_pkey PRIMARY KEY (name, batch);

ALTER TABLE ONLY mailroom.spark_drain
    ADD CONSTRAINT spark_drain_pkey PRIMARY KEY (inbox, shard);

ALTER TABLE ONLY mailroom.spark_staging
    ADD CONSTRAINT spark_staging_pkey PRIMARY KEY (token);

ALTER TABLE ONLY mailroom.spark_stream
    ADD CONSTRAINT spark_stream_pkey PRIMARY KEY (inbox, batch);

ALTER TABLE ONLY mailroom.stable
    ADD CONSTRAINT stable_pkey PRIMARY KEY (inbox, clock);

ALTER TABLE ONLY mailroom.stat_minute
    ADD CONSTRAINT stat_minute_pkey PRIMARY KEY (minute, inbox);

ALTER TABLE ONLY mailroom.store
    ADD CONSTRAINT store_pkey PRIMARY KEY (key);

ALTER TABLE ONLY mailroom.subscription
    ADD CONSTRAINT subscription_pkey PRIMARY KEY (topic, inbox, origin);

ALTER TABLE ONLY mailroom.transit
    ADD CONSTRAINT transit_pkey PRIMARY KEY (link, seq);

ALTER TABLE ONLY mailroom.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (id);

CREATE INDEX attempt_at ON mailroom.attempt USING btree (at);

CREATE INDEX attempt_key ON mailroom.attempt USING btree (inbox, key, clock, id);

CREATE INDEX audit_at ON mailroom.audit USING btree (at);

CREATE INDEX key_state_due ON mailroom.key_state USING btree (inbox, retry_at, key);

CREATE UNIQUE INDEX link_allowed_commands ON mailroom.link_allowed USING btree (topic) WHERE commands;

CREATE INDEX link_topic_link ON mailroom.link_topic USING btree (link);

CREATE INDEX link_topic_pattern ON mailroom.link_topic USING btree (fits, words, link) WHERE (fits IS NOT NULL);

CREATE INDEX log_segment_newest ON mailroom.log_segment USING btree (log, segment DESC);

CREATE INDEX outbox_jdbc_id_at ON mailroom.outbox_jdbc_id USING btree (at);

CREATE INDEX periodic_next ON mailroom.periodic USING btree (next_at) WHERE (NOT paused);

CREATE INDEX reaped_cause ON ONLY mailroom.reaped USING btree (((headers ->> 'causation'::text)) COLLATE "C");

CREATE INDEX reaped_id ON ONLY mailroom.reaped USING btree (message_id);

CREATE INDEX reaped_when ON ONLY mailroom.reaped USING btree (inbox, reaped_at, clock);

CREATE INDEX registry_total ON mailroom.inbox_registry USING btree (name) WHERE ("order" = 'total'::text);

CREATE INDEX spark_batch_at ON mailroom.spark_batch USING btree (at);

CREATE INDEX subscription_pattern ON mailroom.subscription USING btree (fits, words, inbox, origin, since) WHERE (fits IS NOT NULL);

CREATE RULE once AS
    ON INSERT TO mailroom.outbox_jdbc DO INSTEAD  INSERT INTO mailroom.outbox (message_id, topic, key, kind, message_type, event_type, value, value_json, headers, deliver_at, expires_at, after_clock)  SELECT mailroom.outbox_jdbc_take((new.message_id)::uuid) AS outbox_jdbc_take,
            new.topic,
            COALESCE(new.key, (gen_random_uuid())::text) AS "coalesce",
            (
                CASE
                    WHEN (octet_length(new.kind) > 1) THEN '?'::text
                    ELSE COALESCE(new.kind, 'M'::text)
                END)::"char" AS "coalesce",
            (
                CASE
                    WHEN (octet_length(new.message_type) > 1) THEN '?'::text
                    ELSE COALESCE(new.message_type, 'U'::text)
                END)::"char" AS "coalesce",
            (
                CASE
                    WHEN (octet_length(new.event_type) > 1) THEN '?'::text
                    ELSE new.event_type
                END)::"char" AS event_type,
            new.value,
            (new.value_json)::jsonb AS value_json,
            (new.headers)::jsonb AS headers,
            new.deliver_at,
            new.expires_at,
            new.after_clock;

CREATE TRIGGER acknowledged_less BEFORE UPDATE OF acked ON mailroom.link FOR EACH ROW WHEN ((new.acked < old.acked)) EXECUTE FUNCTION mailroom.acknowledged_less();

CREATE TRIGGER bounded BEFORE INSERT OR UPDATE OF wanted_clock, claim_clock ON mailroom.link FOR EACH ROW WHEN (((new.wanted_clock > '4294967296'::bigint) OR (new.claim_clock > '4294967296'::bigint))) EXECUTE FUNCTION mailroom.bound_reader();

CREATE TRIGGER checked BEFORE INSERT OR UPDATE ON mailroom.outbox_executable FOR EACH ROW EXECUTE FUNCTION mailroom.check_executable();

CREATE TRIGGER checked_clock BEFORE INSERT OR UPDATE ON mailroom.outbox_executable FOR EACH ROW WHEN ((new.after_clock > '4294967296'::bigint)) EXECUTE FUNCTION mailroom.check_executable_clock();

CREATE TRIGGER copied BEFORE INSERT ON mailroom.attempt FOR EACH ROW EXECUTE FUNCTION mailroom.raise_copied('id', 'attempt');

ALTER TABLE mailroom.attempt ENABLE REPLICA TRIGGER copied;

CREATE TRIGGER copied BEFORE INSERT ON mailroom.audit FOR EACH ROW EXECUTE FUNCTION mailroom.raise_copied('id', 'audit');

ALTER TABLE mailroom.audit ENABLE REPLICA TRIGGER copied;

CREATE TRIGGER copied BEFORE INSERT ON mailroom.dead_letter FOR EACH ROW EXECUTE FUNCTION mailroom.raise_copied('id', 'dead_letter');

ALTER TABLE mailroom.dead_letter ENABLE REPLICA TRIGGER copied;

CREATE TRIGGER copied BEFORE INSERT ON mailroom.link FOR EACH ROW EXECUTE FUNCTION mailroom.raise_copied('number', 'link');

ALTER TABLE mailroom.link ENABLE REPLICA TRIGGER copied;

CREATE TRIGGER copied BEFORE INSERT ON mailroom.origin FOR EACH ROW EXECUTE FUNCTION mailroom.raise_copied('number', 'origin');

ALTER TABLE mailroom.origin ENABLE REPLICA TRIGGER copied;

CREATE TRIGGER copied BEFORE INSERT ON mailroom.outbox_executable FOR EACH ROW EXECUTE FUNCTION mailroom.raise_copied('position', 'outbox_executable');

ALTER TABLE mailroom.outbox_executable ENABLE REPLICA TRIGGER copied;

CREATE TRIGGER copied BEFORE INSERT ON mailroom.scheduled FOR EACH ROW EXECUTE FUNCTION mailroom.raise_copied('position', 'outbox');

ALTER TABLE mailroom.scheduled ENABLE REPLICA TRIGGER copied;

CREATE TRIGGER copy INSTEAD OF INSERT ON mailroom.outbox_jdbc FOR EACH ROW EXECUTE FUNCTION mailroom.outbox_jdbc_copy();

CREATE TRIGGER deleted AFTER UPDATE OF deleted ON mailroom.breaker FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION mailroom.delete_marked();

CREATE TRIGGER deleted AFTER UPDATE OF deleted ON mailroom.key_state FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION mailroom.delete_marked();

CREATE TRIGGER deleted AFTER UPDATE OF deleted ON mailroom.spark_bulk FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION mailroom.delete_marked();

CREATE TRIGGER deleted AFTER UPDATE OF deleted ON mailroom.spark_staging FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION mailroom.delete_marked();

CREATE TRIGGER deleted AFTER UPDATE OF deleted ON mailroom.spark_stream FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION mailroom.delete_marked();

CREATE TRIGGER deleted AFTER UPDATE OF deleted ON mailroom.worker FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION mailroom.delete_marked();

CREATE TRIGGER doorbell BEFORE INSERT ON mailroom.outbox FOR EACH STATEMENT EXECUTE FUNCTION mailroom.doorbell();

CREATE TRIGGER doorbell BEFORE INSERT ON mailroom.outbox_executable FOR EACH STATEMENT EXECUTE FUNCTION mailroom.doorbell();

CREATE TRIGGER greeted BEFORE INSERT OR UPDATE OF run ON mailroom.link FOR EACH ROW WHEN ((new.run IS NOT NULL)) EXECUTE FUNCTION mailroom.greeted();

CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON mailroom.attempt FOR EACH ROW EXECUTE FUNCTION mailroom.refuse_others();

CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON mailroom.dead_letter FOR EACH ROW EXECUTE FUNCTION mailroom.refuse_others();

CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON mailroom.key_state FOR EACH ROW EXECUTE FUNCTION mailroom.refuse_others();

CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON mailroom.parked FOR EACH ROW EXECUTE FUNCTION mailroom.refuse_others();

CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON mailroom.spark_stream FOR EACH ROW EXECUTE FUNCTION mailroom.refuse_others();

CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON mailroom.stat_minute FOR EACH ROW EXECUTE FUNCTION mailroom.refuse_others();

CREATE TRIGGER zz_asked BEFORE INSERT ON mailroom.link_topic FOR EACH ROW EXECUTE FUNCTION mailroom.link_topic_asked();

CREATE TRIGGER zz_checked BEFORE INSERT OR UPDATE ON mailroom.outbox FOR EACH ROW EXECUTE FUNCTION mailroom.check_message();

ALTER TABLE mailroom.outbox ENABLE ALWAYS TRIGGER zz_checked;

REVOKE ALL ON FUNCTION mailroom.delete_marked() FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.drop_log_segment(number bigint, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.drop_reaped_day(over date, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.empty_log_segment(number bigint, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.empty_reaped_day(over date, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_acknowledge(of_link bigint, by_run uuid, seq bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_ask(of_link bigint, by_run uuid, topics text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_claim(of_link bigint, by_run uuid, seq bigint, clock bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_hello(of_link bigint, id uuid, system_id bigint, database_oid bigint, origin bigint, by_run uuid) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_hold(of_name text) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_match(of_link bigint, by_run uuid) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_next(of_link bigint, behind bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_topic_asked() FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.link_want(of_link bigint, by_run uuid, clock bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.lock_log_segment(number bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.make_log_segment(of_log text, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.make_reaped_days(at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.watch() FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.watch_audit(act text, watched text, changed text, by_actor text, why text) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.watch_json(given record) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.watch_query(relid oid, hidden_as text, hidden text[], event text, is_row boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.watch_rest(changes refcursor) FROM PUBLIC;

REVOKE ALL ON FUNCTION mailroom.watch_told(given text, of_type oid) FROM PUBLIC;

GRANT SELECT ON TABLE mailroom.my_due TO PUBLIC;
