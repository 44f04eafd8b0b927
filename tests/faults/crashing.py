"""A crash matrix: a child does the same each time, and is struck at each of its statements, in each way."""

import json
import random
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.faults.nursery import Nursery
from tests.faults.task import READ_COMMITTED, USUAL, Task
from tests.support.waiting import eventually

Point = tuple[str, int]  # a statement's name, and at which of its passes
Fault = tuple[str, str, str, int]  # as `Failpoint` has it
# Name, when and action. Where a session is cut before a statement, the server sees the end of a process as well. A
# child does one thing after the other: killed after a statement, it is killed before the next one.
WAYS = {
    "killed": ("before", "kill"),
    "cut": ("before", "cut"),
    "sent and killed": ("before", "kill when sent"),
    "sent and its answer lost": ("before", "cut when sent"),
    "paused": ("before", "stop"),
}
COMMANDS = ("BEGIN", "COMMIT")
PASSES = 2  # of a statement; all of a command, since each belongs to another transaction
SEED = 18
SAMPLE = 4  # faults of each way that the bounded part has


class Matrix(ABC):
    """A node, or two, and a nursery for those who are struck; what they do is the task of a role."""

    role: str

    def __init__(self, nursery: Nursery, home: Path) -> None:
        self._nursery = nursery
        self._home = home
        self.struck = 0

    @abstractmethod
    def dsns(self) -> tuple[str, str]:
        """Return where the child works, and the other way it may take."""

    @abstractmethod
    def send(self) -> None:
        """Give the child something to do."""

    @abstractmethod
    def go_on(self) -> None:
        """Do in this process, which nothing strikes, what the child would do."""

    @abstractmethod
    def work_beside(self) -> None:
        """Work as another process does while the child is paused, and want all that was sent to be done."""

    @abstractmethod
    def check(self, case: str) -> None:
        """Hold what was done since the last check against what was sent."""

    def strike(self, fault: Fault | None, beside: Callable[[], None] | None = None) -> dict[str, int] | None:
        """Have a child work that is struck; return what it passed, if it lived. `beside`: while it is paused."""
        task = Task(
            self.role, self.role, *self.dsns(), str(self._home), 0, "", False, 0.0, USUAL, READ_COMMITTED, fault
        )
        passes: dict[str, int] | None = None
        pid = 0
        with self._nursery.start(task) as connection:
            connection.settimeout(60)
            for said in _lines(connection):
                pid = said.get("pid", pid)
                passes = said.get("passes", passes)
                self.struck += "hit" in said
                if said.get("action") == "stop":
                    paused = psutil.Process(pid)
                    eventually(lambda: paused.status() == psutil.STATUS_STOPPED)  # noqa: B023
                    try:
                        (beside or self.work_beside)()
                    finally:
                        paused.send_signal(signal.SIGCONT)
                if said.get("ended"):
                    raise AssertionError(f"{fault}: {said}")
        return passes

    def points(self) -> list[Point]:
        """Return what a child passes that nobody strikes."""
        self.send()
        passes = self.strike(None)
        assert passes is not None
        self.check("nothing was struck")
        return [
            (name, nth)
            for name, count in sorted(passes.items())
            if not name.startswith("await ") and name != "?"
            for nth in range(1, count + 1 if name in COMMANDS else min(count, PASSES) + 1)
        ]

    def run(self, faults: Sequence[Fault]) -> None:
        """Strike with half of the faults, each time strike what recovers with one of the rest, and let one through."""
        half = len(faults) // 2
        for case in zip(faults[:half], faults[half : 2 * half], strict=True):
            for fault in case:
                self.send()
                lived = self.strike(fault) is not None
            if not lived:
                self.go_on()
            self.check(str(case))


def faults_at(points: Sequence[Point]) -> list[Fault]:
    """Return each point in each way, shuffled."""
    found = [(name, when, action, nth) for name, nth in points for when, action in WAYS.values()]
    random.Random(SEED).shuffle(found)
    return found


def sampled(faults: Sequence[Fault]) -> list[Fault]:
    """Return some of each way."""
    return [each for way in WAYS.values() for each in [found for found in faults if found[1:3] == way][:SAMPLE]]


def _lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    try:
        with connection.makefile("r") as lines:
            yield from map(json.loads, lines)
    except (ConnectionResetError, ValueError):
        pass  # killed in the middle of a line
