"""The outbox's rules in a trigger function, which a session compiles once, and a doorbell that sets nothing.

PostgreSQL parses all CHECKs of a table again for each statement, which took three quarters of the time of an insert.
"""

import re

from alembic import op

revision = "0119"
down_revision = "0118"
branch_labels = None
depends_on = None

# As in a CHECK, a rule that is null holds. The topic's length is not part of its pattern, which it would make slow.
RULES = {
    "topic": "new.topic ~ '^[A-Za-z][A-Za-z0-9_.-]*$' AND octet_length(new.topic) <= 200",
    "key": "octet_length(new.key) >= 1 AND octet_length(new.key) <= 1024",
    "kind": "new.kind = ANY ('{M,E,C,R}')",
    "message_type": "new.message_type = ANY ('{O,D,C,U}')",
    "event_type": "new.event_type = ANY ('{C,U,D}')",
    "one_value": "num_nonnulls(new.value, new.value_json) = 1",
    "value": "octet_length(new.value) <= 16777216",
    "value_json": "octet_length(new.value_json::text) <= 16777216",
    "headers": "jsonb_typeof(new.headers) = 'object' AND octet_length(new.headers::text) <= 8192 "
    """AND NOT jsonb_path_exists(new.headers, 'strict $.* ? (@.type() <> "string")')""",
    "deliver_at": "new.deliver_at >= '0001-01-01 00:00+00' AND new.deliver_at < '9999-01-01 00:00+00'",
    "expires_at": "new.expires_at >= '0001-01-01 00:00+00' AND new.expires_at < '9999-01-01 00:00+00'",
    "sent_at": "new.sent_at >= '0001-01-01 00:00+00' AND new.sent_at < '9999-01-01 00:00+00'",
    "after_clock": "new.after_clock >= 0 AND new.after_clock <= 4611686018427387904",
    "source": "octet_length(new.source) <= 200",
}


def _qualified(rule: str) -> str:
    """Name the schema of all that a rule calls: the writer's search_path may put something else first."""
    rule = re.sub(r" (~|=|<|<=|>=) ", r" OPERATOR(pg_catalog.\1) ", rule)
    return re.sub(r"(?<![.\w])[a-z_]+\(|(?<=::)text\b", r"pg_catalog.\g<0>", rule)


BROKEN = "\n        ".join(f"WHEN NOT ({_qualified(rule)}) THEN '{name}'" for name, rule in RULES.items())

# Without SET search_path, which takes as long as all of the rest. The error is that of a CHECK, without the row.
CHECKED = f"""
CREATE FUNCTION check_message() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    broken pg_catalog.text := CASE
        {BROKEN} END;
BEGIN
    IF broken IS NULL THEN
        RETURN new;
    END IF;
    RAISE check_violation USING
        MESSAGE = pg_catalog.format(
            'new row for relation "%s" violates check constraint "outbox_%s"', tg_table_name, broken),
        SCHEMA = tg_table_schema, TABLE = tg_table_name, CONSTRAINT = pg_catalog.concat('outbox_', broken),
        COLUMN = pg_catalog.replace(broken, 'one_value', 'value');
END $$
"""
# Triggers fire by name, and this one is to see what triggers of users have made of the row.
CHECK = "CREATE TRIGGER zz_checked BEFORE INSERT OR UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION check_message()"
# Also with session_replication_role = replica, and for rows that logical replication applies: as CHECKs do.
ALWAYS = "ALTER TABLE outbox ENABLE ALWAYS TRIGGER zz_checked"
UNCHECK = "ALTER TABLE outbox " + ", ".join(f"DROP CONSTRAINT outbox_{name}" for name in RULES)

# As in 0101, without SET search_path. Parentheses, since IF reads to the first THEN.
DOORBELL = """
CREATE OR REPLACE FUNCTION doorbell() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    node CONSTANT integer := (tg_relid::bigint OPERATOR(pg_catalog.-) 2147483648)::integer;
BEGIN
    IF (coalesce(pg_catalog.current_setting('mailroom.notify', true), '') OPERATOR(pg_catalog.<>) 'off'
        AND CASE WHEN pg_catalog.pg_try_advisory_lock_shared(1835100524, node)
                 THEN pg_catalog.pg_advisory_unlock_shared(1835100524, node)
                 ELSE false END) THEN
        PERFORM pg_catalog.pg_notify(pg_catalog.concat('mailroom:', tg_relid), '');
    END IF;
    RETURN NULL;
END $$
"""

# What 0101 had.
CHECKS = "ALTER TABLE outbox " + ", ".join(
    f"ADD CONSTRAINT outbox_{name} CHECK ({rule.replace('new.', '')})" for name, rule in RULES.items()
)
DOORBELL_BEFORE = """
CREATE OR REPLACE FUNCTION doorbell() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (current_setting('mailroom.notify', true) IS DISTINCT FROM 'off'
        AND CASE WHEN pg_try_advisory_lock_shared(1835100524, (tg_relid::bigint - 2147483648)::integer)
                 THEN pg_advisory_unlock_shared(1835100524, (tg_relid::bigint - 2147483648)::integer)
                 ELSE false END) THEN
        PERFORM pg_notify(concat('mailroom:', tg_relid), '');
    END IF;
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    for statement in (CHECKED, CHECK, ALWAYS, UNCHECK, DOORBELL):
        op.execute(statement)
    op.execute("COMMENT ON FUNCTION check_message() IS 'Refuses rows that are not valid messages.'")


def downgrade() -> None:
    op.execute("DROP TRIGGER zz_checked ON outbox")
    op.execute("DROP FUNCTION check_message()")
    op.execute(CHECKS)
    op.execute(DOORBELL_BEFORE)
