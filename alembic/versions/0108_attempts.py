"""Attempts: counted per message, recorded while its lock is held; by default spread over hours."""

from alembic import op

revision = "0108"
down_revision = "0107"
branch_labels = None
depends_on = None

# With (inbox, key, clock) alone, a plan may search the last attempt of a message from the end of the whole history.
STATEMENTS = (
    "ALTER TABLE key_state ADD alone_to bigint NOT NULL DEFAULT 0",
    "ALTER TABLE attempt ADD retry_at timestamptz",
    "DROP INDEX attempt_key",
    "CREATE INDEX attempt_key ON attempt (inbox, key, clock, id)",
    "ALTER TABLE inbox_registry ALTER backoff_max_s SET DEFAULT 3600, ALTER max_attempts SET DEFAULT 16",
)

# VOLATILE, so that it has a snapshot of its own: a claim calls it after locking the keys, and the snapshot of the claim
# may be older than the locks. In PL/pgSQL, which caches the plan; an SQL function would be planned for each claim.
FAILING_KEYS = """
CREATE FUNCTION failing_keys(of_inbox text, of_keys text[]) RETURNS TABLE (key text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT s.key, s.retry_at FROM "{schema}".key_state AS s
                 WHERE s.inbox = of_inbox AND s.key = ANY (of_keys);
END $$
"""

COMMENTS = {
    "TABLE attempt": "The history of failed attempts and of replays, kept for a while; attempts are counted from it.",
    "COLUMN attempt.attempt": "The number of the attempt, from 1; 0 for a replay.",
    "COLUMN attempt.outcome": "The outcome: retry, park, skip or replay.",
    "COLUMN attempt.retry_at": "When the message may be tried again; null if it may not.",
    "COLUMN key_state.clock": "Clock of the message that failed last.",
    "COLUMN key_state.attempts": "How often that message failed; 0 if only its batch failed.",
    "COLUMN key_state.alone_to": "Up to this clock the key is tried one message at a time.",
    "FUNCTION failing_keys(text, text[])": "Which of these keys are failing at this moment.",
}


def upgrade() -> None:
    schema = op.get_context().version_table_schema
    for statement in (*STATEMENTS, FAILING_KEYS.replace("{schema}", str(schema))):
        op.execute(statement)
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute("DROP FUNCTION failing_keys(text, text[])")
    op.execute("ALTER TABLE inbox_registry ALTER backoff_max_s SET DEFAULT 60, ALTER max_attempts SET DEFAULT 3")
    op.execute("DROP INDEX attempt_key")
    op.execute("CREATE INDEX attempt_key ON attempt (inbox, key, clock)")
    op.execute("ALTER TABLE attempt DROP retry_at")
    op.execute("ALTER TABLE key_state DROP alone_to")
