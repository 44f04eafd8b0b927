"""A reaper by hand: `reap` and `reap_any` in transactions of its own, many of which it rolls back."""

import random
from pathlib import Path
from typing import Any

import psycopg

from inbox import Inbox, Message
from tests.faults.history import Observations
from tests.faults.ledger import PROBE, READ, REAPED, SEEN
from tests.faults.load import KEYS, READERS
from tests.faults.role import Control, rest
from tests.faults.role_worker import isolation_level
from tests.faults.task import Task

ROLLED_BACK = 0.15
PASSING = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable)


def play(task: Task, control: Control) -> None:
    """Reap until the process is ended; a lost connection is made anew."""
    dice = random.Random(task.seed)
    inbox = Inbox(task.inbox)
    observations = Observations(Path(task.home), task.name)
    while True:
        try:
            options: dict[str, Any] = {"prepare_threshold": None} if task.pooled else {}
            with psycopg.connect(
                task.dsn, application_name="faults reaper", connect_timeout=5, **options
            ) as connection:
                connection.isolation_level = isolation_level(task)
                while True:
                    if not reap(connection, inbox, dice, observations):
                        rest(0.02)
        except psycopg.OperationalError as error:
            if not isinstance(error, PASSING):
                rest(dice.uniform(0.02, 0.3))


def reap(connection: psycopg.Connection[Any], inbox: Inbox, dice: random.Random, observations: Observations) -> int:
    """Do one transaction; returns how many messages it consumed."""
    messages: list[Message]
    match dice.randrange(4) if inbox.inbox not in READERS else 3:  # of a log no key is reaped by itself
        case 0:
            messages = inbox.reap(connection, "hot", dice.randint(1, 50))
        case 1:
            messages = inbox.reap(connection, f"key-{dice.randrange(KEYS)}", dice.randint(1, 10))
        case _:
            messages = inbox.reap_any(connection, dice.randint(1, 30), dice.randint(1, 10))
    if messages:
        observations.had((one.id, one.clock) for one in messages)
        columns = [[one.id for one in messages], [one.key for one in messages], [one.clock for one in messages]]
        if inbox.inbox in READERS:
            connection.execute(READ.encode(), [[inbox.inbox] * len(messages), *columns])
        else:
            connection.execute(REAPED.encode(), [inbox.inbox, *columns])
        for message in messages:
            assert message.value["id"] == str(message.id), "the value belongs to another message"
            if message.key.startswith(PROBE):
                connection.execute(SEEN, [message.id, inbox.inbox])
    if messages and dice.random() < ROLLED_BACK:
        if dice.random() < 0.2:
            rest(0.02)  # others look at the key meanwhile
        connection.rollback()
        return 0
    connection.commit()
    return len(messages)
