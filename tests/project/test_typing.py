"""What `mypy --strict` says of programs that use our types: the marked lines are wrong, and no others."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "typing"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checker_finds_what_is_wrong_and_nothing_else() -> None:
    programs = sorted(map(str, PROGRAMS.glob("[a-z]*.py")))
    command = [sys.executable, "-m", "mypy", "--strict", *programs]
    ended = subprocess.run(command, cwd=PROGRAMS.parents[1], capture_output=True, text=True, check=False)
    assert programs
    assert ended.returncode == 0, ended.stdout + ended.stderr
