"""The current writers of an outbox: the transactions whose rows may still become visible.

They are not read from `pg_current_snapshot()`: it does not list running transactions newer than the last completed one,
and a test lost a writer that way within seconds.
"""

from collections.abc import Mapping
from typing import TypeAlias

from mailroom.sql.operation import Operation, Sql

Writers: TypeAlias = Mapping[str, int | None]  # virtual transaction -> transaction id, None as long as it has none
PREPARED = "-1/"  # prefix of the virtual transaction of every prepared transaction

# A writer takes RowExclusiveLock on the outbox before it checks "awake" or draws a position, and holds it until its
# rows are visible. pg_locks is scanned once, not twice. The oldest id among a transaction and its savepoints is its
# own. pg_locks shows 32 of the 64 bits of an id; the full ids are within 2^31 of the newest.
WRITERS = Sql(
    """
WITH held AS MATERIALIZED (SELECT * FROM pg_locks WHERE granted AND pid IS DISTINCT FROM pg_backend_pid()),
newest AS MATERIALIZED (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS id)
SELECT virtualtransaction, min(id - ((id - transactionid::text::bigint + 2147483648) & 4294967295) + 2147483648)
FROM newest, held
WHERE (mode, locktype) IN (('RowExclusiveLock', 'relation'), ('ExclusiveLock', 'transactionid'))
  AND virtualtransaction IN (
    SELECT virtualtransaction FROM held
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = '{schema}.{outbox}'::regclass::oid
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
GROUP BY virtualtransaction
""",
    columns=("text", "bigint"),
)


def reading_writers(schema: str, table: str) -> Operation[Writers]:
    """Return the current writers of the table."""
    rows = yield WRITERS.at(schema=schema, outbox=table)()
    return dict(rows)


def remaining(before: Writers, now: Writers) -> Writers:
    """Return those of `before` that have not ended, under their present names.

    PREPARE TRANSACTION detaches a transaction from its session: then only its id identifies it. A writer whose id was
    not known before may be any prepared transaction.
    """
    ids = {id for id in before.values() if id is not None}
    is_any = any(id is None and name not in now for name, id in before.items())
    return {
        name: id for name, id in now.items() if name in before or id in ids or (is_any and name.startswith(PREPARED))
    }
