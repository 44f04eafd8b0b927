"""The server's notification queue: 8 GB that all databases share. A listener that does not read keeps it from emptying.

Once it is full, every commit that notifies fails. The dispatcher warns early, and makes sure that it is not the cause.
"""

from mailroom.sql.operation import Operation, Sql

CHECK_INTERVAL_S = 10.0
WARN_AT = 0.10
DROP_AT = 0.25  # from here on the dispatcher drops the connection it listens on and opens another

USAGE = Sql("SELECT pg_notification_queue_usage()", columns=("float8",))


def reading_queue_usage() -> Operation[float]:
    """Return how full the queue is, from 0 to 1."""
    [(usage,)] = yield USAGE.at()()
    return float(usage)
