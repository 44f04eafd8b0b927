"""A writer: transactions of a few messages and their ledger, ended in every way a transaction can end."""

import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

import mailroom
from mailroom import CommitUnknown
from outbox import Outbox, Outgoing
from tests.faults.history import History
from tests.faults.ledger import SENT, sent
from tests.faults.load import EVENT, Letter, letter
from tests.faults.role import Control, rest
from tests.faults.task import Task

ENDINGS = ("commit", "roll back", "savepoint", "prepare", "quiet commit")
WEIGHTS = (70, 8, 12, 5, 5)
LARGEST = 40
ATOMIC_SHARE = 0.2
COPY_SHARE = 0.7
GID = "faults-"


def play(task: Task, control: Control) -> None:
    """Write until the process is ended; a lost connection is made anew."""
    # With the process id: the same ids must not be sent again by the process that follows.
    options: dict[str, Any] = {"prepare_threshold": None} if task.pooled else {}
    connect = partial(psycopg.connect, task.dsn, application_name="faults writer", connect_timeout=5, **options)
    writer = Writer(task, random.Random(task.seed * 1_000_003 + os.getpid()))
    while True:
        try:
            with connect() as connection:
                while True:
                    if not control.running.wait(0.5):
                        continue
                    began = time.monotonic()
                    if writer.dice.random() < ATOMIC_SHARE:
                        messages = writer.write_atomically(connect)
                    else:
                        messages = writer.write(connection)
                    rest(messages / task.pace - (time.monotonic() - began))
        except (psycopg.OperationalError, CommitUnknown):
            rest(writer.dice.uniform(0.02, 0.3))


class Writer:
    """Writes one transaction after the other over whatever connection it is given."""

    def __init__(self, task: Task, dice: random.Random) -> None:
        self.dice = dice
        self._outbox = Outbox()
        self._history = History(Path(task.home), task.name)
        self._pooled = task.pooled
        self._number = 0

    def write(self, connection: psycopg.Connection[Any]) -> int:
        """Write one transaction; returns how many messages were in it."""
        [ending] = self.dice.choices(ENDINGS, WEIGHTS)
        letters = [letter(self.dice) for _ in range(self.dice.randint(1, LARGEST))]
        invoked = time.monotonic()
        if ending == "prepare" or (ending == "quiet commit"):
            connection.execute("SET LOCAL mailroom.notify = off")
        ledger = self._send(connection, letters, 0)
        if ending == "savepoint":
            ledger += self._in_savepoints(connection, len(ledger))
        wtx = self._note(connection, ledger)
        match ending:
            case "roll back":
                connection.rollback()
                return len(letters)
            case "prepare":
                self._prepare(connection)
            case _:
                connection.commit()
        self._history.acknowledged(wtx, invoked)
        return len(letters)

    def write_atomically(self, connect: Callable[[], psycopg.Connection[Any]]) -> int:
        """Write one transaction by `mailroom.atomically`, which runs it again or looks it up as need be."""
        letters = [letter(self.dice) for _ in range(self.dice.randint(1, LARGEST))]
        invoked = 0.0

        def work(connection: psycopg.Connection[Any]) -> int:
            nonlocal invoked
            invoked = time.monotonic()
            return self._note(connection, self._send(connection, letters, 0))

        self._history.acknowledged(mailroom.atomically(connect, work), invoked)
        return len(letters)

    def _send(
        self, connection: psycopg.Connection[Any], letters: list[Letter], first: int
    ) -> list[tuple[UUID, str, str, int | None]]:
        if self.dice.random() < COPY_SHARE:
            self._outbox.send_many(connection, [_outgoing(one) for one in letters])
        else:
            for one in letters:
                if one.topic == EVENT:
                    self._outbox.publish(connection, one.topic, one.value, key=one.key, deliver_at=_due(one), id=one.id)
                else:
                    self._outbox.send(connection, one.topic, one.value, key=one.key, deliver_at=_due(one), id=one.id)
        return [
            (one.id, one.topic, one.key, first + nth if one.delay_s is None else None)
            for nth, one in enumerate(letters)
        ]

    def _in_savepoints(
        self, connection: psycopg.Connection[Any], first: int
    ) -> list[tuple[UUID, str, str, int | None]]:
        ledger: list[tuple[UUID, str, str, int | None]] = []
        for _ in range(self.dice.randint(1, 3)):
            keeps = self.dice.random() < 0.5
            with connection.transaction(force_rollback=not keeps):
                more = self._send(connection, [letter(self.dice) for _ in range(3)], first + len(ledger))
            ledger += more if keeps else []
        return ledger

    def _note(self, connection: psycopg.Connection[Any], ledger: list[tuple[UUID, str, str, int | None]]) -> int:
        connection.execute(SENT.encode(), sent(ledger))
        row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        return int(row[0])

    def _prepare(self, connection: psycopg.Connection[Any]) -> None:
        self._number += 1
        gid = f"{GID}{os.getpid()}-{self._number}"
        connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        connection.commit()  # of the empty transaction that psycopg believes to be in
        if self.dice.random() < 0.3:
            rest(self.dice.uniform(0, 0.2))
        connection.autocommit = True
        connection.execute(f"COMMIT PREPARED '{gid}'".encode())
        connection.autocommit = False


def _due(one: Letter) -> datetime | None:
    return None if one.delay_s is None else datetime.now(UTC) + timedelta(seconds=one.delay_s)


def _outgoing(one: Letter) -> Outgoing:
    return Outgoing(
        one.topic, one.value, key=one.key, deliver_at=_due(one), id=one.id, kind="E" if one.topic == EVENT else "M"
    )
