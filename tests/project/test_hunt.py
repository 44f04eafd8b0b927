"""The hunt for tests that pass by chance stops what it should, continues all of it, and lists what failed."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.hunt.__main__ import list_failures
from tests.hunt.processes import Run
from tests.hunt.rounds import read
from tests.hunt.stopper import GAP_S, LONGEST_S, Stopper, stopping
from tests.support.databases import Connect
from tests.support.waiting import eventually

# A pytest whose one worker has a process of a test, and one of a test that stops its own. $0 is how xdist starts it.
PYTEST = """
sh -c 'PYTEST_CURRENT_TEST="tests/test_forms.py::test" sleep 600 &
       PYTEST_CURRENT_TEST="tests/worker/test_alive.py::test" sleep 601 & wait' 'exec(eval(sys.stdin.readline()))' &
wait
"""
REPORT = """
<testsuites><testsuite>
  <testcase file="tests/test_a.py" name="test_good[1]"/>
  <testcase file="tests/test_a.py" name="test_skipped"><skipped/></testcase>
  <testcase file="tests/test_a.py" name="test_bad"><failure message="m">first\nlast</failure></testcase>
  <testcase file="tests/test_a.py" name="test_leaves_something"/>
  <testcase file="tests/test_a.py" name="test_leaves_something"><error message="m">left open</error></testcase>
</testsuite></testsuites>
"""


class Longest(Random):
    """A lot that draws the longest times."""

    def uniform(self, a: float, b: float) -> float:
        return b


@pytest.fixture
def sleepers() -> Iterator[list[psutil.Process]]:
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    try:
        yield [psutil.Process(each.pid) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()


def are_stopped(processes: list[psutil.Process], count: int) -> bool:
    return [each.status() for each in processes].count(psutil.STATUS_STOPPED) == count


def test_several_are_stopped_at_once_none_of_them_twice_and_all_go_on(sleepers: list[psutil.Process]) -> None:
    stopper = Stopper(lambda: sleepers, Longest(1))
    for nth in range(3):
        assert stopper.step(nth * GAP_S) == pytest.approx(min((nth + 1) * GAP_S, LONGEST_S))
        eventually(lambda: are_stopped(sleepers, nth + 1))  # noqa: B023
    assert stopper.stops == 3
    stopper.step(3 * GAP_S)  # the first has gone on, and is the only one that may be stopped
    assert stopper.stops == 4
    eventually(lambda: are_stopped(sleepers, 3))
    stopper.end()
    eventually(lambda: are_stopped(sleepers, 0))


def test_what_a_test_has_stopped_is_left_alone(sleepers: list[psutil.Process]) -> None:
    for each in sleepers:
        each.suspend()
    eventually(lambda: are_stopped(sleepers, 3))
    stopper = Stopper(lambda: sleepers, Longest(1))
    stopper.step(0.0)
    stopper.end()
    assert are_stopped(sleepers, 3)
    assert stopper.stops == 0


def test_all_goes_on_when_the_run_is_interrupted(sleepers: list[psutil.Process]) -> None:
    stopper = Stopper(lambda: sleepers, Longest(1))

    def interrupted() -> None:
        with stopping(stopper):
            eventually(lambda: are_stopped(sleepers, 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    eventually(lambda: are_stopped(sleepers, 0))


def test_what_tests_started_may_be_stopped_but_no_worker_and_no_postmaster(connect: Connect) -> None:
    session = connect()
    [data] = session.execute("SHOW data_directory").fetchone() or ()
    with subprocess.Popen(["sh", "-c", PYTEST], start_new_session=True) as started:
        try:
            run = Run(started.pid, Path(data).parent)

            def found() -> dict[int, list[str]]:
                lines = {}
                for each in run.stoppable():
                    with contextlib.suppress(psutil.NoSuchProcess):  # a session of another test has ended meanwhile
                        lines[each.pid] = each.cmdline()
                return lines

            eventually(lambda: ["sleep", "600"] in found().values())
            assert len([line for line in found().values() if line[0] == "sleep"]) == 1
            assert [line for line in found().values() if "sh" in line] == []
            assert session.info.backend_pid in found()
            assert psutil.Process(session.info.backend_pid).ppid() not in found()
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def test_failures_are_listed_by_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = read(tmp_path / "report.xml")
    assert outcome.passed == {"tests/test_a.py::test_good[1]"}
    assert list_failures([outcome, outcome]) == 4
    said = capsys.readouterr().out
    assert "tests/test_a.py::test_bad failed in 2 of 2 rounds:\nfirst\nlast\n" in said
    assert "tests/test_a.py::test_leaves_something failed in 2 of 2 rounds:\nleft open\n" in said
    assert said.endswith("\n2 passed, 4 failed\n")
