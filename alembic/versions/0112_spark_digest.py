"""Spark: the ledger keeps what each batch held, as a digest."""

from alembic import op

revision = "0112"
down_revision = "0111"
branch_labels = None
depends_on = None

ABOUT = "The sum of its rows'' hashes, their ids left out, whatever their order; null if entered before revision 0112."


def upgrade() -> None:
    op.execute("ALTER TABLE spark_batch ADD digest bytea CHECK (octet_length(digest) = 16)")
    op.execute(f"COMMENT ON COLUMN spark_batch.digest IS '{ABOUT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE spark_batch DROP digest")
