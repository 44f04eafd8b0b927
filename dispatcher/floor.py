"""The floor: the position below which nothing can still turn up, so that scans of an outbox start above dead rows.

Rows deleted behind a long snapshot stay in the index as dead entries; a scan from 0 pays for each of them every time.
The floor is a hint for speed, kept in memory; without it the result is the same. It dies with its connection.
"""

from typing import Protocol

from dispatcher.writers import reading_writers
from mailroom.operation import Operation, Sql

STEP = 1_000  # messages between two raises: about what a scan may pass over for nothing

LAST_POSITION = Sql(
    "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.{outbox}_position_seq", columns=("bigint",)
)


class Batch(Protocol):
    """What was taken from the outbox: how many, the largest position among them, and whether there may be more."""

    @property
    def taken(self) -> int: ...  # noqa: D102 - told above
    @property
    def last(self) -> int | None: ...  # noqa: D102 - told above
    @property
    def more(self) -> bool: ...  # noqa: D102 - told above


class Floor:
    """Of one outbox, `table`. Raised in steps, after deliveries: never past a position that may still turn up.

    (1) Read the last position drawn, the goal; (2) in a later statement read the writers; (3) when all of them have
    left, a batch that began afterwards and took everything up to the goal raises the floor to it. A position up to
    the goal was drawn under the lock that (2) looks at, so it belongs to a transaction that had ended or to one of
    those writers. Raised without (3), rows were stuck.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self.value = 0
        self._taken = 0
        self._goal: int | None = None
        self._writers: frozenset[str] = frozenset()

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
