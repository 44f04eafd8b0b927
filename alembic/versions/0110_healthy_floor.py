"""Claims begin above the messages of failing keys, however many there are."""

from alembic import op

revision = "0110"
down_revision = "0109"
branch_labels = None
depends_on = None

COMMENTS = {
    "inbox_registry.healthy_floor": "All messages up to this clock are of failing keys, which stay failing up to it.",
    "key_state.alone_to": "Up to this clock the key is claimed by itself, and keeps this row.",
    "key_state.suspect_to": "Up to this clock the key is tried one message at a time.",
}

# Key by key: no single plan is right both for few failing keys and for many.
FAILING_KEYS = """
CREATE OR REPLACE FUNCTION failing_keys(of_inbox text, of_keys text[]) RETURNS TABLE (key text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT n.key, n.retry_at FROM pg_catalog.unnest(of_keys) AS k (key), LATERAL (
        SELECT s.key, s.retry_at FROM "{schema}".key_state AS s
        WHERE s.inbox = of_inbox AND s.key = k.key OFFSET 0) AS n;
END $$
"""
AS_IT_WAS = """
CREATE OR REPLACE FUNCTION failing_keys(of_inbox text, of_keys text[]) RETURNS TABLE (key text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT s.key, s.retry_at FROM "{schema}".key_state AS s
                 WHERE s.inbox = of_inbox AND s.key = ANY (of_keys);
END $$
"""


def upgrade() -> None:
    op.execute("ALTER TABLE inbox_registry ADD healthy_floor bigint NOT NULL DEFAULT 0")
    op.execute("ALTER TABLE key_state ADD suspect_to bigint NOT NULL DEFAULT 0")
    op.execute("UPDATE key_state SET suspect_to = alone_to")
    op.execute(FAILING_KEYS.replace("{schema}", str(op.get_context().version_table_schema)))
    for column, text in COMMENTS.items():
        op.execute(f"COMMENT ON COLUMN {column} IS '{text}'")


def downgrade() -> None:
    op.execute(AS_IT_WAS.replace("{schema}", str(op.get_context().version_table_schema)))
    op.execute("ALTER TABLE key_state DROP suspect_to")
    op.execute("ALTER TABLE inbox_registry DROP healthy_floor")
