"""Who is writing to an outbox right now: the transactions whose rows may still become visible.

Not read from `pg_current_snapshot()`: that does not list running transactions newer than the last completed one, and a
writer was lost that way within seconds.
"""

from collections.abc import Mapping
from typing import TypeAlias

from mailroom.sql.operation import Operation, Sql

Writers: TypeAlias = Mapping[str, int | None]  # by virtual transaction: its transaction id, once it has one
PREPARED = "-1/"  # what the virtual transaction of every prepared one begins with

# A writer holds RowExclusiveLock on the outbox before it looks at the bell or draws a position, and drops it only after
# its rows are visible. One scan of pg_locks, not two. Of a transaction and its savepoints the oldest id is its own;
# pg_locks has 32 of their 64 bits, which are within 2^31 of the newest one.
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
    """Return the writers there are."""
    rows = yield WRITERS.at(schema=schema, outbox=table)()
    return dict(rows)


def remaining(before: Writers, now: Writers) -> Writers:
    """Return those of `before` that have not ended, as they are called now.

    PREPARE TRANSACTION takes a transaction away from its session: it is known by its id then. One of which the id was
    not known yet may be any that is prepared.
    """
    ids = {id for id in before.values() if id is not None}
    is_any = any(id is None and name not in now for name, id in before.items())
    return {
        name: id for name, id in now.items() if name in before or id in ids or (is_any and name.startswith(PREPARED))
    }
