"""Sequences that are behind their rows, since these were copied from another database without them, are raised.

Whoever copies rows brings their `xact` along, which is not the transaction that inserts them. So in both outboxes a row
of another transaction is a copy, and a send pays nothing for it. In other tables only replication is looked at.
"""

from alembic import op

revision = "0133"
down_revision = "0132"
branch_labels = None
depends_on = None

# How far past the rows. What is drawn while a sequence is raised is below that.
BEYOND = 1_000_000

# From the catalog, so that no identity is forgotten. What is scheduled keeps the position that the outbox gave it.
# Leaders own all of it; who may not read a table or a sequence asks for the status, and is told of the others.
BEHIND = """
CREATE FUNCTION sequences_behind(OUT "table" text, OUT "column" text, OUT sequence regclass, OUT highest bigint)
RETURNS SETOF record LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    next bigint;
    place text[];
    found bigint;
BEGIN
    FOR "table", "column", sequence IN
        SELECT t.relname, a.attname, s.oid
        FROM pg_class AS s
        JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = s.oid
            AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
        JOIN pg_class AS t ON t.oid = d.refobjid
        JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
        WHERE s.relnamespace = '"{schema}"'::regnamespace AND t.relnamespace = s.relnamespace AND s.relkind = 'S'
        ORDER BY 1, 2
    LOOP
        CONTINUE WHEN NOT has_sequence_privilege(sequence, 'SELECT');
        next := coalesce(pg_sequence_last_value(sequence) + 1, 1);
        highest := NULL;
        FOREACH place SLICE 1 IN ARRAY ARRAY[["table", "column"]] || CASE "table"
            WHEN 'outbox' THEN '{{scheduled,position}}'::text[] ELSE '{}' END
        LOOP
            CONTINUE WHEN NOT has_table_privilege(format('"{schema}".%I', place[1]), 'SELECT');
            EXECUTE format('SELECT max(%2$I) FROM "{schema}".%1$I WHERE %2$I >= $1', place[1], place[2])
            INTO found USING next;
            highest := greatest(highest, found);
        END LOOP;
        IF highest IS NOT NULL THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END $$
"""
# Two that raise one sequence at once would lower it again, so the second one waits and looks again. With the rights of
# the caller: those of writers do not reach the sequences, and numbers and `xact` are nothing that they set.
RAISE = f"""
CREATE FUNCTION raise_sequence(sequence regclass, number bigint) RETURNS bigint LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF number <= pg_sequence_last_value(sequence) THEN
        RETURN NULL;
    END IF;
    PERFORM FROM "{{schema}}".node FOR NO KEY UPDATE;
    IF number <= pg_sequence_last_value(sequence) THEN
        RETURN NULL;
    END IF;
    RETURN setval(sequence, least(number, 9223372036854775807 - {BEYOND}) + {BEYOND});
END $$
"""
RAISE_ALL = """
CREATE FUNCTION raise_sequences(OUT "table" text, OUT "column" text, OUT value bigint)
RETURNS SETOF record LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    behind record;
BEGIN
    FOR behind IN SELECT * FROM "{schema}".sequences_behind() LOOP
        "table" := behind."table";
        "column" := behind."column";
        value := "{schema}".raise_sequence(behind.sequence, behind.highest);
        IF value IS NOT NULL THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END $$
"""
# The locks of a subtransaction that is rolled back are let go: all inboxes at once may not fit into the lock table.
CLOCK_OF_ROWS = """
CREATE FUNCTION clock_of_rows() RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    partition regclass;
    found bigint;
    highest bigint := greatest(
        (SELECT max(clock) FROM "{schema}".parked), (SELECT max(clock) FROM "{schema}".dead_letter),
        (SELECT max(sent_clock) FROM "{schema}".transit), 0);
BEGIN
    FOR partition IN SELECT inhrelid FROM pg_inherits WHERE inhparent = '"{schema}".inbox'::regclass LOOP
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
END $$
"""
# Its arguments: the column that the sequence numbers, and the table that the sequence is of.
COPIED = """
CREATE FUNCTION raise_copied() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM "{schema}".raise_sequence(
        pg_get_serial_sequence(format('"{schema}".%I', tg_argv[1]), tg_argv[0])::regclass,
        (to_jsonb(new) ->> tg_argv[0])::bigint);
    RETURN new;
END $$
"""
# They fire where rows are replicated, and nowhere else. The outbox's own trigger fires always.
NUMBERED = {
    "outbox_executable": ("position", "outbox_executable"),
    "scheduled": ("position", "outbox"),
    "dead_letter": ("id", "dead_letter"),
    "attempt": ("id", "attempt"),
    "audit": ("id", "audit"),
    "link": ("number", "link"),
    "origin": ("number", "origin"),
}
# A row that breaks no rule of its outbox (0119, 0107) may be a copy. One of the two functions has no search_path of its
# own.
RIGHT = "IF broken IS NULL THEN"
COPY = """IF broken IS NULL THEN
        IF (new.xact OPERATOR(pg_catalog.<>) pg_catalog.pg_current_xact_id()) THEN
            PERFORM "{schema}".raise_sequence('"{schema}".{outbox}_position_seq', new.position);
        END IF;"""
CHECKED = {"outbox": "0119", "outbox_executable": "0107"}
COMMENTS = {
    "sequences_behind()": "The sequences that are behind the rows that they number, as after a copy of rows alone.",
    "raise_sequence(regclass, bigint)": "Raises a sequence past a number that a row has, and returns its value.",
    "raise_sequences()": "Raises each sequence that is behind its rows past them, and returns which.",
    "clock_of_rows()": "The largest clock that a row of this node has.",
    "raise_copied()": "Raises the sequence of a table past a row that replication brings.",
}


def _checked(outbox: str) -> str:
    """Return how the function is created that checks the rows of an outbox, as it was before this revision."""
    environment = op.get_context().environment_context
    if environment is None:
        raise AssertionError("a migration runs in alembic's environment")
    found: str = environment.script.get_revision(CHECKED[outbox]).module.CHECKED
    return found.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)


def raising(outbox: str, schema: str) -> str:
    """Return how that function is created so that it raises the sequence for a copy."""
    return _checked(outbox).replace(RIGHT, COPY.replace("{schema}", schema).replace("{outbox}", outbox))


def upgrade() -> None:
    schema = str(op.get_context().version_table_schema)
    for function in (BEHIND, RAISE, RAISE_ALL, CLOCK_OF_ROWS, COPIED):
        op.execute(function.replace("{schema}", schema))
    for outbox in CHECKED:
        op.execute(raising(outbox, schema))
    for table, (column, owner) in NUMBERED.items():
        op.execute(
            f"CREATE TRIGGER copied BEFORE INSERT ON {table} FOR EACH ROW "
            f"EXECUTE FUNCTION raise_copied('{column}', '{owner}')"
        )
        op.execute(f"ALTER TABLE {table} ENABLE REPLICA TRIGGER copied")
    for name, text in COMMENTS.items():
        op.execute(f"COMMENT ON FUNCTION {name} IS '{text}'")


def downgrade() -> None:
    for table in NUMBERED:
        op.execute(f"DROP TRIGGER copied ON {table}")
    for outbox in CHECKED:
        op.execute(_checked(outbox))
    op.execute("DROP FUNCTION raise_copied(), clock_of_rows(), raise_sequences()")
    op.execute("DROP FUNCTION raise_sequence(regclass, bigint), sequences_behind()")
