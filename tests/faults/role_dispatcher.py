"""A dispatcher: the product's own, both lanes of it, with batches small enough that there are many of them."""

import asyncio
import random

from dispatcher.daemon import Dispatcher, Executor, run_until_signalled
from dispatcher.housekeeping import janitor
from dispatcher.lanes import lane, leading, lease
from mailroom.logs import segments
from mailroom.order import clock
from tests.faults.role import Control
from tests.faults.task import Habits, Task

ROWS = 500
DAY_S = 4  # of logs
SWEEP_S = 1.0


def play(task: Task, control: Control) -> None:
    """Deliver and execute until told to stop."""
    shorten(task.habits)
    # Some have room for one inbox only, so that almost all they deliver is fanned out.
    partitions = random.Random(task.seed).choice((1, None))
    poll_s = task.habits.poll_s
    dispatcher = Dispatcher(task.dsn, poll_interval_s=poll_s, rows=ROWS, partitions=partitions)
    asyncio.run(run_until_signalled([dispatcher, Executor(task.dsn, poll_interval_s=poll_s, rows=ROWS)]))


def shorten(habits: Habits) -> None:
    """Shorten the product's bounds to these."""
    for module, name, value in (
        (lease, "LEASE_S", habits.lease_s),
        (lease, "RENEW_S", habits.lease_s / 3),
        (lane, "RENEW_S", habits.lease_s / 3),
        (leading, "RENEW_S", habits.lease_s / 3),
        (clock, "CEILING_STEP", habits.ceiling_step),
        (janitor, "SWEEP_INTERVAL_S", SWEEP_S),
    ):
        setattr(module, name, value)
    # Everybody goes by the same clock, so it is the day that is shorter.
    for sql in (segments.OLD_LOGS, segments.OVER):
        sql.template = sql.template.replace(segments.DAY, f"interval '{DAY_S} s'")
