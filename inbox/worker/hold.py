"""Hold: the transaction of a worker's batch is ended by its worker alone.

A handler that committed would commit the removal of all the messages behind its own, which nobody would handle; one
that rolled back would have those before it handled twice. So the claim that takes a batch also declares a cursor WITH
HOLD (`hold_batch`), whose query fails. The server runs it at a COMMIT or PREPARE TRANSACTION, whoever sends that in
whatever way, and rolls back. The worker closes the cursor first; if it is not there, the transaction is another one.

A ROLLBACK cannot be refused. The claim therefore also flips, for its transaction only, a setting of which the server
reports each change. Once the driver has another value of it than after the claim, the transaction is over, or has
failed; and that is known without a trip.
"""

from typing import Any

from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import is_aborted, reported

ABORTED = "the handler returned, but a statement had failed in its transaction"
ENDED = (
    "the handler ended the transaction of its batch, or swallowed an error of it: leave COMMIT and ROLLBACK to the "
    "worker, and open another connection for work of its own"
)

RELEASE = Sql("CLOSE mailroom_batch")
COMMIT = f"{RELEASE.template}; COMMIT"  # one simple query, so that it takes no trip more than COMMIT


def mark(driver: object) -> object:
    """Return what is the same on a driver's connection as long as the transaction of its claim is."""
    return reported(driver, "default_transaction_read_only")


def why_over(connection: Any, driver: object, claimed: object) -> str:
    """Tell why the transaction cannot be committed whose claim left that mark on the driver's connection; "" if it can.

    Asks the driver only. One that a pooler keeps the reports from does not know; then closing the cursor fails.
    """
    in_transaction = getattr(connection, "in_transaction", None)
    if in_transaction is not None and not in_transaction():
        return ENDED  # a session has given its connection back: another lane may use it by now
    if is_aborted(driver):
        return ABORTED
    return ENDED if mark(driver) != claimed else ""


def releasing() -> Operation[None]:
    """Let the transaction be committed; the last statement before that, where COMMIT is not sent by us."""
    yield RELEASE.at()()
