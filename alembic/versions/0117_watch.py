"""Watch: triggers on users' tables that send what happens to the rows."""

from alembic import op
from mailroom.schema import HOLDS_MESSAGES

revision = "0117"
down_revision = "0116"
branch_labels = None
depends_on = None

# A row as JSON; null if it has none, or more than a message may have. For instance json may hold \u0000, which jsonb
# refuses, and no jsonb holds more than 256 MiB. Only a block with EXCEPTION survives that. It writes nothing, so its
# subtransaction has no id. A cancelled statement is not among OTHERS.
JSON = """
CREATE FUNCTION watch_json(given record) RETURNS jsonb LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    made jsonb;
BEGIN
    made := to_jsonb(given);
    RETURN CASE WHEN octet_length(made::text) <= 16777216 THEN made END;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$
"""

# The trigger's arguments are the topic, the prefix of keys and the hidden columns. The rest is read from the catalog
# each time, since tables change, so the statement is made each time, too. It is put together and not formatted twice,
# since a column's name may hold a %.
#
# It runs with its owner's rights: writers have none on the outbox. The settings beside search_path decide how values
# are written.
#
# The rows of the two transition tables are paired by key, and one that is in both is taken from both: what is left of a
# key is what the statement did to it. The tables may have their rows in different orders, and a cascade onto the same
# table may put a key there several times. A row that cannot be told has a number in its place, on each side another, so
# that it is always taken to have changed.
#
# OFFSET 0 keeps a value from being computed again wherever it is used.
WATCH = """
CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET TimeZone = 'UTC' SET DateStyle = 'ISO, YMD' SET IntervalStyle = 'postgres' SET bytea_output = 'hex'
SET extra_float_digits = 1 AS $$
DECLARE
    -- bytea, bpchar, varchar, text: their size is known without reading what is stored apart.
    texts     CONSTANT oid[] := '{17,25,1042,1043}';
    -- These and numbers, dates, times, uuid, inet, cidr and macaddr have a JSON whatever they hold.
    plain     CONSTANT oid[] := '{16,17,18,19,20,21,23,25,26,650,700,701,829,869,1042,1043,1082,1083,1114,1184,1186,1266,'
                                '1700,2950}';
    hidden    CONSTANT text[] := tg_argv[2:];
    otherwise jsonb := '{"too_large": true}';
    notify    CONSTANT text := current_setting('mailroom.notify', true);
    key       text;
    columns   text;
    stored    text;
    direct    text;
    rows      text;
    changes   text;
    old_side  text;
    new_side  text;
    sent      bigint;
BEGIN
    IF current_setting('mailroom.watch', true) = 'off' THEN
        RETURN NULL;
    END IF;
    IF tg_op = 'TRUNCATE' THEN
        INSERT INTO {schema}.outbox (topic, kind, message_type, event_type, value_json)
        VALUES (concat(tg_argv[0], '.truncated'), 'E', 'C', 'U', '{"old": null, "new": null, "changed": []}');
        RETURN NULL;
    END IF;
    -- An INSERT of no rows would ring the doorbell.
    IF tg_level = 'STATEMENT' THEN
        IF tg_op = 'DELETE' THEN
            PERFORM FROM old_rows LIMIT 1;
        ELSE
            PERFORM FROM new_rows LIMIT 1;
        END IF;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
    END IF;

    SELECT CASE count(*) WHEN 0 THEN NULL
                         WHEN 1 THEN concat('jsonb_build_array(', string_agg(c.name, ''), ') ->> 0')
                         ELSE concat('jsonb_build_array(', string_agg(c.name, ', ' ORDER BY c.nth), ')::text') END
    INTO key
    FROM (SELECT format('n.%I', a.attname) AS name, k.nth
          FROM pg_index AS i CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (attnum, nth)
          JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
          WHERE i.indrelid = tg_relid AND i.indisprimary AND k.nth <= i.indnkeyatts) AS c;
    IF key IS NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('table %I.%I is watched, but has no primary key any more', tg_table_schema, tg_table_name),
            HINT = 'It makes the keys of the messages. Add one, or end the watch: mailroom unwatch TABLE. To change rows '
                   'meanwhile without messages: SET LOCAL mailroom.watch = off.';
    END IF;

    -- Virtual columns are null in triggers.
    SELECT string_agg(c.name, ', ' ORDER BY c.attnum),
           concat_ws(' + ', '0::bigint', string_agg(
               format('coalesce(%s(%s), 0)',
                      CASE WHEN c.atttypid = ANY (texts) THEN 'octet_length' ELSE 'pg_column_size' END, c.name),
               ' + ') FILTER (WHERE c.attlen = -1)),
           CASE WHEN bool_and(c.atttypid = ANY (plain)) THEN '524288' ELSE '-1' END
    INTO columns, stored, direct
    FROM (SELECT format('n.%I', a.attname) AS name, a.attnum, a.atttypid, a.attlen FROM pg_attribute AS a
          WHERE a.attrelid = tg_relid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> 'v'
            AND a.attname <> ALL (hidden)) AS c;
    -- A hidden column that is gone may have another name now, so nothing of the row is told.
    IF EXISTS (SELECT FROM unnest(hidden) AS h (name) WHERE NOT EXISTS (
                   SELECT FROM pg_attribute AS a
                   WHERE a.attrelid = tg_relid AND a.attname = h.name AND a.attnum > 0 AND NOT a.attisdropped)) THEN
        otherwise := '{"withheld": true}';
        stored := '16777217';
    END IF;

    rows := format('SELECT (%s) COLLATE "C" AS key, coalesce(CASE WHEN %s <= %s THEN to_jsonb(r.*) '
                   'WHEN %2$s <= 16777216 THEN {schema}.watch_json(r.*) END, ', key, stored, direct);
    columns := concat(' AS n CROSS JOIN LATERAL (SELECT ', columns, ') AS r OFFSET 0');
    old_side := concat(rows, '''-1'') AS value FROM ',
                       CASE tg_level WHEN 'ROW' THEN '(SELECT ($1).*)' ELSE 'old_rows' END, columns);
    new_side := concat(rows, '''1'') AS value FROM ',
                       CASE tg_level WHEN 'ROW' THEN '(SELECT ($2).*)' ELSE 'new_rows' END, columns);
    changes := CASE tg_op
        WHEN 'INSERT' THEN concat('SELECT key, NULL::jsonb AS old, value AS new FROM (', new_side, ') AS s')
        WHEN 'DELETE' THEN concat('SELECT key, value AS old, NULL::jsonb AS new FROM (', old_side, ') AS s')
        ELSE concat('SELECT key, (array_agg(value) FILTER (WHERE times < 0))[1] AS old, '
                    '(array_agg(value) FILTER (WHERE times > 0))[1] AS new '
                    'FROM (SELECT key, value, sum(times) AS times '
                    'FROM (SELECT key, value, -1 AS times FROM (', old_side, ') AS o '
                    'UNION ALL SELECT key, value, 1 FROM (', new_side, ') AS n) AS s '
                    'GROUP BY key, value HAVING sum(times) <> 0) AS t GROUP BY key') END;

    -- Only the statement itself finds out whether an UPDATE has changed anything that is told.
    IF tg_op = 'UPDATE' THEN
        PERFORM set_config('mailroom.notify', 'off', true);
    END IF;
    EXECUTE concat('
        INSERT INTO {schema}.outbox (topic, key, kind, message_type, event_type, value_json)
        SELECT concat($3, CASE event WHEN ''C'' THEN ''.created'' WHEN ''U'' THEN ''.updated'' ELSE ''.deleted'' END),
               CASE WHEN octet_length($4 || key) BETWEEN 1 AND 1024 THEN $4 || key ELSE $4 || md5(key) END,
               ''E'', ''O'', event, CASE WHEN octet_length(value::text) <= 16777216 THEN value ELSE $5 END
        FROM (SELECT key, event, CASE
                  WHEN jsonb_typeof(coalesce(old, new)) = ''object'' AND jsonb_typeof(coalesce(new, old)) = ''object''
                  THEN jsonb_build_object(''old'', old, ''new'', new, ''changed'', CASE WHEN event <> ''U'' THEN ''[]''
                      ELSE (SELECT jsonb_agg(c.key) FROM jsonb_each(new) AS c (key, value)
                            WHERE c.value IS DISTINCT FROM old -> c.key) END) END AS value
              FROM (SELECT key, old, new, CASE WHEN old IS NULL THEN ''C'' WHEN new IS NULL THEN ''D'' ELSE ''U'' END::"char"
                        AS event FROM (', changes, ') AS c OFFSET 0) AS e OFFSET 0) AS m')
    USING OLD, NEW, tg_argv[0], tg_argv[1], otherwise;
    GET DIAGNOSTICS sent = ROW_COUNT;
    IF tg_op = 'UPDATE' THEN
        PERFORM set_config('mailroom.notify', coalesce(notify, ''), true);
        IF sent > 0 THEN
            -- No rows: it rings the doorbell.
            INSERT INTO {schema}.outbox (topic, value_json) SELECT '', NULL WHERE false;
        END IF;
    END IF;
    RETURN NULL;
END $$
"""

COMMENTS = {
    "watch()": "The trigger of watched tables: sends what happens to their rows.",
    "watch_json(record)": "A row as JSON; null if it has none, or more than 16 MiB.",
}

# Without this, the error would name functions and triggers, but no command.
REFUSE = f"""
DO $$
DECLARE
    watched text;
BEGIN
    SELECT string_agg(DISTINCT t.tgrelid::regclass::text, ', ') INTO watched FROM pg_trigger AS t
    WHERE t.tgfoid = 'watch()'::regprocedure AND t.tgparentid = 0;
    IF watched IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '{HOLDS_MESSAGES}', MESSAGE = concat('Not removed: ', watched, ' is watched. End '
            'that first (mailroom unwatch TABLE; mailroom watch --list), or have it ended: '
            'mailroom migrate --revision base --discard (alembic -x discard=yes downgrade base).');
    END IF;
END $$
"""


def upgrade() -> None:
    schema = op.get_context().version_table_schema
    for statement in (JSON, WATCH):
        op.execute(statement.replace("{schema}", f'"{schema}"'))
    # Else whoever owns a table could send whatever he likes.
    op.execute("REVOKE ALL ON FUNCTION watch(), watch_json(record) FROM PUBLIC")
    for function, text in COMMENTS.items():
        op.execute(f"COMMENT ON FUNCTION {function} IS '{text}'")


def downgrade() -> None:
    config = op.get_context().config
    if config is None or not config.attributes.get("discard"):
        op.execute(REFUSE)
    op.execute("DROP FUNCTION watch(), watch_json(record) CASCADE")
