"""What `mailroom top` sees, for all pages: one look at a time, and at most one a second, however many people watch.

A look takes as long as the node has inboxes, so a page that is there is shown the last one, while the next is taken.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime

import psycopg

from dispatcher.dashboard.sessions import NodeSessions
from mailroom.errors import MailroomError
from mailroom.figures.node import WhichNode, reading_place
from mailroom.metrics.look import Look, Watch
from mailroom.sql.runner import run

log = logging.getLogger("mailroom.dashboard")

FRESH_S = 1.0
# D-dashboard-2: The dashboard reads what `mailroom top` reads, once a second at most.
SHOWN_S = 10.0  # an older look is not shown: a page then waits for the next
KEPT = 120  # looks whose rates are drawn
# The rates of a look are those since the one before. After a longer time without any it begins anew.
APART_S = 60.0


class Looks:
    """The newest look at a node, and the rates of those before it. `monotonic` is its clock, in seconds."""

    def __init__(self, sessions: NodeSessions, schema: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._sessions, self._schema, self._monotonic = sessions, schema, monotonic
        self._lock = threading.Lock()
        self._watch = Watch(schema, monotonic)
        self._look: tuple[float, Look] | None = None
        self._looked_at = float("-inf")
        self.place: WhichNode | None = None  # which node it is, once a look was taken
        self.rates: deque[tuple[datetime, float, float, float]] = deque(maxlen=KEPT)

    def newest(self) -> Look:
        """Return the last look, and have the next one taken; who is the first after a while waits for it."""
        known = self._look
        age_s = float("inf") if known is None else self._monotonic() - known[0]
        if known is None or age_s > SHOWN_S:
            return self._taken()
        if age_s > FRESH_S and not self._lock.locked():
            threading.Thread(target=self._taken_beside, name="mailroom dashboard look", daemon=True).start()
        return known[1]

    def expire(self) -> None:
        """Have the next page wait for a look of its own: something was changed."""
        self._look = None

    def _taken_beside(self) -> None:
        try:
            self._taken()
        except (psycopg.Error, MailroomError) as error:  # a page that has to wait for a look is told
            log.info("no look at the node: %s", type(error).__name__)

    def _taken(self) -> Look:
        with self._lock:
            now, known = self._monotonic(), self._look
            if known is not None and now - known[0] <= FRESH_S:
                return known[1]  # another page has just taken it
            if now - self._looked_at > APART_S:
                self._watch = Watch(self._schema, self._monotonic)
                self.rates.clear()
            with self._sessions.reading() as connection:
                look = run(connection, self._watch.looking())
                if self.place is None or self.place.name != look.node:
                    self.place = run(connection, reading_place(self._schema))
            self._looked_at = self._monotonic()
            self._look = self._looked_at, look
            if look.sent_per_s is not None:
                self.rates.append((look.at, look.sent_per_s, look.delivered_per_s or 0.0, look.reaped_per_s or 0.0))
            return look
