"""Take: the oldest committed executables, off their outbox, by one executor at a time."""

from dispatcher.fold import Taken
from mailroom import locks
from mailroom.operation import Operation, Sql

EXECUTABLE_KEY = locks.key("'{schema}.outbox_executable'::regclass")
# In UTC, whatever the server's zone: in others the first year has times that Python cannot hold.
LOCK = Sql(
    f"SELECT pg_advisory_xact_lock({locks.DISPATCH}, {EXECUTABLE_KEY}) IS NULL, set_config('TimeZone', 'UTC', true)",
    columns=("boolean", "text"),
)


def locking_executables(schema: str) -> Operation[None]:
    """Be the one executor until the transaction ends; what the one before it did is then seen."""
    yield LOCK.at(schema=schema)()


COLUMNS = (
    "position, message_id, version::bigint, operation, target, key, end_key, value, amount, bytes, expected, "
    "arguments::text, at, row_limit, notify, headers::text, after_clock, source, sent_at"
)
TYPES = (
    *("bigint", "uuid", "bigint", "text", "text", "text", "text", "bytea", "bigint", "bigint", "bytea", "text"),
    *("timestamptz", "bigint", "text", "text", "bigint", "text", "timestamptz"),
)
# A range that has begun, and has keys left to delete.
UNDER_WAY = """
    SELECT c.position FROM {schema}.executable_cursor AS c JOIN {schema}.outbox_executable AS o USING (position)
    ORDER BY c.position LIMIT 1
"""
# Up to the first delete_range, which has transactions of its own: all before it is done, and nothing behind it begun.
# Nothing at all while one is under way: a lower position may commit meanwhile, and would see half of it.
# Deleted by range, in the snapshot that was looked at: what commits meanwhile with a lower position stays.
TAKE = Sql(
    f"""
WITH head AS MATERIALIZED (
    SELECT position, version = 1 AND operation = 'delete_range' AS is_range,
           coalesce(octet_length(value), 0) + coalesce(octet_length(expected), 0)
           + coalesce(octet_length(arguments::text), 0) AS bytes
    FROM {{schema}}.outbox_executable WHERE position > %(floor)s::bigint AND NOT EXISTS ({UNDER_WAY})
    ORDER BY position LIMIT %(rows)s::bigint),
summed AS (
    SELECT position, bool_or(is_range) OVER so_far AS behind, sum(bytes) OVER so_far - bytes AS before
    FROM head WINDOW so_far AS (ORDER BY position)),
last AS MATERIALIZED (
    SELECT max(position) AS position FROM summed WHERE NOT behind AND before < %(bytes)s::bigint),
gone AS (
    DELETE FROM {{schema}}.outbox_executable
    WHERE position > %(floor)s::bigint AND position <= (SELECT position FROM last)
    RETURNING *)
SELECT {COLUMNS}, (SELECT count(*) FROM head) FROM gone ORDER BY position
""",
    columns=(*TYPES, "bigint"),
)


def taking(schema: str, *, floor: int, rows: int, max_bytes: int) -> Operation[tuple[list[Taken], bool]]:
    """Take up to `rows` executables and `max_bytes` of values (at least one), and tell whether there may be more."""
    found = yield TAKE.at(schema=schema)(floor=floor, rows=rows, bytes=max_bytes)
    taken = [Taken._make(row[:-1]) for row in found]
    return taken, bool(taken) and (len(taken) == rows or len(taken) < found[0][-1])


NEXT = Sql(
    f"""
SELECT {COLUMNS} FROM {{schema}}.outbox_executable WHERE position = coalesce(({UNDER_WAY}), (
    SELECT position FROM {{schema}}.outbox_executable WHERE position > %(floor)s::bigint ORDER BY position LIMIT 1))
""",
    columns=TYPES,
)
REMOVE = Sql("DELETE FROM {schema}.outbox_executable WHERE position = %(position)s::bigint")


def looking_at_next(schema: str, floor: int) -> Operation[Taken | None]:
    """Return the range that is under way, else the oldest executable, and leave it where it is."""
    rows = yield NEXT.at(schema=schema)(floor=floor)
    return Taken._make(rows[0]) if rows else None


def removing(schema: str, position: int) -> Operation[None]:
    """Take one executable off the outbox."""
    yield REMOVE.at(schema=schema)(position=position)
