"""Only the worker may commit the transaction of its batch.

A handler that commits would also commit the deletion of the messages after its own, and these would be lost. One
that rolls back would have the messages before its own handled twice. So the claim of a batch also declares a cursor
WITH HOLD (`hold_batch`) whose query fails. The server runs that query at COMMIT or PREPARE TRANSACTION, however it
is sent, and rolls back. The worker closes the cursor first; if there is no such cursor, this is another
transaction.

The server cannot refuse a ROLLBACK. So the claim also changes a setting for its transaction only, one whose changes the
server reports to the client. When the driver has another value than after the claim, the transaction has ended or
failed; finding that out takes no round trip.
"""

from typing import Any

from psycopg.pq import TransactionStatus

from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import driver_of, reading_reported, reading_status

ABORTED = "the handler returned, but a statement had failed in its transaction"
ENDED = (
    "the handler ended the transaction of its batch, or swallowed an error in it: leave COMMIT and ROLLBACK to the "
    "worker, and open another connection for separate work"
)

RELEASE = Sql("CLOSE mailroom_batch")
INERROR = int(TransactionStatus.INERROR)  # to look it up in its enumeration each time takes as long as to compare
# D-workers-8: The server refuses the handler's COMMIT.
COMMIT = f"{RELEASE.template}; COMMIT"  # one simple query, so that it takes one round trip, like COMMIT alone


class Hold:
    """The transaction that a claim just made on this connection.

    It only reads the driver's state. Behind a pooler that withholds the server's reports the driver cannot know; then
    closing the cursor fails.
    """

    __slots__ = ("_claimed", "_in_transaction", "_mark", "_status", "driver")

    def __init__(self, connection: Any) -> None:
        # Read now: a session that has lost its connection no longer gives the driver's connection.
        self.driver = driver_of(connection)
        self._in_transaction = getattr(connection, "in_transaction", None)
        self._status = reading_status(self.driver)
        self._mark = reading_reported(self.driver, "default_transaction_read_only")
        self._claimed = self._mark()

    def why_over(self) -> str:
        """Return why the transaction cannot be committed, "" if it can. Cheap: called after each message."""
        if self._in_transaction is not None and not self._in_transaction():
            return ENDED  # a SQLAlchemy session has returned its connection to the pool, where another loop may use it
        if self._status() == INERROR:
            return ABORTED  # its COMMIT would roll back and report success
        return ENDED if self._mark() != self._claimed else ""


def releasing() -> Operation[None]:
    """Close the cursor as the last statement before the COMMIT, where we do not send the COMMIT ourselves."""
    yield RELEASE.at()()
