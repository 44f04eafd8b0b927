"""A node as tests see it: writers that commit, what a dispatcher delivers, and a look into the tables."""

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from psycopg import Connection
from psycopg.rows import Row, TupleRow

from dispatcher import Totals, deliver_all
from dispatcher.delivery.deliver import Delivery, delivering
from dispatcher.delivery.floor import FIRST, ScanStart
from inbox.by_key.due import reaping_due
from inbox.by_key.failure import Recorded, failed, recording
from mailroom import create_inbox, set_inbox
from mailroom.message.message import Message
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from outbox import Outbox, Outgoing

SCHEMA = "mailroom"
MADE = "the fixture"

# For the mark `node_sql`: the clock's ceiling is 0 in a new node.
CLOCKS_ALLOWED = "UPDATE mailroom.node SET clock_ceiling = 1000000"


class Node:
    """The node `mailroom` in the test's database; `connection` is an autocommit one of the test's own."""

    def __init__(self, dsn: str, connection: Connection[TupleRow]) -> None:
        self.dsn = dsn
        self.connection = connection

    def inbox(self, name: str, *topics: str, backoff_s: float = 1, **settings: Any) -> None:
        """Make an inbox that subscribes to the topics, or give it these settings and topics, too."""
        settings |= {"backoff_s": backoff_s, "backoff_max_s": max(backoff_s, 60)}
        exists = self.rows("SELECT FROM mailroom.inbox_registry WHERE name = %s", name)
        with self.connection.transaction():
            if exists:
                settings.pop("order", None)
                set_inbox(self.connection, name, actor=MADE, **settings)
            create_inbox(self.connection, name, topics, actor=MADE, **({} if exists else settings))
            # Tests look at what they have changed themselves.
            self.connection.execute("DELETE FROM mailroom.audit WHERE actor = %s", [MADE])

    def send(self, topic: str, value: object = None, **fields: Any) -> UUID:
        """Send one message in a transaction of its own."""
        with self.connection.transaction():
            return send(self.connection, topic, value, **fields)

    def deliver_all(self, now: datetime | None = None) -> Totals:
        """Deliver all there is, as a dispatcher that has just started."""
        with ThreadPoolExecutor(1) as thread:  # an async test's own thread has a loop already
            return thread.submit(deliver_all, self.dsn, now=now).result()

    def deliver(self, *, start: ScanStart = FIRST, rows: int = 10_000, max_bytes: int = 2**25) -> Delivery:
        """Run the delivery's statements once, in a transaction."""
        with self.connection.transaction():
            return run(self.connection, delivering(SCHEMA, start=start, rows=rows, max_bytes=max_bytes))

    def allow_clocks(self, ceiling: int = 1_000_000) -> None:
        """Raise the clock's ceiling, as `CLOCKS_ALLOWED` does."""
        self.connection.execute("UPDATE mailroom.node SET clock_ceiling = %s", [ceiling])

    def delivered(self, columns: str = "inbox, key, clock") -> list[TupleRow]:
        """Return what stands in the inboxes, by clock and inbox."""
        return self.rows(f"SELECT {columns} FROM mailroom.inbox ORDER BY clock, inbox")

    def waiting(self) -> list[str]:
        """Return the keys that stand in the outbox, in position order."""
        return [key for (key,) in self.rows("SELECT key FROM mailroom.outbox ORDER BY position")]

    def dead(self) -> list[TupleRow]:
        """Return key, stage and reason of the dead letters."""
        return self.rows("SELECT key, stage, reason FROM mailroom.dead_letter ORDER BY id")

    def sessions(self, name: str = "mailroom", state: str = "true") -> list[int]:
        """Return the backends of sessions to this database whose application's name begins so, and that are in `state`.

        A backend ends a moment after its client has closed the session: wait for it.
        """
        rows = self.rows(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name ^@ %s "
            f"AND {state}",
            name,
        )
        return [pid for (pid,) in rows]

    def end_sessions(self, name: str) -> None:
        """End them, and wait until they have ended."""
        for pid in self.sessions(name):
            self.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])

    def rows(self, query: str, *values: object) -> list[TupleRow]:
        """Return the rows of a query."""
        return self.connection.execute(query, values).fetchall()

    def value(self, query: str, *values: object) -> Any:
        """Return the one value of a query."""
        [(value,)] = self.rows(query, *values)
        return value


def send(connection: Connection[Row], topic: str, value: object = None, *, kind: str = "M", **fields: Any) -> UUID:
    """Send one message of any kind in the connection's transaction."""
    outbox = Outbox()
    if kind == "M":
        return outbox.send(connection, topic, value, **fields)
    message_id = uuid4()
    outbox.send_many(connection, [Outgoing(topic, value, kind=kind, id=message_id, **fields)])  # type: ignore[arg-type]
    return message_id


def failing(inbox: str, message: Message, error: Exception) -> Operation[Recorded]:
    """Record a failure as a worker does, and end the message, if it was the last one, as the key's next claim does."""
    recorded = yield from recording(SCHEMA, inbox, failed(message, error))
    if recorded.outcome in ("park", "skip"):
        assert (yield from reaping_due(SCHEMA, inbox)).ended is not None
    return recorded
