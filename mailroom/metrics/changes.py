"""What the server counts of the outbox and of each inbox: rows inserted and deleted, and those that are there.

It counts what is inserted and deleted whether that is committed or not, so that a batch that fails at each try looks as
busy as one that is reaped. Rows that are there count only what is committed: of both it follows what was taken.
"""

from typing import NamedTuple

from mailroom.sql.operation import Operation, Sql

OUTBOX = None  # in the place of an inbox
# As `catalog.TABLES`: by name, through the session's cache.
# D-metrics-8: Rates are differences of the server's counts.
CHANGES = Sql(
    """
SELECT t.name, pg_catalog.pg_stat_get_tuples_inserted(t.oid), pg_catalog.pg_stat_get_tuples_deleted(t.oid),
       pg_catalog.pg_stat_get_live_tuples(t.oid)
FROM (SELECT name, pg_catalog.to_regclass(pg_catalog.concat('{schema}.inbox_', name))::oid FROM {schema}.inbox_registry
      UNION ALL
      SELECT NULL, '{schema}.outbox'::regclass::oid) AS t (name, oid)
WHERE t.oid IS NOT NULL
""",
    columns=("text", "bigint", "bigint", "bigint"),
)


class Changes(NamedTuple):
    """How many rows were inserted into a table and deleted from it, rolled back or not, and how many are there."""

    inserted: int
    deleted: int
    live: int


def reading_changes(schema: str) -> Operation[dict[str | None, Changes]]:
    """Return the counts of each inbox, and of the outbox."""
    return {name: Changes(*counts) for name, *counts in (yield CHANGES.at(schema=schema)())}


def came_and_went(before: Changes, after: Changes) -> tuple[int, int]:
    """Return how many rows came into a table and were taken out of it between two looks.

    After a crash the server may know of no row that is there: then all that were deleted count. Counts that have
    fallen were reset, and count from there.
    """
    inserted = after.inserted - before.inserted
    deleted = after.deleted - before.deleted
    if inserted < 0 or deleted < 0:
        return after.inserted, after.deleted
    taken = deleted if after.live == 0 else min(max(inserted - (after.live - before.live), 0), deleted)
    return inserted, taken
