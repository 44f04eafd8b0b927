"""The floor: the position below which nothing can still turn up, so that scans of an outbox start above dead rows.

Rows deleted behind a long snapshot stay in the index as dead entries; a scan from 0 pays for each of them every time.
So it does for the rows of a long transaction that has not committed: above the floor there may be gaps, of which all
is known that can still turn up, and a scan starts above them until one of their transactions has ended. Both are hints
for speed, kept in memory; without them the result is the same. They die with their connection.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dispatcher.writers import Writers, reading_writers, remaining
from mailroom.sql.operation import Operation

FULL_SCAN_S = 60.0
STEP = 1_000  # positions between two raises: about what a scan may pass over for nothing


@dataclass(frozen=True, slots=True)
class Start:
    """Where a scan starts: above `position`; or at the first gap of which a transaction has ended, for its snapshot.

    `gaps` are the positions at which gaps begin, each with one of the transactions that it waits for.
    """

    position: int = 0
    gaps: tuple[tuple[int, int], ...] = ()

    def values(self) -> dict[str, object]:
        """Return the values of `START`."""
        return {
            "start": self.position,
            "gaps": [position for position, _ in self.gaps],
            "writers": [str(writer) for _, writer in self.gaps],
        }


FIRST = Start()

# The scan's own snapshot is asked: with any other one, a transaction that ended between the two would be overtaken by
# what was sent after its commit.
START = """
start AS MATERIALIZED (
    SELECT coalesce(min(gap) FILTER (WHERE has_ended), %(start)s::bigint) AS position,
           coalesce(pg_catalog.array_agg(writer) FILTER (WHERE NOT has_ended), '{}'::text[]) AS running
    FROM (SELECT gap, writer, pg_visible_in_snapshot(writer::xid8, pg_current_snapshot()) AS has_ended
          FROM unnest(%(gaps)s::bigint[], %(writers)s::text[]) AS g (gap, writer)) AS g)"""


class Scanned(Protocol):
    """What was taken from an outbox."""

    @property
    def taken(self) -> int:
        """How many."""
        ...

    @property
    def last(self) -> int | None:
        """The largest position among them; None if that says nothing of those below."""
        ...

    @property
    def more(self) -> bool:
        """Whether there may be more."""
        ...

    @property
    def drawn(self) -> int:
        """The last position that was drawn before its scan."""
        ...

    @property
    def running(self) -> Sequence[str]:
        """Which transactions of its `Start` had not ended for its scan."""
        ...


@dataclass(slots=True)
class Gap:
    """Positions above `low`, up to `high`: what is not visible there belongs to the transactions in `writers`."""

    low: int
    high: int
    writers: set[int]


class Floor:
    """Of one outbox, `table`. Raised in steps, after batches: never past a position that may still turn up.

    (1) The last position that a batch saw drawn is the goal; (2) in a later statement read the writers. A position up
    to the goal was drawn under the lock that (2) looks at, so it belongs to a transaction that had ended or to one of
    those writers. (3) A batch that began afterwards and took everything up to the goal raises the start of the next
    scans to it. What can still turn up below belongs to those writers that had not ended for that batch: if there are
    any, a gap stays behind. Raised without (3), rows were stuck.

    A gap is scanned again, with all above it, by the batch for which one of its writers has ended. So a batch takes the
    very rows that a scan of everything would.

    `monotonic` is the clock, in seconds, by which a scan starts at 0 once a minute all the same: it finds rows that
    were written with a position of their own.
    """

    def __init__(self, table: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._monotonic = monotonic
        self._scanned = monotonic()
        self._start = 0
        self._gaps: list[Gap] = []
        self._goal: int | None = None
        self._writers: Writers = {}

    @property
    def value(self) -> int:
        """The position below which nothing can turn up."""
        return self._gaps[0].low if self._gaps else self._start

    def start(self) -> Start:
        """Return where the next scan is to start."""
        gaps = [(gap.low, writer) for gap in self._gaps for writer in gap.writers]
        gaps += [(self._start, id) for id in self._writers.values() if id is not None]
        if self._monotonic() - self._scanned < FULL_SCAN_S:
            return Start(self._start, tuple(gaps))
        self._scanned = self._monotonic()
        return Start(0, tuple((0, writer) for _, writer in gaps))

    def raising(self, schema: str, batch: Scanned) -> Operation[None]:
        """Take one step, after `batch` has committed."""
        running = set(map(int, batch.running))
        reached = (batch.last or 0) if batch.more else math.inf
        self._close(running, reached)
        if self._goal is None:
            if batch.drawn - self._start >= STEP:
                self._writers = yield from reading_writers(schema, self._table)
                self._goal = batch.drawn
        # One without an id may have drawn a position, and get its id later.
        elif None in self._writers.values():
            self._writers = remaining(self._writers, (yield from reading_writers(schema, self._table)))
        elif reached >= self._goal:
            writers = running & {id for id in self._writers.values() if id is not None}
            self._gaps.append(Gap(self._start, self._goal, writers))
            self._start, self._goal, self._writers = self._goal, None, {}
            self._join()

    def _close(self, running: set[int], reached: float) -> None:
        """Forget the writers that had ended for a batch that took everything up to there."""
        for gap in self._gaps:
            if gap.high <= reached:
                gap.writers &= running
        self._join()

    def _join(self) -> None:
        """Drop gaps in which nothing can turn up, and join neighbours that wait for the same."""
        gaps, self._gaps = self._gaps, []
        for gap in gaps:
            last = self._gaps[-1] if self._gaps else None
            if last is not None and last.high == gap.low and last.writers == gap.writers:
                last.high = gap.high
            elif gap.writers:
                self._gaps.append(gap)
