"""How many messages a loop's next batch may hold, after messages that failed."""

from inbox.handling.batch import Batch

HANDLED_PER_REPEATED = 10


class Size:
    """How many messages the next batch of a loop may hold: `most`, unless too many had to be repeated recently.

    When a message fails, those handled before it in the batch are rolled back and handled again. To keep a storm of
    failures from repeating a full batch each time, a loop has an allowance: a tenth of the messages it handles, of
    which at most a full batch is saved up. A batch holds one message, and as many more as the allowance covers. So,
    whatever fails, a loop repeats at most a tenth of what it handles, plus one full batch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._saved = HANDLED_PER_REPEATED * (most - 1)  # counted in messages handled

    def next(self) -> int:
        """Return the size of the next batch: `most` or a power of two, since each size is a statement to be planned."""
        size = 1 + self._saved // HANDLED_PER_REPEATED
        return size if size == self._most else 1 << (size.bit_length() - 1)

    def handled(self, batch: Batch) -> None:
        """Add to the allowance for a batch that was committed."""
        if not batch.is_alone:
            self._saved = min(self._saved + len(batch.messages), HANDLED_PER_REPEATED * (self._most - 1))

    def failed(self, batch: Batch) -> None:
        """Charge a failed batch: the messages before the failed one are repeated, or all but one if it is unknown."""
        messages, blamed = batch.messages, batch.run.blamed
        repeated = len(messages) - 1 if blamed is None else messages.index(blamed)
        self._saved = max(0, self._saved - HANDLED_PER_REPEATED * repeated)
