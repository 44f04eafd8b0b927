"""Turns: deliveries and executions no longer look for programs of before 0124, which were never released."""

from pathlib import Path
from runpy import run_path

from alembic import op

revision = "0152"
down_revision = "0151"
branch_labels = None
depends_on = None

TAKE = """
CREATE OR REPLACE FUNCTION {function}() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    LOCK TABLE ONLY "{schema}".{turn} IN SHARE UPDATE EXCLUSIVE MODE;
END $$
"""


def upgrade() -> None:
    schema = str(op.get_context().version_table_schema)
    for turn in ("dispatch_turn", "execute_turn"):
        op.execute(TAKE.replace("{function}", f"take_{turn}").replace("{turn}", turn).replace("{schema}", schema))
    op.execute("DROP FUNCTION has_older_program(integer, regclass)")
    op.execute(
        "COMMENT ON COLUMN spark_batch.digest IS "
        "'The sum of its rows'' hashes, their ids left out, whatever their order.'"
    )


def downgrade() -> None:
    schema = str(op.get_context().version_table_schema)
    before = run_path(str(Path(__file__).with_name("0124_turns.py")))
    op.execute(before["HAS_OLDER_PROGRAM"])
    op.execute(f"COMMENT ON FUNCTION has_older_program(integer, regclass) IS '{before['ABOUT_OLDER_PROGRAM']}'")
    for function, (turn, outbox, _) in before["FUNCTIONS"].items():
        taking = before["TAKE"].replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").replace("{function}", function)
        op.execute(taking.replace("{turn}", turn).replace("{outbox}", outbox).replace("{schema}", schema))
