"""One run of the tests beside all that, and what came of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from xml.etree import ElementTree

from tests.hunt.processes import Run
from tests.hunt.stopper import Stopper, stopping

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900  # of a test: its own is for a machine that has time
_TAIL_LINES = 25
_LISTED = (0, 1)  # how pytest ends if its report says all


@dataclass
class Outcome:
    """The tests that passed, and those that failed with the end of what they said."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    stops: int = 0


def run(arguments: Sequence[str], lot: Random, directory: Path) -> Outcome:
    """Run pytest with these arguments and stop its processes; `directory` is empty, and for what the tests write."""
    report = directory / "report.xml"
    base = directory / "tests"
    options = [f"--timeout={TIMEOUT_S}", f"--basetemp={base}", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    # In a session of its own: Ctrl-C reaches it once, by us.
    pytest = subprocess.Popen([sys.executable, "-m", "pytest", *options, *arguments], cwd=ROOT, start_new_session=True)
    stopper = Stopper(Run(pytest.pid, base.resolve()).stoppable, lot)
    try:
        with stopping(stopper):
            code = pytest.wait()
    finally:
        if pytest.poll() is None:
            os.killpg(pytest.pid, signal.SIGINT)
            pytest.wait()  # until it has stopped its servers
    outcome = read(report) if report.exists() else Outcome()
    if code not in _LISTED:
        outcome.failed["pytest itself"] = f"it ended with {code}"
    outcome.stops = stopper.stops
    return outcome


def read(report: Path) -> Outcome:
    """Read a report of pytest, in which a test may stand twice: its end may fail, too."""
    outcome = Outcome()
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
        troubles = [*case.iter("failure"), *case.iter("error")]
        if troubles:
            lines = "\n".join(trouble.text or trouble.get("message") or "" for trouble in troubles).splitlines()
            outcome.failed[test] = "\n".join(lines[-_TAIL_LINES:])
        elif case.find("skipped") is None:
            outcome.passed.add(test)
    outcome.passed -= {*outcome.failed}
    return outcome
