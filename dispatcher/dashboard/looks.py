"""What `mailroom top` sees, for all pages: one look at a time, and at most one a second, however many people watch."""

import threading
import time
from collections import deque
from collections.abc import Callable

from dispatcher.dashboard.sessions import Sessions
from mailroom.metrics.look import Look, Watch
from mailroom.sql.runner import run

FRESH_S = 1.0
KEPT = 120  # looks whose rates are drawn
# The rates of a look are those since the one before. After a longer time without any it begins anew.
APART_S = 60.0


class Looks:
    """The newest look at a node, and the rates of those before it. `monotonic` is its clock, in seconds."""

    def __init__(self, sessions: Sessions, schema: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._sessions, self._schema, self._monotonic = sessions, schema, monotonic
        self._lock = threading.Lock()
        self._watch = Watch(schema, monotonic)
        self._look: Look | None = None
        self._at = float("-inf")
        self.rates: deque[tuple[float, float, float]] = deque(maxlen=KEPT)

    def newest(self) -> Look:
        """Return a look that is no older than a second; who comes meanwhile waits for it."""
        with self._lock:
            now = self._monotonic()
            if self._look is not None and now - self._at < FRESH_S:
                return self._look
            if now - self._at > APART_S:
                self._watch = Watch(self._schema, self._monotonic)
                self.rates.clear()
            with self._sessions.reading() as connection:
                self._look = run(connection, self._watch.looking())
            self._at = self._monotonic()
            look = self._look
            if look.sent_per_s is not None:
                self.rates.append((look.sent_per_s, look.delivered_per_s or 0.0, look.reaped_per_s or 0.0))
            return look
