"""For tests, users' and ours: follow a message all the way on the test's own connection, without daemon or sleep.

Everything happens in the transaction of the given connection, so a test that rolls back leaves nothing. This is not for
production: until that transaction ends, a delivery holds the node's dispatch lock, and an execution the executor's.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.delivery.deliver import Delivery, delivering, releasing
from dispatcher.delivery.fan_out import fanning_out
from dispatcher.executor.execute import executing
from dispatcher.links.at_source.bounds import Position, bounding, reading_position
from dispatcher.links.at_source.fetch import FetchedBatch, fetching
from dispatcher.links.receive import receiving
from inbox import AsyncInbox, Inbox
from inbox.claims import Claims
from mailroom.bridges.out import finding_out
from mailroom.bridges.record import Record
from mailroom.bridges.waiting import waiting_records
from mailroom.errors import ConfigurationError
from mailroom.message.carry import handling
from mailroom.message.columns import MESSAGE_ROW
from mailroom.message.message import Message
from mailroom.order.clock import raising_ceiling
from mailroom.sql.apart import in_hand
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async, unwrapped
from mailroom.sql.sight import NODE_ROW, the_one
from mailroom.testing.stepping import (
    Worked,
    awaitable,
    placing,
    refuse_async,
    refuse_awaitable,
    shifting,
    step,
    step_async,
)
from mailroom.values import codec
from mailroom.values.names import DEFAULT_SCHEMA, schema_name


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message in the outbox, as sent."""

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


# Not what the database adds to it.
SHOWN = [column for column in MESSAGE_ROW if column.by != "database" and column.name != "after_clock"]
SENT = Sql(
    """
SELECT {shown}
FROM {schema}.outbox WHERE %(topic)s::text IS NULL OR topic = %(topic)s::text ORDER BY position
""",
    columns={column.name: column.plain for column in SHOWN},
    shown=", ".join(column.given() for column in SHOWN),
)


def _sent_to(topic: str, *, schema: str = DEFAULT_SCHEMA) -> Operation[list[SentMessage]]:
    """Return the messages of `topic` that are in the outbox, in the order sent. Delivered ones are no longer there."""
    return reading_sent(schema_name(schema), topic)


def _delivering(*, schema: str = DEFAULT_SCHEMA, now: datetime | None = None) -> Operation[int]:
    """Deliver everything in the outbox, as the dispatcher would, and return how many messages were taken.

    `now` decides what is due and what has expired; None is the database's clock.
    """
    return delivering_all(schema_name(schema), now)


def _executing(*, schema: str = DEFAULT_SCHEMA) -> Operation[int]:
    """Execute everything in the outbox of executables, as the executor would, and return how many there were.

    Their replies are in the outbox afterwards: call `deliver`. An executable that cannot be applied goes to
    `dead_letter` and raises nothing.
    """
    return executing_all(schema_name(schema))


def _publishing(bridge: str, *, schema: str = DEFAULT_SCHEMA, now: datetime | None = None) -> Operation[list[Record]]:
    """Do what a bridge out of this node does, without a broker: deliver, and return the records of what waits for it.

    They count as published: the next call returns those that came since. Raises `UnknownBridge`, and `Unencodable` for
    a message that has no record, which a dispatcher would stop at or skip, as the bridge says.
    """
    return publishing_all(schema_name(schema), bridge, now)


sent, sent_async = on_connections("sent", _sent_to)
publish, publish_async = on_connections("publish", _publishing)
deliver, deliver_async = on_connections("deliver", _delivering)
execute, execute_async = on_connections("execute", _executing)


def carry(
    source: AnyConnection,
    target: AnyConnection,
    *,
    schema: str = DEFAULT_SCHEMA,
    target_schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> int:
    """Do what the links do: deliver at the source, and receive at the target; return how many messages arrived there.

    Each in the transaction of its connection; they are two databases, or two schemas of one. The target must read the
    source: it is found there by the source's node id. Raises `ConfigurationError` if the nodes are not linked, or do
    not agree on what has been received. A message that is not wanted goes to the target's `dead_letter`, as always.
    """
    deliver(source, schema=schema, now=now)
    known = run(source, _known_as(schema_name(schema)))
    arrived = 0
    reader = run(target, _reading(schema_name(target_schema), known))
    while True:
        position = run(target, reading_position(target_schema, reader.origin))
        batch = run(source, _next_batch(schema, reader.link, position))
        if batch is None:
            return arrived
        arrived += run(target, _receiving(target_schema, reader.origin, batch, position, now))


async def carry_async(
    source: AnyAsyncConnection,
    target: AnyAsyncConnection,
    *,
    schema: str = DEFAULT_SCHEMA,
    target_schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> int:
    """`carry` on async connections."""
    await deliver_async(source, schema=schema, now=now)
    known = await run_async(source, _known_as(schema_name(schema)))
    arrived = 0
    reader = await run_async(target, _reading(schema_name(target_schema), known))
    while True:
        position = await run_async(target, reading_position(target_schema, reader.origin))
        batch = await run_async(source, _next_batch(schema, reader.link, position))
        if batch is None:
            return arrived
        arrived += await run_async(target, _receiving(target_schema, reader.origin, batch, position, now))


def handle_all(
    connection: AnyConnection,
    inbox: str,
    handler: Callable[[Message, Any], object],
    *,
    schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> int:
    """Deliver, and call a worker's handler for each message in `inbox`, until none is left; return how many calls.

    What the handler sends is delivered too. An exception of the handler passes through; `work` shows what a worker
    would do. Raises `ConfigurationError` for an async handler: use `handle_all_async`.
    """
    refuse_async(handler, "handle_all_async")
    reaped, calls = Inbox(inbox, schema=schema), 0
    while True:
        deliver(connection, schema=schema, now=now)
        messages = reaped.reap_any(connection)
        if not messages:
            return calls
        for message in messages:
            with handling(message), in_hand(*run(connection, placing(connection))):
                refuse_awaitable(handler(message, unwrapped(connection)), "handle_all_async")
            calls += 1


async def handle_all_async(
    connection: AnyAsyncConnection,
    inbox: str,
    handler: Callable[[Message, Any], Awaitable[object]],
    *,
    schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> int:
    """`handle_all` of an `AsyncWorker`'s handler on an async connection."""
    reaped, calls = AsyncInbox(inbox, schema=schema), 0
    while True:
        await deliver_async(connection, schema=schema, now=now)
        messages = await reaped.reap_any(connection)
        if not messages:
            return calls
        for message in messages:
            with handling(message), in_hand(*await run_async(connection, placing(connection))):
                await awaitable(handler(message, connection), "handle_all")
            calls += 1


def work(
    connection: AnyConnection,
    inbox: str,
    handler: Callable[[Message, Any], object],
    *,
    fatal: tuple[type[Exception], ...] = (),
    schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> Worked:
    """Do what a worker would, failures included, until nothing is left: deliver, and handle messages one by one.

    Each message is handled in a savepoint. An exception rolls it back, and the attempt is recorded as a worker records
    it, by the inbox's settings and `fatal`: the key waits or is parked, or the message goes to `dead_letter`. A key
    that waits is tried by a later call whose `now` has reached its time. Raises `ConfigurationError` for an async
    handler.
    """
    refuse_async(handler, "work_async")
    claims, worked = Claims(schema, inbox), Worked([], [])
    ahead_s = run(connection, _coming_to(claims, now))
    while True:
        deliver(connection, schema=schema, now=now)
        if step(connection, claims, handler, fatal, worked, instead="work_async") != "worked":
            break
    run(connection, shifting(claims, ahead_s))
    return worked


async def work_async(
    connection: AnyAsyncConnection,
    inbox: str,
    handler: Callable[[Message, Any], Awaitable[object]],
    *,
    fatal: tuple[type[Exception], ...] = (),
    schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> Worked:
    """`work` of an `AsyncWorker`'s handler on an async connection."""
    claims, worked = Claims(schema, inbox), Worked([], [])
    ahead_s = await run_async(connection, _coming_to(claims, now))
    while True:
        await deliver_async(connection, schema=schema, now=now)
        if await step_async(connection, claims, handler, fatal, worked, instead="work") != "worked":
            break
    await run_async(connection, shifting(claims, ahead_s))
    return worked


def reading_sent(schema: str, topic: str | None = None) -> Operation[list[SentMessage]]:
    """Read what is in the outbox, of one topic or of all."""
    rows = yield SENT.at(schema=schema)(topic=topic)
    return [_sent(row._asdict()) for row in SENT.named(rows)]


def _sent(row: dict[str, Any]) -> SentMessage:
    raw, json_text, headers = row.pop("value"), row.pop("value_json"), row.pop("headers")
    value = codec.decode(raw) if json_text is None else json.loads(json_text)
    return SentMessage(id=row.pop("message_id"), value=value, headers=json.loads(headers or "{}"), **row)


def delivering_all(schema: str, now: datetime | None) -> Operation[int]:
    """`deliver` as an operation."""
    yield IN_TRANSACTION
    yield from releasing(schema, now=now)
    taken = 0
    while (delivery := (yield from delivering_once(schema, now))).taken or delivery.ceiling or delivery.waits:
        taken += delivery.taken
    return taken


def delivering_once(schema: str, now: datetime | None) -> Operation[Delivery]:
    """Deliver one batch, or raise the ceiling of clocks for it."""
    delivery = yield from delivering(schema, rows=1_000, max_bytes=2**24, now=now)
    if delivery.ceiling is not None:
        yield from raising_ceiling(schema, delivery.ceiling)
    if delivery.waits:
        while (yield from fanning_out(schema)).more:
            pass
    return delivery


def executing_all(schema: str) -> Operation[int]:
    """`execute` as an operation."""
    yield IN_TRANSACTION
    taken, rows = 0, 1_000
    while True:
        execution = yield from executing(schema, rows=rows, max_bytes=2**24)
        rows = execution.rows(1_000)
        taken += execution.taken
        if not execution.more:
            return taken


ACKNOWLEDGED = Sql(
    """
UPDATE {schema}.link SET acked = greatest(acked, (
    SELECT t.seq FROM {schema}.transit AS t WHERE t.link = number ORDER BY t.seq DESC LIMIT 1))
WHERE number = %(link)s::bigint
"""
)


def publishing_all(schema: str, bridge: str, now: datetime | None) -> Operation[list[Record]]:
    """`publish` as an operation."""
    yield from delivering_all(schema, now)
    row = yield from finding_out(schema, bridge)
    records = yield from waiting_records(schema, row, None)
    yield ACKNOWLEDGED.at(schema=schema)(link=row.link)
    return records


KNOWN_AS = Sql("SELECT id, name FROM {schema}.node", columns=("uuid", "text"))
READER = Sql(
    "SELECT number, link FROM {schema}.origin WHERE id = %(id)s::uuid AND state = 'open' AND link IS NOT NULL",
    columns=("bigint", "bigint"),
)


@dataclass(frozen=True, slots=True)
class _Known:
    id: UUID
    name: str


@dataclass(frozen=True, slots=True)
class _Reader:
    origin: int
    link: int


def _known_as(schema: str) -> Operation[_Known]:
    return _Known(*the_one((yield KNOWN_AS.at(schema=schema)()), NODE_ROW, schema))


def _reading(schema: str, source: _Known) -> Operation[_Reader]:
    yield IN_TRANSACTION
    rows = yield READER.at(schema=schema)(id=source.id)
    if not rows:
        raise ConfigurationError(
            f"The target does not read the node {source.name}. Link them first: mailroom link allow at the source, "
            "mailroom link add at the target.",
            code="MR-test-link-missing",
        )
    return _Reader(*rows[0])


def _next_batch(schema: str, link: int, position: Position) -> Operation[FetchedBatch | None]:
    bounds = yield from bounding(schema, link, position, rows=1_000, max_bytes=2**24)
    if bounds.verdict != "agrees":
        raise ConfigurationError(
            f"The nodes do not agree on what has been received ({bounds.verdict}).", code="MR-test-link-stuck"
        )
    if bounds.last is None:
        return None
    # Decoded, since the two connections may be of two drivers.
    return (yield from fetching(schema, link, after=position.seq, to=bounds.last, decoded=True))


def _receiving(
    schema: str, origin: int, batch: FetchedBatch, position: Position, now: datetime | None
) -> Operation[int]:
    while (reception := (yield from receiving(schema, origin, batch, position, now=now))).ceiling is not None:
        yield from raising_ceiling(schema, reception.ceiling)
    if reception.outcome != "taken":
        raise ConfigurationError(
            f"The target could not receive row {position.seq + 1} of the link: {reception.outcome}.",
            code="MR-test-link-stuck",
        )
    return reception.rows - reception.marks


BEHIND = Sql("SELECT extract(epoch FROM clock_timestamp() - %(now)s::timestamptz)::float8", columns=("float8",))


def _coming_to(claims: Claims, now: datetime | None) -> Operation[float]:
    """Shift retry times so that what is due at `now` is due; return the shift in seconds that undoes this."""
    yield IN_TRANSACTION
    if now is None:
        return 0.0
    [(behind_s,)] = yield BEHIND.at()(now=now)
    yield from shifting(claims, behind_s)
    return -float(behind_s)
