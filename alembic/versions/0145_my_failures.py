"""What is recorded of failures: a role reads and writes that of its own inboxes, through views."""

from alembic import op
from mailroom.schema.migration import grants_moved

revision = "0145"
down_revision = "0144"
branch_labels = None
depends_on = None

# As `my_worker`. A security barrier hands no order out of an index, however a query asks for one: so some views have
# the order of an index, and a query for the first rows reads no more than those.
VIEWS = {
    "my_key_state": "SELECT * FROM key_state WHERE is_mine(inbox)",
    "my_due": "SELECT * FROM key_state WHERE is_mine(inbox) ORDER BY inbox, retry_at, key",
    "my_attempt": "SELECT * FROM attempt WHERE is_mine(inbox) ORDER BY inbox, key, clock, id DESC",
    "my_parked": "SELECT * FROM parked WHERE is_mine(inbox)",
}
# What a view checks of a new row it checks after ON CONFLICT has locked the row that is in the way, and a unique index
# has told that there is one. A trigger comes before. Roles with rights to the whole table, as the dispatcher's, write
# for any inbox, or for none. Of dead letters a consumer writes those that an inbox has skipped: one of another stage
# would be sent or executed when it is requeued. Without SET search_path, which costs as much as the rest; so it names
# the schema of everything.
REFUSE = """
CREATE FUNCTION refuse_others() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    may boolean := "{schema}".is_mine(NEW.inbox);
BEGIN
    IF may AND TG_RELID OPERATOR(pg_catalog.=) '"{schema}".dead_letter'::pg_catalog.regclass THEN
        may := NEW.stage OPERATOR(pg_catalog.=) 'reap';
    END IF;
    IF may OR pg_catalog.has_table_privilege(TG_RELID, 'DELETE') THEN
        RETURN NEW;
    END IF;
    RAISE insufficient_privilege USING
        MESSAGE = pg_catalog.format('role %I may not write into %I for the inbox %L', current_user, TG_TABLE_NAME,
                                    NEW.inbox),
        HINT = 'That takes DELETE on the table of the inbox.';
END $$
"""
WRITTEN = ("key_state", "attempt", "parked", "dead_letter")
FAILING_KEYS = """
CREATE OR REPLACE FUNCTION failing_keys(of_inbox text, of_keys text[]) RETURNS TABLE (key text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT n.key, n.retry_at FROM pg_catalog.unnest(of_keys) AS k (key), LATERAL (
        SELECT s.key, s.retry_at FROM "{schema}".{state} AS s
        WHERE s.inbox = of_inbox AND s.key = k.key OFFSET 0) AS n;
END $$
"""
COMMENT = "The rows of {table} about inboxes that the current role may take messages out of{order}."
ABOUT_REFUSE = "Refuses rows about an inbox that the current role may not take messages out of."


def upgrade() -> None:
    for view, query in VIEWS.items():
        op.execute(f"CREATE VIEW {view} WITH (security_barrier) AS {query}")
        table, order = (
            ("key_state", ", in the order of retry_at") if view == "my_due" else (view.removeprefix("my_"), "")
        )
        op.execute(f"COMMENT ON VIEW {view} IS '{COMMENT.format(table=table, order=order)}'")
    op.execute(REFUSE.replace("{schema}", str(op.get_context().version_table_schema)))
    op.execute(f"COMMENT ON FUNCTION refuse_others() IS '{ABOUT_REFUSE}'")
    for table in WRITTEN:
        op.execute(
            f"CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION refuse_others()"
        )
    for table in ("key_state", "attempt"):
        op.execute(grants_moved(table, f"my_{table}"))
    op.execute("GRANT SELECT ON my_due TO PUBLIC")  # it shows nobody more than what is theirs
    _asking("my_key_state")


def downgrade() -> None:
    _asking("key_state")
    for table in ("key_state", "attempt"):
        op.execute(grants_moved(f"my_{table}", table))
    for table in WRITTEN:
        op.execute(f"DROP TRIGGER refuse_others ON {table}")
    op.execute("DROP FUNCTION refuse_others()")
    op.execute(f"DROP VIEW {', '.join(VIEWS)}")


def _asking(state: str) -> None:
    schema = str(op.get_context().version_table_schema)
    op.execute(FAILING_KEYS.replace("{schema}", schema).replace("{state}", state))
