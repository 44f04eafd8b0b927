"""In-flight entries: a role reads and writes those of its own inboxes, through a view."""

from alembic import op
from mailroom.schema.migration import grants_moved

revision = "0144"
down_revision = "0142"
branch_labels = None
depends_on = None

# Whoever may take messages out of an inbox may write what is recorded of them. A view's condition and a trigger see the
# role of the statement, also after SET ROLE; a function with its owner's rights would not. With a bound body: its names
# mean what they mean here, and its text becomes part of the queries that call it.
IS_MINE = """
CREATE FUNCTION is_mine(inbox text) RETURNS boolean LANGUAGE sql STABLE
RETURN coalesce(has_table_privilege(to_regclass('"{schema}".' || quote_ident('inbox_' || inbox))::oid, 'DELETE'), false)
"""
# A view's condition says nothing of rows that are inserted, and with ON CONFLICT nothing of the row that is in the way:
# it would be locked before anything is checked. Without SET search_path, which costs as much as the rest; so it names
# the schema of everything.
REFUSE = """
CREATE FUNCTION refuse_others() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF "{schema}".is_mine(NEW.inbox) OR pg_catalog.has_table_privilege(TG_RELID, 'DELETE') THEN
        RETURN NEW;
    END IF;
    RAISE insufficient_privilege USING
        MESSAGE = pg_catalog.format('role %I may not write into %I for the inbox %L', current_user, TG_TABLE_NAME,
                                    NEW.inbox),
        HINT = 'That takes DELETE on the table of the inbox.';
END $$
"""
# A security barrier: no function of a user's sees a row before the condition has let it through.
VIEW = "CREATE VIEW my_worker WITH (security_barrier) AS SELECT * FROM worker WHERE is_mine(inbox)"
TRIGGER = """
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON worker
FOR EACH ROW EXECUTE FUNCTION refuse_others()
"""

COMMENTS = {
    "FUNCTION is_mine(text)": "Whether the current role may take messages out of this inbox.",
    "FUNCTION refuse_others()": "Refuses rows about an inbox that the current role may not take messages out of.",
    "VIEW my_worker": "The rows of worker about inboxes that the current role may take messages out of.",
}


def upgrade() -> None:
    schema = str(op.get_context().version_table_schema)
    for statement in (IS_MINE, REFUSE, VIEW, TRIGGER, grants_moved("worker", "my_worker")):
        op.execute(statement.replace("{schema}", schema))
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute(grants_moved("my_worker", "worker"))
    op.execute("DROP TRIGGER refuse_others ON worker")
    op.execute("DROP VIEW my_worker")
    op.execute("DROP FUNCTION refuse_others(), is_mine(text)")
