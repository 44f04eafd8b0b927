"""What the tests may cost: `tests/budget.toml` has cases and seconds of each room, so that growth is a decision.

Cases are counted, and a test compares them (tests/project/test_budget.py). Seconds depend on the machine: `make test`
and `make check` record them in `.durations`, and say which rooms took more of a run than their part.

    python -m tests.support.budget test beyond-test     # the records of these runs become the budget
"""

import json
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BUDGET = TESTS / "budget.toml"
DURATIONS = TESTS.parent / ".durations"  # the docs' build empties .cache
_FURTHER = 1.5  # so much more than its part of the budget a room may take, since machines differ

Room = Mapping[str, float]


def room_of(nodeid: str) -> str:
    """Return the folder of `tests` that a test stands in; `tests` itself is one."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def is_whole(config: pytest.Config) -> bool:
    """Tell whether a run has all tests of `make test` or `make check`: no part was chosen by hand."""
    chosen = config.option.keyword or config.option.markexpr or config.option.deselect
    whole: bool = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return whole and not chosen and config.getoption("run") != "all"


def budget_of(run: str) -> dict[str, Room]:
    """Return cases and seconds of each room; those of `check` are those of `test` and `beyond-test`."""
    budgets: dict[str, dict[str, Room]] = tomllib.loads(BUDGET.read_text())
    if run in budgets:
        return budgets[run]
    rooms = {room for budget in budgets.values() for room in budget}
    parts = {room: [budget[room] for budget in budgets.values() if room in budget] for room in rooms}
    return {
        room: {what: sum(part[what] for part in found) for what in ("cases", "seconds")}
        for room, found in parts.items()
    }


def over(cases: Mapping[str, int], budget: Mapping[str, Room]) -> dict[str, str]:
    """Return the rooms that have more cases than the budget says."""
    allowed = {room: budget.get(room, {}).get("cases", 0) for room in cases}
    return {room: f"{count} cases, {allowed[room]} allowed" for room, count in cases.items() if count > allowed[room]}


def record(run: str, reports: Iterable[pytest.TestReport]) -> list[str]:
    """Write what a run took, and return a line for each room that took more of it than its part."""
    tests: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        tests[report.nodeid] += report.duration
    DURATIONS.mkdir(parents=True, exist_ok=True)
    (DURATIONS / f"{run}.json").write_text(
        json.dumps(dict(sorted(tests.items(), key=itemgetter(1), reverse=True)), indent=0)
    )
    return slow(_seconds(tests), budget_of(run))


def slow(seconds: Mapping[str, float], budget: Mapping[str, Room]) -> list[str]:
    """Return a line for each room whose part of all seconds is much larger than its part of the budget's."""
    rate = sum(seconds.values()) / (sum(room["seconds"] for room in budget.values()) or 1)
    expected = {room: budget.get(room, {}).get("seconds", 0) * rate for room in seconds}
    return [
        f"{room} took {seconds[room]:.0f} s, and {expected[room]:.0f} s are its part: tests/budget.toml"
        for room in seconds
        if seconds[room] > _FURTHER * expected[room] + 5
    ]


def _seconds(tests: Mapping[str, float]) -> Mapping[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for nodeid, duration in tests.items():
        seconds[room_of(nodeid)] += duration
    return seconds


def _renewed(run: str) -> str:
    tests: dict[str, float] = json.loads((DURATIONS / f"{run}.json").read_text())
    cases, seconds = Counter(map(room_of, tests)), _seconds(tests)
    lines = [f"{room} = {{ cases = {cases[room]}, seconds = {round(seconds[room])} }}" for room in sorted(cases)]
    return "\n".join([f"[{run}]", *lines])


if __name__ == "__main__":
    head = "# Cases, and seconds summed over processes, of each room in a run: tests/support/budget.py writes it."
    BUDGET.write_text("\n\n".join([head, *map(_renewed, sys.argv[1:])]) + "\n")
