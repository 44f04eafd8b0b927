"""Whether a link flows, known at its reader: since when and why a source is not read."""

from alembic import op

revision = "0129"
down_revision = "0125"
branch_labels = None
depends_on = None

# Beside `state`, which says what may be received: a source that is not reached now is open, and what was fetched before
# may come in.
COLUMNS = """
ALTER TABLE origin
    ADD trouble text COLLATE "C" CHECK (trouble IN ('unreachable', 'failing')),
    ADD since   timestamptz
"""
COMMENTS = {
    "trouble": "Why it is not read now, though it is tried again: unreachable, or failing; null while neither.",
    "since": "Since when it is not read; null while it is.",
    "why": "Why it is not read, and what to do.",
}


def upgrade() -> None:
    op.execute(COLUMNS)
    for column, text in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN origin.{column} IS '{text}'")


def downgrade() -> None:
    op.execute("UPDATE origin SET why = NULL WHERE state = 'open'")
    op.execute("ALTER TABLE origin DROP trouble, DROP since")
    op.execute("COMMENT ON COLUMN origin.why IS 'Why it is stopped, and what to do.'")
