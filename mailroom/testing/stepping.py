"""One message handled as a worker would handle it, failures included, in the transaction of a test.

Each message is handled in a savepoint. An exception rolls it back, and the attempt is recorded as a worker records it.
"""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Literal, TypeAlias

import psycopg

from inbox import Unavailable
from inbox.by_key.claim import Claimed, Share
from inbox.by_key.failure import Outcome, Recorded, failed
from inbox.claims import Claims
from mailroom.errors import ConfigurationError
from mailroom.message.carry import handling
from mailroom.message.message import Message
from mailroom.session.home import reading_place
from mailroom.sql.apart import in_hand, is_watched
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, driver_of, is_django, run, run_async, unwrapped

# What became of a step. Paused is a worker that has met `Unavailable`; idle is one for which nothing waits.
Step: TypeAlias = Literal["worked", "idle", "paused"]


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


def step(
    connection: AnyConnection,
    claims: Claims,
    handler: Callable[[Message, Any], object],
    fatal: tuple[type[Exception], ...],
    worked: Worked,
    *,
    instead: str,
) -> Step:
    """Handle one message of the inbox, if one waits, and add it to `worked`. `instead` is what async handlers need."""
    message: Message | None = None
    error: Exception | None = None
    try:
        with _undone_by_exceptions(connection):
            claimed = run(connection, _claiming_one(claims))
            if claimed.ended:
                return "worked"
            if not claimed.messages:
                return "idle"
            [message] = claimed.messages
            try:
                with handling(message), in_hand(*run(connection, placing(connection))):
                    returned = handler(message, unwrapped(connection))
            except Exception as raised:
                error = raised  # kept, since psycopg swallows its own Rollback
                raise
            refuse_awaitable(returned, instead)
            if is_django(connection):
                connection.validate_no_broken_transaction()  # else its `atomic` would roll back in silence
            run(connection, _finishing(claims, message))
    except Exception as raised:
        if message is None or isinstance(raised, WrongHandler):
            raise
        error = raised
    return run(connection, _recording(claims, worked, message, error, fatal))


async def step_async(
    connection: AnyAsyncConnection,
    claims: Claims,
    handler: Callable[[Message, Any], Awaitable[object]],
    fatal: tuple[type[Exception], ...],
    worked: Worked,
    *,
    instead: str,
) -> Step:
    """`step` of an `AsyncWorker`'s handler on an async connection."""
    message: Message | None = None
    error: Exception | None = None
    try:
        async with (
            connection.transaction() if isinstance(connection, psycopg.AsyncConnection) else connection.begin_nested()
        ):
            claimed = await run_async(connection, _claiming_one(claims))
            if claimed.ended:
                return "worked"
            if not claimed.messages:
                return "idle"
            [message] = claimed.messages
            try:
                with handling(message), in_hand(*await run_async(connection, placing(connection))):
                    await awaitable(handler(message, connection), instead)
            except Exception as raised:
                error = raised
                raise
            await run_async(connection, _finishing(claims, message))
    except Exception as raised:
        if message is None or isinstance(raised, WrongHandler):
            raise
        error = raised
    return await run_async(connection, _recording(claims, worked, message, error, fatal))


def placing(connection: object) -> Operation[tuple[object, int, datetime]]:
    """Return what `in_hand` needs: a handler in a test fails by what fails it in a worker."""
    if not is_watched():
        return None, 0, datetime.now(UTC)
    place = yield from reading_place()
    return driver_of(connection), place.oid, place.server_started


def _undone_by_exceptions(connection: AnyConnection) -> AbstractContextManager[Any]:
    if is_django(connection):  # its own, since Django keeps count of what is to be rolled back
        atomic: AbstractContextManager[Any] = import_module("django.db.transaction").atomic(connection.alias)
        return atomic
    plain = unwrapped(connection)
    return plain.transaction() if isinstance(plain, psycopg.Connection) else plain.begin_nested()


def _recording(
    claims: Claims, worked: Worked, message: Message, error: Exception | None,
    fatal: tuple[type[Exception], ...],
) -> Operation[Step]:  # fmt: skip
    """Add the message to `worked`, as handled or as failed, and record the attempt; return what became of it."""
    if error is None:
        worked.handled.append(message)
        return "worked"
    if isinstance(error, Unavailable):
        worked.failures.append(Failure(message, error, 0, "retry", error.after_s))
        return "paused"
    order = yield from claims.looking_up()
    recorded = yield from order.recording(failed(message, error, fatal))
    worked.failures.append(_failure(message, error, recorded))
    return "worked"


# Attempts follow the database's clock. For another `now`, the retry times are shifted before the work and shifted back
# afterwards.
SHIFT = Sql(
    """
UPDATE {schema}.my_key_state SET retry_at = retry_at + %(by_s)s::float8 * interval '1 s'
WHERE inbox = '{inbox}' AND retry_at < 'infinity'
"""
)
PROBE = Sql("SELECT true", columns=("boolean",))


def shifting(claims: Claims, by_s: float) -> Operation[None]:
    """Shift the times at which the inbox's keys are tried again."""
    if by_s:
        yield SHIFT.at(schema=claims.schema, inbox=claims.inbox)(by_s=by_s)


def _claiming_one(claims: Claims) -> Operation[Claimed]:
    """Claim one message as a worker does: of a failing key that is due, else of a healthy key."""
    claimed = yield from claims.claiming_due()
    if claimed.messages or claimed.ended:
        return claimed
    return (yield from claims.claiming(Share(1, 1, 1, due_too=False)))


def _finishing(claims: Claims, message: Message) -> Operation[None]:
    """Fail with 25P02 if the handler has swallowed a database error; otherwise its key is healthy."""
    yield PROBE.at()()
    order = yield from claims.looking_up()
    yield from order.healing(message)


def _failure(message: Message, error: Exception, recorded: Recorded) -> Failure:
    due_in_s = recorded.due_in_s if recorded.outcome == "retry" else None
    return Failure(message, error, recorded.attempt, recorded.outcome, due_in_s)


class WrongHandler(ConfigurationError):
    """A sync handler was given instead of an async one, or vice versa: an error of the test, not of a message."""

    code = "MR-async-mismatch"


def refuse_async(handler: Callable[..., object], instead: str) -> None:
    """Raise `WrongHandler` for an async handler."""
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        raise WrongHandler(f"This handler is async: use {instead}, with an async connection.")


def refuse_awaitable(returned: object, instead: str) -> None:
    """Raise `WrongHandler` if a handler has returned something to await."""
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise WrongHandler(
            f"This handler returned an awaitable, so it has not done its work: use {instead}, with an async connection."
        )


def awaitable(returned: object, instead: str) -> Awaitable[object]:
    """Return what a handler has returned, to be awaited. Raises `WrongHandler` if it cannot be."""
    if not inspect.isawaitable(returned):
        raise WrongHandler(f"This handler returned no awaitable, so it is not async: use {instead}.")
    return returned
