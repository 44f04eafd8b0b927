"""Drains: a shard is one of several side by side, and a segment one transaction with its file."""

from alembic import op

revision = "0150"
down_revision = "0149"
branch_labels = None
depends_on = None

RENAMED = (("lane", "shard"), ("epoch", "segment"))
COMMENTS = {
    None: "How far inboxes have been drained into files: a row per shard, locked by the drainer of the shard.",
    "shard": "The number of the drain, of those that run side by side.",
    "segment": "The last segment: one transaction and one file with its messages.",
    "messages": "How many messages the shard has drained in total.",
    "at": "When the last segment was committed.",
}


def upgrade() -> None:
    for old, new in RENAMED:
        op.execute(f"ALTER TABLE spark_drain RENAME COLUMN {old} TO {new}")
    op.execute("ALTER TABLE spark_drain RENAME CONSTRAINT spark_drain_lane_check TO spark_drain_shard_check")
    for column, text in COMMENTS.items():
        what = "TABLE spark_drain" if column is None else f"COLUMN spark_drain.{column}"
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute("ALTER TABLE spark_drain RENAME CONSTRAINT spark_drain_shard_check TO spark_drain_lane_check")
    for old, new in RENAMED:
        op.execute(f"ALTER TABLE spark_drain RENAME COLUMN {new} TO {old}")
