"""All that a log goes through, once and in turns: delivered into, read, diverted, set back, and its segments turned.

It uses the product's operations without the loops around them, so what it does is the same each time, and each
statement can be struck by its number. What it handles is written down in the transaction of the claim.
"""

import asyncio
from datetime import timedelta
from typing import Any

import psycopg

from dispatcher.delivery.deliverer import Deliverer
from dispatcher.lanes.leading import LANE, open_session
from inbox import Inbox
from inbox.by_key.claim import Course, Share
from inbox.by_key.failure import failed
from inbox.order import reading_order
from mailroom.errors import ConnectionFailed
from mailroom.logs.segments import (
    dropping_segment,
    emptying,
    listing_over,
    making_segment,
    sweeping_receipts,
    sweeping_ticks,
)
from mailroom.message.message import Message
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run
from mailroom.values.names import DEFAULT_SCHEMA as SCHEMA
from tests.faults.role import Control
from tests.faults.task import Task

LOG, READERS = "orders", ("billing", "search")  # only the first one's handler fails, and only it is set back
ATTEMPTS = 6
MOST = 4  # of a delivery, and of a claim: what is sent for one case takes several
SHARE = Share(MOST, MOST, MOST, due_too=False)
FAILING = 3  # the values that a handler fails with at first
DAY = timedelta(days=1)
TABLES = """
CREATE TABLE handled (n bigserial, inbox text, epoch bigint, mid uuid, key text, clock bigint);
CREATE TABLE rewound (inbox text, epoch bigint, clock bigint)
"""
HANDLED = """
INSERT INTO handled (inbox, epoch, mid, key, clock)
SELECT name, epoch, %s, %s, %s FROM mailroom.inbox_registry WHERE name = %s
"""
REWOUND = "INSERT INTO rewound SELECT name, epoch, %s FROM mailroom.inbox_registry WHERE name = %s"
LAST_TRIED = "SELECT attempt FROM mailroom.attempt WHERE inbox = %s AND clock = %s ORDER BY id DESC LIMIT 1"
MIDDLE = "SELECT clock FROM mailroom.log ORDER BY clock DESC OFFSET 3 LIMIT 1"


def play(task: Task, control: Control) -> None:
    """Go through everything; begin anew where a session was lost."""
    go_through(task.dsn)
    control.report(passes=control.passes)


def go_through(dsn: str) -> None:
    """Deliver and read what there is, set back, read again, and have a day pass."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _go_through(dsn)
            return
        except (psycopg.OperationalError, ConnectionFailed):
            if attempt == ATTEMPTS:
                raise


def _go_through(dsn: str) -> None:
    asyncio.run(_deliver(dsn))
    with (
        psycopg.connect(dsn, application_name="mailroom log reading") as connection,
        psycopg.connect(dsn, application_name="mailroom log apart", autocommit=True) as apart,
    ):
        for inbox in READERS:
            _Reading(connection, apart, inbox).read_all()
        _rewind(connection, READERS[0])
        _Reading(connection, apart, READERS[0]).read_all()
        _turn(apart)


async def _deliver(dsn: str) -> None:
    async with open_session(dsn, "log delivering", LANE) as session:
        deliverer = Deliverer(session, SCHEMA, rows=MOST)
        while (await deliverer.deliver()).taken:
            pass


class _Reading:
    """One claim after the other, of the log and of what it has diverted."""

    def __init__(self, connection: psycopg.Connection[Any], apart: psycopg.Connection[Any], inbox: str) -> None:
        self._connection = connection
        self._apart = apart
        self._inbox = inbox
        self._order = run(connection, reading_order(SCHEMA, inbox))
        self._course = Course()
        connection.commit()

    def read_all(self) -> None:
        """Go on until neither has anything."""
        while self._read() or self._read_due():
            pass

    def _read(self) -> bool:
        claimed, course = run(self._connection, self._order.claiming(SHARE, self._course))
        if not self._handle(claimed.messages):
            return True
        self._connection.commit()
        self._course = course
        return bool(claimed.messages) or not claimed.is_all

    def _read_due(self) -> bool:
        claimed = run(self._connection, self._order.claiming_due(MOST))
        if not self._handle(claimed.messages):
            return True
        if claimed.messages:
            run(self._connection, self._order.healing(claimed.messages[-1]))
        self._connection.commit()
        return bool(claimed.messages)

    def _handle(self, messages: list[Message]) -> bool:
        for message in messages:
            if message.value == FAILING and self._inbox == READERS[0] and not self._was_tried(message):
                run(self._apart, self._order.recording(failed(message, ValueError("not yet"))))
                self._connection.rollback()
                return False
            self._connection.execute(HANDLED, [message.id, message.key, message.clock, self._inbox])
        return True

    def _was_tried(self, message: Message) -> bool:
        row = self._connection.execute(LAST_TRIED, [self._inbox, message.clock]).fetchone()
        return row is not None and row[0] > 0  # a rewind counts anew


def _rewind(connection: psycopg.Connection[Any], inbox: str) -> None:
    row = connection.execute(MIDDLE).fetchone()
    if row is not None:
        place = Inbox(inbox).rewind(connection, row[0], actor="faults")
        connection.execute(REWOUND, [place.clock, inbox])
    connection.commit()


def _turn(connection: psycopg.Connection[Any]) -> None:
    """Have a day pass."""
    row = connection.execute("SELECT max(opened_at) FROM mailroom.log_segment").fetchone()
    assert row is not None
    now = row[0] + DAY * 1.1
    _in_transaction(connection, making_segment(SCHEMA, LOG, now))
    for over in run(connection, listing_over(SCHEMA, now)):
        _in_transaction(connection, (dropping_segment if over.is_empty else emptying)(SCHEMA, over, now))
    run(connection, sweeping_ticks(SCHEMA))
    for inbox in READERS:
        run(connection, sweeping_receipts(SCHEMA, inbox))


def _in_transaction(connection: psycopg.Connection[Any], operation: Operation[T]) -> T:
    with connection.transaction():
        return run(connection, operation)
