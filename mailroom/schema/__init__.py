"""The schema of a node: migrate it, check it, and hide it from users' Alembic autogenerate."""

from mailroom.schema.checks import HEAD as HEAD
from mailroom.schema.checks import check, check_async, current_revision, current_revision_async
from mailroom.schema.checks import checking as checking
from mailroom.schema.checks import finding as finding
from mailroom.schema.migration import include_object, migrate, migrate_async, revisions
from mailroom.schema.migration import refuse_to_drop_messages as refuse_to_drop_messages
from mailroom.schema.migration import run_migrations as run_migrations
from mailroom.values.names import DEFAULT_SCHEMA as DEFAULT_SCHEMA

__all__ = [
    "check",
    "check_async",
    "current_revision",
    "current_revision_async",
    "include_object",
    "migrate",
    "migrate_async",
    "revisions",
]
