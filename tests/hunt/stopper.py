"""Stops processes for a while, drawn by lot."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import psutil

SHORTEST_S, LONGEST_S = 0.05, 2.0
GAP_S = 0.8  # at most, between two stops

# A test stops these itself, or they have ended.
_NOT_RUNNING = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Stopper:
    """Stops one of `candidates()` after another, several at once, and continues each."""

    def __init__(self, candidates: Callable[[], Sequence[psutil.Process]], lot: Random) -> None:
        self._candidates = candidates
        self._lot = lot
        self._until: dict[psutil.Process, float] = {}
        self._next = 0.0
        self.stops = 0

    def step(self, now: float) -> float:
        """Continue what has been stopped for its time, stop one more if it is time for that; return when to go on."""
        for process in [process for process, until in self._until.items() if until <= now]:
            self._continue(process)
        if self._next <= now:
            self._next = now + self._lot.uniform(0, GAP_S)
            self._stop_one(now)
        return min([self._next, *self._until.values()])

    def end(self) -> None:
        """Continue all that is stopped."""
        for process in list(self._until):
            self._continue(process)

    def _stop_one(self, now: float) -> None:
        candidates = [process for process in self._candidates() if process not in self._until]
        if not candidates:
            return
        process = self._lot.choice(candidates)
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() not in _NOT_RUNNING:
                # Before it is stopped, so that `end` continues it whatever happens here.
                self._until[process] = now + self._drawn_s()
                process.suspend()
                self.stops += 1

    def _drawn_s(self) -> float:
        """Draw a time; short ones as often as long ones, by their magnitude."""
        return math.exp(self._lot.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))

    def _continue(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
        del self._until[process]


@contextmanager
def stopping(stopper: Stopper) -> Iterator[None]:
    """Let it stop processes in a thread; afterwards all go on, and what it raised is raised."""
    ended = threading.Event()

    def work() -> None:
        try:
            while not ended.wait(max(0.0, stopper.step(time.monotonic()) - time.monotonic())):
                pass
        finally:
            stopper.end()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(work)
        try:
            yield
        finally:
            ended.set()
        done.result()
