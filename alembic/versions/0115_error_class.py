"""Failure: the class of the error, which the answer to a command that failed names; its text stays here."""

from alembic import op

revision = "0115"
down_revision = "0114"
branch_labels = None
depends_on = None

ABOUT = "The class of what was raised, or of what is known of it; null for a replay."


def upgrade() -> None:
    op.execute('ALTER TABLE attempt ADD error_class text COLLATE "C"')
    op.execute(f"COMMENT ON COLUMN attempt.error_class IS '{ABOUT}'")


def downgrade() -> None:
    op.execute("ALTER TABLE attempt DROP error_class")
