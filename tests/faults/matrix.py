"""The crash matrix: every failpoint with every action that applies, against a campaign under load.

A case arms one failpoint in one process, waits until it is struck, and then wants messages that are sent afterwards to
be handled.
"""

import contextlib
import random
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.faults import awaits
from tests.faults.actors import Actor
from tests.faults.failpoints import AFTER, AT_AWAIT, BEFORE, COMMANDS, RAW, Failpoint
from tests.faults.invariants import Violation
from tests.faults.load import INBOXES, LOGGED, NOTED, TARGETS, WORKED
from tests.faults.report import Report
from tests.faults.stage import NotHandled, Stage

PATIENCE_S = 0.8
START_PATIENCE_S = 2.0
PAUSE_S = (0.1, 0.5)
KIND_OF = {
    "kill": "F1", "stop": "F2", "terminate": "F3", "cancel statement": "F4", "cut": "F8", "cut when sent": "F9",
    "serialization failure": "F26", "cancel": "F30", "raise": "F31", "bug": "F31",
}  # fmt: skip
# Whose awaits each role comes by, so that one that is never passed is noticed and not just absent.
MODULES = {
    "dispatcher": ("dispatcher.", "mailroom.session.listener", "mailroom.session.disconnect"),
    "worker": ("inbox.", "mailroom.session.listener", "mailroom.session.disconnect"),
}
LINKS = "await dispatcher.links."  # the node of this campaign reads no other one
# Passed only while a process takes over, or ends: it is made to.
TAKING_OVER = "dispatcher.lanes.lease.TERMINATE[0]"
GIVING_UP = "dispatcher.lanes.lease.GIVE_UP"
ENDING = (GIVING_UP, "await dispatcher.lanes.leading._end", "await dispatcher.lanes.leading.Leading._work")


@dataclass(frozen=True, slots=True)
class Case:
    """One failpoint of one role."""

    role: str
    failpoint: Failpoint

    def __str__(self) -> str:
        return f"{self.role}: {self.failpoint.action} {self.failpoint.when} {self.failpoint.name}"


def cases_of(role: str, passed: Iterable[str], dice: random.Random) -> list[Case]:
    """Return the cases of a role, shuffled; `passed` are the names that its processes have come by so far."""
    names = {name for name in passed if name != "?"}
    if role in ("dispatcher", "worker"):
        own = tuple(f"await {module}" for module in MODULES[role])
        names |= {each.name for each in awaits.catalogue() if each.name.startswith(own)}
        names = {name for name in names if not name.startswith(LINKS)}
    if role == "dispatcher":
        names |= {TAKING_OVER, GIVING_UP}
    cases = [Case(role, failpoint) for name in sorted(names) for failpoint in _failpoints(name, dice)]
    dice.shuffle(cases)
    return cases


def _failpoints(name: str, dice: random.Random) -> Iterator[Failpoint]:
    def nth() -> int:
        return dice.choice((1, 1, 1, 2, 3))

    if name.startswith("await "):
        for action in AT_AWAIT:
            yield Failpoint(name, "at", action, nth())
        return
    for action in BEFORE:
        if action != "serialization failure" or name not in (*COMMANDS, *RAW):
            yield Failpoint(name, "before", action, nth())
    for action in AFTER:
        yield Failpoint(name, "after", action, nth())


class Matrix:
    """Runs cases of one role, one after the other."""

    def __init__(self, stage: Stage, report: Report, seed: int) -> None:
        self._stage = stage
        self._report = report
        self._dice = random.Random(seed)

    def run(self, case: Case) -> None:
        """Run one case and report it."""
        with self._stage.standing_still(case.role) if case.failpoint.action == "stop" else contextlib.nullcontext():
            hit = self._run(case)
        if not hit:
            return
        try:
            self._stage.probe(self._inboxes(case.role), f"after {case.failpoint.action}: {case.role}")
        except NotHandled as error:
            self._report.wrong(Violation("I11", f"liveness, {case}", ((str(error),),)))

    def _run(self, case: Case) -> bool:
        point = case.failpoint
        kind = KIND_OF[point.action]
        actor = self._actor(case)
        hit = actor is not None and self._strike(actor, case)
        self._report.place(case.role, point.name, hit=hit)
        if hit:
            self._report.did(kind, case.role)
        else:
            self._report.did_not(kind, case.role)
        try:
            if hit and point.action == "stop" and case.role == "reaper":
                self.pause()  # the others soon wait for the hot key that it holds, as `reap` promises
            elif hit and point.action == "stop" and case.role in ("worker", "rewinder"):
                # The lane of a log waits for who has it in hand, and all lanes for a rewind.
                self._stage.probe([one for one in INBOXES if one != "gamma"], f"while stopped: {case.role}")
            elif hit and point.action == "stop":
                self._stage.probe(self._inboxes(case.role), f"while stopped: {case.role}")
        except NotHandled as error:
            self._report.wrong(Violation("I11", f"liveness, {case}", ((str(error),),)))
        finally:
            if actor is not None:
                if not hit:
                    actor.arm(None)
                actor.signal(signal.SIGCONT)
        return hit

    def _actor(self, case: Case) -> Actor | None:
        actors = self._stage.of_role(case.role)
        if case.role == "dispatcher":
            leader = self._stage.leader_or_none()
            others = [one for one in actors if one is not leader]
            if case.failpoint.name == TAKING_OVER and others:
                return self._dice.choice(others)
            if leader is not None:
                return leader
        # An async worker does not pass what only a sync one has, and the other way round.
        if "AsyncWorker" in case.failpoint.name:
            actors = [one for one in actors if one.task.inbox.startswith("b")]
        elif "inbox.worker.worker.Worker" in case.failpoint.name:
            actors = [one for one in actors if not one.task.inbox.startswith("b")]
        actor = self._dice.choice(actors)
        return actor if actor.alive.wait(10) else None

    def _strike(self, actor: Actor, case: Case) -> bool:
        point = case.failpoint
        if not actor.arm(point):
            return actor.hit.is_set()
        if point.name == TAKING_OVER:
            self._stage.strike_leader(signal.SIGKILL)
            return actor.hit.wait(5)
        if point.name.startswith(ENDING):
            if actor.hit.wait(0.1):
                return True
            actor.signal(signal.SIGTERM)
            return actor.hit.wait(START_PATIENCE_S)
        if actor.hit.wait(PATIENCE_S):
            return True
        # Passed at the start only, perhaps: a first pass is all there is then.
        actor.restart(Failpoint(point.name, point.when, point.action, 1))
        return actor.hit.wait(START_PATIENCE_S)

    @staticmethod
    def _inboxes(role: str) -> tuple[str, ...]:
        return {"worker": WORKED, "reaper": ("gamma", NOTED), "rewinder": (LOGGED, NOTED)}.get(role, TARGETS)

    def pause(self) -> None:
        """Let the load go on for a moment."""
        time.sleep(self._dice.uniform(*PAUSE_S))
