"""What a process counts, minute by minute, until it is written: differences of numbers that only rise."""

from collections.abc import Mapping
from datetime import datetime
from typing import TypeAlias, cast

from mailroom.metrics.family import Family, Histogram, Samples
from mailroom.metrics.process import AGE, BATCHES, FAILED, HANDLE, LONG_S, OUTCOME, REAPED

NODE = ""  # in the place of an inbox: what the dispatcher delivered
KEPT_ROWS = 10_000  # that wait to be written; the oldest minutes go first
BUCKETS = len(LONG_S) + 1
COUNTED = ("delivered", "reaped", "failed", "parked", "skipped", "batches", "handle_s")
# The outcomes of AttemptFailed by the columns that count them. "alone" is no attempt of a message.
OUTCOMES = {"retry": ("failed",), "park": ("failed", "parked"), "skip": ("failed", "skipped")}

# The values of `COUNTED`, and then how many ages fell into each bucket.
Numbers: TypeAlias = tuple[float, ...]
NONE: Numbers = (*(0.0 if column == "handle_s" else 0 for column in COUNTED), *(0,) * BUCKETS)
Rows: TypeAlias = dict[tuple[datetime, str], Numbers]


def minute_of(at: datetime) -> datetime:
    """Return the beginning of the minute."""
    return at.replace(second=0, microsecond=0)


def totals(metrics: Mapping[Family, Samples]) -> dict[str, Numbers]:
    """Return what a process has counted so far, by inbox; `NODE` is what it delivered."""
    found: dict[str, list[float]] = {}

    def add(inbox: str, column: str, value: float) -> None:
        found.setdefault(inbox, list(NONE))[COUNTED.index(column)] += value

    for (outcome,), value in _plain(metrics, OUTCOME):
        if outcome == "delivered":
            add(NODE, "delivered", value)
    for (inbox,), value in _plain(metrics, REAPED):
        add(inbox, "reaped", value)
    for (inbox, outcome), value in _plain(metrics, FAILED):
        for column in OUTCOMES.get(outcome, ()):
            add(inbox, column, value)
    for (inbox, outcome), value in _plain(metrics, BATCHES):
        if outcome == "committed":
            add(inbox, "batches", value)
    for (inbox,), histogram in metrics[HANDLE]:
        add(inbox, "handle_s", cast(Histogram, histogram).sum)
    for (inbox,), histogram in metrics[AGE]:
        found.setdefault(inbox, list(NONE))[len(COUNTED) :] = cast(Histogram, histogram).counts
    return {inbox: tuple(numbers) for inbox, numbers in found.items()}


def _plain(metrics: Mapping[Family, Samples], family: Family) -> list[tuple[tuple[str, ...], float]]:
    return [(labels, cast(float, value)) for labels, value in metrics[family]]


class Minutes:
    """What waits to be written: of each minute only the inboxes where something happened."""

    def __init__(self) -> None:
        self._last: dict[str, Numbers] = {}
        self._rows: Rows = {}
        self.dropped = 0  # rows that were too many

    def cut(self, minute: datetime, so_far: Mapping[str, Numbers]) -> None:
        """Put what was counted since the last cut into this minute."""
        for inbox, numbers in so_far.items():
            last = self._last.get(inbox, NONE)
            if numbers != last:
                new = tuple(now - before for now, before in zip(numbers, last, strict=True))
                self._rows[minute, inbox] = _sum(self._rows.get((minute, inbox), NONE), new)
        self._last = dict(so_far)
        for old in sorted(self._rows)[: max(len(self._rows) - KEPT_ROWS, 0)]:
            del self._rows[old]
            self.dropped += 1

    def forget_before(self, minute: datetime) -> None:
        """Drop what is older than it is kept."""
        for old in [each for each in self._rows if each[0] < minute]:
            del self._rows[old]

    def waiting(self) -> Rows:
        """Return what waits."""
        return dict(self._rows)

    def done(self, rows: Rows) -> None:
        """Forget rows that `waiting` returned."""
        for each in rows:
            del self._rows[each]


def _sum(some: Numbers, more: Numbers) -> Numbers:
    return tuple(one + other for one, other in zip(some, more, strict=True))
