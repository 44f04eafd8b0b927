"""Make a sync and an async form of one operation, so that both do the same and share one docstring and its parameters.

`on_connection` and `on_async_connection` make methods, `on_connections` makes both functions of a module. What they
make takes the connection as its first argument, by position or by keyword, and has a signature for `help` and editors.
What a function checks before it returns its operation is refused before anything is asked of the database.
"""

import inspect
from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class OnConnection(Protocol[P, R]):
    """A function on a sync connection. A protocol, since a `Concatenate` would take the connection by position only."""

    def __call__(self, connection: AnyConnection, *arguments: P.args, **named: P.kwargs) -> R: ...  # noqa: D102


class OnAsyncConnection(Protocol[P, R]):
    """A function on an async connection."""

    def __call__(self, connection: AnyAsyncConnection, *arguments: P.args, **named: P.kwargs) -> R: ...  # noqa: D102


class Method(Protocol[P, R]):
    """A method on a sync connection."""

    def __get__(self, instance: object, owner: type | None = None) -> OnConnection[P, R]: ...


class AsyncMethod(Protocol[P, R]):
    """A method on an async connection."""

    def __get__(self, instance: object, owner: type | None = None) -> OnAsyncConnection[P, R]: ...


Awaited: TypeAlias = Coroutine[Any, Any, T]


def on_connection(operation: Callable[Concatenate[S, P], Operation[T]]) -> Method[P, T]:
    """Return a method that runs the operation on a sync connection, its first argument."""

    def method(self: S, connection: AnyConnection, *arguments: P.args, **named: P.kwargs) -> T:
        return run(connection, operation(self, *arguments, **named))

    _describe(method, operation, operation.__name__.lstrip("_"), AnyConnection)
    return method


def on_async_connection(operation: Callable[Concatenate[S, P], Operation[T]]) -> AsyncMethod[P, Awaited[T]]:
    """Return an async method that runs the operation on an async connection, its first argument."""

    async def method(self: S, connection: AnyAsyncConnection, *arguments: P.args, **named: P.kwargs) -> T:
        return await run_async(connection, operation(self, *arguments, **named))

    _describe(method, operation, operation.__name__.lstrip("_"), AnyAsyncConnection)
    return method


def on_connections(
    name: str, operation: Callable[P, Operation[T]]
) -> tuple[OnConnection[P, T], OnAsyncConnection[P, Awaited[T]]]:
    """Return the functions `name` and `name_async`, which run the operation on a sync and on an async connection."""

    def function(connection: AnyConnection, *arguments: P.args, **named: P.kwargs) -> T:
        return run(connection, operation(*arguments, **named))

    async def function_async(connection: AnyAsyncConnection, *arguments: P.args, **named: P.kwargs) -> T:
        return await run_async(connection, operation(*arguments, **named))

    _describe(function, operation, name, AnyConnection)
    _describe(function_async, operation, f"{name}_async", AnyAsyncConnection)
    return function, function_async


def _describe(made: Callable[..., object], operation: Callable[..., object], name: str, connection: object) -> None:
    """Give what was made its name, and the operation's signature with the connection in it, for `help` and editors."""
    update_wrapper(made, operation)
    made.__name__ = name
    made.__qualname__ = ".".join([*operation.__qualname__.split(".")[:-1], name])
    signature = inspect.signature(operation)
    parameters = [each for given in signature.parameters.values() for each in _unpacked(given)]
    taken = inspect.Parameter("connection", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=connection)
    parameters.insert(int(bool(parameters) and parameters[0].name == "self"), taken)
    *_, returned = get_args(signature.return_annotation)  # of an operation: what comes of it in the end
    signed = signature.replace(parameters=parameters, return_annotation=returned)
    known = {each.name: each.annotation for each in parameters if each.annotation is not each.empty}
    made.__annotations__ = known | {"return": returned}
    made.__signature__ = signed  # type: ignore[attr-defined]  # what `inspect` looks for first


def _unpacked(given: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter; of `**settings: Unpack[...]` each setting as one of its own."""
    if given.kind is not inspect.Parameter.VAR_KEYWORD or get_origin(given.annotation) is not Unpack:
        return [given]
    [declared] = get_args(given.annotation)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in get_type_hints(declared).items()
    ]
