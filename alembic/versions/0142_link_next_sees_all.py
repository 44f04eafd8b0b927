"""What a source answers its readers is all there is, or an error: its owner may be bound by row security too."""

from alembic import op

revision = "0142"
down_revision = "0139"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER FUNCTION link_next(bigint, bigint) SET row_security = off")


def downgrade() -> None:
    op.execute("ALTER FUNCTION link_next(bigint, bigint) RESET row_security")
