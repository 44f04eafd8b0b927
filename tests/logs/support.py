"""Logs as tests use them."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg import Connection
from psycopg.rows import TupleRow

from inbox.by_key.claim import Claimed, Course, Share
from inbox.by_key.failure import Recorded, failed
from inbox.by_log.log_order import LogOrder
from inbox.order import reading_order
from mailroom import create_inbox, create_log
from mailroom.logs.segments import making_segment
from mailroom.message.message import Message
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from tests.support.node import SCHEMA, Node

NOW = datetime(2026, 11, 29, tzinfo=UTC)
DAY = timedelta(days=1)


def make(node: Node, *readers: str, lanes: int = 4, log: str = "orders", **settings: Any) -> None:
    """Make a log of `order.#` with these readers."""
    with node.connection.transaction():
        create_log(node.connection, log, ["order.#"], lanes=lanes)
        for reader in readers:
            create_inbox(node.connection, reader, log=log, **settings)


def write(node: Node, keys: Iterable[str]) -> None:
    """Send a message for each of these keys, and deliver them."""
    for key in keys:
        node.send("order.paid", key=key)
    node.deliver_all()


def days(node: Node, count: int, keys: Iterable[str] = ("a",)) -> list[int]:
    """Give the log a segment a day, each with a message of each key; return the last clock of each day."""
    clocks: list[int] = []
    for day in range(count):
        write(node, keys)
        at, last = NOW + day * DAY, clocks[-1] if clocks else 0
        clocks.append(node.value("SELECT max(clock) FROM mailroom.log"))
        node.connection.execute("UPDATE mailroom.log_tick SET at = %s WHERE clock > %s", [at, last])
        node.connection.execute("UPDATE mailroom.log SET delivered_at = %s WHERE clock > %s", [at, last])
        node.connection.execute(
            "UPDATE mailroom.log_segment SET opened_at = %s WHERE segment = %s", [at - DAY / 2, day + 1]
        )
        with node.connection.transaction():
            assert run(node.connection, making_segment(SCHEMA, "orders", at)) == day + 2
    return clocks


class Reader:
    """What a worker does with a log inbox, in steps: one claim after the other, on a connection of its own."""

    def __init__(self, connection: Connection[TupleRow], inbox: str) -> None:
        self.connection = connection
        self.course = Course()
        order = run(connection, reading_order(SCHEMA, inbox))
        assert isinstance(order, LogOrder)
        self.order = order
        connection.commit()

    def claim(self, most: int = 100, *, due: bool = False, **bounds: Any) -> Claimed:
        """Claim in the connection's transaction."""
        if due:
            return run(self.connection, self.order.claiming_due(most))
        share = Share(most, most, most, **{"due_too": False} | bounds)
        claimed, self.course = run(self.connection, self.order.claiming(share, self.course))
        return claimed

    def take(self, most: int = 100, *, due: bool = False) -> list[Message]:
        """Claim and commit."""
        messages = self.claim(most, due=due).messages
        if due and messages:
            self._run(self.order.healing(messages[-1]))
        self.connection.commit()
        return messages

    def take_all(self) -> list[Message]:
        """Claim and commit until nothing is left."""
        taken: list[Message] = []
        while messages := self.take():
            taken += messages
        return taken

    def fail(self, message: Message, apart: Connection[TupleRow], error: Exception | None = None) -> Recorded:
        """Record a failure on another connection, and roll the claim back."""
        recorded = run(apart, self.order.recording(failed(message, error or ValueError("no"))))
        self.connection.rollback()
        return recorded

    def _run(self, operation: Operation[None]) -> None:
        run(self.connection, operation)


def keys_of(messages: Iterable[Message]) -> list[str]:
    """Return their keys."""
    return [message.key for message in messages]


def in_order(messages: Iterable[Message]) -> bool:
    """Return whether each key's clocks rise."""
    last: dict[str, int] = {}
    for message in messages:
        if message.clock <= last.get(message.key, 0):
            return False
        last[message.key] = message.clock
    return True
