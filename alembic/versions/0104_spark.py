"""Spark: the ledger of batches that jobs and streams have committed, and the list of staging tables."""

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
)
"""
LEDGER_AT = "CREATE INDEX spark_batch_at ON spark_batch (at)"

STAGING = """
CREATE TABLE spark_staging (
    token    uuid PRIMARY KEY,
    name     text COLLATE "C" NOT NULL,
    batch    bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
"""

COMMENTS = {
    "spark_batch": {
        None: "What Spark has committed: each batch once, in the transaction that sent its messages.",
        "name": "The stream's name, or its query's id; the idempotency key of a job.",
        "batch": "The number of the micro-batch; -1 for a job.",
        "query": "The id of the streaming query; a new checkpoint brings a new one.",
        "messages": "How many messages it sent. Their source is mailroom spark <name> <batch>.",
        "at": "When.",
    },
    "spark_staging": {
        None: "Staging tables of Spark's tasks that are not dropped yet: staging_<token>.",
        "token": "The task attempt's token; it begins with the time, in milliseconds.",
        "name": "The batch's name in spark_batch.",
        "batch": "The batch's number in spark_batch.",
        "at": "When it was created.",
    },
}


STAGED = """
DO $$
DECLARE
    staged text;
BEGIN
    FOR staged IN SELECT concat('staging_', replace(token::text, '-', '')) FROM spark_staging LOOP
        EXECUTE format('DROP TABLE IF EXISTS %I', staged);
    END LOOP;
END $$
"""


def upgrade() -> None:
    op.execute(LEDGER)
    op.execute(LEDGER_AT)
    op.execute(STAGING)
    for table, columns in COMMENTS.items():
        for column, about in columns.items():
            what = f"TABLE {table}" if column is None else f"COLUMN {table}.{column}"
            op.execute(f"COMMENT ON {what} IS '{about.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    op.execute(STAGED)
    op.execute("DROP TABLE spark_staging")
    op.execute("DROP TABLE spark_batch")
