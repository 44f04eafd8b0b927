"""How much of a full batch to try at once, so that a batch that takes too long is not retried at the same size."""

from collections.abc import Iterator
from contextlib import contextmanager

# D-statements-7: What timed out is not tried again unchanged.
MOST_HALVINGS = 20  # makes one row of a million


class Portion:
    """Halves after each batch that failed, for whatever reason, and doubles after each that succeeded.

    On a slow server a batch may hit a timeout, or a new leader may end its session; the same batch would fail again. It
    outlives connections, since a failing batch often ends its connection.
    """

    def __init__(self) -> None:
        self._halvings = 0

    def of(self, full: int) -> int:
        """Return how much of `full` to try now; at least 1."""
        return max(1, full >> self._halvings)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Run one batch in this context."""
        try:
            yield
        except BaseException:
            self._halvings = min(self._halvings + 1, MOST_HALVINGS)
            raise
        self._halvings = max(self._halvings - 1, 0)
