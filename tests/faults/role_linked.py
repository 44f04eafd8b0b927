"""A daemon of a linked node: what delivers and what reads other nodes, as the product runs them."""

import asyncio
import random

from dispatcher.daemon import Dispatcher, run_until_signalled
from dispatcher.lanes import lease
from dispatcher.links import lane, reading
from dispatcher.links.lane import LinksLane
from mailroom.sql.operation import Sql
from tests.faults.links import mutants
from tests.faults.role import Control
from tests.faults.role_dispatcher import shorten
from tests.faults.task import Task

ACKNOWLEDGE_S = 0.3  # a daemon lives for seconds only
# The share of daemons that may not end the session of the leader before them, as under another role: then it is left to
# the fences what that one does once it goes on.
POWERLESS = 0.3
ENDS_NOTHING = Sql("SELECT %(backend_pid)s::bigint = 0 AND %(backend_from)s::timestamptz IS NULL", columns=("boolean",))


def play(task: Task, control: Control) -> None:
    """Deliver and read until told to stop."""
    shorten_links(task)
    if task.habits.link_mutant:
        mutants.apply(task.habits.link_mutant)
    lanes = [make(task.dsn, poll_interval_s=task.habits.poll_s) for make in (Dispatcher, LinksLane)]
    asyncio.run(run_until_signalled(lanes))


def shorten_links(task: Task) -> None:
    """Shorten the bounds of both lanes; and let some daemons be powerless."""
    shorten(task.habits)
    for module, name, value in (
        (lane, "RENEW_S", task.habits.lease_s / 3),
        (lane, "ACKNOWLEDGE_S", ACKNOWLEDGE_S),
        (reading, "LEASE_S", task.habits.lease_s),
    ):
        setattr(module, name, value)
    if random.Random(task.seed).random() < POWERLESS:
        end_nothing()


def end_nothing() -> None:
    """Let this daemon end no other session when it begins to lead."""
    setattr(lease, "TERMINATE", (ENDS_NOTHING,))  # noqa: B010
