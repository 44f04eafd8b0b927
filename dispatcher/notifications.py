"""The server's queue of notifications: 8 GB that all its databases share, held back by whoever listens and takes none.

A commit that notifies fails once it is full. The dispatcher warns early, and makes sure that it is not to blame.
"""

from mailroom.sql.operation import Operation, Sql

CHECK_INTERVAL_S = 10.0
WARN_AT = 0.10
DROP_AT = 0.25  # then a dispatcher drops the connection it listens with, and listens on another

USAGE = Sql("SELECT pg_notification_queue_usage()", columns=("float8",))


def reading_queue_usage() -> Operation[float]:
    """Return how full the queue is: 0 to 1."""
    [(usage,)] = yield USAGE.at()()
    return float(usage)
