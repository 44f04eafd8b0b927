"""A migration of the next release, so that the programs at hand are those of the release before."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from mailroom import schema
from mailroom.schema import migration

HEAD, NEXT = schema.HEAD, "0201"

# What it may do to tables that programs use; in the order of no program.
_SCRIPT = """
from alembic import op

revision, down_revision = "{next}", "{head}"
TABLES = ("outbox", "worker", "key_state", "inbox", "attempt", "inbox_registry", "subscription", "node", "lease",
          "outbox_executable", "store", "dead_letter", "parked", "scheduled")


def upgrade():
    for table in TABLES:
        op.execute(f"ALTER TABLE {{table}} ADD later text DEFAULT 'x'")
    op.execute("CREATE INDEX key_state_later ON key_state (later)")
    op.execute("UPDATE inbox_registry SET later = 'y'")
    op.execute("UPDATE lease SET later = 'y'")


def downgrade():
    op.execute("DROP INDEX key_state_later")
    for table in TABLES:
        op.execute(f"ALTER TABLE {{table}} DROP later")
"""


@contextlib.contextmanager
def known_to_migrate() -> Iterator[None]:
    """Let `migrate` in this process know the revision `NEXT` in this block."""
    with tempfile.TemporaryDirectory(prefix="mailroom-next-") as directory:
        migrations = Path(directory, "alembic")
        shutil.copytree(migration._migrations(), migrations)
        (migrations / "versions" / f"{NEXT}_next.py").write_text(_SCRIPT.format(head=HEAD, next=NEXT))
        with mock.patch.object(migration, "_migrations", return_value=migrations):
            yield
