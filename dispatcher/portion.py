"""A portion: how much of a full batch is tried at once, so that what takes too long is not tried the same way again."""

from collections.abc import Iterator
from contextlib import contextmanager

MOST_HALVINGS = 20  # of a million rows, one


class Portion:
    """Half as much after each batch that did not come to its end, whatever ended it, and twice after each that did.

    A batch may run into a timeout, or its session be ended by another leader to whom it looks dead, only because the
    server is slow; the same batch would again. It outlives connections, since a batch often ends with its own.
    """

    def __init__(self) -> None:
        self._halvings = 0

    def of(self, full: int) -> int:
        """Return how much of `full` to try now, at least 1."""
        return max(1, full >> self._halvings)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Try one batch within."""
        try:
            yield
        except BaseException:
            self._halvings = min(self._halvings + 1, MOST_HALVINGS)
            raise
        self._halvings = max(self._halvings - 1, 0)
