"""`Handlers` and `AsyncHandlers`: a handler made of handlers, one for each topic or pattern; it answers commands.

A command that asks for an answer is handled in a savepoint. If its handler raises `Reject`, what it did is undone, and
the rest of the batch goes on. Every other error passes through, and the savepoint stays open: the caller of the handler
rolls back anyway, and learns from the state of the transaction what the error means.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, overload

from inbox.exceptions import Reject
from inbox.handling import arguments
from inbox.handling.run import HandlerFailed
from inbox.sessions import hold
from mailroom.errors import ConfigurationError, NoHandler
from mailroom.message.answer import DONE, REJECTED, answer, answered_by_return, refuse_second, reply_topic
from mailroom.message.carry import handling
from mailroom.message.message import Message
from mailroom.message.outgoing import sending
from mailroom.message.patterns import Patterns
from mailroom.message.topic import Topic
from mailroom.sql.operation import Operation
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from mailroom.sql.savepoint import SavepointGone, savepoint, savepoint_async
from mailroom.sql.sqlstate import ABORTED, sqlstate
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

SyncCall: TypeAlias = Callable[[Message, Any], object]
AsyncCall: TypeAlias = Callable[[Message, Any], Awaitable[object]]
Call = TypeVar("Call", SyncCall, AsyncCall)
H = TypeVar("H", bound=Callable[[Message, Any], object])
T = TypeVar("T")  # the values of a topic
A = TypeVar("A")  # the answers to its commands
C = TypeVar("C")  # the handler's connection
R = TypeVar("R")  # what a handler returns that does not answer by it

# How many commands that ask for an answer are in hand: a handler may call handlers, these included.
# D-messages-6: A savepoint only for commands that may be answered.
_depth: ContextVar[int] = ContextVar("mailroom_handlers_depth", default=0)


@dataclass(frozen=True, slots=True)
class _Route(Generic[Call]):
    """A registered handler; `answers`: what it returns is the answer. `topic` reads and writes values, if it is typed.

    It reads what is to be handled and writes what is returned; error replies are of no topic's type.
    """

    call: Call
    answers: bool
    topic: Topic[Any, Any] | None = None

    def typed(self, message: Message) -> Message:
        """Return the message as its handler gets it. Raises `DecodeError` if its value does not fit."""
        return message if self.topic is None else self.topic.typed(message)

    def plain(self, answer: object) -> object:
        """Return the value that is sent for what the handler returned."""
        return answer if self.topic is None else self.topic.write_answer(answer)


class _Registry(Generic[Call]):
    """What both classes share: the handlers of each topic, and the answer."""

    def __init__(self, *, schema: str = DEFAULT_SCHEMA) -> None:
        self.schema = schema_name(schema)
        self._routes: Patterns[_Route[Call]] = Patterns()
        self._error_replies: Patterns[_Route[Call]] = Patterns()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._routes)})"

    def _checked(self, handler: Any) -> Call:
        raise NotImplementedError

    def _on(self, topic: Topic[Any, Any] | str, reply: bool) -> Callable[[H], H]:
        typed = topic if isinstance(topic, Topic) else None
        arguments.flag(reply, "reply")

        def register(handler: H) -> H:
            self._routes.add(topic, _Route(self._checked(handler), reply, typed))
            return handler

        return register

    def on_error_reply(self, topic: Topic[Any, Any] | str) -> Callable[[H], H]:
        """Register the decorated handler for replies to a topic or pattern whose status is not 200.

        Their values are plain ones.
        """

        def register(handler: H) -> H:
            self._error_replies.add(topic, _Route(self._checked(handler), answers=False))
            return handler

        return register

    def _route(self, message: Message) -> _Route[Call]:
        is_error = message.kind == "R" and message.status != DONE
        route = (self._error_replies if is_error else self._routes).find(message.topic)
        if route is None:
            kind = f"replies of status {message.status}" if is_error else "messages"
            how = "on_error_reply" if is_error else "on"
            raise NoHandler(f"No handler is for {kind} of the topic {message.topic}: register one with `{how}`.")
        return route

    def _answering(self, message: Message, status: int, value: object) -> Operation[None]:
        return sending(self.schema, answer(message, value, status))


class Handlers(_Registry[SyncCall]):
    """A handler for a `Worker`, `handle_all` or a loop of yours, made of handlers for single topics; see `on`.

    What a handler returns answers a command that asks for it, with status 200, in the transaction of the batch. If it
    raises `Reject`, the status is 400, and only what it did is undone. A command gets at most one answer: a failed
    command, which may be tried again, has none yet, and one that is skipped or discarded gets status 500.

    `schema` is that of the worker. Raises `NoHandler` for a message of any other topic, which is then not tried again.
    """

    @overload
    def on(
        self, topic: Topic[T, A], *, reply: Literal[True] = True
    ) -> Callable[[Callable[[Message[T], C], A]], Callable[[Message[T], C], A]]: ...
    @overload
    def on(
        self, topic: Topic[T, Any], *, reply: Literal[False]
    ) -> Callable[[Callable[[Message[T], C], R]], Callable[[Message[T], C], R]]: ...
    @overload
    def on(self, topic: str, *, reply: bool = True) -> Callable[[H], H]: ...

    def on(self, topic: Topic[Any, Any] | str, *, reply: bool = True) -> Callable[[Any], Any]:
        """Register the decorated `handler(message, connection)` for a `Topic`, a topic or a pattern.

        In a pattern, `*` stands for one word between dots, and a last word `#` for any number of words, or none. Of the
        patterns that fit a message the most specific is called, compared word by word: a word, `*`, `#`. It gets only
        replies of status 200; `on_error_reply` gets the others. For a `Topic` the message's value is of its type.

        What it returns answers a command that has a header `reply_to`. With `reply=False` the handler, or somebody
        later, answers by `Outbox.reply`. Raises `ConfigurationError` if this topic or pattern has a handler already.
        """
        return self._on(topic, reply)

    def _checked(self, handler: Any) -> SyncCall:
        return arguments.synchronous(handler, instead="AsyncHandlers")

    def __call__(self, message: Message, connection: AnyConnection) -> None:
        """Call the message's handler, and answer if it is a command that asks for it."""
        route = self._route(message)
        with handling(message):
            typed = route.typed(message)
            if asks(message):
                with _own_savepoint(message) as name:
                    self._answer(route, typed, connection, name)
            else:
                route.call(typed, connection)

    def _answer(self, route: _Route[SyncCall], message: Message, connection: AnyConnection, name: str) -> None:
        saved = savepoint(connection, name)
        try:
            with answered_by_return(message) if route.answers else contextlib.nullcontext():
                returned = route.call(message, connection)
        except Reject as rejected:
            with _ending():
                saved.undo()
            run(connection, self._answering(message, REJECTED, rejected.value))
            return
        with _ending():
            saved.release()
        if route.answers:
            run(connection, self._answering(message, DONE, route.plain(returned)))


class AsyncHandlers(_Registry[AsyncCall]):
    """`Handlers` for async handlers, an `AsyncWorker` and async connections."""

    @overload
    def on(
        self, topic: Topic[T, A], *, reply: Literal[True] = True
    ) -> Callable[[Callable[[Message[T], C], Awaitable[A]]], Callable[[Message[T], C], Awaitable[A]]]: ...
    @overload
    def on(
        self, topic: Topic[T, Any], *, reply: Literal[False]
    ) -> Callable[[Callable[[Message[T], C], Awaitable[R]]], Callable[[Message[T], C], Awaitable[R]]]: ...
    @overload
    def on(self, topic: str, *, reply: bool = True) -> Callable[[H], H]: ...

    def on(self, topic: Topic[Any, Any] | str, *, reply: bool = True) -> Callable[[Any], Any]:
        """See `Handlers.on`."""
        return self._on(topic, reply)

    def _checked(self, handler: Any) -> AsyncCall:
        return arguments.asynchronous(handler, instead="Handlers")

    async def __call__(self, message: Message, connection: AnyAsyncConnection) -> None:
        """See `Handlers.__call__`."""
        route = self._route(message)
        with handling(message):
            typed = route.typed(message)
            if asks(message):
                with _own_savepoint(message) as name:
                    await self._answer(route, typed, connection, name)
            else:
                await route.call(typed, connection)

    async def _answer(
        self, route: _Route[AsyncCall], message: Message, connection: AnyAsyncConnection, name: str
    ) -> None:
        saved = await savepoint_async(connection, name)
        try:
            with answered_by_return(message) if route.answers else contextlib.nullcontext():
                returned = await route.call(message, connection)
        except Reject as rejected:
            with _ending():
                await saved.undo()
            await run_async(connection, self._answering(message, REJECTED, rejected.value))
            return
        with _ending():
            await saved.release()
        if route.answers:
            await run_async(connection, self._answering(message, DONE, route.plain(returned)))


def asks(message: Message) -> bool:
    """Return whether the message is a command that asks for an answer."""
    return message.kind == "C" and reply_topic(message) is not None


@contextlib.contextmanager
def _own_savepoint(message: Message) -> Iterator[str]:
    """Handle a command inside this context, in a savepoint of the name that this gives.

    Handlers that a handler calls have another savepoint: what they leave open must not replace the outer one. Raises
    `InvalidMessage` if they are to answer the same command, and its handler answers it already.
    """
    refuse_second(message)
    token = _depth.set(_depth.get() + 1)
    try:
        yield f"handlers_{_depth.get()}"
    finally:
        _depth.reset(token)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """End the savepoint inside this context. If that fails, it is the handler's fault: it was fine before."""
    try:
        yield
    except SavepointGone as error:
        raise HandlerFailed(hold.ENDED, code="MR-transaction-ended") from error
    except Exception as error:
        if sqlstate(error) == ABORTED:
            raise HandlerFailed(hold.ABORTED, code="MR-transaction-aborted") from error
        raise


def check_schema(handler: object, schema: str) -> None:
    """Raise `ConfigurationError` if the handler of a worker of this schema would answer in another one."""
    if isinstance(handler, _Registry) and handler.schema != schema:
        raise ConfigurationError(
            f"These handlers answer in schema {handler.schema}, and the worker's is {schema}: give both the same.",
            code="MR-other-schema",
        )
