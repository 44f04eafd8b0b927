"""Handlers that take all messages of a batch in one call."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from inbox.handling import arguments
from mailroom.message.carry import handling
from mailroom.message.message import Message

CALL = "handler(messages, connection)"

Whole: TypeAlias = Callable[[list[Message], Any], None]
AsyncWhole: TypeAlias = Callable[[list[Message], Any], Awaitable[object]]


class BatchHandler:
    """Have a `Worker` call `handler(messages, connection)` once per batch, instead of once per message.

    Use it where one call for many messages is cheaper than many calls: one INSERT of all rows, one request to a model.
    The list has 1 to `batch` messages in clock order. It is the handler's own and may be changed.
    They are consumed together if the handler returns.

    If it raises an exception and the list has one message, that message has failed, as with any handler. If the list
    has more, it is not known which one failed: no attempt is counted, and each is handled again in a list of its own.
    That also holds for `Retry`, `Park` and `Skip`. What the handler sends has no single cause, so no headers are
    carried (`mailroom.carrying` adds some).

    `BatchHandler` can decorate the function. Raises `ConfigurationError` if the handler is async or cannot be called
    like that.
    """

    def __init__(self, handler: Whole) -> None:
        self._whole: Callable[[list[Message], Any], object] = arguments.synchronous(
            handler, instead="AsyncBatchHandler", call=CALL
        )

    def __call__(self, message: Message, connection: Any) -> None:
        """Handle a list of this one message, for callers that handle one by one, as `mailroom.testing` does."""
        with handling():
            self._whole([message], connection)


class AsyncBatchHandler:
    """`BatchHandler` for async handlers and an `AsyncWorker`."""

    def __init__(self, handler: AsyncWhole) -> None:
        self._whole: AsyncWhole = arguments.asynchronous(handler, instead="BatchHandler", call=CALL)

    async def __call__(self, message: Message, connection: Any) -> None:
        """See `BatchHandler.__call__`."""
        with handling():
            await self._whole([message], connection)


def whole(handler: BatchHandler) -> Callable[[list[Message], Any], object]:
    """Return what handles a whole batch in one call."""
    return handler._whole


def whole_async(handler: AsyncBatchHandler) -> AsyncWhole:
    """Return what handles a whole batch in one call."""
    return handler._whole
