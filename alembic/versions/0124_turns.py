"""Who delivers and who executes is decided by locks on tables, which take a right at the node."""

from alembic import op

revision = "0124"
down_revision = "0120"
branch_labels = None
depends_on = None

# Nothing is ever in these tables, so nothing vacuums or analyzes them for long. The mode of the lock is the weakest
# that conflicts with itself: reading the tables, as a dump does, is in nobody's way.
TABLES = {
    "dispatch_turn": "Has no rows: who locks it may deliver. Takes UPDATE, DELETE or TRUNCATE on it.",
    "execute_turn": "Has no rows: who locks it may execute. Takes UPDATE, DELETE or TRUNCATE on it.",
}
# Programs of before this revision take an advisory lock instead. It is tried for as well, and waited for as long as a
# role with rights at the node has it or is in the queue: whoever else holds it, which every role can, is passed over.
# 1835100525 is `mailroom.locks.DISPATCH`, and the second key is `mailroom.locks.key` of the outbox.
#
# Without SET search_path, which costs as much as the rest; so it names the schema of everything.
FUNCTIONS = {
    "take_dispatch_turn": ("dispatch_turn", "outbox", "Waits until nobody else delivers; until the transaction ends."),
    "take_execute_turn": (
        "execute_turn",
        "outbox_executable",
        "Waits until nobody else executes; until the transaction ends.",
    ),
}
TAKE = """
CREATE FUNCTION {function}() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    key CONSTANT integer := pg_catalog.int4(
        pg_catalog.int8mi(pg_catalog.int8('"{schema}".{outbox}'::pg_catalog.regclass::pg_catalog.oid), 2147483648));
BEGIN
    LOCK TABLE ONLY "{schema}".{turn} IN SHARE UPDATE EXCLUSIVE MODE;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(1835100525, key)
       AND "{schema}".has_older_program(key, '"{schema}".{outbox}'::pg_catalog.regclass) THEN
        PERFORM pg_catalog.pg_advisory_xact_lock(1835100525, key);
    END IF;
END $$
"""
HAS_OLDER_PROGRAM = """
CREATE FUNCTION has_older_program(key integer, outbox regclass) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
SELECT EXISTS (
    SELECT FROM pg_locks AS l, pg_stat_get_activity(l.pid) AS a, pg_roles AS r
    WHERE l.locktype = 'advisory' AND l.classid = 1835100525::oid AND l.objsubid = 2
      AND l.objid::bigint = key::bigint & 4294967295
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.pid <> pg_backend_pid()
      AND pg_has_role(a.usesysid, r.oid, 'MEMBER') AND has_table_privilege(r.oid, outbox, 'DELETE'))
$$
"""
ABOUT_OLDER_PROGRAM = "Whether a role that may empty the outbox has, or waits for, the lock of programs before 0124."


def upgrade() -> None:
    schema = str(op.get_context().version_table_schema)
    for table, text in TABLES.items():
        op.execute(f"CREATE TABLE {table} ()")
        op.execute(f"COMMENT ON TABLE {table} IS '{text}'")
    op.execute(HAS_OLDER_PROGRAM)
    op.execute(f"COMMENT ON FUNCTION has_older_program(integer, regclass) IS '{ABOUT_OLDER_PROGRAM}'")
    for function, (turn, outbox, text) in FUNCTIONS.items():
        created = TAKE.replace("{function}", function).replace("{turn}", turn).replace("{outbox}", outbox)
        op.execute(created.replace("{schema}", schema))
        op.execute(f"COMMENT ON FUNCTION {function}() IS '{text}'")


def downgrade() -> None:
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {function}()")
    op.execute("DROP FUNCTION has_older_program(integer, regclass)")
    for table in TABLES:
        op.execute(f"DROP TABLE {table}")
