"""What became of one worker's attempts within the last minute, in all or of each prefix of keys."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

WINDOW_S = 60.0
LEAST = 20  # attempts in the window, for a share of them to say anything
MOST_PREFIXES = 1_000  # whose attempts one worker counts


class Outcomes:
    """The attempts of one worker within the last minute, and how many of them failed."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seconds: deque[list[int]] = deque()  # of each second: which, attempts, failures
        self.attempts = self.failures = 0

    def add(self, attempts: int, failures: int) -> None:
        """Count attempts that have ended, and how many of these failed."""
        now = int(self._monotonic())
        self._forget(now)
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0, 0])
        self._seconds[-1][1] += attempts
        self._seconds[-1][2] += failures
        self.attempts += attempts
        self.failures += failures

    def tripped(self, percent: int) -> bool:
        """Return whether enough attempts were made, and this share of them failed."""
        return self.attempts >= LEAST and 100 * self.failures >= percent * self.attempts

    def said(self) -> str:
        """Return the share that failed as a sentence says it."""
        share = 100 * self.failures // max(1, self.attempts)
        return f"{self.failures} of {self.attempts} attempts failed ({share} %) within {WINDOW_S:.0f} s"

    def clear(self) -> None:
        """Begin anew."""
        self._seconds.clear()
        self.attempts = self.failures = 0

    def are_well(self) -> bool:
        """Return whether none has failed within the last minute."""
        self._forget(int(self._monotonic()))
        return not self.failures

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            _, attempts, failures = self._seconds.popleft()
            self.attempts -= attempts
            self.failures -= failures


class ByPrefix:
    """The attempts of one worker by prefix: of those that had a failure, at most `MOST_PREFIXES`.

    What succeeds before the first failure of a prefix is not counted, so it costs nothing where all goes
    well.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._of: OrderedDict[str, Outcomes] = OrderedDict()  # the least recently failing first

    def handled(self, prefixes: Iterable[str]) -> None:
        """Count attempts that have succeeded."""
        for prefix in prefixes if self._of else ():
            if (outcomes := self._of.get(prefix)) is None:
                continue
            if outcomes.are_well():
                del self._of[prefix]
            else:
                outcomes.add(1, 0)

    def failed(self, prefix: str) -> Outcomes:
        """Count an attempt that has failed; return those of its prefix."""
        if prefix not in self._of:
            self._of[prefix] = Outcomes(self._monotonic)
        self._of.move_to_end(prefix)
        if len(self._of) > MOST_PREFIXES:
            self._of.popitem(last=False)
        self._of[prefix].add(1, 1)
        return self._of[prefix]

    def clear(self, prefix: str) -> None:
        """Begin anew with a prefix."""
        self._of.pop(prefix, None)
