"""`python -m tests.support.carried_column DSN TARGET_DSN`, in a copy of the source whose messages have a column more.

It says by what ways a message came, and what stood in the column at the end: see `tests.test_columns`.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg

from dispatcher.delivery.deliver import delivering
from dispatcher.delivery.fan_out import fanning_out
from inbox import Inbox, Message, Park, Parked, Skip
from mailroom.message.columns import MOVING
from mailroom.message.outgoing import Outgoing, row_of, sending, sending_many
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.runner import run
from mailroom.testing import carry, deliver, work
from outbox.bulk import NTH, moving_rows, table_in
from tests.support.drivers import opened
from tests.support.links import linked
from tests.support.node import SCHEMA, Node

ADDED = "note"
assert ADDED in [column.name for column in MOVING], "this is not a copy with a column more"
TABLES = ("outbox", "scheduled", "fan_out", "inbox", "log", "parked", "dead_letter", "transit")


def message(way: str, topic: str = "order.paid", **fields: Any) -> Outgoing:
    """Return a message that says in the added column by which way it is to go."""
    return Outgoing(topic, 1, key=way, **{ADDED: way, **fields})


@contextmanager
def handling(node: Node) -> Iterator[Any]:
    """Give a connection of a handler of messages."""
    with psycopg.connect(node.dsn) as connection:
        yield connection


def main(source: Node, target: Node) -> dict[str, str | None]:
    """Send messages by every way there is, and return what each has in the added column at its end."""
    for node in (source, target):
        for name in TABLES:
            node.connection.execute(f"ALTER TABLE mailroom.{name} ADD COLUMN {ADDED} text".encode())
    pair = linked(source, target, ["order.linked"])
    pair.inbox("elsewhere", "order.linked")
    source.inbox("shipping", "order.paid")
    now = datetime.now(UTC)
    with source.connection.transaction():
        run(source.connection, sending(SCHEMA, row_of(message("one"))))
        run(source.connection, sending_many(SCHEMA, [row_of(message("copy"))]))
        run(source.connection, sending_many(SCHEMA, [row_of(message("due", deliver_at=now + timedelta(hours=1)))]))
    with opened(source.dsn, "Connection pg8000") as connection, connection.begin():
        run(connection, sending_many(SCHEMA, [row_of(message("arrays"))]))
    stage(source)
    with handling(source) as connection:
        deliver(connection)
        deliver(connection, now=now + timedelta(hours=2))
    found = reaped(source, "shipping")
    fail(source)
    found |= reaped(source, "shipping")
    return found | fanned_out(source) | carried(source, target)


def stage(node: Node) -> None:
    """Move a staged table into the outbox, as Spark's batches are."""
    staged = table_in(SCHEMA, uuid4())
    node.connection.execute(
        f"CREATE TABLE {staged} ({NTH} bigint, message_id uuid, key text, value bytea, {ADDED} text)".encode()
    )
    node.connection.execute(f"INSERT INTO {staged} VALUES (1, gen_random_uuid(), 'staged', '\\xf6', 'staged')".encode())
    with node.connection.transaction():
        moved = moving_rows(SCHEMA, staged, ("message_id", "key", "value", ADDED), {"topic": "order.paid"}, "tests")
        assert run(node.connection, moved).messages == 1


def fail(node: Node) -> None:
    """Have messages be parked and replayed, and skipped and requeued."""

    def fails(message: Message, connection: Any) -> None:
        raise Skip("no") if message.key == "skipped" else Park("no")

    with node.connection.transaction():
        for way in ("parked", "skipped"):
            run(node.connection, sending(SCHEMA, row_of(message(way))))
    with handling(node) as connection:
        deliver(connection)
        work(connection, "shipping", fails)
    with node.connection.transaction():
        assert Parked("shipping").replay(node.connection, None, actor="tests").messages == 1
        assert DeadLetters().requeue(node.connection, None, actor="tests") == 1
    with handling(node) as connection:
        deliver(connection)


def fanned_out(node: Node) -> dict[str, str | None]:
    """Send to more inboxes than one transaction may meet."""
    for name in ("first", "second"):
        node.inbox(name, "order.fanned")
    with node.connection.transaction():
        run(node.connection, sending(SCHEMA, row_of(message("fanned", "order.fanned"))))
        assert run(node.connection, delivering(SCHEMA, rows=10, max_bytes=2**20, partitions=1)).waits
        while run(node.connection, fanning_out(SCHEMA, partitions=1)).more:
            pass
    return reaped(node, "first")


def carried(source: Node, target: Node) -> dict[str, str | None]:
    """Send to a node that reads this one."""
    with source.connection.transaction():
        run(source.connection, sending(SCHEMA, row_of(message("linked", "order.linked"))))
    with handling(source) as at_source, handling(target) as at_target:
        assert carry(at_source, at_target) == 1
    return reaped(target, "elsewhere")


def reaped(node: Node, inbox: str) -> dict[str, str | None]:
    """Reap what an inbox holds."""
    with node.connection.transaction():
        return {each.key: getattr(each, ADDED) for each in Inbox(inbox).reap_any(node.connection)}


if __name__ == "__main__":
    source_dsn, target_dsn = sys.argv[1:]
    with (
        psycopg.connect(source_dsn, autocommit=True) as at_source,
        psycopg.connect(target_dsn, autocommit=True) as at_target,
    ):
        print(json.dumps(main(Node(source_dsn, at_source), Node(target_dsn, at_target))))  # noqa: T201 - its result
