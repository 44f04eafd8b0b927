"""Tables that cannot be read now: a look at a node passes over them, and says which session has locked them.

Only ACCESS EXCLUSIVE keeps readers out, and so does a session that waits for it: readers queue after it.
"""

from dataclasses import dataclass

from mailroom.sql.operation import Operation, Sql
from mailroom.sql.waits import Blocker

# What a look at a node waits for a lock: who has it is told instead.
LOCK_TIMEOUT = "500ms"
PARTITION = "inbox_"
LOCKED = Sql(
    """
SELECT c.relname::text, coalesce(l.pid, 0)::bigint, coalesce(a.application_name, ''), coalesce(a.usename::text, ''),
       coalesce(a.state, ''), extract(epoch FROM pg_catalog.clock_timestamp() - a.xact_start)::float8,
       CASE WHEN l.granted THEN l.mode ELSE '' END
FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_class AS c ON c.oid = l.relation
     LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND c.relnamespace = '{schema}'::regnamespace
  AND c.relkind IN ('r', 'p') AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
ORDER BY 1, l.granted DESC, 2
""",
    columns=("text", "bigint", "text", "text", "text", "float8", "text"),
)


@dataclass(frozen=True, slots=True)
class LockedTable:
    """A table that cannot be read now, and who has it or is the first that waits for it."""

    table: str
    by: Blocker

    def __str__(self) -> str:
        return f"{self.table} cannot be read: {self.by}"


def reading_locked(schema: str) -> Operation[list[LockedTable]]:
    """Return the tables of the schema that cannot be read now."""
    found: dict[str, LockedTable] = {}
    for table, *blocker in (yield LOCKED.at(schema=schema)()):
        found.setdefault(table, LockedTable(table, Blocker(*blocker)))
    return list(found.values())


def reading_lock_of(schema: str, inbox: str) -> Operation[LockedTable | None]:
    """Return who keeps readers out of the table of an inbox, None if none does."""
    locked = yield from reading_locked(schema)
    return next((each for each in locked if each.table in (PARTITION.removesuffix("_"), PARTITION + inbox)), None)


def locked_inboxes(locked: list[LockedTable]) -> set[str]:
    """Return the inboxes whose own tables are among them."""
    return {each.table.removeprefix(PARTITION) for each in locked if each.table.startswith(PARTITION)}
