"""How large a loop's batches are, by the time that they take: no message should wait long for its batch."""

# D-workers-12: Batches double up to a quarter of `batch_s`.
FIRST = 1  # messages in a loop's first batch: it is not known yet how long they take


class Pace:
    """How many messages the next batch of a loop should have, for handlers to take a quarter of `batch_s` seconds.

    It starts with one message. A full batch whose handlers took less than that is followed by one twice as large, up to
    `most`. If its handlers took longer, the next batch is so small that, at the same rate, they would not have, down to
    one message. If claim and COMMIT take more than a quarter of `batch_s`, as on a slow disk, handlers may take as long
    as those do, up to `batch_s`: else claims and COMMITs would take most of the time. With `batch_s=None` each batch
    may have `most` messages.
    """

    def __init__(self, most: int, batch_s: float | None) -> None:
        self._most = most
        self._batch_s = batch_s
        self._size = most if batch_s is None else min(FIRST, most)

    def next(self) -> int:
        """Return the size: `most` or a power of two, since each size is a statement to be planned."""
        return self._size

    def took(self, messages: int, handlers_s: float, others_s: float = 0.0) -> None:
        """Take how long handlers took with the messages of a batch that were handled or begun, and the rest of it."""
        if self._batch_s is None:
            return
        wanted_s = min(max(self._batch_s / 4, others_s), self._batch_s)
        if handlers_s > wanted_s:
            fitting = int(messages * wanted_s / handlers_s)
            self._size = min(self._size, 1 << max(0, fitting.bit_length() - 1))
        elif messages >= self._size:
            self._size = min(self._most, 2 * self._size)
