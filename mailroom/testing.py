"""For tests, users' and ours: follow a message all the way on the test's own connection, without a daemon or a sleep.

Everything here happens in the transaction of the connection that is given, so a test that rolls back leaves nothing.
Not for production: a delivery holds the node's dispatch lock until that transaction ends, an execution the executor's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.deliver import delivering, releasing
from dispatcher.execute import executing
from inbox import Inbox
from mailroom import codec
from mailroom.message import Message
from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.operation import IN_TRANSACTION, Operation, Sql
from mailroom.stamping import raising_ceiling
from mailroom.transaction import AnyAsyncConnection, AnyConnection, run, run_async


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that stands in the outbox, as its sender gave it."""

    id: UUID
    topic: str
    key: str
    kind: str
    message_type: str
    event_type: str | None
    value: object
    headers: Mapping[str, str]
    deliver_at: datetime | None
    expires_at: datetime | None


SENT = Sql(
    """
SELECT message_id, topic, key, kind::text, message_type::text, event_type::text, value, value_json::text,
       headers::text, deliver_at, expires_at
FROM {schema}.outbox WHERE topic = %(topic)s::text ORDER BY position
""",
    columns=("uuid", "text", "text", "text", "text", "text", "bytea", "text", "text", "timestamptz", "timestamptz"),
)


def sent(connection: AnyConnection, topic: str, *, schema: str = DEFAULT_SCHEMA) -> list[Sent]:
    """Return what stands in the outbox for `topic`, in the order sent; what was delivered is not there any more."""
    return run(connection, _reading_sent(schema_name(schema), topic))


async def sent_async(connection: AnyAsyncConnection, topic: str, *, schema: str = DEFAULT_SCHEMA) -> list[Sent]:
    """`sent` on an async connection."""
    return await run_async(connection, _reading_sent(schema_name(schema), topic))


def deliver(connection: AnyConnection, *, schema: str = DEFAULT_SCHEMA, now: datetime | None = None) -> int:
    """Deliver all that stands in the outbox, as the dispatcher would, and return how many messages were taken.

    `now` decides what is due and what has expired; the database's clock if None.
    """
    return run(connection, _delivering_all(schema_name(schema), now))


async def deliver_async(
    connection: AnyAsyncConnection, *, schema: str = DEFAULT_SCHEMA, now: datetime | None = None
) -> int:
    """`deliver` on an async connection."""
    return await run_async(connection, _delivering_all(schema_name(schema), now))


def execute(connection: AnyConnection, *, schema: str = DEFAULT_SCHEMA) -> int:
    """Execute all that stands in the outbox of executables, as the executor would, and return how many there were.

    What tells their outcomes stands in the outbox afterwards: `deliver` it. One that cannot be applied goes to
    `dead_letter`, and raises nothing.
    """
    return run(connection, _executing_all(schema_name(schema)))


async def execute_async(connection: AnyAsyncConnection, *, schema: str = DEFAULT_SCHEMA) -> int:
    """`execute` on an async connection."""
    return await run_async(connection, _executing_all(schema_name(schema)))


def drain(
    connection: AnyConnection,
    inbox: str,
    handler: Callable[[Message, Any], object],
    *,
    schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> int:
    """Deliver, and call a worker's handler for what reached `inbox`, until nothing is left; returns how many calls.

    What the handler sends is delivered too. An exception of the handler comes out as it is.
    """
    reaped, calls = Inbox(inbox, schema), 0
    while True:
        deliver(connection, schema=schema, now=now)
        messages = reaped.reap_any(connection)
        if not messages:
            return calls
        for message in messages:
            handler(message, connection)
            calls += 1


def _reading_sent(schema: str, topic: str) -> Operation[list[Sent]]:
    rows = yield SENT.at(schema=schema)(topic=topic)
    return [_sent(*row) for row in rows]


def _sent(
    id: UUID, topic: str, key: str, kind: str, message_type: str, event_type: str | None, raw: bytes,
    json_text: str | None, headers: str | None, deliver_at: datetime | None, expires_at: datetime | None,
) -> Sent:  # fmt: skip
    value = codec.decode(raw) if json_text is None else json.loads(json_text)
    return Sent(
        id, topic, key, kind, message_type, event_type, value, json.loads(headers or "{}"), deliver_at, expires_at
    )


def _delivering_all(schema: str, now: datetime | None) -> Operation[int]:
    yield IN_TRANSACTION
    yield from releasing(schema, now=now)
    taken = 0
    while True:
        delivery = yield from delivering(schema, floor=0, rows=1_000, max_bytes=2**24, now=now)
        if delivery.ceiling is not None:
            yield from raising_ceiling(schema, delivery.ceiling)
        elif not delivery.taken:
            return taken
        taken += delivery.taken


def _executing_all(schema: str) -> Operation[int]:
    yield IN_TRANSACTION
    taken = 0
    while True:
        execution = yield from executing(schema, floor=0, rows=1_000, max_bytes=2**24)
        taken += execution.taken
        if not execution.more:
            return taken
