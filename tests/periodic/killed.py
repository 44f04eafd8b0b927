"""Two processes that send periodic messages as a daemon's janitor does, killed at moments that are drawn from a seed.

`python -m tests.periodic.killed DSN NOW SEED MOMENT...`: each MOMENT is a number of messages; once so many were sent,
one of the two is killed, and another begins. It ends when nothing is due any more, with exit code 0 if each end was
one that it should be. A process of its own that forks, since a start of Python takes longer than what is tested.
"""

import asyncio
import os
import random
import signal
import sys
from datetime import datetime
from functools import partial

import psycopg

from dispatcher.housekeeping.periodic import looking, sending_due
from dispatcher.lanes.leading import KEEPER
from mailroom.session import settings
from mailroom.sql.runner import run_async, run_in_transaction
from tests.support.node import SCHEMA
from tests.support.waiting import eventually

ROWS = 2  # so that one transaction is a small part of all there is


async def send_all(dsn: str, now: datetime) -> None:
    async with await settings.connect_async(dsn, "sender", KEEPER) as connection:
        while (due_in_s := await run_async(connection, looking(SCHEMA, [], now))) is not None and due_in_s <= 0:
            await run_in_transaction(connection, sending_due(SCHEMA, rows=ROWS, now=now))


def started(dsn: str, now: datetime) -> int:
    """Fork a sender, and return its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(send_all(dsn, now))
            code = 0
        finally:
            os._exit(code)  # without closing what belongs to the one that forked
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reached(connection: psycopg.Connection[tuple[bool]], moment: int) -> bool:
    rows = connection.execute("SELECT coalesce(max(position), 0) >= %s FROM mailroom.outbox", [moment]).fetchall()
    return rows[0][0]


def main(dsn: str, now: datetime, seed: int, moments: list[int]) -> int:
    drawn = random.Random(seed)
    senders = [started(dsn, now), started(dsn, now)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for moment in moments:
            eventually(partial(reached, connection, moment))
            victim = drawn.randrange(len(senders))
            os.kill(senders[victim], signal.SIGKILL)
            if ended(senders[victim]) != -signal.SIGKILL:
                return 1  # it had ended before: too few are due for so many moments
            senders[victim] = started(dsn, now)
    return int([ended(pid) for pid in senders] != [0, 0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], datetime.fromisoformat(sys.argv[2]), int(sys.argv[3]), [*map(int, sys.argv[4:])]))
