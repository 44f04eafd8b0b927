"""A worker's batch is held: the server refuses a COMMIT that is not its worker's."""

from alembic import op

revision = "0111"
down_revision = "0110"
branch_labels = None
depends_on = None

# What a cursor WITH HOLD is to give is computed at COMMIT, whoever sends it and however; an error then rolls back.
REFUSE_COMMIT = """
CREATE FUNCTION refuse_commit() RETURNS void LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'the transaction of a batch is for its worker to end' USING
        ERRCODE = 'invalid_transaction_termination',
        HINT = 'Leave COMMIT and ROLLBACK to the worker; for work of its own, a handler opens another connection.';
END $$
"""
# The server tells its client when this setting changes, and undoes it at the end of the transaction. It says how the
# next transaction of the session would begin, so it means nothing to this one, and is itself again before the next.
HOLD_BATCH = """
CREATE FUNCTION hold_batch() RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM set_config('default_transaction_read_only',
                       (NOT current_setting('default_transaction_read_only')::boolean)::text, true);
    EXECUTE 'DECLARE mailroom_batch NO SCROLL CURSOR WITH HOLD FOR SELECT "{schema}".refuse_commit()';
    RETURN true;
END $$
"""

COMMENTS = {
    "hold_batch()": "Has the transaction refuse COMMIT until the cursor mailroom_batch is closed, and its end be told.",
    "refuse_commit()": "What the COMMIT of a batch fails by if it is not its worker who sends it.",
}


def upgrade() -> None:
    schema = op.get_context().version_table_schema
    for statement in (REFUSE_COMMIT, HOLD_BATCH):
        op.execute(statement.replace("{schema}", str(schema)))
    for function, text in COMMENTS.items():
        op.execute(f"COMMENT ON FUNCTION {function} IS '{text}'")


def downgrade() -> None:
    for function in COMMENTS:
        op.execute(f"DROP FUNCTION {function}")
