"""An operator who sets inboxes back in their logs while they are read, and is not always sure of it."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from inbox import Inbox
from tests.faults.ledger import REWOUND
from tests.faults.load import READERS
from tests.faults.role import Control, rest
from tests.faults.task import Task

EVERY_S = (1, 6)
START_SHARE = 0.03  # all of the log is read again
ROLLED_BACK = 0.2
RECENT = """
SELECT clock FROM mailroom.log_tick WHERE log = %s ORDER BY clock DESC OFFSET floor(random() * 20)::integer LIMIT 1
"""


def play(task: Task, control: Control) -> None:
    """Set inboxes back until the process is ended; a lost connection is made anew."""
    dice = random.Random(task.seed)
    while True:
        try:
            with psycopg.connect(task.dsn, application_name="faults rewinder", connect_timeout=5) as connection:
                while True:
                    rest(dice.uniform(*EVERY_S))
                    if control.running.wait(0.5):
                        rewind(connection, dice)
        except psycopg.OperationalError:
            rest(dice.uniform(0.02, 0.3))


def rewind(connection: psycopg.Connection[Any], dice: random.Random) -> None:
    """Set an inbox back: to a clock, a time or the start, or to where it has not read yet."""
    reader = dice.choice(list(READERS))
    to: str | int | datetime
    row = connection.execute(RECENT, [READERS[reader]]).fetchone()
    draw = dice.random()
    if draw < START_SHARE or row is None:
        to = "start"
    elif draw < 0.3:
        to = datetime.now(UTC) - timedelta(seconds=dice.uniform(0, 5))
    else:
        to = max(1, row[0] + dice.randint(-300, 50))
    connection.commit()  # the clock was looked for by a snapshot of its own
    place = Inbox(reader).rewind(connection, to, actor="faults")
    connection.execute(REWOUND.encode(), [place.clock, reader])
    if dice.random() < 0.2:
        rest(0.1)  # workers wait meanwhile
    if dice.random() < ROLLED_BACK:
        connection.rollback()
    else:
        connection.commit()
