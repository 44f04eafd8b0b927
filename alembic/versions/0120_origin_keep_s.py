"""How long a source keeps what was acknowledged, known at its reader, which keeps the receipts a day longer."""

from alembic import op

revision = "0120"
down_revision = "0119"
branch_labels = None
depends_on = None

COMMENT = "How many seconds the source keeps rows that were acknowledged, as it said at the last hello."


def upgrade() -> None:
    op.execute("ALTER TABLE origin ADD keep_s double precision NOT NULL DEFAULT 172800 CHECK (keep_s >= 0)")
    op.execute(f"COMMENT ON COLUMN origin.keep_s IS '{COMMENT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE origin DROP keep_s")
