"""For tests, users' and ours: follow a message all the way on the test's own connection, without daemon or sleep.

Everything happens in the transaction of the given connection, so a test that rolls back leaves nothing. This is not for
production: until that transaction ends, a delivery holds the node's dispatch lock, and an execution the executor's.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from dispatcher.deliver import delivering, releasing
from dispatcher.executor.execute import executing
from inbox import AsyncInbox, Inbox, Unavailable
from inbox.claim import Claimed, Share
from inbox.due import healing
from inbox.failure import Outcome, Recorded, recording
from mailroom import codec
from mailroom.carry import handling
from mailroom.clock import raising_ceiling
from mailroom.errors import ConfigurationError
from mailroom.message import Message
from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async

__all__ = [
    "Failure",
    "Sent",
    "Worked",
    "deliver",
    "deliver_async",
    "drain",
    "drain_async",
    "execute",
    "execute_async",
    "sent",
    "sent_async",
    "work",
    "work_async",
]


@dataclass(frozen=True, slots=True)
class Sent:
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


SENT = Sql(
    """
SELECT message_id, topic, key, kind::text, message_type::text, event_type::text, value, value_json::text,
       headers::text, deliver_at, expires_at
FROM {schema}.outbox WHERE topic = %(topic)s::text ORDER BY position
""",
    columns=("uuid", "text", "text", "text", "text", "text", "bytea", "text", "text", "timestamptz", "timestamptz"),
)


def sent(connection: AnyConnection, topic: str, *, schema: str = DEFAULT_SCHEMA) -> list[Sent]:
    """Return the messages of `topic` that are in the outbox, in the order sent. Delivered ones are no longer there."""
    return run(connection, _reading_sent(schema_name(schema), topic))


async def sent_async(connection: AnyAsyncConnection, topic: str, *, schema: str = DEFAULT_SCHEMA) -> list[Sent]:
    """`sent` on an async connection."""
    return await run_async(connection, _reading_sent(schema_name(schema), topic))


def deliver(connection: AnyConnection, *, schema: str = DEFAULT_SCHEMA, now: datetime | None = None) -> int:
    """Deliver everything in the outbox, as the dispatcher would, and return how many messages were taken.

    `now` decides what is due and what has expired; None is the database's clock.
    """
    return run(connection, _delivering_all(schema_name(schema), now))


async def deliver_async(
    connection: AnyAsyncConnection, *, schema: str = DEFAULT_SCHEMA, now: datetime | None = None
) -> int:
    """`deliver` on an async connection."""
    return await run_async(connection, _delivering_all(schema_name(schema), now))


def execute(connection: AnyConnection, *, schema: str = DEFAULT_SCHEMA) -> int:
    """Execute everything in the outbox of executables, as the executor would, and return how many there were.

    Their replies are in the outbox afterwards: call `deliver`. An executable that cannot be applied goes to
    `dead_letter` and raises nothing.
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
    """Deliver, and call a worker's handler for each message in `inbox`, until none is left; return how many calls.

    What the handler sends is delivered too. An exception of the handler passes through; `work` shows what a worker
    would do. Raises `ConfigurationError` for an async handler: use `drain_async`.
    """
    _refuse_async(handler, "drain_async")
    reaped, calls = Inbox(inbox, schema), 0
    while True:
        deliver(connection, schema=schema, now=now)
        messages = reaped.reap_any(connection)
        if not messages:
            return calls
        for message in messages:
            with handling(message):
                _refuse_awaitable(handler(message, connection), "drain_async")
            calls += 1


async def drain_async(
    connection: AnyAsyncConnection,
    inbox: str,
    handler: Callable[[Message, Any], Awaitable[object]],
    *,
    schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
) -> int:
    """`drain` of an `AsyncWorker`'s handler on an async connection."""
    reaped, calls = AsyncInbox(inbox, schema), 0
    while True:
        await deliver_async(connection, schema=schema, now=now)
        messages = await reaped.reap_any(connection)
        if not messages:
            return calls
        for message in messages:
            with handling(message):
                await _awaitable(handler(message, connection), "drain")
            calls += 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt: its number `attempt`, counted from 1, and its `outcome`.

    The key is tried again in `due_in_s` seconds (retry), the key is parked (park), or the message is skipped (skip).
    `Unavailable` is not an attempt, so `attempt` is 0. A worker would pause its inbox: the work ends there.
    """

    message: Message
    error: Exception
    attempt: int
    outcome: Outcome
    due_in_s: float | None


@dataclass(frozen=True, slots=True)
class Worked:
    """What a worker would have done: the handled messages and the failed attempts, in order."""

    handled: list[Message]
    failures: list[Failure]


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
    _refuse_async(handler, "work_async")
    reaped, worked = Inbox(inbox, schema), Worked([], [])
    ahead_s = run(connection, _coming_to(reaped, now))
    while True:
        deliver(connection, schema=schema, now=now)
        message: Message | None = None
        error: Exception | None = None
        try:
            with connection.transaction() if isinstance(connection, psycopg.Connection) else connection.begin_nested():
                claimed = run(connection, _claiming_one(reaped))
                if claimed.ended:
                    continue
                if not claimed.messages:
                    break
                [message] = claimed.messages
                try:
                    with handling(message):
                        returned = handler(message, connection)
                except Exception as raised:
                    error = raised  # kept, since psycopg swallows its own Rollback
                    raise
                _refuse_awaitable(returned, "work_async")
                run(connection, _finishing(reaped, message))
        except Exception as raised:
            if message is None or isinstance(raised, _WrongHandler):
                raise
            error = raised
        if not run(connection, _recording(reaped, worked, message, error, fatal)):
            break
    run(connection, _shifting(reaped, ahead_s))
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
    reaped, worked = AsyncInbox(inbox, schema), Worked([], [])
    ahead_s = await run_async(connection, _coming_to(reaped, now))
    while True:
        await deliver_async(connection, schema=schema, now=now)
        message: Message | None = None
        error: Exception | None = None
        try:
            async with (
                connection.transaction()
                if isinstance(connection, psycopg.AsyncConnection)
                else connection.begin_nested()
            ):
                claimed = await run_async(connection, _claiming_one(reaped))
                if claimed.ended:
                    continue
                if not claimed.messages:
                    break
                [message] = claimed.messages
                try:
                    with handling(message):
                        await _awaitable(handler(message, connection), "work")
                except Exception as raised:
                    error = raised
                    raise
                await run_async(connection, _finishing(reaped, message))
        except Exception as raised:
            if message is None or isinstance(raised, _WrongHandler):
                raise
            error = raised
        if not await run_async(connection, _recording(reaped, worked, message, error, fatal)):
            break
    await run_async(connection, _shifting(reaped, ahead_s))
    return worked


def _recording(
    reaped: Inbox | AsyncInbox, worked: Worked, message: Message, error: Exception | None,
    fatal: tuple[type[Exception], ...],
) -> Operation[bool]:  # fmt: skip
    """Add the message to `worked`, as handled or as failed, and record the attempt; return whether to go on."""
    if error is None:
        worked.handled.append(message)
        return True
    if isinstance(error, Unavailable):
        worked.failures.append(Failure(message, error, 0, "retry", error.after_s))
        return False
    recorded = yield from recording(reaped.schema, reaped.name, message, error, fatal)
    worked.failures.append(_failure(message, error, recorded))
    return True


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
        delivery = yield from delivering(schema, rows=1_000, max_bytes=2**24, now=now)
        if delivery.ceiling is not None:
            yield from raising_ceiling(schema, delivery.ceiling)
        elif not delivery.taken:
            return taken
        taken += delivery.taken


def _executing_all(schema: str) -> Operation[int]:
    yield IN_TRANSACTION
    taken, rows = 0, 1_000
    while True:
        execution = yield from executing(schema, rows=rows, max_bytes=2**24)
        rows = execution.rows(1_000)
        taken += execution.taken
        if not execution.more:
            return taken


# Attempts follow the database's clock. For another `now`, the retry times are shifted before the work and shifted back
# afterwards.
BEHIND = Sql("SELECT extract(epoch FROM clock_timestamp() - %(now)s::timestamptz)::float8", columns=("float8",))
SHIFT = Sql(
    """
UPDATE {schema}.key_state SET retry_at = retry_at + %(by_s)s::float8 * interval '1 s'
WHERE inbox = '{inbox}' AND retry_at < 'infinity'
"""
)
PROBE = Sql("SELECT true", columns=("boolean",))


def _coming_to(reaped: Inbox | AsyncInbox, now: datetime | None) -> Operation[float]:
    """Shift retry times so that what is due at `now` is due; return the shift in seconds that undoes this."""
    yield IN_TRANSACTION
    if now is None:
        return 0.0
    [(behind_s,)] = yield BEHIND.at()(now=now)
    yield from _shifting(reaped, behind_s)
    return -float(behind_s)


def _shifting(reaped: Inbox | AsyncInbox, by_s: float) -> Operation[None]:
    if by_s:
        yield SHIFT.at(schema=reaped.schema, inbox=reaped.name)(by_s=by_s)


def _claiming_one(reaped: Inbox | AsyncInbox) -> Operation[Claimed]:
    """Claim one message as a worker does: of a failing key that is due, else of a healthy key."""
    claimed = yield from reaped.claiming_due()
    if claimed.messages or claimed.ended:
        return claimed
    return (yield from reaped.claiming(Share(1, 1, 1, due_too=False)))


def _finishing(reaped: Inbox | AsyncInbox, message: Message) -> Operation[None]:
    """Fail with 25P02 if the handler has swallowed a database error; otherwise its key is healthy."""
    yield PROBE.at()()
    yield from healing(reaped.schema, reaped.name, message)


def _failure(message: Message, error: Exception, recorded: Recorded) -> Failure:
    due_in_s = recorded.due_in_s if recorded.outcome == "retry" else None
    return Failure(message, error, recorded.attempt, recorded.outcome, due_in_s)


class _WrongHandler(ConfigurationError):
    """A sync handler was given instead of an async one, or vice versa: an error of the test, not of a message."""


def _refuse_async(handler: Callable[..., object], instead: str) -> None:
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        raise _WrongHandler(f"This handler is async: use {instead}, with an async connection.")


def _refuse_awaitable(returned: object, instead: str) -> None:
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise _WrongHandler(
            f"This handler returned an awaitable, so it has not done its work: use {instead}, with an async connection."
        )


def _awaitable(returned: object, instead: str) -> Awaitable[object]:
    if not inspect.isawaitable(returned):
        raise _WrongHandler(f"This handler returned no awaitable, so it is not async: use {instead}.")
    return returned
