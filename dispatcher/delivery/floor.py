"""The floor: the position below which no row can appear any more, so that scans of an outbox start above dead rows.

While a long snapshot is open, deleted rows stay in the index as dead entries, and a scan from 0 reads them all each
time. The same goes for the rows of a long transaction that has not committed. These are the gaps above the floor: the
transactions that can still fill a gap are known, and scans start above the gaps until one of those has ended. Floor and
gaps only save time; without them the result is the same. They are kept in memory, for one connection.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dispatcher.delivery.writers import Writers, reading_writers, remaining
from mailroom.sql.operation import Operation

FULL_SCAN_S = 60.0
STEP = 1_000  # positions between two raises: about how many dead rows a scan may read


@dataclass(frozen=True, slots=True)
class ScanStart:
    """Where a scan starts: above `position`, or at the first gap with a transaction that its snapshot sees as ended.

    `gaps` are pairs: the position above which a gap begins, and one of the transactions that may fill it.
    """

    position: int = 0
    gaps: tuple[tuple[int, int], ...] = ()

    def values(self) -> dict[str, object]:
        """Return the parameters of `START`."""
        return {
            "start": self.position,
            "gaps": [position for position, _ in self.gaps],
            "writers": [str(writer) for _, writer in self.gaps],
        }


FIRST = ScanStart()

# This must be the snapshot of the scan itself. If a transaction ended between two snapshots, messages sent after its
# commit would overtake its own.
# D-doorbell-8: Gaps above the floor are decided by the delivery's own snapshot.
START = """
start AS MATERIALIZED (
    SELECT coalesce(min(gap) FILTER (WHERE has_ended), %(start)s::bigint) AS position,
           coalesce(pg_catalog.array_agg(writer) FILTER (WHERE NOT has_ended), '{}'::text[]) AS running
    FROM (SELECT gap, writer, pg_visible_in_snapshot(writer::xid8, pg_current_snapshot()) AS has_ended
          FROM unnest(%(gaps)s::bigint[], %(writers)s::text[]) AS g (gap, writer)) AS g)"""


class Scanned(Protocol):
    """What one batch took from an outbox."""

    @property
    def taken(self) -> int:
        """How many rows."""
        ...

    @property
    def last(self) -> int | None:
        """The largest position taken; None if lower ones may be left."""
        ...

    @property
    def more(self) -> bool:
        """Whether there may be more to take."""
        ...

    @property
    def drawn(self) -> int:
        """The last position that the sequence had given out before the scan."""
        ...

    @property
    def running(self) -> Sequence[str]:
        """The transactions of its `ScanStart` that had not ended in the snapshot of the scan."""
        ...


@dataclass(slots=True)
class Gap:
    """Positions above `low`, up to `high`. Rows not visible there belong to the transactions in `writers`."""

    low: int
    high: int
    writers: set[int]


class Floor:
    """The floor of the outbox `table`. It rises in steps, after batches, and never passes a row that may still appear.

    (1) The goal is the last position that was drawn before a batch. (2) A later statement reads the writers. A writer
    draws positions while it holds the lock that (2) reads, so each position up to the goal belongs to a transaction
    that had ended or to one of these writers. (3) A later batch that took everything up to the goal raises the start
    of the next scans to it. Rows that may still appear below belong to those writers that had not ended for that batch:
    if there are any, a gap remains. Without (3), rows got stuck below the floor.

    The batch for which one of a gap's writers has ended scans from that gap on. So a batch takes exactly the rows that
    a full scan would take.

    Once a minute, by the clock `monotonic`, a scan starts at 0: it finds rows that were inserted with an explicit
    position.
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
        """The position below which no row can appear."""
        return self._gaps[0].low if self._gaps else self._start

    def start(self) -> ScanStart:
        """Return where the next scan starts."""
        above = self.above()
        if self._monotonic() - self._scanned < FULL_SCAN_S:
            return above
        self._scanned = self._monotonic()
        return ScanStart(0, tuple((0, writer) for _, writer in above.gaps))

    def above(self) -> ScanStart:
        """Return where a look starts. It takes nothing, so it leaves the scan of each minute to the next batch."""
        gaps = [(gap.low, writer) for gap in self._gaps for writer in gap.writers]
        gaps += [(self._start, id) for id in self._writers.values() if id is not None]
        return ScanStart(self._start, tuple(gaps))

    def raising(self, schema: str, batch: Scanned) -> Operation[None]:
        """Take one step, after `batch` has committed."""
        running = set(map(int, batch.running))
        reached = (batch.last or 0) if batch.more else math.inf
        self._close(running, reached)
        if self._goal is None:
            if batch.drawn - self._start >= STEP:
                self._writers = yield from reading_writers(schema, self._table)
                self._goal = batch.drawn
        # A writer without an id may have drawn a position already, and get its id later.
        elif None in self._writers.values():
            self._writers = remaining(self._writers, (yield from reading_writers(schema, self._table)))
        elif reached >= self._goal:
            writers = running & {id for id in self._writers.values() if id is not None}
            self._gaps.append(Gap(self._start, self._goal, writers))
            self._start, self._goal, self._writers = self._goal, None, {}
            self._join()

    def _close(self, running: set[int], reached: float) -> None:
        """Forget writers of gaps up to `reached` that had ended for the batch that took everything up to there."""
        for gap in self._gaps:
            if gap.high <= reached:
                gap.writers &= running
        self._join()

    def _join(self) -> None:
        """Drop gaps in which no row can appear, and join neighbours that wait for the same writers."""
        gaps, self._gaps = self._gaps, []
        for gap in gaps:
            last = self._gaps[-1] if self._gaps else None
            if last is not None and last.high == gap.low and last.writers == gap.writers:
                last.high = gap.high
            elif gap.writers:
                self._gaps.append(gap)
