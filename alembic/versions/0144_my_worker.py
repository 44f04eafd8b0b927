"""In-flight entries: a role reads and writes those of its own inboxes, through a view."""

from alembic import op
from mailroom.schema.migration import grants_moved

revision = "0144"
down_revision = "0142"
branch_labels = None
depends_on = None

# Whoever may take messages out of an inbox may write what is recorded of them. A view's condition sees the role of the
# statement, also after SET ROLE; a function with its owner's rights would not. With a bound body: its names mean what
# they mean here, and its text becomes part of the queries that call it.
IS_MINE = """
CREATE FUNCTION is_mine(inbox text) RETURNS boolean LANGUAGE sql STABLE
RETURN coalesce(has_table_privilege(to_regclass('"{schema}".' || quote_ident('inbox_' || inbox))::oid, 'DELETE'), false)
"""
# A security barrier: no function of a user's sees a row before the condition has let it through. The check costs half
# as much as a trigger, for each batch of a worker. It comes after ON CONFLICT has locked the row that is in the way:
# that one has the same id, which is random, and which nobody else sees.
VIEW = "CREATE VIEW my_worker WITH (security_barrier) AS SELECT * FROM worker WHERE is_mine(inbox) WITH CHECK OPTION"

COMMENTS = {
    "FUNCTION is_mine(text)": "Whether the current role may take messages out of this inbox.",
    "VIEW my_worker": "The rows of worker about inboxes that the current role may take messages out of.",
}


def upgrade() -> None:
    schema = str(op.get_context().version_table_schema)
    for statement in (IS_MINE, VIEW, grants_moved("worker", "my_worker")):
        op.execute(statement.replace("{schema}", schema))
    for what, text in COMMENTS.items():
        op.execute(f"COMMENT ON {what} IS '{text}'")


def downgrade() -> None:
    op.execute(grants_moved("my_worker", "worker"))
    op.execute("DROP VIEW my_worker")
    op.execute("DROP FUNCTION is_mine(text)")
