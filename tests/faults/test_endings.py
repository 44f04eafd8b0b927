"""How processes of a campaign may end by themselves, and how not."""

from collections import Counter

from tests.faults.report import unasked

MAY = (
    "worker: killed",
    "dispatcher: ConnectionFailed: Cannot",
    "reaper: Bug",
)
MAY_NOT = (
    "dispatcher: killed",
    "dispatcher: returned",
    "dispatcher: UndefinedTable: no",
    "worker: returned",
    "worker: ConnectionFailed: Cannot connect",
    "worker: Bug",
)


def test_daemon_or_worker_that_ends_by_itself_is_a_violation() -> None:
    assert unasked(Counter(MAY)) == []
    [violation] = unasked(Counter([*MAY, *MAY_NOT, *MAY_NOT]))
    assert violation.invariant == "I17"
    assert violation.rows == tuple((2, ending) for ending in MAY_NOT)
