"""Advisory locks and channels of a node: each is named by what it is for and by the table it belongs to.

A table's bell is the channel `mailroom:<oid>`. A lock is a pair of ints, the use and the table, so locks live and die
with the table and two nodes in one database never meet; but for ALIVE.
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
    """Return SQL for the second int of a lock on `table`, itself SQL for an oid; one to one, where a cast overflows."""
    return f"({table}::oid::bigint - 2147483648)::integer"


def channel(table: str) -> str:
    """Return SQL for the name of the channel that is the bell of `table`, itself SQL for an oid."""
    return f"'mailroom:' || {table}::oid::text"
