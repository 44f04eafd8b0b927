"""How long connecting may take: longer each time it took too long, for the server would be as slow the next time.

It starts a process and looks up the role; a server without a free core or a quiet disk takes its time for that, and for
every connection that was given up too. Where nobody is, or nobody answers, it is a bound to the waiting.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psycopg.errors import ConnectionTimeout

USUAL_S = 10
LONGEST_S = 80


class ConnectTimes:
    """How long connecting may take, by connection string; for all sessions of a process, which share the server."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._allowed_s: dict[str, int] = {}

    def allowed_s(self, dsn: str) -> int:
        """Return how many seconds it may take now."""
        return self._allowed_s.get(dsn, USUAL_S)

    @contextmanager
    def measured(self, dsn: str) -> Iterator[None]:
        """Connect within: twice as long is allowed if that was too long, and never more than twice what was needed."""
        began, allowed_s = self._monotonic(), self.allowed_s(dsn)
        try:
            yield
        except ConnectionTimeout:
            self._allowed_s[dsn] = min(2 * allowed_s, LONGEST_S)
            raise
        needed_s = math.ceil(2 * (self._monotonic() - began))
        # Not back at once: those that connect next may need as long.
        self._allowed_s[dsn] = max(USUAL_S, min(self.allowed_s(dsn), needed_s))
