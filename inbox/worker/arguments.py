"""What a worker is given, looked at when it is made: a wrong value would only show when messages fail of it."""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from mailroom.errors import ConfigurationError
from mailroom.message import Message

# None and not object, which a coroutine is too: so a type checker refuses an `async def` for a Worker.
Handler: TypeAlias = Callable[[Message, Any], None]
AsyncHandler: TypeAlias = Callable[[Message, Any], Awaitable[object]]
OnError: TypeAlias = Callable[[Message | None, Exception], None]
AsyncOnError: TypeAlias = Callable[[Message | None, Exception], object]  # awaited if it can be

C = TypeVar("C", bound=AsyncOnError)

MOST = 10_000


class NotAwaited(ConfigurationError):
    """A handler of a `Worker` returned something to be awaited, so it has done nothing. No message is to blame."""


def synchronous(handler: Handler) -> Handler:
    """Return the handler of a `Worker`; raises `ConfigurationError` at once, or `NotAwaited` when it is called."""
    _check_call(handler, "handler(message, connection)")
    if _is(inspect.iscoroutinefunction, handler):
        raise ConfigurationError("This handler is async: use AsyncWorker for it.")

    def handle(message: Message, connection: Any) -> None:
        result: object = handler(message, connection)  # type: ignore[func-returns-value]  # as the checker believes
        if result is not None and inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise NotAwaited("This handler returned an awaitable, which a Worker does not await: use AsyncWorker.")

    return handle


def asynchronous(handler: AsyncHandler) -> AsyncHandler:
    """Return the handler of an `AsyncWorker`, or raise `ConfigurationError`."""
    _check_call(handler, "handler(message, connection)")
    if not _is(inspect.iscoroutinefunction, handler):
        raise ConfigurationError(
            "This handler is not async: define it by `async def`, or use Worker. If it only returns an awaitable, as a "
            "lambda may, await that in one: async def handle(message, connection): await ..."
        )
    return handler


def callback(on_error: OnError | None) -> OnError | None:
    """Return what a `Worker` is to call on errors, or raise `ConfigurationError`."""
    if on_error is not None and _is(inspect.iscoroutinefunction, on_error):
        raise ConfigurationError("This on_error is async: use AsyncWorker for it.")
    return async_callback(on_error)


def async_callback(on_error: C | None) -> C | None:
    """Return what an `AsyncWorker` is to call on errors, or raise `ConfigurationError`."""
    if on_error is not None:
        _check_call(on_error, "on_error(message, error)")
    return on_error


def count(number: int, what: str) -> int:
    """Return `number` if it is an int from 1 to 10,000, else raise `ConfigurationError`; `what` names it."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST:
        raise ConfigurationError(f"{what} is {number!r}; give an int from 1 to {MOST:,}.")
    return number


def seconds(number: float, what: str) -> float:
    """Return `number` if it is a number above 0, else raise `ConfigurationError`; `what` names it."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ConfigurationError(f"{what} is {number!r}; give seconds above 0.")
    return number


def flag(value: bool, what: str) -> bool:
    """Return `value` if it is a bool, else raise `ConfigurationError`; `what` names it."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} is {value!r}; give True or False.")
    return value


def exceptions(classes: tuple[type[Exception], ...], what: str) -> tuple[type[Exception], ...]:
    """Return `classes` if they are classes of exceptions, else raise `ConfigurationError`; `what` names them."""
    if not isinstance(classes, tuple) or not all(
        inspect.isclass(each) and issubclass(each, Exception) for each in classes
    ):
        raise ConfigurationError(f"{what} is {classes!r}; give a tuple of exception classes.")
    return classes


def _check_call(given: Callable[..., object], call: str) -> None:
    what = call.partition("(")[0]
    if not callable(given) or inspect.isclass(given):
        raise ConfigurationError(f"{what} is {given!r}; give a function: {call}.")
    if _is(inspect.isgeneratorfunction, given) or _is(inspect.isasyncgenfunction, given):
        raise ConfigurationError(f"This {what} is a generator: nobody would run it. Take `yield` out of it.")
    try:
        signature = inspect.signature(given)
    except Exception:  # of some builtins it is not known, or an annotation fails: a call will tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(f"This {what} cannot be called as {call}: {error}.") from None


def _is(kind: Callable[[object], bool], handler: Callable[..., object]) -> bool:
    """Tell whether the function that a call runs is of a kind: behind `partial`, a bound method, or `__call__`."""
    while isinstance(handler, partial):
        handler = handler.func
    return kind(handler) or kind(type(handler).__call__)
