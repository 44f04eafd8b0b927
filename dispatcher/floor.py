"""The floor: the position below which nothing can still turn up, so that scans of an outbox start above dead rows.

Rows deleted behind a long snapshot stay in the index as dead entries; a scan from 0 pays for each of them every time.
The floor is a hint for speed, kept in memory; without it the result is the same. It dies with its connection.
"""

import time
from collections.abc import Callable
from typing import Protocol

from dispatcher.writers import reading_writers
from mailroom.operation import Operation, Sql

FULL_SCAN_S = 60.0
STEP = 1_000  # messages between two raises: about what a scan may pass over for nothing

LAST_POSITION = Sql(
    "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.{outbox}_position_seq", columns=("bigint",)
)


class Batch(Protocol):
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


class Floor:
    """Of one outbox, `table`. Raised in steps, after batches: never past a position that may still turn up.

    (1) Read the last position drawn, the goal; (2) in a later statement read the writers; (3) when all of them have
    left, a batch that began afterwards and took everything up to the goal raises the floor to it. A position up to
    the goal was drawn under the lock that (2) looks at, so it belongs to a transaction that had ended or to one of
    those writers. Raised without (3), rows were stuck.

    `monotonic` is the clock, in seconds, by which a scan starts at 0 once a minute all the same: it finds rows that
    were written with a position of their own.
    """

    def __init__(self, table: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._monotonic = monotonic
        self._scanned = monotonic()
        self.value = 0
        self._taken = 0
        self._goal: int | None = None
        self._writers: frozenset[str] = frozenset()

    def start(self) -> int:
        """Return the position above which the next scan is to look."""
        if self._monotonic() - self._scanned < FULL_SCAN_S:
            return self.value
        self._scanned = self._monotonic()
        return 0

    def raising(self, schema: str, batch: Batch) -> Operation[None]:
        """Take one step, after `batch` has committed."""
        self._taken += batch.taken
        if self._goal is None:
            if self._taken >= STEP:
                self._taken = 0
                [(goal,)] = yield LAST_POSITION.at(schema=schema, outbox=self._table)()
                self._writers = yield from reading_writers(schema, self._table)
                self._goal = goal
        elif self._writers:
            self._writers &= yield from reading_writers(schema, self._table)
        elif not batch.more or (batch.last is not None and batch.last >= self._goal):
            self.value, self._goal = self._goal, None
