"""The model of causality: a vector clock, which says of any two events whether one may have caused the other.

Scalar clocks only say that a cause has a smaller clock than its effects. `tests/order/test_lamport.py` holds those of
`mailroom.LamportClock` against this one. Its stamps grow with the number of processes, so nodes have none.
"""

from collections.abc import Sequence


class VectorClock:
    """A vector clock of one of `processes` processes, numbered from 0: it knows exactly what may have caused what.

    `tick` and `receive` are called as those of `LamportClock`, and return the vector of the event. Raises `ValueError`
    for a process that there is not.
    """

    def __init__(self, process: int, processes: int) -> None:
        """Begin with zeros."""
        if not 0 <= process < processes:
            raise ValueError(f"process must be from 0 to {processes - 1}, not {process!r}")
        self._process = process
        self._vector = [0] * processes

    @property
    def vector(self) -> tuple[int, ...]:
        """For each process, how many of its events are known here."""
        return tuple(self._vector)

    def tick(self) -> tuple[int, ...]:
        """Count a send or an internal event, and return its vector."""
        self._vector[self._process] += 1
        return self.vector

    def receive(self, sent: Sequence[int]) -> tuple[int, ...]:
        """Learn what the sender knew at `sent`, count the event, and return its vector.

        Raises `ValueError` for a vector of another number of processes.
        """
        if len(sent) != len(self._vector):
            raise ValueError(f"a vector of {len(self._vector)} processes is expected, not of {len(sent)}")
        self._vector = [max(pair) for pair in zip(self._vector, sent, strict=True)]
        return self.tick()

    @staticmethod
    def happened_before(one: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether the event with the vector `one` may have caused the event with the vector `other`.

        Of two different events neither may have: then they are concurrent. Raises `ValueError` if the vectors are not
        of one length.
        """
        return tuple(one) != tuple(other) and all(a <= b for a, b in zip(one, other, strict=True))

    def __repr__(self) -> str:
        """Say what it knows."""
        return f"VectorClock({self._process}, {self.vector})"
