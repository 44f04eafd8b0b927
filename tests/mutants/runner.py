"""A copy of the source, in which mutants are tried one after the other; the checkout itself is never touched."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.mutants.mutant import Mutant, Unanchored

TEST_TIMEOUT_S = 60
WITHIN_S = 20  # what a broken rule keeps from coming need not be waited for as long as a test does on a busy machine
RUN_TIMEOUT_S = 300
RUNS = 3  # of the tests of a broken rule, until one fails: some rules break only if sessions meet in a certain way
# Tests in the order in which they are named, and half a second less of imports.
_WITHOUT = ("randomly", "cacheprovider", "xdist", "anyio")
QUICKLY = ("--override-ini=addopts=", "-q", *(part for name in _WITHOUT for part in ("-p", f"no:{name}")))
PACKAGES = ("mailroom", "outbox", "inbox", "dispatcher", "spark_jobs")


class RunnerError(Exception):
    """Nothing can be said about the mutants; the message says what to do first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a mutant was caught, why so, and what pytest said."""

    caught: bool
    reason: str
    output: str


class Copy:
    """The files that git knows or would take, copied from `source` to `directory`."""

    def __init__(self, source: Path, directory: Path) -> None:
        self._root = directory / "source"
        self._report = directory / "report.xml"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source, capture_output=True, text=True,
        )  # fmt: skip
        if listed.returncode:
            raise RunnerError(f"{source} is not a git checkout: {listed.stderr.strip()}")
        for name in filter(None, listed.stdout.split("\0")):
            if (source / name).is_file():  # else removed, and not yet from the index
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self._root / name)
        # Later than all that is there, and each second of it used once: see `_write`.
        self._changed_at = int(time.time())
        # The package is installed editable; the path given here comes before that, in processes that tests start too.
        # With bytecode, whatever the environment says: to compile all modules anew takes each run a second.
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": str(self._root),
            "MAILROOM_TEST_WITHIN_S": str(WITHIN_S),
            "MAILROOM_KAFKA_JARS": os.environ.get("MAILROOM_KAFKA_JARS") or str(source / ".kafka"),
            "GIT_CEILING_DIRECTORIES": str(directory),
        }
        self._check_code_is_the_copy_s()

    def check_tests_pass(self, tests: Sequence[str]) -> None:
        """Raise `RunnerError` unless all the tests pass on the source as it is."""
        # Not stopped at the first failure: all of them are to be seen.
        code, output = self._pytest(tests, timeout_s=RUN_TIMEOUT_S + TEST_TIMEOUT_S * len(tests))
        if code != 0:
            raise RunnerError(f"The tests must pass before a rule is broken; pytest ended with {code}:\n{output}")

    def judge(self, mutant: Mutant) -> Verdict:
        """Break the rule, run its tests, and mend it again."""
        try:
            broken = mutant.broken(self._root)
        except Unanchored as trouble:
            return Verdict(False, "no: its text is not there once, renew it", str(trouble))
        sound = {path: path.read_text() for path in broken}
        try:
            self._write(broken)
            for _ in range(RUNS):
                code, output = self._pytest(("-x", *mutant.tests), timeout_s=RUN_TIMEOUT_S)
                if code != 0:
                    break
        finally:
            self._write(sound)
        if code == 0:
            return Verdict(False, f"no: all tests passed, {RUNS} times", output)
        if code is None:
            return Verdict(False, f"no: it hung for {RUN_TIMEOUT_S} s and no test failed", output)
        if code != 1 or not self._failures():
            return Verdict(False, f"no: pytest ended with {code} and no failed test", output)
        return Verdict(True, "yes", output)

    def _write(self, files: Mapping[Path, str]) -> None:
        """Write the files, each with a time of its own.

        Bytecode is known to be stale by the file's size and its time in whole seconds, and a mutant may need less.
        """
        self._changed_at += 1
        for path, text in files.items():
            path.write_text(text)
            os.utime(path, (self._changed_at, self._changed_at))

    def _check_code_is_the_copy_s(self) -> None:
        program = f"import {', '.join(PACKAGES)}\nfor m in {', '.join(PACKAGES)}: print(m.__file__)"
        found = self._python(["-c", program], timeout_s=60).stdout.split()
        expected = [str(self._root / package / "__init__.py") for package in PACKAGES]
        if found != expected:
            raise RunnerError(f"Not the copy would be tested: {found} were imported and not {expected}.")

    def _pytest(self, arguments: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
        """Return pytest's exit code, None if it hung, and its output."""
        self._report.unlink(missing_ok=True)
        options = [*QUICKLY, f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={self._report}"]
        try:
            done = self._python(["-m", "pytest", *options, *arguments], timeout_s)
        except subprocess.TimeoutExpired as expired:
            return None, bytes(expired.stdout or b"").decode(errors="replace")
        return done.returncode, done.stdout

    def _failures(self) -> int:
        """Count the tests that failed themselves: an error of a fixture proves nothing about the rule."""
        return len(ElementTree.parse(self._report).findall(".//testcase/failure")) if self._report.exists() else 0

    def _python(self, arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *arguments], cwd=self._root, env=self._environment, timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
