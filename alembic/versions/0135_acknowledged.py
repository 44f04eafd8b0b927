"""When what a reader has acknowledged was acknowledged: from then on it is kept for as long as the link says."""

from alembic import op

revision = "0135"
down_revision = "0133"
branch_labels = None
depends_on = None

COLUMNS = """
ALTER TABLE link
    ADD acks     bigint[]      NOT NULL DEFAULT '{}',
    ADD acked_at timestamptz[] NOT NULL DEFAULT '{}'
"""
COMMENTS = {
    "acks": "Some of what acked has been, ascending: rows below one of them stay for keep_s behind its acked_at.",
    "acked_at": "For each of acks, a time by which the reader had acknowledged it.",
}
# A reader that was put back acknowledges anew what it reads again, and it counts from then.
FELL = """
CREATE FUNCTION acknowledged_less() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    left_over CONSTANT integer := (SELECT count(*) FROM unnest(new.acks) AS seq WHERE seq <= new.acked);
BEGIN
    new.acks := new.acks[1:left_over];
    new.acked_at := new.acked_at[1:left_over];
    RETURN new;
END $$
"""
TRIGGER = """
CREATE TRIGGER acknowledged_less BEFORE UPDATE OF acked ON link FOR EACH ROW
WHEN (new.acked < old.acked) EXECUTE FUNCTION acknowledged_less()
"""


def upgrade() -> None:
    for statement in (COLUMNS, FELL, TRIGGER):
        op.execute(statement)
    for column, text in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN link.{column} IS '{text}'")
    op.execute("COMMENT ON FUNCTION acknowledged_less() IS 'Forgets when a reader had acknowledged what it has lost.'")


def downgrade() -> None:
    op.execute("DROP TRIGGER acknowledged_less ON link")
    op.execute("DROP FUNCTION acknowledged_less()")
    op.execute("ALTER TABLE link DROP acks, DROP acked_at")
