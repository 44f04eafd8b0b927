"""outbox_jdbc: the outbox for writers that may write the same row twice.

A view to insert into. An INSERT into it becomes, by a rule, one INSERT into the outbox of those rows whose id was not
there yet. By a rule and not by a row trigger: each statement on the outbox reads its constraints anew, which costs
more than all else, so that a trigger with a statement for each row took 19 times as long as the plain insert of many
rows; the rule takes 3 times as long. COPY knows no rules, so for COPY alone there is a trigger.
"""

from alembic import op

revision = "0105"
down_revision = "0104"
branch_labels = None
depends_on = None

# Each row is deleted a week after it was written. Vacuum reads the whole primary key, which has a week's ids in random
# order. So its threshold is a share of the rows, not a fixed number as for the small tables.
ID = """
CREATE TABLE outbox_jdbc_id (
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 20000)
"""
ID_AT = "CREATE INDEX outbox_jdbc_id_at ON outbox_jdbc_id (at)"

# Returns the id if it is new, otherwise no row. The INSERT waits for a running transaction that has written the same
# id: once that has ended, its message is there or never will be. It runs with the caller's rights, or anybody could use
# up ids.
TAKE = """
CREATE FUNCTION outbox_jdbc_take(message_id uuid) RETURNS SETOF uuid LANGUAGE plpgsql ROWS 1
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF message_id IS NULL THEN
        RAISE not_null_violation USING
            MESSAGE = 'a row for outbox_jdbc has no message_id',
            HINT = 'Give each message a UUID that is the same whenever its row is computed again, such as the md5 of '
                   'its business key. Rows that need none go into outbox, which keeps a row as often as it is written.',
            TABLE = 'outbox_jdbc', COLUMN = 'message_id';
    END IF;
    INSERT INTO {schema}.outbox_jdbc_id (id) VALUES (message_id) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN NEXT message_id;
    END IF;
END $$
"""

# Text where the outbox has uuid, "char" and jsonb, so that JDBC's strings fit without further settings. The view has
# no rows, but Spark reads its columns before it writes.
VIEW = """
CREATE VIEW outbox_jdbc AS SELECT
    NULL::text        AS message_id,
    NULL::text        AS topic,
    NULL::text        AS key,
    NULL::text        AS kind,
    NULL::text        AS message_type,
    NULL::text        AS event_type,
    NULL::bytea       AS value,
    NULL::text        AS value_json,
    NULL::text        AS headers,
    NULL::timestamptz AS deliver_at,
    NULL::timestamptz AS expires_at,
    NULL::bigint      AS after_clock
WHERE false
"""

# The function is in the select list, where an empty set drops the row. In a WHERE it could run before the joins and
# conditions of the INSERT's own SELECT, for rows that are then dropped or doubled: their ids would be known without a
# message. message_id occurs once, since its expression, such as gen_random_uuid(), is computed for each occurrence. A
# cast to "char" truncates: Event would become E, and Refund a reply.
RULE = """
CREATE RULE once AS ON INSERT TO outbox_jdbc DO INSTEAD
INSERT INTO outbox (message_id, topic, key, kind, message_type, event_type, value, value_json, headers, deliver_at,
                    expires_at, after_clock)
SELECT outbox_jdbc_take(NEW.message_id::uuid), NEW.topic, coalesce(NEW.key, gen_random_uuid()::text),
       CASE WHEN octet_length(NEW.kind) > 1 THEN '?' ELSE coalesce(NEW.kind, 'M') END::"char",
       CASE WHEN octet_length(NEW.message_type) > 1 THEN '?' ELSE coalesce(NEW.message_type, 'U') END::"char",
       CASE WHEN octet_length(NEW.event_type) > 1 THEN '?' ELSE NEW.event_type END::"char",
       NEW.value, NEW.value_json::jsonb, NEW.headers::jsonb, NEW.deliver_at, NEW.expires_at, NEW.after_clock
"""

COPY = """
CREATE FUNCTION outbox_jdbc_copy() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.outbox_jdbc SELECT NEW.*;
    RETURN NEW;
END $$
"""
TRIGGER = "CREATE TRIGGER copy INSTEAD OF INSERT ON outbox_jdbc FOR EACH ROW EXECUTE FUNCTION outbox_jdbc_copy()"

COMMENTS = {
    "TABLE outbox_jdbc_id": "Ids of the messages that came through outbox_jdbc, kept for seven days.",
    "COLUMN outbox_jdbc_id.id": "The message_id, written in the transaction that wrote the message.",
    "COLUMN outbox_jdbc_id.at": "When it was written.",
    "VIEW outbox_jdbc": "The outbox for writers that may write a row twice: it takes the first row of each message_id.",
    "COLUMN outbox_jdbc.message_id": "A UUID that is the same whenever the row is written again. Required.",
    "COLUMN outbox_jdbc.topic": "What the message is addressed to. Required.",
    "COLUMN outbox_jdbc.key": "Ordering key within an inbox; null for a key of its own.",
    "COLUMN outbox_jdbc.kind": "M message (null), E event, C command, R reply.",
    "COLUMN outbox_jdbc.message_type": "O object, D database, C collection, U user-defined (null).",
    "COLUMN outbox_jdbc.event_type": "C created, U updated, D deleted.",
    "COLUMN outbox_jdbc.value": "The value as CBOR; exactly one of value and value_json is given.",
    "COLUMN outbox_jdbc.value_json": "The value as the text of a JSON.",
    "COLUMN outbox_jdbc.headers": "Flat map of text to text, as the text of a JSON object.",
    "COLUMN outbox_jdbc.deliver_at": "The message is not delivered before this time.",
    "COLUMN outbox_jdbc.expires_at": "If not delivered before this time, the message is dropped.",
    "COLUMN outbox_jdbc.after_clock": "The stamp is later than this clock.",
    "FUNCTION outbox_jdbc_take(uuid)": "Returns a message_id that is new, and remembers it; no row if it was known.",
    "FUNCTION outbox_jdbc_copy()": "Turns rows that COPY brings into outbox_jdbc into INSERTs.",
}


def upgrade() -> None:
    schema = op.get_context().version_table_schema
    for statement in (ID, ID_AT, TAKE, VIEW, RULE, COPY, TRIGGER):
        op.execute(statement.replace("{schema}", f'"{schema}"'))
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute("DROP VIEW outbox_jdbc")
    op.execute("DROP FUNCTION outbox_jdbc_copy(), outbox_jdbc_take(uuid)")
    op.execute("DROP TABLE outbox_jdbc_id")
