"""Spark's streams: a role reads and writes what is kept of those of its own inboxes, through a view."""

from alembic import op
from mailroom.schema.migration import grants_moved

revision = "0149"
down_revision = "0148"
branch_labels = None
depends_on = None

# As `my_parked`: the trigger comes before the unique index, which would tell that there is such a row.
VIEW = "CREATE VIEW my_spark_stream WITH (security_barrier) AS SELECT * FROM spark_stream WHERE is_mine(inbox)"
TRIGGER = """
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON spark_stream
FOR EACH ROW EXECUTE FUNCTION refuse_others()
"""
COMMENT = """
COMMENT ON VIEW my_spark_stream IS
    'The rows of spark_stream about inboxes that the current role may take messages out of.'
"""


def upgrade() -> None:
    for statement in (VIEW, COMMENT, TRIGGER, grants_moved("spark_stream", "my_spark_stream")):
        op.execute(statement)


def downgrade() -> None:
    op.execute(grants_moved("my_spark_stream", "spark_stream"))
    op.execute("DROP TRIGGER refuse_others ON spark_stream")
    op.execute("DROP VIEW my_spark_stream")
