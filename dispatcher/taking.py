"""Take: the oldest committed executables, off their outbox, by one executor at a time."""

from dispatcher.fold import Taken
from dispatcher.rules import FAULT
from mailroom import locks
from mailroom.operation import Operation, Sql

EXECUTABLE_KEY = locks.key("'{schema}.outbox_executable'::regclass")
# In UTC, whatever the server's zone: in others the first year has times that Python cannot hold. And psycopg writes
# arrays as text: with other settings nulls in them, and bytes, would become something else.
LOCK = Sql(
    f"SELECT pg_advisory_xact_lock({locks.DISPATCH}, {EXECUTABLE_KEY}) IS NULL, set_config('TimeZone', 'UTC', true), "
    "set_config('array_nulls', 'on', true), set_config('standard_conforming_strings', 'on', true)",
    columns=("boolean", "text", "text", "text"),
)


def locking_executables(schema: str) -> Operation[None]:
    """Be the one executor until the transaction ends; what the one before it did is then seen."""
    yield LOCK.at(schema=schema)()


# Times that Python cannot hold, infinite ones for one, break a rule: then the nearest that it can.
HELD = "least(greatest({0}, '0001-01-01 UTC'::timestamptz), '9998-12-31 23:59:59.999999 UTC'::timestamptz)"
COLUMNS = (
    "position, message_id, version::bigint, operation, target, key, end_key, value, amount, bytes, expected, "
    f"arguments::text, CASE WHEN at IS NOT NULL THEN {HELD.format('at')} END, row_limit, notify, headers::text, "
    f"after_clock, source, {HELD.format('sent_at')}, {FAULT}"
)
TYPES = (
    *("bigint", "uuid", "bigint", "text", "text", "text", "text", "bytea", "bigint", "bigint", "bytea", "text"),
    *("timestamptz", "bigint", "text", "text", "bigint", "text", "timestamptz", "text"),
)
# A range that has begun, and has keys left to delete.
UNDER_WAY = """
    SELECT c.position FROM {schema}.executable_cursor AS c JOIN {schema}.outbox_executable AS o USING (position)
    ORDER BY c.position LIMIT 1
"""
# Up to what has transactions of its own, a delete_range or a call: all before it is done, and nothing behind it begun.
# A call that comes first is taken, alone. Nothing at all while a range is under way: a lower position may commit
# meanwhile, and would see half of it. Nothing behind the barrier is read, or many of them would cost their square.
# Deleted by range, in the snapshot that was looked at: what commits meanwhile with a lower position stays.
TAKE = Sql(
    f"""
WITH barrier AS MATERIALIZED (
    SELECT position, operation = 'call' AND nth = 1 AS is_taken FROM (
        SELECT position, version, operation, row_number() OVER (ORDER BY position) AS nth
        FROM {{schema}}.outbox_executable WHERE position > %(floor)s::bigint
        ORDER BY position LIMIT %(rows)s::bigint) AS s
    WHERE version = 1 AND operation IN ('delete_range', 'call') ORDER BY position LIMIT 1),
head AS MATERIALIZED (
    SELECT position, coalesce(octet_length(value), 0) + coalesce(octet_length(expected), 0)
           + coalesce(octet_length(arguments::text), 0) AS bytes
    FROM {{schema}}.outbox_executable WHERE position > %(floor)s::bigint AND NOT EXISTS ({UNDER_WAY})
      AND position <= coalesce((SELECT CASE WHEN is_taken THEN position ELSE position - 1 END FROM barrier),
                               9223372036854775807)
    ORDER BY position LIMIT %(rows)s::bigint),
summed AS (
    SELECT position, sum(bytes) OVER (ORDER BY position) - bytes AS before FROM head),
last AS MATERIALIZED (
    SELECT max(position) AS position FROM summed WHERE before < %(bytes)s::bigint),
gone AS (
    DELETE FROM {{schema}}.outbox_executable
    WHERE position > %(floor)s::bigint AND position <= (SELECT position FROM last)
    RETURNING *)
SELECT {COLUMNS}, (SELECT count(*) FROM head), EXISTS (SELECT FROM barrier) FROM gone ORDER BY position
""",
    columns=(*TYPES, "bigint", "boolean"),
)


def taking(schema: str, *, floor: int, rows: int, max_bytes: int) -> Operation[tuple[list[Taken], bool]]:
    """Take up to `rows` executables and `max_bytes` of values (at least one), and tell whether there may be more."""
    found = yield TAKE.at(schema=schema)(floor=floor, rows=rows, bytes=max_bytes)
    taken = [Taken._make(row[:-2]) for row in found]
    return taken, bool(taken) and (len(taken) == rows or len(taken) < found[0][-2] or found[0][-1])


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
