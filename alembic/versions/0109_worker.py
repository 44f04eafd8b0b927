"""In-flight entries name the process and the transaction of their batch."""

from alembic import op

revision = "0109"
down_revision = "0108"
branch_labels = None
depends_on = None

COMMENTS = {
    "life": "The worker process, which holds the lock of this number while it is alive; null if it has none.",
    "xact": "The transaction of the batch.",
}


def upgrade() -> None:
    op.execute("ALTER TABLE worker ADD life integer, ADD xact bigint")
    for column, text in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN worker.{column} IS '{text}'")


def downgrade() -> None:
    op.execute("ALTER TABLE worker DROP life, DROP xact")
