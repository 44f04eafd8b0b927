"""Rows that are published before older ones: those of other keys, while a receiver refuses some."""

from collections.abc import Iterable, Mapping

from mailroom.bridges.publisher import Publisher, PublishesAround, WaitingRow


# D-bridges-24: A webhook's keys wait each for itself.
class Ahead:
    """Knows which of the rows that a publisher was given are done. Most publishers have none that wait."""

    def __init__(self, publisher: Publisher | None) -> None:
        self._around = publisher if isinstance(publisher, PublishesAround) else None
        self._given: set[int] = set()

    @property
    def waiting(self) -> Mapping[int, WaitingRow | None]:
        """The rows that wait."""
        return {} if self._around is None else self._around.waiting

    def give(self, rows: Iterable[int]) -> None:
        """Note what is given to the publisher."""
        if self._around is not None:
            self._given.update(rows)

    def leave_out(self, row: int) -> None:
        """Have the publisher give this row up."""
        self._given.discard(row)
        if self._around is not None:
            self._around.leave_out(row)

    def reached(self, position: int) -> tuple[int, list[int]]:
        """Return up to where all rows are done, and which ones behind that have been done since the last call.

        `position` is where it is if nothing waits.
        """
        waiting = self.waiting
        done = {row for row in self._given if row not in waiting}
        self._given -= done
        acked = min(waiting, default=position + 1) - 1
        return acked, [row for row in done if row > acked]
