"""Inboxes that keep messages for a while only, such as those of replies that nobody may wait for any more."""

from alembic import op

revision = "0116"
down_revision = "0115"
branch_labels = None
depends_on = None

COMMENTS = {
    "keep_s": "How many seconds a delivered message may wait before the janitor drops it; null for ever.",
    "dropped": "How many messages the janitor has dropped here.",
}


def upgrade() -> None:
    op.execute(
        "ALTER TABLE inbox_registry ADD keep_s double precision CHECK (keep_s > 0), "
        "ADD dropped bigint NOT NULL DEFAULT 0"
    )
    for column, text in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN inbox_registry.{column} IS '{text}'")


def downgrade() -> None:
    op.execute("ALTER TABLE inbox_registry DROP dropped, DROP keep_s")
