"""The budget of the tests: a room that has more cases, or takes a larger part of a run, is told."""

from collections import Counter

import pytest

from tests.support.budget import budget_of, is_whole, over, room_of, slow


@pytest.mark.parametrize("where", ["make test", pytest.param("what make check adds", marks=pytest.mark.slow)])
def test_no_room_has_more_cases_than_its_budget(request: pytest.FixtureRequest, where: str) -> None:
    if not is_whole(request.config):
        pytest.skip("a part of the tests was chosen: nothing can be counted")
    run = request.config.getoption("run")
    cases = Counter(room_of(item.nodeid) for item in request.session.items)
    assert over(cases, budget_of(run)) == {}, "raise tests/budget.toml, if these are worth their time"


def test_cases_beyond_the_budget_are_told() -> None:
    budget = {"worker": {"cases": 2, "seconds": 1.0}, "inbox": {"cases": 1, "seconds": 1.0}}
    assert over({"worker": 2, "inbox": 1}, budget) == {}
    assert over({"worker": 3, "new": 1}, budget) == {"worker": "3 cases, 2 allowed", "new": "1 cases, 0 allowed"}


def test_a_slow_machine_is_no_slow_room() -> None:
    budget = {"worker": {"cases": 2, "seconds": 100.0}, "inbox": {"cases": 1, "seconds": 100.0}}
    assert slow({"worker": 400.0, "inbox": 380.0}, budget) == []
    [line] = slow({"worker": 400.0, "inbox": 50.0}, budget)
    assert line.startswith("worker took 400 s, and 225 s are its part")


def test_room_is_the_folder() -> None:
    assert room_of("tests/worker/test_hold.py::test_x[tests/y]") == "worker"
    assert room_of("tests/test_errors.py::test_x") == "tests"
