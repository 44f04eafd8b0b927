"""Bounds of waits in tests: what comes unless something is wrong is waited for a minute, since machines are busy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import parsed

ROOT = Path(__file__).parents[2]
LEAST_S = 60
# Where a call that waits has its bound, if not by name.
POSITIONS = {
    "eventually": 1, "eventually_async": 1, "wait_until_blocked": 2, "wait_for": 1, "join": 0, "wait": 0, "result": 0,
}  # fmt: skip
BY_NAME = {*POSITIONS, "communicate", "notifies", "Barrier", "run", "check_output", "check_call", "call"}
# So long a test looks at what must not come, which costs the time whenever it passes.
IN_VAIN = {"SOON_S"}
# Campaigns and their mutants draw how long each fault lasts, and programs that mypy reads are not run.
APART = {"faults", "campaign", "mutants", "fuzz", "typing"}
FILES = [
    path
    for home in ("tests", "examples")
    for path in sorted((ROOT / home).rglob("*.py"))
    if not APART & set(path.relative_to(ROOT).parts) or path.name.startswith("test_")
]


def short_bounds(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and bound of the waits that give up sooner. 0 looks and does not wait, nor do parts of a second."""
    constants = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and target.id not in IN_VAIN
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            for bound in _bounds(call):
                value = constants.get(bound.id, bound) if isinstance(bound, ast.Name) else bound
                seconds = value.value if isinstance(value, ast.Constant) else None
                if isinstance(seconds, int | float) and 1 < seconds < LEAST_S:
                    yield call.lineno, ast.unparse(bound)


def _bounds(call: ast.Call) -> Iterator[ast.expr]:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    position = POSITIONS.get(function)
    if position is not None and position < len(call.args):
        yield call.args[position]
    if function in BY_NAME:
        yield from (keyword.value for keyword in call.keywords if keyword.arg in ("timeout", "timeout_s"))


@pytest.mark.slow
def test_waits_that_end_unless_something_is_wrong_last_a_minute() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {bound}"
        for path, tree in parsed(FILES)
        for line, bound in short_bounds(tree)
    ]
    assert found == []


def test_shorter_bound_is_found() -> None:
    waits = [
        "eventually(f, 20)",
        "eventually_async(f, timeout_s=59.9)",
        "wait_until_blocked(c, 1, 10)",
        "thread.join(STOP_S)",
        "asyncio.wait_for(f, 10)",
        "process.communicate(timeout=20)",
        "listener.notifies(timeout=5, stop_after=1)",
    ]
    found = short_bounds(ast.parse("\n".join(["STOP_S = 10.0", *waits])))
    assert [line for line, _ in found] == list(range(2, len(waits) + 2))


def test_what_is_long_enough_or_looks_at_what_must_not_come_is_let_be() -> None:
    waits = ["eventually(f)", "process.wait(60)", "notifies(timeout=0)", "task.wait(SOON_S)"]
    assert list(short_bounds(ast.parse("\n".join(["SOON_S = 2.0", *waits])))) == []


def test_default_is_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAILROOM_TEST_WITHIN_S", raising=False)
    told = [sys.executable, "-c", "from tests.support.waiting import WITHIN_S; print(WITHIN_S)"]
    assert float(subprocess.run(told, cwd=ROOT, capture_output=True, text=True, check=True).stdout) == LEAST_S
