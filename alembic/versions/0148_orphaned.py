"""Claims of workers pass over the keys of a batch that has ended and that nobody has accounted for."""

from alembic import op

revision = "0148"
down_revision = "0145"
branch_labels = None
depends_on = None

# An entry stays when its process died. An abort is on record before the locks of its rows go, so whoever gets one of
# these locks sees it here. What a node brought along from elsewhere may name transactions that its server has not had
# yet, or has forgotten: they have ended.
ORPHANED_KEYS = """
CREATE FUNCTION orphaned_keys(of_inbox text, but uuid[]) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT pg_catalog.unnest(w.keys) FROM "{schema}".my_worker AS w
    WHERE w.inbox = of_inbox AND w.id <> ALL (but)
      AND CASE WHEN w.xact IS NULL THEN false
               WHEN w.xact >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint THEN true
               ELSE coalesce(pg_xact_status(w.xact::text::xid8), 'aborted') = 'aborted' END;
END $$
"""
# Entries are read only if a key was locked before, which is rare: there may be many dead versions of them.
FAILING_KEYS = """
CREATE FUNCTION failing_keys(of_inbox text, of_keys text[], of_tried text[] DEFAULT '{}', but uuid[] DEFAULT '{}')
RETURNS TABLE (key text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT n.key, n.retry_at FROM pg_catalog.unnest(of_keys) AS k (key), LATERAL (
        SELECT s.key, s.retry_at FROM "{schema}".my_key_state AS s
        WHERE s.inbox = of_inbox AND s.key = k.key OFFSET 0) AS n;
    IF of_tried <> '{}' THEN
        RETURN QUERY SELECT o.key, 'infinity'::timestamptz FROM "{schema}".orphaned_keys(of_inbox, but) AS o (key)
                     WHERE o.key = ANY (of_tried);
    END IF;
END $$
"""
AS_IT_WAS = """
CREATE FUNCTION failing_keys(of_inbox text, of_keys text[]) RETURNS TABLE (key text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT n.key, n.retry_at FROM pg_catalog.unnest(of_keys) AS k (key), LATERAL (
        SELECT s.key, s.retry_at FROM "{schema}".my_key_state AS s
        WHERE s.inbox = of_inbox AND s.key = k.key OFFSET 0) AS n;
END $$
"""

COMMENTS = {
    "FUNCTION orphaned_keys(text, uuid[])": "The keys of batches that have ended and that nobody has accounted for.",
    "FUNCTION failing_keys(text, text[], text[], uuid[])": "Which of these keys are failing, or orphaned if tried.",
    "COLUMN worker.xact": "The full id of the batch''s transaction; null if unknown, or lost while its worker lives.",
}
COMMENTS_BEFORE = {
    "FUNCTION failing_keys(text, text[])": "Which of these keys are failing at this moment.",
    "COLUMN worker.xact": "The transaction of the batch.",
}


def upgrade() -> None:
    op.execute("DROP FUNCTION failing_keys(text, text[])")
    _create(ORPHANED_KEYS, FAILING_KEYS)
    _comment(COMMENTS)


def downgrade() -> None:
    op.execute("DROP FUNCTION failing_keys(text, text[], text[], uuid[])")
    op.execute("DROP FUNCTION orphaned_keys(text, uuid[])")
    _create(AS_IT_WAS)
    _comment(COMMENTS_BEFORE)


def _create(*functions: str) -> None:
    schema = op.get_context().version_table_schema
    for function in functions:
        op.execute(function.replace("{schema}", str(schema)))


def _comment(comments: dict[str, str]) -> None:
    for what, text in comments.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")
