-- Values in readable form, such as in psql.

-- One pass with a stack: recursion over slices would cost the square of the size. The pieces are joined once. No
-- EXCEPTION block: it is a subtransaction, which PostgreSQL 15 and 16 refuse in a parallel query. So everything that
-- could raise is checked first, since a bad value must not fail the query that shows it.
CREATE FUNCTION cbor_to_jsonb(cbor bytea) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1 AS $$
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
END $$;
COMMENT ON FUNCTION cbor_to_jsonb(bytea) IS
    'Shows a value (CBOR, as in the column value) as JSON, for people: bytes as base64, times, dates and UUIDs as '
    'text, Infinity and NaN as text, U+2400 for a NUL. What is no value gives the text (not shown: why), no error.';
