"""Who is writing to an outbox right now: the transactions whose rows may still become visible.

Not read from `pg_current_snapshot()`: that does not list running transactions newer than the last completed one, and a
writer was lost that way within seconds.
"""

from mailroom.operation import Operation, Sql

# A writer holds RowExclusiveLock on the outbox before it looks at the bell or draws a position, and drops it only after
# its rows are visible. Each is named by its virtual transaction and, once it has one, by its transaction id, which
# stays the same when PREPARE TRANSACTION takes the locks away from the session. One scan of pg_locks, not two.
WRITERS = Sql(
    """
WITH held AS MATERIALIZED (SELECT * FROM pg_locks WHERE granted AND pid IS DISTINCT FROM pg_backend_pid()),
writer AS MATERIALIZED (
    SELECT virtualtransaction FROM held
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = '{schema}.{outbox}'::regclass::oid
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
SELECT virtualtransaction FROM writer
UNION
SELECT transactionid::text FROM held
WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock'
  AND virtualtransaction IN (SELECT virtualtransaction FROM writer)
""",
    columns=("text",),
)


def reading_writers(schema: str, table: str) -> Operation[frozenset[str]]:
    """Return the writers there are; a set read earlier has left when it has no element in common with this one."""
    rows = yield WRITERS.at(schema=schema, outbox=table)()
    return frozenset(row[0] for row in rows)
