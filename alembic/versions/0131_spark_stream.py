"""Spark: what each stream of an inbox has given out under which batch number, and what its tasks have read of it."""

from alembic import op

revision = "0131"
down_revision = "0130"
branch_labels = None
depends_on = None

STREAM = """
CREATE TABLE spark_stream (
    inbox      text COLLATE "C" NOT NULL,
    checkpoint text COLLATE "C" NOT NULL,
    batch      bigint NOT NULL,
    above      bigint NOT NULL,
    upto       bigint NOT NULL CHECK (upto > above),
    message_id text NOT NULL,
    messages   bigint NOT NULL,
    digest     bigint NOT NULL,
    read       int8multirange NOT NULL DEFAULT '{}',
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (inbox, batch)
)
"""

COMMENTS = {
    None: "The batches that Spark''s stream of an inbox has given out and not all deleted, and the last one.",
    "inbox": "The inbox.",
    "checkpoint": "The id that the stream''s checkpoint got when it began. One for all rows of an inbox.",
    "batch": "The number of the batch of that checkpoint, from 1.",
    "above": "The clock above which it begins.",
    "upto": "The clock of its last message.",
    "message_id": "The id of its last message.",
    "messages": "How many messages it has.",
    "digest": "The hashes of its messages'' clocks and ids, combined by exclusive or.",
    "read": "The clocks that tasks have read, all that was planned of them.",
    "at": "When it was first given out.",
}


def upgrade() -> None:
    op.execute(STREAM)
    for column, text in COMMENTS.items():
        what = "TABLE spark_stream" if column is None else f"COLUMN spark_stream.{column}"
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute("DROP TABLE spark_stream")
