"""In-flight entries: the number of a worker process has a word of its own; a life is one of a node."""

from alembic import op

revision = "0151"
down_revision = "0150"
branch_labels = None
depends_on = None

# The columns of a view keep their names when those of its table change.
RENAMED = ("worker", "my_worker")
# PostgreSQL 18 names what is NOT NULL by the column, and a renamed column's constraint keeps its name.
OF_0150 = """
DO $$
DECLARE
    named name;
BEGIN
    FOR named IN SELECT conname FROM pg_constraint
                 WHERE conrelid = 'spark_drain'::regclass AND conname ~ '_(lane|epoch)_not_null$' LOOP
        EXECUTE format('ALTER TABLE spark_drain RENAME CONSTRAINT %I TO %I', named,
                       replace(replace(named, 'lane', 'shard'), 'epoch', 'segment'));
    END LOOP;
END $$
"""
COMMENT = "The number of the worker process, which holds the lock of it while it is alive; null if it has none."
COMMENT_BEFORE = "The worker process, which holds the lock of this number while it is alive; null if it has none."


def upgrade() -> None:
    for what in RENAMED:
        op.execute(f"ALTER TABLE {what} RENAME COLUMN life TO process_number")
    op.execute(OF_0150)
    op.execute(f"COMMENT ON COLUMN worker.process_number IS '{COMMENT}'")


def downgrade() -> None:
    for what in RENAMED:
        op.execute(f"ALTER TABLE {what} RENAME COLUMN process_number TO life")
    op.execute(f"COMMENT ON COLUMN worker.life IS '{COMMENT_BEFORE}'")
