"""Spark: a large batch is decided in one transaction, and moves into the outbox in chunks."""

from alembic import op
from mailroom.schema import refuse_to_drop_messages

revision = "0113"
down_revision = "0112"
branch_labels = None
depends_on = None

BULK = """
CREATE TABLE spark_bulk (
    name      text COLLATE "C" NOT NULL,
    batch     bigint NOT NULL,
    source    text NOT NULL,
    constants jsonb NOT NULL,
    messages  bigint NOT NULL,
    moved     bigint NOT NULL DEFAULT 0,
    first     bigint,
    last      bigint,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, batch)
)
"""
PARTS = """
ALTER TABLE spark_staging
    ADD schema text COLLATE "C" CHECK (schema ~ '^[a-z][a-z0-9_]*$'), ADD part integer, ADD messages bigint,
    ADD moved bigint NOT NULL DEFAULT 0, ADD moved_to text NOT NULL DEFAULT '(0,0)'
"""

COMMENTS = {
    "spark_bulk": {
        None: "Large batches of Spark that are decided, and of which messages are still to be moved into the outbox.",
        "name": "The batch's name in spark_batch.",
        "batch": "The batch's number in spark_batch.",
        "source": "The source of its messages.",
        "constants": "Common to all of its messages: topic, kind, message_type, event_type.",
        "messages": "How many messages it has.",
        "moved": "How many of them were moved into the outbox.",
        "first": "The position of the first message of its last chunk.",
        "last": "The position of the last message of its last chunk.",
        "at": "When it was decided, or its last chunk was moved.",
    },
    "spark_staging": {
        "schema": "The schema that its table stands in, if that is not this one.",
        "part": "Its place in a decided large batch that still moves; otherwise null.",
        "messages": "How many messages that part has.",
        "moved": "How many of them were moved into the outbox.",
        "moved_to": "The ctid of the last row that was moved.",
    },
}

ELSEWHERE = """
DO $$
DECLARE
    staged text;
BEGIN
    FOR staged IN SELECT format('%I.%I', schema, concat('staging_', replace(token::text, '-', '')))
                  FROM spark_staging WHERE schema IS NOT NULL LOOP
        EXECUTE concat('DROP TABLE IF EXISTS ', staged);
    END LOOP;
    DELETE FROM spark_staging WHERE schema IS NOT NULL;
END $$
"""


def upgrade() -> None:
    op.execute(BULK)
    op.execute(PARTS)
    for table, columns in COMMENTS.items():
        for column, about in columns.items():
            what = f"TABLE {table}" if column is None else f"COLUMN {table}.{column}"
            op.execute(f"COMMENT ON {what} IS '{about.replace(chr(39), chr(39) * 2)}'")


def downgrade() -> None:
    refuse_to_drop_messages(op.get_context(), ("spark_bulk",))
    op.execute(ELSEWHERE)
    op.execute("ALTER TABLE spark_staging DROP schema, DROP part, DROP messages, DROP moved, DROP moved_to")
    op.execute("DROP TABLE spark_bulk")
