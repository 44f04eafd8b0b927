"""How large a loop's batches are, by the time that they take: so that no message waits long for others of its batch."""

FIRST = 1  # messages in a loop's first batch: nobody knows yet how long they take


class Pace:
    """How many messages the next batch of a loop should have, for it to take about a quarter of `batch_s` seconds.

    It starts with one message. A full batch that took less than a quarter of `batch_s` is followed by one twice as
    large, up to `most`. One that took longer is followed by one that would not have, as far as that one tells, down to
    one message. With `batch_s=None` each batch may have `most` messages.
    """

    def __init__(self, most: int, batch_s: float | None) -> None:
        self._most = most
        self._wanted_s = None if batch_s is None else batch_s / 4
        self._size = most if batch_s is None else min(FIRST, most)

    def next(self) -> int:
        """Return the size: `most` or a power of two, since each size is a statement to be planned."""
        return self._size

    def took(self, messages: int, seconds: float) -> None:
        """Take how long a batch took, from its claim on, with the messages that were handled or begun in it."""
        if self._wanted_s is None:
            return
        if seconds > self._wanted_s:
            fitting = int(messages * self._wanted_s / seconds)
            self._size = min(self._size, 1 << max(0, fitting.bit_length() - 1))
        elif messages >= self._size:
            self._size = min(self._most, 2 * self._size)
