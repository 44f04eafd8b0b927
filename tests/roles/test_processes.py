"""Each of our processes runs as its role: what `mailroom grant` gives is enough."""

from collections.abc import Callable

import pytest

from tests.roles import processes
from tests.support.node import Node
from tests.support.roles import rights, role

EVERY = ("ledger", "replies", "shipping")
PROCESSES: dict[str, tuple[Callable[[Node, str], None], tuple[str, ...]]] = {
    "writer": (processes.writes, ()),
    "jdbc-writer": (processes.writes_by_jdbc, ()),
    "executor": (processes.executes, ()),
    "dispatcher": (processes.delivers, EVERY),
    "operator": (processes.administers, ("shipping",)),
    "auditor": (processes.audits, ()),
    "metrics": (processes.measures, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("purpose", PROCESSES)
def test_process_needs_no_more_than_its_role_has(busy: Node, purpose: str) -> None:
    runs, inboxes = PROCESSES[purpose]
    with role(busy.dsn, *rights(purpose, *inboxes, bounded=["ledger"])) as (_, dsn):
        runs(busy, dsn)


@pytest.mark.slow
@pytest.mark.parametrize("inbox", ["shipping", "ledger"])
def test_worker_needs_no_more_than_its_role_has(busy: Node, monkeypatch: pytest.MonkeyPatch, inbox: str) -> None:
    with role(busy.dsn, *rights("reaper", inbox, bounded=["ledger"])) as (_, dsn):
        processes.reaps(busy, dsn, monkeypatch, inbox)
