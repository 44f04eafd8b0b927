"""Whose fault a failed batch is, and what is recorded of it.

The failure is recorded on another session before the batch is rolled back: as long as the batch locks its messages, no
other worker can try them. If the worker knows which message failed, it counts an attempt of that one, and the messages
handled before it are tried one at a time, so that none of them is repeated more than once. If it does not know, all
messages of the batch are tried one at a time.
"""

from uuid import UUID

from inbox.by_key.failure import Recorded, failed, last_clocks
from inbox.exceptions import Unavailable
from inbox.handling.batch import Batch
from mailroom.sql.operation import Operation
from mailroom.sql.sqlstate import BLAMES, is_unserializable, meaning

# D-workers-16: Transient errors are forgiven twice per message.
FORGIVEN = 2  # transient errors in a row that are not counted as attempts at the message being handled
# The same of those that come of the transaction's level. A worker's sessions run the user's statements, and keep the
# level that these rely on; above READ COMMITTED claims and deletions of healthy keys get 40001 from each other.
UNSERIALIZABLE = 100
REMEMBERED = 10_000  # messages


def is_transient(error: Exception, batch: Batch) -> bool:
    """Return whether the error is the fault of the database or of our connection, and not of a message."""
    if batch.run.is_open and not batch.run.is_over:
        return batch.run.is_transient
    return meaning(error) not in BLAMES


class Patience:
    """How often transient errors struck while a message was being handled; one worker's loops share it.

    Some errors look transient but come from a message: its handler terminates its own backend, exceeds a timeout of its
    session, or runs into the same deadlock each time. If these were never counted, its batch would be retried for ever.
    40001 from the server's own comparison of transactions is hardly ever one of these: it takes many in a row.
    """

    def __init__(self) -> None:
        self._times: dict[UUID, int] = {}

    def forgives(self, error: Exception, batch: Batch) -> bool:
        """Return whether to retry the batch without counting an attempt; repeated calls give the same answer."""
        if batch.end.forgiven is None:
            batch.end.forgiven = isinstance(error, Unavailable) or (
                is_transient(error, batch) and (not batch.run.is_open or self._is_rare(error, batch))
            )
        return batch.end.forgiven

    def handled(self, batch: Batch) -> None:
        """Reset the counts of a batch's messages."""
        if self._times:
            for message in batch.messages:
                self._times.pop(message.id, None)

    def _is_rare(self, error: Exception, batch: Batch) -> bool:
        if len(self._times) > REMEMBERED:  # counts remain of messages that other workers have handled
            self._times.clear()
        message = batch.run.blamed or batch.messages[0]
        self._times[message.id] = times = self._times.get(message.id, 0) + 1
        return times <= (UNSERIALIZABLE if is_unserializable(error) else FORGIVEN)


# The outcome if it is not known which message failed: all keys of the batch are tried one message at a time.
SUSPECTED = Recorded("alone", 0, 0.0)


def blaming(batch: Batch, error: Exception, fatal: tuple[type[BaseException], ...]) -> Operation[Recorded]:
    """Record a failed batch: the attempt at the message to blame, and which messages are tried one at a time."""
    if batch.taken is None:
        return SUSPECTED  # it failed before it had any message
    order, blamed, suspects = batch.taken.order, batch.run.blamed, batch.messages
    if blamed is not None:
        suspects = order.suspects(suspects[: suspects.index(blamed)], blamed)
    if suspects:
        keys = last_clocks(suspects)
        reason = f"in a batch that failed: {type(error).__name__}"
        yield from order.suspecting(list(keys), list(keys.values()), reason)
    if blamed is None:
        return SUSPECTED
    return (yield from order.recording(failed(blamed, error, fatal)))
