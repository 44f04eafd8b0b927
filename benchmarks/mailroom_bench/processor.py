"""Processor time: what the processes of this machine have used of it, measured in nanoseconds.

On a shared machine it says more than the clock on the wall: what others do delays a process, but is not charged to it.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import nan

_OF_A_PROCESS = 2  # CPUCLOCK_SCHED of Linux, which also counts what has run since the last tick


def missing() -> str | None:
    """Say what this machine lacks."""
    return None if sys.platform == "linux" else "Only Linux tells the processor time of other processes exactly."


def used_s(pid: int) -> float:
    """Return the seconds of processor time that a process has used. Raises `OSError` if it is not on this machine."""
    return time.clock_gettime(~pid << 3 | _OF_A_PROCESS)


def used_by_s(pids: Iterable[int]) -> dict[int, float]:
    """Return the same for each of these processes that has not just ended."""
    used: dict[int, float] = {}
    for pid in pids:
        with suppress(OSError):
            used[pid] = used_s(pid)
    return used


def spent_us(before: Mapping[int, float], after: Mapping[int, float], count: int) -> float:
    """Return the microseconds per message between two readings of many processes, given in seconds by process id.

    What has begun in between counts, what has ended does not. NaN without messages.
    """
    spent_s = sum(used - before.get(pid, 0.0) for pid, used in after.items())
    return spent_s / count * 1e6 if count else nan


class Meter:
    """What some processes use in the blocks `with meter.running():`, added up; each has a name."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.used_s = dict.fromkeys(pids, 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is used in this block."""
        before = {name: used_s(pid) for name, pid in self._pids.items()}
        yield
        for name, pid in self._pids.items():
            self.used_s[name] += used_s(pid) - before[name]

    def each_us(self, count: int) -> dict[str, float]:
        """Return the microseconds of each process per message."""
        return {name: used / count * 1e6 for name, used in self.used_s.items()}
