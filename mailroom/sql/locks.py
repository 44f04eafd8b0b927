"""Advisory locks and NOTIFY channels of a node.

A lock is a pair of ints: its use, and the oid of the table that it belongs to. So two nodes in one database never share
a lock. DDL, LEDGER and ALIVE belong to no table. The channel of a table is `mailroom:<oid>`, that of a link
`mailroom:<oid of transit>:<number of the link>`.
"""

AWAKE = 1835100524  # on an outbox: held by a dispatcher's session while it is awake. Its trigger repeats the number.
DDL = 1835100526  # on a schema's name: held while an inbox is created or a migration runs
# On an inbox's partition: shared by the sessions of the workers that sleep; on a log's: by those of all inboxes that
# read it. On `transit`: by those of the readers of links that sleep.
ASLEEP = 1835100527
STREAM = 1835100528  # on an inbox's partition: held by the driver of the one Spark stream that reads it
LEDGER = 1835100529  # on the name of a Spark stream that writes: held while one of its batches is entered
ALIVE = 1835100530  # on a random number of a worker process: held by its session as long as the process is alive


def key(table: str) -> str:
    """Return SQL for the second int of a lock on a table; `table` is SQL for its oid. A plain cast would overflow."""
    return f"({table}::oid::bigint - 2147483648)::integer"


def channel(table: str) -> str:
    """Return SQL for the name of a table's channel; `table` is SQL for its oid."""
    return f"'mailroom:' || {table}::oid::text"


def ringing(channel: str, key: str) -> str:
    """Return SQL for an aggregate: notify each channel whose lock `ASLEEP` another session holds, and count them.

    Where none does, the transaction holds the lock until its end: a session about to sleep waits for that.
    """
    return f"pg_catalog.count(pg_notify({channel}, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock({ASLEEP}, {key}))"


def link_channel(transit: str, link: str) -> str:
    """Return SQL for the name of a link's channel; `transit` is SQL for the oid of that table, `link` for its number.

    It is rung when messages were stamped for the link while some reader of the node sleeps.
    """
    return f"{channel(transit)} || ':' || ({link})::text"
