"""Spark: the ledger of what its jobs and streams have committed."""

from alembic import op

revision = "0104"
down_revision = "0103"
branch_labels = None
depends_on = None

LEDGER = """
CREATE TABLE spark_batch (
    name     text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 100),
    batch    bigint NOT NULL,
    query    text COLLATE "C",
    messages bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, batch)
);
CREATE INDEX spark_batch_at ON spark_batch (at)
"""

COMMENTS = {
    None: "What Spark has committed: each batch once, in the transaction that sent its messages.",
    "name": "The stream's name, or its query's id; the idempotency key of a job.",
    "batch": "The number of the micro-batch; -1 for a job.",
    "query": "The id of the streaming query; a new checkpoint brings a new one.",
    "messages": "How many messages it sent; their source is mailroom spark <name> <batch>.",
    "at": "When.",
}


def upgrade() -> None:
    op.execute(LEDGER)
    for column, text in COMMENTS.items():
        what = "TABLE spark_batch" if column is None else f"COLUMN spark_batch.{column}"
        op.execute(f"COMMENT ON {what} IS '{text.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    op.execute("DROP TABLE spark_batch")
