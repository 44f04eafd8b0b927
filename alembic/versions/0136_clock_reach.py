"""How far one send may raise the node's clock, and how far an operator has said that clocks may go."""

import re

from alembic import op

revision = "0136"
down_revision = "0135"
branch_labels = None
depends_on = None

ADVANCED = "ALTER TABLE node ADD advanced bigint NOT NULL DEFAULT 0 CHECK (advanced BETWEEN 0 AND 6917529027641081856)"

# As in mailroom.clock: where a start of this node would take its clock now, is within what it may be raised to. Other
# nodes have started, and their clocks are passed on here. With the owner's rights, since writers may not read the
# clock; it tells one number. It never falls while the server's time does not, so what was taken in once is taken again.
REACH = """
CREATE FUNCTION clock_reach() RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
RETURN (
    SELECT greatest(c.last_value, least(
        greatest(2305843009213693952, n.advanced),
        4294967296 + least(9223372032559808511, greatest(c.last_value, n.clock_ceiling, least(
            extract(epoch FROM clock_timestamp() - timestamptz '2026-01-01 00:00+00'), 15768000000
            )::bigint * 16777216))))
    FROM clock AS c, node AS n)
"""

# As in 0119, with `after_clock` last: so it alone is broken where it is, and mostly a clock that is not large is right.
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
    "source": "octet_length(new.source) <= 200",
    "after_clock": "new.after_clock >= 0 AND new.after_clock <= 4294967296",
}


def _qualified(rule: str) -> str:
    """Name the schema of all that a rule calls: the writer's search_path may put something else first."""
    rule = re.sub(r" (~|=|<|<=|>=) ", r" OPERATOR(pg_catalog.\1) ", rule)
    return re.sub(r"(?<![.\w])[a-z_]+\(|(?<=::)text\b", r"pg_catalog.\g<0>", rule)


BROKEN = "\n        ".join(f"WHEN NOT ({_qualified(rule)}) THEN '{name}'" for name, rule in RULES.items())
BY_TIME = """16777216.0::pg_catalog.float8 OPERATOR(pg_catalog.*) least(15768000000.0::pg_catalog.float8,
                pg_catalog.date_part('epoch', pg_catalog.now() OPERATOR(pg_catalog.-)
                    '2026-01-01 00:00+00'::pg_catalog.timestamptz))"""
TOO_FAR = """RAISE check_violation USING
            MESSAGE = pg_catalog.format('after_clock %s is more than 2^32 beyond the clock of this node',
                                        new.after_clock),
            HINT = 'Give the clock of the message that this one follows. If its node is so far ahead, an operator '
                   'lets this one follow: mailroom node advance CLOCK',
            SCHEMA = tg_table_schema, TABLE = tg_table_name, COLUMN = 'after_clock',
            CONSTRAINT = pg_catalog.concat(tg_table_name, '_after_clock');"""
# A row of another transaction is a copy, as in 0133.
COPY = """IF (new.xact OPERATOR(pg_catalog.<>) pg_catalog.pg_current_xact_id()) THEN
            PERFORM {schema}.raise_sequence('{schema}.outbox_position_seq', new.position);
        END IF;"""
# Without SET search_path, which takes as long as all of the rest. Parentheses, since IF reads to the first THEN.
# 2^32 is within any node's reach, and so is the clock of a start, which takes no look at the node: mostly those are
# given. Beyond, the node is asked, but not for replicated rows, which were sent before.
CHECKED = f"""
CREATE OR REPLACE FUNCTION check_message() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    broken pg_catalog.text := CASE
        {BROKEN} END;
BEGIN
    IF broken IS NULL THEN
        {COPY}
        RETURN new;
    END IF;
    IF (broken OPERATOR(pg_catalog.=) 'after_clock' AND new.after_clock OPERATOR(pg_catalog.>) 0
        AND new.after_clock OPERATOR(pg_catalog.<=) 4611686018427387904) THEN
        IF ({BY_TIME} OPERATOR(pg_catalog.>=) new.after_clock::pg_catalog.float8
            OR pg_catalog.current_setting('session_replication_role') OPERATOR(pg_catalog.=) 'replica'
            OR new.after_clock OPERATOR(pg_catalog.<=) {{schema}}.clock_reach()) THEN
            {COPY}
            RETURN new;
        END IF;
        {TOO_FAR}
    END IF;
    RAISE check_violation USING
        MESSAGE = pg_catalog.format(
            'new row for relation "%s" violates check constraint "outbox_%s"', tg_table_name, broken),
        SCHEMA = tg_table_schema, TABLE = tg_table_name, CONSTRAINT = pg_catalog.concat('outbox_', broken),
        COLUMN = pg_catalog.replace(broken, 'one_value', 'value');
END $$
"""
# The executables' own rules stay in their function (0107), whose trigger fires before this one, by its name.
EXECUTABLE = f"""
CREATE FUNCTION check_executable_clock() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (new.after_clock OPERATOR(pg_catalog.<=) {{schema}}.clock_reach()) THEN
        RETURN new;
    END IF;
    {TOO_FAR}
END $$
"""
TRIGGER = """
CREATE TRIGGER checked_clock BEFORE INSERT OR UPDATE ON outbox_executable FOR EACH ROW
WHEN (new.after_clock > 4294967296) EXECUTE FUNCTION check_executable_clock()
"""
COMMENTS = {
    "COLUMN node.advanced": "How far an operator has let the clock go (`mailroom node advance`); 0 for never.",
    "FUNCTION clock_reach()": "The largest clock to which one send may raise the node''s: 2^32 beyond its own.",
    "FUNCTION check_executable_clock()": "Refuses an after_clock that is too far beyond the node''s clock.",
}


def upgrade() -> None:
    schema = f'"{op.get_context().version_table_schema}"'
    for statement in (ADVANCED, REACH, CHECKED, EXECUTABLE, TRIGGER):
        op.execute(statement.replace("{schema}", schema))
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    scripts = op.get_context().environment_context.script  # type: ignore[union-attr]
    before = scripts.get_revision("0133").module.raising("outbox", str(op.get_context().version_table_schema))
    op.execute("DROP TRIGGER checked_clock ON outbox_executable")
    op.execute(before)
    op.execute("DROP FUNCTION check_executable_clock()")
    op.execute("DROP FUNCTION clock_reach()")
    op.execute("ALTER TABLE node DROP advanced")
