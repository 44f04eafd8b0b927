"""The hunt for a mutant: a short campaign aimed at its rule, until an invariant is violated or the time is over."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from tests.faults.kinds import FAULTS, Fault, kill_listeners, slow_rows
from tests.faults.misuse import Violated
from tests.faults.mutants import MUTANTS, Mutant
from tests.faults.report import unasked
from tests.faults.stage import PATIENCE_S, NotHandled, Stage, home_of_campaign

AIMED: dict[str, Fault] = FAULTS | {"F29b": kill_listeners, "F37b": slow_rows}
CAUGHT_WITHIN_S = 120.0  # of the five minutes that are allowed
CONTROL_S = 15.0
LOOK_EVERY_S = 6.0
HANDLED_WITHIN_S = 8.0
SETTLED_WITHIN_S = 12.0
SOUND_SETTLED_WITHIN_S = 180.0  # a message that workers die of costs its inbox several deaths, one after the other
PACE = 600.0
LOSSY = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
NOBODY_WRITES = ("dispatcher-1", "dispatcher-2", "worker-a1", "worker-a2", "worker-b1", "worker-b2", "reaper-1")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a mutant was caught, by which invariants, and how soon."""

    mutant: Mutant
    caught_by: tuple[str, ...]
    seconds: float
    evidence: str


def hunt(mutant: Mutant, seed: int, *, mutated: bool = True, within_s: float = CAUGHT_WITHIN_S) -> Verdict:
    """Run the mutant's own campaign; without `mutated` the same on sound code, which must violate nothing."""
    dice = random.Random(seed)
    with home_of_campaign() as home:
        stage = Stage(
            home, seed, pace=PACE, habits=replace(mutant.habits, mutant=mutant.name if mutated else ""),
            settings=LOSSY if mutant.lossy else None, durable=not mutant.lossy,
            roles=NOBODY_WRITES if mutant.quiet else (), handled_within_s=HANDLED_WITHIN_S if mutated else 30.0,
            patience_s=0 if mutated else PATIENCE_S,
        )  # fmt: skip
        with stage:
            began = time.monotonic()
            stage.cast()
            while (took := time.monotonic() - began) < within_s:
                found = _look(stage, mutant, dice)
                if any("AssertionError" in ending for ending in stage.endings):
                    return Verdict(mutant, (), took, f"the mutant does not apply: {dict(stage.endings)}")
                if found:
                    return Verdict(mutant, tuple(name for name, _ in found), time.monotonic() - began, found[0][1])
            return Verdict(mutant, (), within_s, "")


def _look(stage: Stage, mutant: Mutant, dice: random.Random) -> list[tuple[str, str]]:
    until = time.monotonic() + LOOK_EVERY_S
    try:
        while time.monotonic() < until:
            for name in mutant.faults:
                AIMED[name](stage, dice)
            time.sleep(0.2)
        stage.settle(SETTLED_WITHIN_S if stage.habits.mutant else SOUND_SETTLED_WITHIN_S)
    except Violated as broken:
        return [(broken.violation.invariant, str(broken.violation))]
    except NotHandled as error:
        violations = [*stage.check(), *unasked(stage.endings)]
        return [(one.invariant, str(one)) for one in violations] + [("I11", str(error)[:300])]
    violations = [*stage.check(), *unasked(stage.endings)]
    stage.go_on()
    return [(one.invariant, str(one)) for one in violations]


def hunt_all(names: Sequence[str], seed: int, console: Console) -> bool:
    """Hunt each mutant and print the table; true if all were caught."""
    verdicts = []
    for name in names or list(MUTANTS):
        verdict = hunt(MUTANTS[name], seed)
        verdicts.append(verdict)
        caught = ", ".join(verdict.caught_by) or "NOT CAUGHT"
        console.print(f"{name}: {caught}, {verdict.seconds:.0f} s", markup=False)
        if not verdict.caught_by:
            console.print(verdict.evidence, markup=False)
    sound = _controls(names, seed, console)
    table = Table("mutant", "broken rule", "caught by", "after s", title="Negative controls")
    for verdict in verdicts:
        table.add_row(
            verdict.mutant.name, verdict.mutant.broken, ", ".join(verdict.caught_by) or "nothing",
            f"{verdict.seconds:.0f}",
        )  # fmt: skip
    console.print(table)
    caught_all = sum(bool(verdict.caught_by) for verdict in verdicts)
    console.print(f"{caught_all} of {len(verdicts)} mutants caught")
    return sound and caught_all == len(verdicts)


def _controls(names: Sequence[str], seed: int, console: Console) -> bool:
    """Run each way of hunting on sound code: there must be nothing to find."""
    ways = {(one.faults, one.quiet, one.lossy, one.habits): one for one in (MUTANTS[name] for name in names or MUTANTS)}
    sound = True
    for one in ways.values():
        verdict = hunt(one, seed, mutated=False, within_s=CONTROL_S)
        found = (
            f"VIOLATED {', '.join(verdict.caught_by)}: {verdict.evidence}" if verdict.caught_by else "nothing violated"
        )
        console.print(f"sound code, hunted as {one.name}: {found}", markup=False)
        sound = sound and not verdict.caught_by
    return sound
