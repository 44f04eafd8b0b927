"""How long connecting may take. The limit doubles after each timeout, since a slow server stays slow for a while.

The server starts a process and looks up the role, also for connections that were given up. Without a free core or with
a busy disk this takes long, and retrying with the same limit would only add load.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psycopg.errors import ConnectionTimeout

USUAL_S = 10
LONGEST_S = 80


# D-statements-7: What timed out is not tried again unchanged.
class ConnectTimes:
    """The connect timeout per connection string, shared by all sessions of a process."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._allowed_s: dict[str, int] = {}

    def allowed_s(self, dsn: str) -> int:
        """Return the current limit in seconds."""
        return self._allowed_s.get(dsn, USUAL_S)

    @contextmanager
    def measured(self, dsn: str) -> Iterator[None]:
        """Connect within this block: a timeout doubles the limit, a success sets it to at most twice what it took."""
        began, allowed_s = self._monotonic(), self.allowed_s(dsn)
        try:
            yield
        except ConnectionTimeout:
            self._allowed_s[dsn] = min(2 * allowed_s, LONGEST_S)
            raise
        needed_s = math.ceil(2 * (self._monotonic() - began))
        # Not reset at once: the next connections may need as long.
        self._allowed_s[dsn] = max(USUAL_S, min(self.allowed_s(dsn), needed_s))
