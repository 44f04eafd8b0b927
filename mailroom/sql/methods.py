"""Make a sync and an async method from one operation, so that both do the same and share one docstring."""

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async

S = TypeVar("S")
P = ParamSpec("P")


def on_connection(
    operation: Callable[Concatenate[S, P], Operation[T]],
) -> Callable[Concatenate[S, AnyConnection, P], T]:
    """Return a method that runs the operation on a sync connection, its first argument."""

    @wraps(operation)
    def method(self: S, connection: AnyConnection, /, *arguments: P.args, **named: P.kwargs) -> T:
        return run(connection, operation(self, *arguments, **named))

    _sign(method, operation)
    return method


def on_async_connection(
    operation: Callable[Concatenate[S, P], Operation[T]],
) -> Callable[Concatenate[S, AnyAsyncConnection, P], Coroutine[Any, Any, T]]:
    """Return an async method that runs the operation on an async connection, its first argument."""

    @wraps(operation)
    async def method(self: S, connection: AnyAsyncConnection, /, *arguments: P.args, **named: P.kwargs) -> T:
        return await run_async(connection, operation(self, *arguments, **named))

    _sign(method, operation)
    return method


def _sign(method: Callable[..., object], operation: Callable[..., object]) -> None:
    """Give the method the operation's signature with the connection in it, for `help` and editors."""
    signature = inspect.signature(operation)
    own, *others = signature.parameters.values()
    connection = inspect.Parameter("connection", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own.replace(kind=inspect.Parameter.POSITIONAL_ONLY), connection, *others]
    signed = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    method.__signature__ = signed  # type: ignore[attr-defined]  # what `inspect` looks for first
