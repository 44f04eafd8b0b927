"""A child of the campaign: one role, told by its task, that obeys and reports over a socket.

It ends with its socket, so no child outlives the campaign.
"""

import importlib
import json
import logging
import os
import select
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

from mailroom.session import backoff
from tests.faults import awaits
from tests.faults.failpoints import Failpoint, Failpoints, names_at_the_fork
from tests.faults.task import Task

ROLES = {
    "writer": "tests.faults.role_writer",
    "reaper": "tests.faults.role_reaper",
    "worker": "tests.faults.role_worker",
    "dispatcher": "tests.faults.role_dispatcher",
    "carrier": "tests.faults.role_carrier",
    "linked": "tests.faults.role_linked",
    "bridged": "tests.faults.role_bridged",
    "log": "tests.faults.role_log",
    "rewinder": "tests.faults.role_rewinder",
}
ENDED_BADLY, ORPHANED = 1, 3
MOST_FAILURES = 3  # after which the pause grows no more


def preload() -> None:
    """Import and read what the roles need, before they are forked."""
    for module in (*ROLES.values(), "tests.faults.mutants", "psycopg_pool", "sqlalchemy", "uuid", "cbor2"):
        importlib.import_module(module)
    awaits.by_line()
    names_at_the_fork()


class Control:
    """The child's end of the socket."""

    def __init__(self, connection: socket.socket, failpoints: Failpoints) -> None:
        self._socket = connection
        self._failpoints = failpoints
        self._lock = threading.Lock()
        self.running = threading.Event()  # cleared while a writer is to rest
        self.running.set()
        self.use_up: Callable[[float], None] = lambda _: None  # of a worker that works on a pool of its program

    def report(self, **fields: Any) -> None:
        """Tell the campaign."""
        with self._lock:
            self._socket.sendall(json.dumps(fields).encode() + b"\n")

    @property
    def passes(self) -> dict[str, int]:
        """How often each failpoint was passed."""
        return dict(self._failpoints.passes)

    def at_call(self, name: str, when: str) -> None:
        """Pass a failpoint at a call that is not a statement."""
        self._failpoints.at_call(name, when)

    def obey(self) -> None:
        """Follow orders until the campaign is gone."""
        with self._socket.makefile("r") as lines:
            for line in lines:
                order = json.loads(line)
                if "arm" in order:
                    self._failpoints.arm(Failpoint(*order["arm"]) if order["arm"] else None)
                    self.report(armed=bool(order["arm"]))
                elif "rest" in order:
                    self.running.clear() if order["rest"] else self.running.set()
                elif "use up" in order:
                    threading.Thread(target=self._using_up, args=(order["use up"],), daemon=True).start()
                elif "stacks" in order:
                    self.report(stacks=[*map(awaits.stack, list(self._failpoints.coroutines)), *awaits.threads()])
                elif "passes" in order:
                    self.report(passes=self.passes)
        os._exit(ORPHANED)

    def _using_up(self, seconds: float) -> None:
        self.use_up(seconds)
        self.report(used_up=True)


def _hasten() -> None:
    """Have no process wait for long before it tries again: more faults fit into an hour."""
    pause_s = backoff.pause_s
    setattr(backoff, "pause_s", lambda failures, longest_s: pause_s(min(failures, MOST_FAILURES), longest_s))  # noqa: B010


def rest(seconds: float) -> None:
    """Do nothing for so long. Not by `time.sleep`, which fails while libfaketime is at work."""
    if seconds > 0:
        select.select([], [], [], seconds)


def main(task: Task, connection: socket.socket) -> int:
    """Play the role until it ends; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(process)d %(name)s %(message)s", level=logging.INFO)
    control: Control
    failpoints = Failpoints(task.direct, lambda **fields: control.report(**fields))
    control = Control(connection, failpoints)
    failpoints.install()
    _hasten()
    if task.armed is not None:
        failpoints.arm(Failpoint(*task.armed))
    control.report(pid=os.getpid())
    threading.Thread(target=control.obey, daemon=True).start()
    try:
        if task.habits.mutant:
            from tests.faults import mutants

            mutants.apply(task.habits.mutant)  # within: one that does not apply is to be heard of
        importlib.import_module(ROLES[task.role]).play(task, control)
    except BaseException as error:
        traceback.print_exc()
        control.report(ended=type(error).__name__, text=str(error)[:200])
        return ENDED_BADLY
    control.report(ended="")
    return 0
