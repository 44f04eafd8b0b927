"""A worker's batch is held: the server refuses a COMMIT that the worker has not allowed."""

from alembic import op

revision = "0111"
down_revision = "0110"
branch_labels = None
depends_on = None

# The rows of a cursor WITH HOLD are computed at COMMIT, whoever sends it; an error then rolls the transaction back.
REFUSE_COMMIT = """
CREATE FUNCTION refuse_commit() RETURNS void LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'only its worker may end the transaction of a batch' USING
        ERRCODE = 'invalid_transaction_termination',
        HINT = 'Leave COMMIT and ROLLBACK to the worker; for separate work open another connection.';
END $$
"""
# The server reports a change of this setting to its client, and undoes it at the end of the transaction. The setting
# applies to the next transaction of the session, so it has no effect on this one, and is restored before the next.
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
    "hold_batch()": "Makes COMMIT fail until the cursor mailroom_batch is closed; reports the end of the transaction.",
    "refuse_commit()": "Fails the COMMIT of a batch that its worker has not allowed.",
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
