"""A campaign: a stage under load, lanes of faults side by side, rest and check between its rounds."""

import contextlib
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial

import psutil
import psycopg

from tests.faults import residues
from tests.faults.invariants import Violation
from tests.faults.kinds import FAULTS, FLUSH_S, Skipped
from tests.faults.matrix import Case, Matrix, cases_of
from tests.faults.misuse import Violated
from tests.faults.report import Report
from tests.faults.stage import MOST_WAITING, NotHandled, Stage, home_of_campaign
from tests.faults.task import READ_COMMITTED

WARM_UP_S = 4.0
ROUND_S = 240.0
ROUNDS = 4  # at least: one for each isolation level, and one on a machine that is too small
SCARCE_ROUND = 2  # not the last one, which a busy machine may not come to
PACE = 1_500.0  # messages a second that writers would send; they rest while consumers lag
ISOLATIONS = (READ_COMMITTED, "repeatable read", "serializable")
SETTLED_WITHIN_S = 90.0
LACKING_S = 600.0  # after its time, for the kinds that are missing
# A lane's last step, with all that it may wait for: longer, and something waits that nobody bounds.
LANE_ENDS_WITHIN_S = 900.0


class StandsStill(Exception):
    """A lane of the campaign itself waits for ever."""


class Campaign:
    """Faults for this many seconds; a seed gives the same faults in the same order.

    How many there are in that time is the machine's affair. So it goes on until the report has `floor` kinds of them.
    """

    def __init__(
        self, report: Report, seed: int, seconds: float, only: tuple[str, ...] = (), logs: str | None = None,
        floor: int = 0, most_waiting: int = MOST_WAITING,
    ) -> None:  # fmt: skip
        self._report = report
        self._logs = logs
        self._seed = seed
        self._seconds = seconds
        self._only = only
        self._floor = floor
        self._most_waiting = most_waiting
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: T201 - its progress

    def run(self) -> None:
        """Play all rounds and fill the report."""
        with (
            home_of_campaign() as home,
            Stage(home, self._seed, pace=PACE, most_waiting=self._most_waiting) as stage,
        ):
            stage.cast()
            stage.probe(what="start")
            time.sleep(WARM_UP_S)
            cases = self._cases(stage)
            faults = self._faults()
            end = time.monotonic() + self._seconds
            number, length_s = 0, min(ROUND_S, self._seconds / ROUNDS)
            while (left := end - time.monotonic()) > 0 or self._lacks_kinds(left):
                stage.isolate(ISOLATIONS[number % len(ISOLATIONS)])
                if number % len(ISOLATIONS):
                    self._report.did("F26", "worker")
                number += 1
                with self._conditions(stage, number):
                    self._round(stage, cases, faults, min(left, length_s) if left > 0 else length_s)
                self._rest(stage, number)
            self._finish(stage)

    def _lacks_kinds(self, left: float) -> bool:
        return len(self._report.kinds) < self._floor and left > -LACKING_S

    def _conditions(self, stage: Stage, number: int) -> contextlib.AbstractContextManager[None]:
        """Have the machine too small for the second of each four rounds: its disk slow, and its cores busy."""
        if number % ROUNDS != SCARCE_ROUND:
            return contextlib.nullcontext()
        return stage.scarcity(FLUSH_S[0], busy=True)

    def _cases(self, stage: Stage) -> dict[str, list[Case]]:
        passed: dict[str, Counter[str]] = {}
        for actor in stage.actors.values():
            actor.ask_passes()
            passed.setdefault(actor.task.role, Counter()).update(actor.passes)
        found = {role: cases_of(role, names, self._dice) for role, names in sorted(passed.items())}
        self._say("cases: " + ", ".join(f"{role} {len(cases)}" for role, cases in found.items()))
        return found

    def _faults(self) -> list[str]:
        names = [name for name in FAULTS if not self._only or name in self._only]
        self._dice.shuffle(names)
        return names

    def _round(self, stage: Stage, cases: dict[str, list[Case]], faults: list[str], seconds: float) -> None:
        self._over.clear()
        lanes = [
            threading.Thread(target=self._run_cases, args=(stage, nth, roles, cases), name=f"cases-{nth}", daemon=True)
            for nth, roles in enumerate((("dispatcher",), ("worker",), ("reaper", "writer", "rewinder")))
            if not self._only or "matrix" in self._only
        ]
        lanes.append(threading.Thread(target=self._run_faults, args=(stage, faults), name="faults", daemon=True))
        for lane in lanes:
            lane.start()
        self._over.wait(seconds)
        self._over.set()
        deadline = time.monotonic() + LANE_ENDS_WITHIN_S
        for lane in lanes:
            lane.join(max(0.0, deadline - time.monotonic()))
        if any(lane.is_alive() for lane in lanes):
            raise StandsStill("\n".join([*map(_standing_at, lanes), stage.situation()]))

    def _run_cases(self, stage: Stage, nth: int, roles: tuple[str, ...], cases: dict[str, list[Case]]) -> None:
        matrix = Matrix(stage, self._report, self._seed + nth)
        while not self._over.is_set():
            for role in roles:
                if cases.get(role):
                    # Taken from the front, put back at the end: the next round goes on where this one stopped.
                    case = cases[role].pop(0)
                    cases[role].append(case)
                    self._guarded(stage, str(case), partial(matrix.run, case))

    def _run_faults(self, stage: Stage, faults: list[str]) -> None:
        dice = random.Random(self._seed + 99)
        while not self._over.is_set() and faults:
            name = faults.pop(0)
            faults.append(name)
            self._guarded(stage, name, partial(self._fault, stage, name, dice))
            self._over.wait(dice.uniform(0, 0.5))

    def _fault(self, stage: Stage, name: str, dice: random.Random) -> None:
        try:
            struck = FAULTS[name](stage, dice)
        except Skipped as reason:
            self._report.skip(name, str(reason))
            return
        if struck:
            self._report.did(name, struck)
        else:
            self._report.did_not(name, "network")
        stage.probe(what=f"after {name}")

    def _guarded(self, stage: Stage, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except NotHandled as error:
            self._say(f"NOT HANDLED {what}: {error}")
            self._report.wrong(Violation("I11", f"liveness: {what}", ((str(error),),)))
            stage.wake()
        except Violated as broken:
            self._report.wrong(broken.violation)
        except (psycopg.Error, OSError, psutil.Error) as error:
            # Another lane's doing: the server was down when this one wanted it.
            self._report.disturbed[f"{type(error).__name__} during {what.partition(':')[0]}"] += 1
            time.sleep(0.2)
        except Exception as error:
            self._report.wrong(Violation("campaign", f"{what} could not be done", ((repr(error),),)))
            raise

    def _rest(self, stage: Stage, number: int) -> None:
        stage.wake()
        stage.host.start()
        try:
            stage.settle(SETTLED_WITHIN_S)
        except NotHandled as error:
            self._report.wrong(Violation("I11", "liveness: drained after the round", ((str(error),),)))
        began = time.monotonic()
        found = [*stage.check(), *residues.found(stage)]
        took = time.monotonic() - began
        counts = stage.counted()
        self._say(f"round {number}: {counts}, {self._report.faults} faults, {len(found)} violations ({took:.0f} s)")
        if found:
            # Once is enough: what is in the ledgers stays there.
            self._report.violations += [one for one in found if one not in self._report.violations]
        stage.go_on()

    def _finish(self, stage: Stage) -> None:
        self._report.messages.update(stage.counted())
        self._report.ended(stage.endings)
        for what, took in stage.liveness.items():
            self._report.liveness[what] = max(took, self._report.liveness.get(what, 0.0))
        if self._logs is not None:
            stage.keep_logs(self._logs)


def _standing_at(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "\n".join([f"{thread.name}:", *(traceback.format_stack(frame) if frame else ["has ended"])])
