"""The cast: the children of a campaign, each started anew when it has ended, and what they report."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from tests.faults.failpoints import Failpoint
from tests.faults.nursery import Nursery
from tests.faults.task import Task

SHORT_LIFE_S = 1.0
USED_UP_S = 10.0  # to get the connections


class Actor:
    """One role, played by one process after the other."""

    def __init__(self, task: Task, nursery: Nursery, endings: Counter[str]) -> None:
        self.task = task
        self.pid = 0
        self.lives = 0
        self.alive = threading.Event()
        self.dead = threading.Event()
        self.armed = threading.Event()
        self.hit = threading.Event()
        self.passes: Counter[str] = Counter()
        self._heard_passes = threading.Event()
        self._stacks: list[str] = []
        self._heard_stacks = threading.Event()
        self._used_up = threading.Event()
        self._nursery = nursery
        self._endings = endings
        self._socket: socket.socket | None = None
        self._wanted = True
        self._next: Failpoint | None = None
        self._struck = False  # the next end is of our making
        self._thread = threading.Thread(target=self._live, name=task.name, daemon=True)
        self._thread.start()

    def arm(self, failpoint: Failpoint | None, timeout_s: float = 2.0) -> bool:
        """Arm a failpoint in the process, or none; false if the process did not say that it has."""
        self.armed.clear()
        self.hit.clear()
        fields = None if failpoint is None else [failpoint.name, failpoint.when, failpoint.action, failpoint.nth]
        return self._tell(arm=fields) and self.armed.wait(timeout_s)

    def disarm(self, within_s: float = 60.0) -> None:
        """Have it pass by everything. One that is slow may be struck only now: it goes on until it says it is disarmed.

        One that is being started is told as soon as it listens.
        """
        self._next = None
        deadline = time.monotonic() + within_s
        self.signal(signal.SIGCONT)
        while not self.arm(None) and time.monotonic() < deadline:
            self.signal(signal.SIGCONT)
            time.sleep(0.05)

    def restart(self, failpoint: Failpoint | None = None, how: signal.Signals = signal.SIGKILL) -> None:
        """End the process; the next one begins with the failpoint armed."""
        self.hit.clear()
        self.alive.clear()
        self._next = failpoint
        self.signal(how)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._struck = True
        if self.pid and not self.dead.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self.pid, number)

    def rest(self, rests: bool) -> None:
        """Have a writer rest, or go on."""
        self._tell(rest=rests)

    def use_up(self, seconds: float) -> bool:
        """Have a worker's program take all connections of their pool for so long; false if it did not say that."""
        self._used_up.clear()
        return self._tell(**{"use up": seconds}) and self._used_up.wait(seconds + USED_UP_S)

    def ask_passes(self) -> None:
        """Have `passes` brought up to date."""
        self._heard_passes.clear()
        if self._tell(passes=True):
            self._heard_passes.wait(1)

    def stacks(self) -> list[str]:
        """Ask the process where its tasks stand."""
        self._stacks.clear()
        self._heard_stacks.clear()
        if self._tell(stacks=True):
            self._heard_stacks.wait(1)
        return self._stacks

    def end(self) -> None:
        """End it for good."""
        self._wanted = False
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._thread.join(10)

    def _tell(self, **order: Any) -> bool:
        connection = self._socket
        if connection is None:
            return False
        try:
            connection.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            return False
        return True

    def _live(self) -> None:
        while self._wanted:
            began = time.monotonic()
            armed, self._next = self._next, None
            fields = None if armed is None else (armed.name, armed.when, armed.action, armed.nth)
            task = replace(self.task, armed=fields, seed=self.task.seed + 1_000 * self.lives)
            self.lives += 1
            try:
                with self._nursery.start(task) as connection:
                    self.dead.clear()
                    self._socket = connection
                    self._listen(connection)
            except OSError:
                return  # the nursery is gone: the campaign is over
            finally:
                self._socket = None
                self.dead.set()
                self.alive.clear()
            if time.monotonic() - began < SHORT_LIFE_S and self._wanted and not self._struck:
                time.sleep(0.2)
            self._struck = False

    def _listen(self, connection: socket.socket) -> None:
        ended: str | None = None
        seen: Counter[str] = Counter()
        try:
            with connection.makefile("r") as lines:
                for line in lines:
                    said = json.loads(line)
                    if "pid" in said:
                        self.pid = said["pid"]
                        self.alive.set()
                    elif "hit" in said:
                        self._struck = self._struck or said["action"] not in ("stop",)
                        self.hit.set()
                    elif "armed" in said:
                        self.armed.set()
                    elif "passes" in said:
                        self.passes += Counter(said["passes"]) - seen
                        seen = Counter(said["passes"])
                        self._heard_passes.set()
                    elif "used_up" in said:
                        self._used_up.set()
                    elif "stacks" in said:
                        self._stacks = said["stacks"]
                        self._heard_stacks.set()
                    elif "ended" in said:
                        ended = f"{said['ended']}: {said.get('text', '')}".strip(": ")
        except (OSError, ValueError):
            pass  # killed in the middle of a line
        if self._wanted and not self._struck:
            how = "killed" if ended is None else ended or "returned"
            self._endings[f"{self.task.role}: {re.sub(r'[0-9]+', 'N', how)}"] += 1
