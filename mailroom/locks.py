"""Advisory locks and NOTIFY channels of a node: each is named by its use and by the table it belongs to.

A table's channel is `mailroom:<oid>`. A lock is a pair of ints, its use and the table's oid. So two nodes in one
database never share a lock, and a lock ends with its table; only ALIVE is not bound to a table.
"""

AWAKE = (
    1835100524  # on an outbox: held by a dispatcher's session while it is awake; the outbox's trigger has the number
)
DISPATCH = 1835100525  # on an outbox: held by the one transaction that delivers
DDL = 1835100526  # on a schema's name: one migration or new inbox at a time
ASLEEP = 1835100527  # on an inbox's partition: shared by the sessions of the workers that sleep
STREAM = 1835100528  # on an inbox's partition: held by the driver of the one Spark stream that reads it
LEDGER = 1835100529  # on the name of a Spark stream that writes: one of its batches is entered at a time
ALIVE = 1835100530  # on a number that a worker process has drawn: held by its session while it speaks


def key(table: str) -> str:
    """Return SQL for the second int of a lock on `table`, SQL for an oid. A plain cast would overflow."""
    return f"({table}::oid::bigint - 2147483648)::integer"


def channel(table: str) -> str:
    """Return SQL for the name of the channel of `table`, SQL for an oid."""
    return f"'mailroom:' || {table}::oid::text"
