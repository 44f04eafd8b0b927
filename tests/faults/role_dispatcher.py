"""A dispatcher: the product's own, both lanes of it, with batches small enough that there are many of them."""

import asyncio

from dispatcher import lane, leading, lease
from dispatcher.daemon import Dispatcher, Executor, run_until_signalled
from mailroom import clock
from tests.faults.role import Control
from tests.faults.task import Task

ROWS = 500


def play(task: Task, control: Control) -> None:
    """Deliver and execute until told to stop."""
    for module, name, value in (
        (lease, "LEASE_S", task.habits.lease_s),
        (lease, "RENEW_S", task.habits.lease_s / 3),
        (lane, "RENEW_S", task.habits.lease_s / 3),
        (leading, "RENEW_S", task.habits.lease_s / 3),
        (clock, "CEILING_STEP", task.habits.ceiling_step),
    ):
        setattr(module, name, value)
    lanes = [make(task.dsn, poll_interval_s=task.habits.poll_s, rows=ROWS) for make in (Dispatcher, Executor)]
    asyncio.run(run_until_signalled(lanes))
