"""A worker checks its arguments when it is created, before it has claimed a message."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from inbox import AsyncWorker, Message, Worker
from inbox.handling.arguments import NotAwaited
from mailroom.errors import ConfigurationError, MailroomError
from tests.support.node import Node
from tests.support.working import SHIPPING_WITH_LEDGER, deliver, failing_keys

pytestmark = SHIPPING_WITH_LEDGER

DSN = "postgresql://me@127.0.0.1/shop"
PSYCOPG = "postgresql+psycopg://me@127.0.0.1/shop"


def handle(_message: Message, _connection: Any) -> None: ...


async def handle_async(_message: Message, _connection: Any) -> None: ...


def generate(_message: Message, _connection: Any) -> Iterator[None]:
    yield


async def generate_async(_message: Message, _connection: Any) -> AsyncIterator[None]:
    yield


def handle_message(_message: Message) -> None: ...


def handle_three(_one: object, _message: Message, _connection: Any) -> None: ...


async def handle_three_async(_one: object, _message: Message, _connection: Any) -> None: ...


def handle_unknown(_message: "NotImported", _connection: Any) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Handles:
    def __call__(self, _message: Message, _connection: Any) -> None: ...

    def method(self, _message: Message, _connection: Any) -> None: ...

    async def method_async(self, _message: Message, _connection: Any) -> None: ...


class HandlesAsync:
    async def __call__(self, _message: Message, _connection: Any) -> None: ...


SYNC: dict[str, Any] = {
    "function": handle,
    "lambda": lambda _message, _connection: None,
    "method": Handles().method,
    "object": Handles(),
    "partial": functools.partial(handle_three, 1),
    "partial of a partial": functools.partial(functools.partial(handle_three), 1),
    "builtin": print,
    "annotated by what is not imported": handle_unknown,
    "mock": Mock(),
}
ASYNC: dict[str, Any] = {
    "function": handle_async,
    "method": Handles().method_async,
    "object": HandlesAsync(),
    "partial": functools.partial(handle_three_async, 1),
    "partial of an object": functools.partial(HandlesAsync()),
    "mock": AsyncMock(),
}
NEITHER: dict[str, Any] = {
    "None": None,
    "text": "handle",
    "class": Handles,
    "generator": generate,
    "async generator": generate_async,
    "partial of a generator": functools.partial(generate),
    "of one argument": handle_message,
    "of three arguments": handle_three,
    "of three arguments, async": handle_three_async,
    "of none": lambda: None,
    "partial of too much": functools.partial(handle_three, 1, Mock(), 3),
}


KINDS: list[tuple[Callable[..., object], Any]] = [(Worker, handle), (AsyncWorker, handle_async)]


def refusal(kind: Callable[..., object], handler: object, inbox: Any = "shipping", **settings: Any) -> str:
    """Return the class and text of the error when a worker is made; empty if there is none."""
    try:
        kind(DSN, inbox, handler, **settings)
    except MailroomError as error:
        known = "ConfigurationError" if error.exit_code == ConfigurationError.exit_code else type(error).__name__
        return f"{known}: {error}"
    return ""


def test_worker_takes_what_can_be_called_with_a_message_and_a_connection() -> None:
    assert {name: refusal(Worker, handler) for name, handler in SYNC.items()} == dict.fromkeys(SYNC, "")


def test_async_worker_takes_what_is_async_whatever_stands_before_it() -> None:
    assert {name: refusal(AsyncWorker, handler) for name, handler in ASYNC.items()} == dict.fromkeys(ASYNC, "")


def test_worker_refuses_an_async_handler_when_it_is_made() -> None:
    said = {name: refusal(Worker, handler) for name, handler in ASYNC.items()}
    assert {name: text for name, text in said.items() if "use AsyncWorker" not in text} == {}


def test_async_worker_refuses_a_sync_handler_when_it_is_made() -> None:
    said = {name: refusal(AsyncWorker, handler) for name, handler in SYNC.items()}
    assert {name: text for name, text in said.items() if "not async" not in text} == {}


def test_what_cannot_be_a_handler_is_refused_when_the_worker_is_made() -> None:
    said = {(kind, name): refusal(kind, NEITHER[name]) for kind, _ in KINDS for name in NEITHER}
    starts = ("ConfigurationError: handler ", "ConfigurationError: This handler ")
    assert {case: text for case, text in said.items() if not text.startswith(starts)} == {}


def test_setting_of_a_wrong_type_or_range_is_refused_when_the_worker_is_made() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"parallel": 0}, "int from 1 to 10,000, not 0"),
        ({"parallel": "2"}, "parallel must be an int from 1 to 10,000, not str"),
        ({"parallel": 10_001}, "10,000"),
        ({"batch": 0}, "batch must be an int from 1 to 10,000, not 0"),
        ({"batch": True}, "10,000, not bool"),
        ({"batch": 1.5}, "10,000, not 1.5"),
        ({"batch": None}, "not NoneType"),
        ({"poll_interval_s": 0}, "poll_interval_s must be a number of seconds, above 0, not 0"),
        ({"poll_interval_s": "1"}, "above 0, not str"),
        ({"poll_interval_s": None}, "above 0, not NoneType"),
        ({"poll_interval_s": float("nan")}, "above 0, not nan"),
        ({"dispatch": "no"}, "dispatch is 'no'"),
        ({"fatal": ValueError}, "a tuple of exception classes"),
        ({"fatal": [ValueError]}, "a tuple of exception classes"),
        ({"fatal": (ValueError(),)}, "a tuple of exception classes"),
        ({"fatal": (KeyboardInterrupt,)}, "a tuple of exception classes"),
        ({"fatal": 5}, "a tuple of exception classes"),
        ({"listen_dsn": 5}, "connection string"),
        ({"on_error": 5}, "on_error is 5"),
        ({"on_error": handle_message}, "on_error(message, error)"),
        ({"on_error": generate}, "on_error is a generator"),
        ({"schema": None}, "Schema name None"),
        ({"schema": 5}, "Schema name 5"),
    ]
    said = [(refusal(kind, handler, **bad), why) for kind, handler in KINDS for bad, why in refused]
    assert [(text, why) for text, why in said if why not in text] == []


def test_worker_refuses_an_async_on_error_when_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match="use AsyncWorker"):
        Worker(DSN, "shipping", handle, on_error=handle_async)  # type: ignore[arg-type]
    AsyncWorker(DSN, "shipping", handle_async, on_error=AsyncMock())
    AsyncWorker(DSN, "shipping", handle_async, on_error=print)


def test_inbox_that_is_no_name_is_refused_when_the_worker_is_made() -> None:
    names = [None, 5, b"shipping", "Shipping"]
    said = [refusal(kind, handler, name) for kind, handler in KINDS for name in names]
    assert [text for text in said if "Inbox name" not in text] == []


def sources() -> dict[str, Any]:
    engine = create_engine(PSYCOPG)
    return {"text": DSN, "pool": ConnectionPool(DSN, open=False), "engine": engine, "sessions": sessionmaker(engine)}


def async_sources() -> dict[str, Any]:
    engine = create_async_engine(PSYCOPG)
    pool = AsyncConnectionPool(DSN, open=False)
    return {"text": DSN, "pool": pool, "engine": engine, "sessions": async_sessionmaker(engine)}


OTHER: tuple[Any, ...] = (None, 5, b"", psycopg.Connection, handle)


def test_worker_takes_each_source_and_refuses_every_other_thing_when_it_is_made() -> None:
    taken, of_async = sources(), async_sources()
    for source in taken.values():
        Worker(source, "shipping", handle)
    for wrong in (*OTHER, *(source for name, source in of_async.items() if name != "text")):
        with pytest.raises(ConfigurationError, match=f"cannot use a {type(wrong).__qualname__} as its source"):
            Worker(wrong, "shipping", handle)


async def test_async_worker_takes_each_source_and_refuses_every_other_thing_when_it_is_made() -> None:
    taken, of_sync = async_sources(), sources()
    for source in taken.values():
        AsyncWorker(source, "shipping", handle_async)
    for wrong in (*OTHER, *(source for name, source in of_sync.items() if name != "text")):
        with pytest.raises(ConfigurationError, match=f"cannot use a {type(wrong).__qualname__} as its source"):
            AsyncWorker(wrong, "shipping", handle_async)


def test_handler_that_turns_out_to_be_async_ends_the_worker_and_no_message_is_to_blame(node: Node) -> None:
    def hand_on(message: Message, connection: Any) -> Any:
        worker.stop()  # the worker has already ended by itself
        return handle_async(message, connection)

    deliver(node, "a", "b")
    worker = Worker(node.dsn, "shipping", hand_on)
    with pytest.raises(NotAwaited, match="use AsyncWorker"):
        worker.run()
    assert node.value("SELECT count(*) FROM mailroom.inbox") == 2
    assert failing_keys(node) == []
    assert node.value("SELECT count(*) FROM mailroom.worker") == 0
