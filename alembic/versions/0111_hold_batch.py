"""The server refuses a COMMIT of a worker's batch by anybody but the worker."""

from alembic import op

revision = "0111"
down_revision = "0110"
branch_labels = None
depends_on = None

# The query of a cursor WITH HOLD runs at COMMIT, whoever sends it and however; its error rolls back.
REFUSE_COMMIT = """
CREATE FUNCTION refuse_commit() RETURNS void LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'only its worker may end the transaction of a batch' USING
        ERRCODE = 'invalid_transaction_termination',
        HINT = 'Leave COMMIT and ROLLBACK to the worker; for separate work open another connection.';
END $$
"""
# The server reports changes of this setting to the client, and restores it at the end of the transaction. It is the
# default of later transactions, so it does not affect this one, and it is restored before the next.
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
    "hold_batch()": "Makes COMMIT fail until the cursor mailroom_batch is closed, and the transaction end visibly.",
    "refuse_commit()": "Makes the COMMIT of a batch fail unless its worker sends it.",
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
