"""Take: read the oldest committed executables and remove them from their outbox, one executor at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from dispatcher.delivery.floor import START, ScanStart
from dispatcher.executor.batch.fold import Taken
from dispatcher.executor.batch.rules import FAULT
from mailroom.message.columns import EXECUTABLE_ROW
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import seeing

# UTC, whatever the server's zone: in others year 1 has times that Python cannot hold. The other two, since psycopg
# writes arrays as text: under other settings their nulls and bytes would be read differently.
OWN = (
    "set_config('TimeZone', 'UTC', true), set_config('array_nulls', 'on', true), "
    "set_config('standard_conforming_strings', 'on', true)"
)
# The tables of users may have policies for the code that runs here, so `row_security` is on. Ours must have none.
OURS = (
    *("outbox_executable", "executable_target", "executable_function", "executable_cursor", "store", "accounting"),
    *("outbox", "dead_letter"),
)
EXECUTE_LOCK = Sql(
    "SELECT {schema}.take_execute_turn() IS NULL, {own}, {hidden}",
    columns=("boolean", "text", "text", "text", "boolean"),
    own=OWN,
    hidden=" OR ".join(f"row_security_active('{{schema}}.{table}'::regclass::oid)" for table in OURS),
)


def locking_executables(schema: str) -> Operation[None]:
    """Become the only executor until the transaction ends. Later statements see what the previous one committed.

    Raises `SchemaError` if row security hides rows of the executor's tables.
    """
    [(*_, is_hidden)] = yield EXECUTE_LOCK.at(schema=schema)()
    if is_hidden:
        yield from seeing(schema, *OURS)


# Times that Python cannot hold, such as infinity, break a rule anyway; they are read as the nearest it can hold.
CLAMPED = "least(greatest({0}, '0001-01-01 UTC'::timestamptz), '9998-12-31 23:59:59.999999 UTC'::timestamptz)"
IN_RANGE = {"at": f"CASE WHEN at IS NOT NULL THEN {CLAMPED.format('at')} END", "sent_at": CLAMPED.format("sent_at")}
# The fields of `Taken`.
TAKEN_COLUMNS = {
    "position": "position",
    **{column.name: IN_RANGE.get(column.name) or column.given() for column in EXECUTABLE_ROW},
    "fault": FAULT,
}
TYPES = {"position": "bigint", **{column.name: column.plain for column in EXECUTABLE_ROW}, "fault": "text"}
NAMES = ", ".join(TAKEN_COLUMNS.values())
# A range that has begun and has keys left to delete.
UNDER_WAY = """
    SELECT c.position FROM {schema}.executable_cursor AS c JOIN {schema}.outbox_executable AS o USING (position)
    ORDER BY c.position LIMIT 1
"""
# Stops before a delete_range, which has transactions of its own: everything before it is applied, and nothing after it
# is begun. Reads nothing while a range is under way: a lower position may commit meanwhile, and would see half of the
# range. Rows after the barrier are not read: with many ranges that would cost the square of their number.
OLDEST = Sql(
    """
WITH {start},
barrier AS MATERIALIZED (
    SELECT position FROM (
        SELECT position, version, operation
        FROM {schema}.outbox_executable WHERE position > (SELECT position FROM start)
        ORDER BY position LIMIT %(rows)s::bigint) AS s
    WHERE version = 1 AND operation = 'delete_range' ORDER BY position LIMIT 1),
head AS MATERIALIZED (
    SELECT position, coalesce(octet_length(value), 0) + coalesce(octet_length(expected), 0)
           + coalesce(octet_length(arguments::text), 0) AS bytes
    FROM {schema}.outbox_executable WHERE position > (SELECT position FROM start) AND NOT EXISTS ({under_way})
      AND position < coalesce((SELECT position FROM barrier), 9223372036854775807)
    ORDER BY position LIMIT %(rows)s::bigint),
summed AS (
    SELECT position, sum(bytes) OVER (ORDER BY position) - bytes AS before FROM head),
last AS MATERIALIZED (
    SELECT max(position) AS position FROM summed WHERE before < %(bytes)s::bigint)
SELECT o.*, (SELECT count(*) FROM head), EXISTS (SELECT FROM barrier),
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.outbox_executable_position_seq), running
FROM start LEFT JOIN LATERAL (
    SELECT {names} FROM {schema}.outbox_executable
    WHERE position > start.position AND position <= (SELECT position FROM last) ORDER BY position) AS o ON true
""",
    columns=TYPES | {"heads": "bigint", "is_barred": "boolean", "drawn": "bigint", "running": "text[]"},
    start=START,
    under_way=UNDER_WAY,
    names=NAMES,
)


@dataclass(frozen=True, slots=True)
class Oldest:
    """Executables in order, and whether there may be more. `drawn` and `running` are for the floor."""

    taken: list[Taken]
    more: bool
    drawn: int
    running: list[str]


def reading_oldest_executables(schema: str, *, start: ScanStart, rows: int, max_bytes: int) -> Operation[Oldest]:
    """Read up to `rows` executables and `max_bytes` of values (at least one), from `start` on.

    They stay in the outbox until `removing` deletes those that were applied.
    """
    found = yield OLDEST.at(schema=schema)(**start.values(), rows=rows, bytes=max_bytes)
    taken = [Taken._make(row[: len(TYPES)]) for row in found if row[0] is not None]
    first = OLDEST.named(found[:1])[0]
    more = bool(taken) and (len(taken) == rows or len(taken) < first.heads or first.is_barred)
    return Oldest(taken, more, first.drawn, first.running)


NEXT = Sql(
    """
WITH {start}
SELECT {names} FROM {schema}.outbox_executable WHERE position = coalesce(({under_way}), (
    SELECT position FROM {schema}.outbox_executable WHERE position > (SELECT position FROM start)
    ORDER BY position LIMIT 1))
""",
    columns=tuple(TYPES.values()),
    start=START,
    names=NAMES,
    under_way=UNDER_WAY,
)
# By position, not by range: an executable with a lower position may have committed since the read.
# D-execute-2: A batch ends after 0.25 s, or where it would wait for others.
REMOVE = Sql(
    """
WITH gone AS (DELETE FROM {schema}.outbox_executable WHERE position = ANY(%(positions)s::bigint[]) RETURNING 1)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)


def reading_next_executable(schema: str, start: ScanStart) -> Operation[Taken | None]:
    """Return the range that is under way, else the oldest executable; it stays in the outbox."""
    rows = yield NEXT.at(schema=schema)(**start.values())
    return Taken._make(rows[0]) if rows else None


def removing(schema: str, taken: Sequence[Taken], *, may_be_gone: bool = False) -> Operation[None]:
    """Delete executables from the outbox, in the transaction of their effects.

    Raises `SerializationFailure` if one is gone already, unless `may_be_gone`: user code of this transaction
    may have removed it.
    """
    [(count,)] = yield REMOVE.at(schema=schema)(positions=[each.position for each in taken])
    if count != len(taken) and not may_be_gone:  # not by an executor: only one runs at a time
        raise psycopg.errors.SerializationFailure("another session removed an executable while it was being applied")
