"""The schema of the first release: the SQL files of `base`, in the order of their names.

Revision ids are RRNN: release, then number within it. No migration before this one was released; a database of the last
of them has this id, and is the same. In the files, names are unqualified but where a function needs them: the
environment pins `search_path` to the node's schema. `{name}` stands for the file of that name in `base/parts`.
"""

from pathlib import Path

from alembic import op
from mailroom.schema.migration import refuse_to_drop_messages, refuse_to_drop_watches
from mailroom.schema.sql_files import statements_of

revision = "0152"
down_revision = None
branch_labels = None
depends_on = None

BASE = Path(__file__).parents[1] / "base"
HOLD_MESSAGES = (
    "outbox", "inbox", "scheduled", "dead_letter", "parked", "fan_out", "transit", "spark_bulk", "outbox_executable",
    "store", "accounting", "reaped", "log",
)  # fmt: skip


def upgrade() -> None:
    names = {part.stem: part.read_text().rstrip() for part in (BASE / "parts").glob("*.sql")}
    names["schema"] = f'"{op.get_context().version_table_schema}"'
    for statement in statements_of(sorted(BASE.glob("[0-9]*.sql")), names):
        op.execute(statement)


def downgrade() -> None:
    refuse_to_drop_messages(op.get_context(), HOLD_MESSAGES)
    refuse_to_drop_watches(op.get_context())
    for statement in statements_of([BASE / "remove.sql"], {}):
        op.execute(statement)
