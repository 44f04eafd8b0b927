"""Checks of a worker's arguments when it is created: otherwise a wrong value would only show when messages fail."""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from mailroom.errors import ConfigurationError
from mailroom.message.message import Message
from mailroom.values.numbers import whole

# The result is None and not object: a coroutine is an object too, and a type checker should reject an `async def` here.
Handler: TypeAlias = Callable[[Message, Any], None]
AsyncHandler: TypeAlias = Callable[[Message, Any], Awaitable[object]]
OnError: TypeAlias = Callable[[Message | None, Exception], None]
AsyncOnError: TypeAlias = Callable[[Message | None, Exception], object]  # an awaitable result is awaited

C = TypeVar("C", bound=AsyncOnError)
G = TypeVar("G")  # what a handler is given: a message, or all of a batch

CALL = "handler(message, connection)"

MOST = 10_000


class NotAwaited(ConfigurationError):
    """A handler of a `Worker` returned an awaitable, so it has not done its work. No message is to blame."""

    code = "MR-async-mismatch"


def synchronous(
    handler: Callable[[G, Any], object], instead: str = "AsyncWorker", call: str = CALL
) -> Callable[[G, Any], object]:
    """Return a checked sync handler, or raise `ConfigurationError`; calling it may raise `NotAwaited`.

    `instead` names who takes an async one, `call` shows how the handler is called.
    """
    _check_call(handler, call)
    if _is(inspect.iscoroutinefunction, handler):
        raise ConfigurationError(f"This handler is async: use {instead} for it.", code="MR-async-mismatch")

    def handle(given: G, connection: Any) -> object:
        result = handler(given, connection)
        if result is not None and inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise NotAwaited(f"This handler returned an awaitable, which is not awaited here: use {instead}.")
        return result

    return handle


def asynchronous(
    handler: Callable[[G, Any], Awaitable[object]], instead: str = "Worker", call: str = CALL
) -> Callable[[G, Any], Awaitable[object]]:
    """Return `handler` if it is async, else raise `ConfigurationError`; `instead` names who takes a sync one."""
    _check_call(handler, call)
    if not _is(inspect.iscoroutinefunction, handler):
        raise ConfigurationError(
            f"This handler is not async: define it with `async def`, or use {instead}. If it returns an awaitable, as "
            "a lambda may, wrap it: async def handle(message, connection): await ...",
            code="MR-async-mismatch",
        )
    return handler


def callback(on_error: OnError | None) -> OnError | None:
    """Return `on_error` if a `Worker` can use it, else raise `ConfigurationError`."""
    if on_error is not None and _is(inspect.iscoroutinefunction, on_error):
        raise ConfigurationError("This on_error is async: use AsyncWorker for it.", code="MR-async-mismatch")
    return async_callback(on_error)


def async_callback(on_error: C | None) -> C | None:
    """Return `on_error` if an `AsyncWorker` can use it, else raise `ConfigurationError`."""
    if on_error is not None:
        _check_call(on_error, "on_error(message, error)")
    return on_error


def count(number: int, what: str) -> int:
    """Return `number` if it is an int from 1 to 10,000, else raise `ConfigurationError`; `what` names it."""
    return whole(number, what, 1, MOST, ConfigurationError)


def flag(value: bool, what: str) -> bool:
    """Return `value` if it is a bool, else raise `ConfigurationError`; `what` names it."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} is {value!r}; give True or False.", code="MR-invalid-argument")
    return value


def exceptions(classes: tuple[type[Exception], ...], what: str) -> tuple[type[Exception], ...]:
    """Return `classes` if it is a tuple of exception classes, else raise `ConfigurationError`; `what` names it."""
    if not isinstance(classes, tuple) or not all(
        inspect.isclass(each) and issubclass(each, Exception) for each in classes
    ):
        raise ConfigurationError(
            f"{what} is {classes!r}; give a tuple of exception classes.", code="MR-invalid-argument"
        )
    return classes


def _check_call(given: Callable[..., object], call: str) -> None:
    what = call.partition("(")[0]
    if not callable(given) or inspect.isclass(given):
        raise ConfigurationError(f"{what} is {given!r}; give a function: {call}.", code="MR-invalid-handler")
    if _is(inspect.isgeneratorfunction, given) or _is(inspect.isasyncgenfunction, given):
        raise ConfigurationError(
            f"This {what} is a generator function, whose body would never run: remove its `yield`.",
            code="MR-invalid-handler",
        )
    try:
        signature = inspect.signature(given)
    except Exception:  # some builtins have no signature, and annotations may fail: the first call decides
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"This {what} cannot be called as {call}: {error}.", code="MR-invalid-handler"
        ) from None


def _is(kind: Callable[[object], bool], handler: Callable[..., object]) -> bool:
    """Return `kind` of the function that a call runs, which may be behind `partial`, a method or `__call__`."""
    while isinstance(handler, partial):
        handler = handler.func
    return kind(handler) or kind(type(handler).__call__)
