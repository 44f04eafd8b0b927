"""`Handlers` and `AsyncHandlers`: who handles a message, and the answers of status 200 and 400."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from inbox import (
    AsyncHandlers,
    AsyncInbox,
    AsyncWorker,
    Handlers,
    Inbox,
    Message,
    NoHandler,
    Parked,
    Reject,
    Retry,
    Unavailable,
    Worker,
)
from inbox.handling.arguments import NotAwaited
from inbox.handling.run import HandlerFailed
from inbox.worker import loop
from mailroom import Topic
from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName, NotInTransaction
from mailroom.node.dead_letter import DeadLetters
from mailroom.testing import handle_all, work, work_async
from outbox import AsyncOutbox, Outbox
from tests.support.drivers import ASYNC, SYNC, opened, opened_async, url
from tests.support.node import Node
from tests.support.waiting import eventually
from tests.support.working import NEVER_S, working, working_async

pytestmark = [
    pytest.mark.sample(1),
    pytest.mark.inbox("stock", "stock.reserve", "stock.count", backoff_s=0, max_attempts=2),
    pytest.mark.inbox("answers", "answered"),
    pytest.mark.node_sql("CREATE TABLE shelf (item text UNIQUE)"),
]

OUTBOX, ASYNC_OUTBOX = Outbox(), AsyncOutbox()
BROKEN = "SELECT 1 / 0"


def command(node: Node, topic: str = "stock.reserve", reply_to: str | None = "answered", **fields: Any) -> UUID:
    headers = fields.pop("headers", {}) | ({} if reply_to is None else {"reply_to": reply_to})
    return node.send(topic, fields.pop("value", "teapot"), kind="C", headers=headers, **fields)


def answers(node: Node) -> list[tuple[str, int, object]]:
    node.deliver_all()
    found = Inbox("answers").peek(node.connection, limit=1_000)
    assert all(message.kind == "R" for message in found)
    return [(message.headers["correlation"], message.status, message.value) for message in found]


def shelf(node: Node) -> list[str]:
    return [item for (item,) in node.rows("SELECT item FROM shelf ORDER BY item")]


def put(connection: Any, item: str) -> None:
    """Write to the shelf on any kind of connection."""
    if isinstance(connection, psycopg.Connection):
        connection.execute("INSERT INTO shelf VALUES (%s)", [item])
    else:
        connection.execute(text("INSERT INTO shelf VALUES (:item)"), {"item": item})


async def put_async(connection: Any, item: str) -> None:
    if isinstance(connection, psycopg.AsyncConnection):
        await connection.execute("INSERT INTO shelf VALUES (%s)", [item])
    else:
        await connection.execute(text("INSERT INTO shelf VALUES (:item)"), {"item": item})


def execute(connection: Any, query: str) -> None:
    connection.execute(query if isinstance(connection, psycopg.Connection) else text(query))


async def execute_async(connection: Any, query: str) -> None:
    await connection.execute(query if isinstance(connection, psycopg.AsyncConnection) else text(query))


# -- Answers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def closing_engine(engine: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        engine.dispose()


def by_value() -> Handlers:
    """Handle by the value: "no" is rejected, "fail" fails, anything else is taken; all of them write and send first."""
    stock = Handlers()

    @stock.on("stock.reserve")
    def take(message: Message, connection: Any) -> dict[str, object]:
        put(connection, message.key)
        OUTBOX.send(connection, "stock.taken", message.value)
        if message.value == "no":
            raise Reject({"why": "out of stock"})
        if message.value == "fail":
            raise ValueError("broken")
        return {"shelf": 7}

    return stock


def by_value_async() -> AsyncHandlers:
    stock = AsyncHandlers()

    @stock.on("stock.reserve")
    async def take(message: Message, connection: Any) -> dict[str, object]:
        await put_async(connection, message.key)
        await ASYNC_OUTBOX.send(connection, "stock.taken", message.value)
        if message.value == "no":
            raise Reject({"why": "out of stock"})
        if message.value == "fail":
            raise ValueError("broken")
        return {"shelf": 7}

    return stock


@pytest.mark.parametrize("kind", SYNC)
def test_command_is_answered_by_what_its_handler_returns_or_rejects(node: Node, kind: str) -> None:
    asked = [command(node, value=value, key=value) for value in ("a", "no", "b")]
    node.deliver_all()
    with opened(node.dsn, kind) as connection:
        for message in Inbox("stock").reap_any(connection):
            by_value()(message, connection)
        connection.commit()
    assert node.value("SELECT count(*) FROM mailroom.outbox WHERE topic = 'stock.taken'") == 2
    done, rejected = {"shelf": 7}, {"why": "out of stock"}
    assert answers(node) == [
        (str(asked[0]), 200, done),
        (str(asked[1]), 400, rejected),
        (str(asked[2]), 200, done),
    ]
    assert shelf(node) == ["a", "b"]


@pytest.mark.parametrize("kind", ASYNC)
async def test_async_command_is_answered_by_what_its_handler_returns_or_rejects(node: Node, kind: str) -> None:
    asked = [command(node, value=value, key=value) for value in ("a", "no", "b")]
    node.deliver_all()
    async with opened_async(node.dsn, kind) as connection:
        for message in await AsyncInbox("stock").reap_any(connection):
            await by_value_async()(message, connection)
        await connection.commit()
    assert [(id, status) for id, status, _ in answers(node)] == [
        (str(asked[0]), 200),
        (str(asked[1]), 400),
        (str(asked[2]), 200),
    ]
    assert shelf(node) == ["a", "b"]


def test_answer_goes_away_with_the_batch(node: Node) -> None:
    command(node, value="a", key="a")
    command(node, value="no", key="no")
    node.deliver_all()
    with psycopg.connect(node.dsn) as connection:
        for message in Inbox("stock").reap_any(connection):
            by_value()(message, connection)
        connection.rollback()
    assert answers(node) == []
    assert len(node.delivered()) == 2


def test_failed_command_has_no_answer_until_it_is_done(node: Node) -> None:
    asked = command(node, value="fail", key="k")
    stock, repaired = by_value(), Handlers()

    @repaired.on("stock.reserve")
    def take(_message: Message, _connection: Any) -> str:
        return "done after all"

    with psycopg.connect(node.dsn) as connection:
        fates = [failure.outcome for failure in work(connection, "stock", stock).failures]
        assert fates == ["retry", "park"]
        connection.commit()
        assert answers(node) == []
        Parked("stock").replay(connection, "k", actor="ada")
        connection.commit()
        assert work(connection, "stock", repaired).failures == []
    assert answers(node) == [(str(asked), 200, "done after all")]


def test_rejected_without_an_answer_is_skipped(node: Node) -> None:
    for reply_to in (None, "no topic", "", "a" * 201):
        command(node, value="no", reply_to=reply_to)
    with psycopg.connect(node.dsn) as connection:
        failures = work(connection, "stock", by_value()).failures
    assert ([failure.outcome for failure in failures], shelf(node), answers(node)) == (["skip"] * 4, [], [])
    assert [reason for _, _, reason in node.dead()] == ["rejected by its handler"] * 4


def test_only_commands_are_answered(node: Node) -> None:
    for kind in "MER":
        node.send("stock.reserve", "a", kind=kind, headers={"reply_to": "answered", "status": "200"})
    with psycopg.connect(node.dsn) as connection:
        assert handle_all(connection, "stock", by_value()) == 3
    assert answers(node) == []
    assert len(shelf(node)) == 3


def test_answered_once_however_often_it_is_requeued(node: Node) -> None:
    node.inbox("stock", "stock.reserve", on_failure="skip", max_attempts=1)
    asked = command(node, value="fail", key="k")
    with psycopg.connect(node.dsn) as connection:
        work(connection, "stock", by_value())
        connection.commit()
        DeadLetters().requeue(connection, None, actor="ada")
        node_done = Handlers()
        node_done.on("stock.reserve")(lambda _message, _connection: "done")
        assert len(work(connection, "stock", node_done).handled) == 1
    assert answers(node) == [(str(asked), 500, {"error": "ValueError"})]


@pytest.mark.parametrize("kind", SYNC)
def test_error_of_the_database_that_a_handler_swallows_is_its_failure(node: Node, kind: str) -> None:
    command(node, value="a", key="k")
    node.deliver_all()
    stock = Handlers()

    @stock.on("stock.reserve")
    def swallow(_message: Message, connection: Any) -> str:
        with pytest.raises((psycopg.Error, DBAPIError)):
            execute(connection, BROKEN)
        return "all is well"

    with opened(node.dsn, kind) as connection:
        [message] = Inbox("stock").reap_any(connection)
        with pytest.raises(HandlerFailed, match="a statement had failed"):
            stock(message, connection)
        connection.rollback()
    assert answers(node) == []


@pytest.mark.parametrize("kind", ASYNC)
async def test_error_of_the_database_that_an_async_handler_swallows_is_its_failure(node: Node, kind: str) -> None:
    command(node, value="a", key="k")
    node.deliver_all()
    stock = AsyncHandlers()

    @stock.on("stock.reserve")
    async def swallow(_message: Message, connection: Any) -> str:
        with pytest.raises((psycopg.Error, DBAPIError)):
            await execute_async(connection, BROKEN)
        return "all is well"

    async with opened_async(node.dsn, kind) as connection:
        [message] = await AsyncInbox("stock").reap_any(connection)
        with pytest.raises(HandlerFailed, match="a statement had failed"):
            await stock(message, connection)
        await connection.rollback()
    assert answers(node) == []


@pytest.mark.parametrize("kind", SYNC)
def test_command_may_be_rejected_after_an_error_of_the_database(node: Node, kind: str) -> None:
    asked = [command(node, value=value, key=value) for value in ("a", "a", "b")]
    node.deliver_all()
    stock = Handlers()

    @stock.on("stock.reserve")
    def take(message: Message, connection: Any) -> str:
        try:
            put(connection, message.value)
        except (psycopg.errors.UniqueViolation, DBAPIError):
            raise Reject("taken") from None
        return "done"

    with opened(node.dsn, kind) as connection:
        for message in Inbox("stock").reap_any(connection):
            stock(message, connection)
        connection.commit()
    assert sorted((id, status) for id, status, _ in answers(node)) == sorted(
        zip(map(str, asked), (200, 400, 200), strict=True)
    )
    assert shelf(node) == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SYNC)
def test_handler_that_ends_the_transaction_answers_nothing(node: Node, kind: str) -> None:
    """Else the answer would be in another transaction than the command's end."""
    stock = Handlers()

    @stock.on("stock.reserve")
    def end(message: Message, connection: Any) -> None:
        ends, raises = message.value
        getattr(connection, ends)()
        execute(connection, "SELECT 1")
        if raises:
            raise Reject

    with opened(node.dsn, kind) as connection:
        for value in map(list, product(("commit", "rollback"), (False, True))):
            command(node, value=value, key="k")
            node.deliver_all()
            message = Inbox("stock").reap_any(connection)[-1]
            with pytest.raises(HandlerFailed, match="ended the transaction"):
                stock(message, connection)
            connection.rollback()
    assert answers(node) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ASYNC)
async def test_async_handler_that_ends_the_transaction_answers_nothing(node: Node, kind: str) -> None:
    command(node, value="a", key="k")
    node.deliver_all()
    stock = AsyncHandlers()

    @stock.on("stock.reserve")
    async def end(_message: Message, connection: Any) -> None:
        await connection.rollback()
        await execute_async(connection, "SELECT 1")
        raise Reject

    async with opened_async(node.dsn, kind) as connection:
        [message] = await AsyncInbox("stock").reap_any(connection)
        with pytest.raises(HandlerFailed, match="ended the transaction"):
            await stock(message, connection)
        await connection.rollback()
    assert answers(node) == []


def test_answer_that_cannot_be_sent_is_a_failure(node: Node) -> None:
    command(node, key="k")
    stock = Handlers()
    stock.on("stock.reserve")(lambda _message, _connection: object())
    with psycopg.connect(node.dsn) as connection:
        failures = work(connection, "stock", stock).failures
    assert [(type(each.error).__name__, each.outcome) for each in failures] == [
        ("EncodeError", "retry"),
        ("EncodeError", "park"),
    ]
    assert answers(node) == []


def test_handlers_need_a_transaction(node: Node) -> None:
    command(node)
    node.deliver_all()
    [message] = Inbox("stock").peek(node.connection)
    with pytest.raises(NotInTransaction):
        by_value()(message, node.connection)
    assert (shelf(node), answers(node)) == ([], [])


def test_answer_has_the_key_and_saga_of_its_command(node: Node) -> None:
    asked = command(node, key="k", headers={"saga": "s"})
    wished = command(node, key="k", headers={"reply_key": "mine"})
    with psycopg.connect(node.dsn) as connection:
        handle_all(connection, "stock", quiet())
    node.deliver_all()
    first, second = Inbox("answers").peek(node.connection)
    assert (first.key, first.headers["correlation"], first.headers["saga"]) == ("k", str(asked), "s")
    assert (second.key, second.headers["correlation"]) == ("mine", str(wished))


def test_answers_follow_from_their_commands(node: Node) -> None:
    """By hand, too, where nobody but `Handlers` knows the message in hand; and whatever the command carries."""
    large = {"saga": "s" * 3_000, "baggage": "b" * 3_000}
    asked = [command(node, value=value, key=value, headers=large) for value in ("a", "no")]
    node.deliver_all()
    with psycopg.connect(node.dsn) as connection:
        for message in Inbox("stock").reap_any(connection):
            by_value()(message, connection)
    node.deliver_all()
    for answer, id in zip(Inbox("answers").peek(node.connection), asked, strict=True):
        assert answer.headers["causation"] == answer.headers["correlation"] == str(id)
        assert answer.headers["saga"] == large["saga"]
        assert "baggage" not in answer.headers


def quiet(**options: Any) -> Handlers:
    stock = Handlers()
    stock.on("#", **options)(lambda _message, _connection: None)
    return stock


# -- Answers of the handler's own -------------------------------------------------------------------------------------


def test_handler_without_reply_answers_by_itself_also_later(node: Node) -> None:
    now, later = command(node, key="now"), command(node, key="later")
    stock, left = Handlers(), []

    @stock.on("stock.reserve", reply=False)
    def take(message: Message, connection: Any) -> str:
        if message.key == "now":
            OUTBOX.reply(connection, message, "at once")
        else:
            left.append(message)
        return "not an answer"

    with psycopg.connect(node.dsn) as connection:
        assert handle_all(connection, "stock", stock) == 2
        connection.commit()
        OUTBOX.reply(connection, left[0], "later", status=202)
    assert answers(node) == [(str(now), 200, "at once"), (str(later), 202, "later")]


def test_handler_without_reply_may_reject_and_takes_its_own_answer_back(node: Node) -> None:
    asked = command(node)
    stock = Handlers()

    @stock.on("stock.reserve", reply=False)
    def take(message: Message, connection: Any) -> None:
        OUTBOX.reply(connection, message, "done")
        raise Reject("not after all")

    with psycopg.connect(node.dsn) as connection:
        handle_all(connection, "stock", stock)
    assert answers(node) == [(str(asked), 400, "not after all")]


def test_second_answer_is_refused(node: Node) -> None:
    first, second = command(node, key="a"), command(node, key="b")
    stock = Handlers()
    seen: list[Message] = []

    @stock.on("stock.reserve")
    def take(message: Message, connection: Any) -> str:
        with pytest.raises(InvalidMessage, match="reply=False"):
            OUTBOX.reply(connection, message, "mine")
        if seen:
            OUTBOX.reply(connection, seen[0], "of another command")
        seen.append(message)
        return "returned"

    with psycopg.connect(node.dsn) as connection:
        handle_all(connection, "stock", stock)
        connection.commit()
        OUTBOX.reply(connection, seen[0], "after the handler")
        connection.rollback()
    assert answers(node) == [
        (str(first), 200, "returned"),
        (str(first), 200, "of another command"),
        (str(second), 200, "returned"),
    ]


def test_second_answer_by_handlers_that_a_handler_has_called_is_refused(node: Node) -> None:
    asked, other = command(node), command(node, "stock.count")
    stock = Handlers()

    @stock.on("stock.count")
    def count(_message: Message, connection: Any) -> int:
        with pytest.raises(InvalidMessage, match="reply=False"):
            OUTBOX.reply(connection, in_hand, "of the one around it")
        return 7

    @stock.on("stock.reserve")
    def take(_message: Message, connection: Any) -> str:
        stock(within, connection)
        return "returned"

    node.deliver_all()
    with psycopg.connect(node.dsn) as connection:
        in_hand, within = Inbox("stock").reap_any(connection)
        stock(in_hand, connection)
    assert answers(node) == [(str(other), 200, 7), (str(asked), 200, "returned")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize("inner_reply", [True, False])
@pytest.mark.parametrize("rejects", [True, False])
def test_command_that_a_handler_hands_on_is_answered_once(
    node: Node, reply: bool, inner_reply: bool, rejects: bool
) -> None:
    asked = command(node)
    outer, inner = Handlers(), Handlers()
    outer.on("stock.#", reply=reply)(inner)

    @inner.on("stock.reserve", reply=inner_reply)
    def take(_message: Message, _connection: Any) -> str:
        if rejects:
            raise Reject("no")
        return "returned"

    with psycopg.connect(node.dsn) as connection:
        if reply:
            with pytest.raises(InvalidMessage, match="reply=False"):
                handle_all(connection, "stock", outer)
            connection.rollback()
        else:
            handle_all(connection, "stock", outer)
    answered = [(str(asked), 400, "no")] * rejects or [(str(asked), 200, "returned")] * inner_reply
    assert answers(node) == ([] if reply else answered)


async def test_second_answer_is_refused_in_tasks_of_the_handler(node: Node) -> None:
    command(node)
    stock = AsyncHandlers()

    @stock.on("stock.reserve")
    async def take(message: Message, connection: Any) -> str:
        with pytest.raises(InvalidMessage, match="reply=False"):
            await asyncio.create_task(ASYNC_OUTBOX.reply(connection, message, "mine"))
        return "returned"

    async with opened_async(node.dsn, "psycopg") as connection:
        assert (await work_async(connection, "stock", stock)).failures == []
        await connection.commit()
    assert [value for _, _, value in answers(node)] == ["returned"]


# -- Which handler ----------------------------------------------------------------------------------------------------


def named(*patterns: str) -> Handlers:
    """Return handlers that answer with the pattern that was chosen."""
    handlers = Handlers()
    for each in patterns:
        handlers.on(each)(partial(lambda pattern, _message, _connection: pattern, each))
    return handlers


def chosen(handlers: Handlers, topic: str) -> object:
    route = handlers._routes.find(topic)
    return None if route is None else route.call(None, None)  # type: ignore[arg-type]  # they look at neither


def test_most_specific_handler_is_chosen_word_by_word() -> None:
    expected = [
        ("order", "order"),
        ("order.paid", "order.paid"),
        ("order.sent", "order.*"),
        ("order.item.sent", "order.item.#"),
        ("order.item", "order.item.#"),
        ("order.gone.far", "order.#"),
        ("stock.paid", "*.paid"),
        ("stock", "#"),
        ("stock.item.a.b", "#"),
        ("order..x", "order.#"),
    ]
    patterns = ["#", "order.#", "order.*", "*.paid", "*.*.x", "order.paid", "order.item.#", "order"]
    for seed in range(5):
        random.Random(seed).shuffle(patterns)
        handlers = named(*patterns)
        assert [(topic, chosen(handlers, topic)) for topic, _ in expected] == expected


def test_pattern_fits_whole_words() -> None:
    for pattern, fits, others in (
        ("a.*", ["a.b", "a."], ["a", "a.b.c", "b.a", "ab.c"]),
        ("a.#", ["a", "a.b", "a.b.c"], ["ab", "b", "b.a"]),
        ("*.b", ["a.b"], ["b", "a.b.c", "a.c"]),
        ("*", ["a"], ["a.b"]),
        ("a-b_c.*", ["a-b_c.d"], ["aXb_c.d", "a-bXc.d"]),
    ):
        handlers = named(pattern)
        assert [topic for topic in [*fits, *others] if chosen(handlers, topic)] == fits


def test_what_is_no_pattern_is_refused() -> None:
    handle: Any = lambda _message, _connection: None  # noqa: E731
    for pattern in (
        "",
        "a b",
        7,
        *["a.#.b", "*.#", "a.*.#", "*.a.#", "##", "a.**", "a.b*", "1.*", ".*", "a/#", "é.*", ".#"],
    ):
        with pytest.raises(InvalidMessage, match="not valid"):
            Handlers().on(pattern)(handle)  # type: ignore[call-overload]


def test_one_pattern_has_one_handler() -> None:
    for pattern in ("order.paid", "order.*", "order.#"):
        handlers = named(pattern)
        with pytest.raises(ConfigurationError, match="already"):
            handlers.on(pattern)(lambda _message, _connection: None)
        assert chosen(handlers, pattern.replace("*", "x").replace("#", "x")) == pattern  # the first one stays
        handlers.on_error_reply(pattern)(lambda _message, _connection: None)
        with pytest.raises(ConfigurationError, match="already"):
            handlers.on_error_reply(pattern)(lambda _message, _connection: None)


def test_message_without_a_handler_is_not_tried_again(node: Node) -> None:
    asked = command(node, "stock.count", key="k")
    with psycopg.connect(node.dsn) as connection:
        [failure] = work(connection, "stock", by_value()).failures
        assert (failure.outcome, failure.attempt, type(failure.error)) == ("park", 1, NoHandler)
        assert "stock.count" in str(failure.error)
        connection.commit()
        assert answers(node) == []
        Parked("stock").discard(connection, "k", actor="ada")
    assert answers(node) == [(str(asked), 500, {"error": "NoHandler"})]


def test_replies_are_told_apart_by_their_status(node: Node) -> None:
    for status in ("200", "400", "500", "", "2OO", "\u0662\u0660\u0660"):
        node.send("answered", 1, kind="R", headers={"status": status}, key="k")
    node.deliver_all()
    shop, got = Handlers(), []
    shop.on("answered")(lambda message, _connection: got.append(("on", message.status)))
    shop.on_error_reply("answered")(lambda message, _connection: got.append(("refused", message.status)))
    with psycopg.connect(node.dsn) as connection:
        handle_all(connection, "answers", shop)
    assert got == [("on", 200), ("refused", 400), ("refused", 500), *[("refused", 600)] * 3]


def test_refusal_that_nobody_handles_has_no_handler(node: Node) -> None:
    node.send("answered", 1, kind="R", headers={"status": "400"})
    with psycopg.connect(node.dsn) as connection, pytest.raises(NoHandler, match="on_error_reply"):
        handle_all(connection, "answers", quiet())


def test_status_says_nothing_of_what_is_no_reply(node: Node) -> None:
    node.send("stock.reserve", "a", headers={"status": "400"})
    with psycopg.connect(node.dsn) as connection:
        assert handle_all(connection, "stock", by_value()) == 1


# -- Wrong use --------------------------------------------------------------------------------------------------------


async def coroutine(_message: Message, _connection: Any) -> None: ...


def function(_message: Message, _connection: Any) -> None: ...


def test_worker_refuses_async_handlers(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="use AsyncWorker"):
        Worker(dsn, "stock", AsyncHandlers())  # type: ignore[arg-type]  # as the checker says
    with pytest.raises(ConfigurationError, match="use Worker"):
        AsyncWorker(dsn, "stock", Handlers())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="use AsyncHandlers"):
        Handlers().on("stock.reserve")(coroutine)
    with pytest.raises(ConfigurationError, match="use Handlers"):
        AsyncHandlers().on("stock.reserve")(function)
    with pytest.raises(ConfigurationError, match="cannot be called"):
        Handlers().on("stock.reserve")(lambda _message: None)  # type: ignore[type-var]


def test_awaitable_of_a_sync_handler_is_no_answer(node: Node) -> None:
    command(node)
    stock = Handlers()
    stock.on("stock.reserve")(lambda message, connection: coroutine(message, connection))
    with psycopg.connect(node.dsn) as connection, pytest.raises(NotAwaited, match="use AsyncHandlers"):
        handle_all(connection, "stock", stock)
    assert answers(node) == []


def test_handlers_and_their_worker_are_of_one_schema(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="tenant_a"):
        Worker(dsn, "stock", Handlers(), schema="tenant_a")
    with pytest.raises(ConfigurationError, match="tenant_a"):
        AsyncWorker(dsn, "stock", AsyncHandlers(schema="tenant_a"))
    Worker(dsn, "stock", Handlers(schema="tenant_a"), schema="tenant_a")
    with pytest.raises(InvalidName):
        Handlers(schema="no schema")
    with pytest.raises(ConfigurationError, match="reply is 1"):
        Handlers().on("a", reply=1)  # type: ignore[call-overload]


# -- In a worker ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_worker_answers_each_command_of_a_batch_once(node: Node) -> None:
    values = ["a", "no", "b", "fail", "c", "no", "d"]
    asked = [command(node, value=value, key=str(nth)) for nth, value in enumerate(values)]
    node.deliver_all()
    with working(Worker(node.dsn, "stock", by_value(), poll_interval_s=NEVER_S)):
        eventually(lambda: len(Parked("stock").keys(node.connection)) == 1)
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.inbox_stock") == 0)
    expected = {
        str(id): {"no": 400}.get(value, 200) for id, value in zip(asked, values, strict=True) if value != "fail"
    }
    found = answers(node)
    assert {id: status for id, status, _ in found} == expected
    assert len(found) == len(expected)
    assert shelf(node) == ["0", "2", "4", "6"]


@pytest.mark.slow
async def test_async_worker_answers_each_command_of_a_batch_once(node: Node) -> None:
    values = ["a", "no", "fail", "b"]
    asked = [command(node, value=value, key=str(nth)) for nth, value in enumerate(values)]
    node.deliver_all()
    async with working_async(AsyncWorker(node.dsn, "stock", by_value_async(), poll_interval_s=NEVER_S)):
        await asyncio.to_thread(eventually, lambda: len(Parked("stock").keys(node.connection)) == 1)
        await asyncio.to_thread(eventually, lambda: node.value("SELECT count(*) FROM mailroom.inbox_stock") == 0)
    found = [(id, status) for id, status, _ in answers(node)]
    assert sorted(found) == sorted([(str(asked[0]), 200), (str(asked[1]), 400), (str(asked[3]), 200)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "sessionmaker"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_command_that_fails_leaves_its_savepoint_to_the_rollback(node: Node, kind: str, driver: str) -> None:
    values = ["a", "fail", "no", "b"]
    asked = [command(node, value=value, key=str(nth)) for nth, value in enumerate(values)]
    node.deliver_all()
    engine = create_engine(url(node.dsn, driver))
    source = engine if kind == "engine" else sessionmaker(engine)
    with closing_engine(engine), working(Worker(source, "stock", by_value(), poll_interval_s=NEVER_S)):
        eventually(lambda: len(Parked("stock").keys(node.connection)) == 1)
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.inbox_stock") == 0)
    found = [(id, status) for id, status, _ in answers(node)]
    assert sorted(found) == sorted([(str(asked[0]), 200), (str(asked[2]), 400), (str(asked[3]), 200)])
    assert shelf(node) == ["0", "3"]
    assert [error for (error,) in node.rows("SELECT DISTINCT error_class FROM mailroom.attempt")] == ["ValueError"]


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("kind", ["engine", "sessionmaker"])
async def test_async_command_that_fails_leaves_its_savepoint_to_the_rollback(
    node: Node, kind: str, driver: str
) -> None:
    values = ["a", "fail", "no", "b"]
    asked = [command(node, value=value, key=str(nth)) for nth, value in enumerate(values)]
    node.deliver_all()
    engine = create_async_engine(url(node.dsn, driver), poolclass=NullPool)
    source: Any = engine if kind == "engine" else async_sessionmaker(engine)
    async with working_async(AsyncWorker(source, "stock", by_value_async(), poll_interval_s=NEVER_S)):
        await asyncio.to_thread(eventually, lambda: len(Parked("stock").keys(node.connection)) == 1)
        await asyncio.to_thread(eventually, lambda: node.value("SELECT count(*) FROM mailroom.inbox_stock") == 0)
    await engine.dispose()
    found = [(id, status) for id, status, _ in answers(node)]
    assert sorted(found) == sorted([(str(asked[0]), 200), (str(asked[2]), 400), (str(asked[3]), 200)])
    assert shelf(node) == ["0", "3"]


@pytest.mark.parametrize("kind", SYNC)
def test_work_of_a_test_goes_on_after_a_command_that_fails(node: Node, kind: str) -> None:
    asked = [command(node, value=value, key=value) for value in ("fail", "no", "a")]
    with opened(node.dsn, kind) as connection:
        worked = work(connection, "stock", by_value())
        connection.commit()
    assert [failure.outcome for failure in worked.failures] == ["retry", "park"]
    assert sorted((id, status) for id, status, _ in answers(node)) == sorted(
        [(str(asked[1]), 400), (str(asked[2]), 200)]
    )
    assert shelf(node) == ["a"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", SYNC)
@pytest.mark.parametrize("rejects", [True, False])
@pytest.mark.parametrize("is_itself", [True, False])
def test_savepoint_of_handlers_that_a_handler_has_called_is_its_own(
    node: Node, kind: str, rejects: bool, is_itself: bool
) -> None:
    """What the inner ones leave open must not keep what was done before them."""
    outer = Handlers()
    inner = outer if is_itself else Handlers()

    @inner.on("stock.count")
    def fail(_message: Message, connection: Any) -> None:
        put(connection, "inner")
        raise LookupError

    @outer.on("stock.reserve")
    def reject(_message: Message, connection: Any) -> None:
        put(connection, "outer")
        with contextlib.suppress(LookupError):
            inner(within, connection)
        if rejects:
            raise Reject("no")

    asked, _ = command(node), command(node, "stock.count")
    node.deliver_all()
    with opened(node.dsn, kind) as connection:
        in_hand, within = Inbox("stock").reap_any(connection)
        outer(in_hand, connection)
        connection.commit()
    assert answers(node) == [(str(asked), 400, "no") if rejects else (str(asked), 200, None)]
    assert shelf(node) == ([] if rejects else ["inner", "outer"])


@pytest.mark.parametrize("kind", ASYNC)
async def test_savepoint_of_async_handlers_that_call_themselves_is_its_own(node: Node, kind: str) -> None:
    handlers = AsyncHandlers()

    @handlers.on("stock.count")
    async def fail(_message: Message, connection: Any) -> None:
        await put_async(connection, "inner")
        raise LookupError

    @handlers.on("stock.reserve")
    async def reject(_message: Message, connection: Any) -> None:
        await put_async(connection, "outer")
        with contextlib.suppress(LookupError):
            await handlers(within, connection)
        raise Reject("no")

    asked, _ = command(node), command(node, "stock.count")
    node.deliver_all()
    async with opened_async(node.dsn, kind) as connection:
        in_hand, within = await AsyncInbox("stock").reap_any(connection)
        await handlers(in_hand, connection)
        await connection.commit()
    assert answers(node) == [(str(asked), 400, "no")]
    assert shelf(node) == []


@pytest.mark.parametrize("kind", SYNC)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("rejects", [True, False])
def test_handler_that_ends_the_transaction_by_a_statement_is_told(
    node: Node, kind: str, end: str, rejects: bool
) -> None:
    handlers = Handlers()

    @handlers.on("stock.reserve")
    def end_it(_message: Message, connection: Any) -> None:
        connection.execute(end if isinstance(connection, psycopg.Connection) else text(end))
        if rejects:
            raise Reject("no")

    command(node)
    with opened(node.dsn, kind) as connection:
        with pytest.raises(HandlerFailed, match="ended the transaction"):
            handle_all(connection, "stock", handlers)
        connection.rollback()
    assert answers(node) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_pipelined", [True, False])
@pytest.mark.parametrize("prepare_threshold", [0, 5, None])
def test_commands_are_rejected_however_psycopg_sends(
    node: Node, prepare_threshold: int | None, is_pipelined: bool
) -> None:
    asked = [command(node, value=value, key=value) for value in ("a", "no", "b")]
    node.deliver_all()
    with (
        psycopg.connect(node.dsn, prepare_threshold=prepare_threshold) as connection,
        connection.pipeline() if is_pipelined else contextlib.nullcontext(),
    ):
        for message in Inbox("stock").reap_any(connection):
            by_value()(message, connection)
    found = [(id, status) for id, status, _ in answers(node)]
    assert sorted(found) == sorted([(str(asked[0]), 200), (str(asked[1]), 400), (str(asked[2]), 200)])
    assert shelf(node) == ["a", "b"]


@pytest.mark.parametrize("is_pipelined", [True, False])
async def test_commands_are_rejected_however_async_psycopg_sends(node: Node, is_pipelined: bool) -> None:
    asked = [command(node, value=value, key=value) for value in ("a", "no", "b")]
    node.deliver_all()
    async with (
        await psycopg.AsyncConnection.connect(node.dsn, prepare_threshold=0) as connection,
        connection.pipeline() if is_pipelined else contextlib.nullcontext(),
    ):
        for message in await AsyncInbox("stock").reap_any(connection):
            await by_value_async()(message, connection)
    found = [(id, status) for id, status, _ in answers(node)]
    assert sorted(found) == sorted([(str(asked[0]), 200), (str(asked[1]), 400), (str(asked[2]), 200)])


def test_session_forgets_the_objects_of_a_rejected_command(node: Node) -> None:
    """Objects that were never flushed belong to the command too, and those of earlier messages do not."""

    class Base(DeclarativeBase): ...

    class Shelf(Base):
        __tablename__ = "shelf"
        item: Mapped[str] = mapped_column(primary_key=True)

    for value in ("a", "no", "b"):
        command(node, value=value, key=value)
    node.deliver_all()
    stock = Handlers()

    @stock.on("stock.reserve")
    def take(message: Message, session: Session) -> None:
        session.add(Shelf(item=message.key))
        if message.value == "no":
            raise Reject

    with opened(node.dsn, "Session psycopg") as session:
        for message in Inbox("stock").reap_any(session):
            stock(message, session)
        session.commit()
    assert shelf(node) == ["a", "b"]
    assert [status for _, status, _ in answers(node)] == [200, 400, 200]


@pytest.mark.slow
def test_unavailable_holds_the_inbox_and_counts_nothing(node: Node) -> None:
    asked = [command(node, key=str(nth)) for nth in range(3)]
    node.deliver_all()
    stock = Handlers()
    calls: list[str] = []
    is_up: list[bool] = []

    @stock.on("stock.reserve")
    def call(message: Message, connection: Any) -> str:
        calls.append(message.key)
        put(connection, message.key)
        if not is_up:
            raise Unavailable("the bank is closed", after_s=0)
        return "paid"

    with working(Worker(node.dsn, "stock", stock, poll_interval_s=NEVER_S)):
        eventually(lambda: len(calls) >= 10)  # far beyond the two that a lost connection is forgiven
        assert node.rows("SELECT * FROM mailroom.attempt") == node.rows("SELECT * FROM mailroom.key_state") == []
        is_up.append(True)
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.inbox_stock") == 0)
    assert sorted(answers(node)) == sorted((str(id), 200, "paid") for id in asked)
    assert shelf(node) == ["0", "1", "2"]


def test_lane_backs_off_while_what_a_failing_key_needs_is_down(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing key takes turns with claims of others, which find nothing and must not end the back-off."""
    failures: list[int] = []

    def no_pause(count: int, _longest_s: float) -> float:
        failures.append(count)
        return 0.0

    monkeypatch.setattr(loop, "backoff", SimpleNamespace(pause_s=no_pause))
    command(node, key="k")
    node.deliver_all()
    stock, calls = Handlers(), []

    @stock.on("stock.reserve")
    def call(_message: Message, _connection: Any) -> None:
        calls.append(1)
        raise Retry(after_s=0) if len(calls) == 1 else Unavailable("down")

    with working(Worker(node.dsn, "stock", stock, poll_interval_s=0.01)):
        eventually(lambda: len(failures) >= 5)
    assert failures[:5] == [1, 2, 3, 4, 5]


def test_unavailable_ends_the_work_of_a_test(node: Node) -> None:
    command(node, key="k")
    stock = Handlers()

    @stock.on("stock.reserve")
    def call(_message: Message, _connection: Any) -> None:
        raise Unavailable("down", after_s=5)

    with psycopg.connect(node.dsn) as connection:
        worked = work(connection, "stock", stock)
    [failure] = worked.failures
    assert (failure.outcome, failure.attempt, failure.due_in_s, worked.handled) == ("retry", 0, 5, [])
    assert node.rows("SELECT * FROM mailroom.attempt") == []


def test_pause_of_unavailable_has_bounds() -> None:
    for after_s in (-1, float("nan"), 86_401):
        with pytest.raises(ValueError, match="after_s"):
            Unavailable("down", after_s)


# -- Typed topics -----------------------------------------------------------------------------------------------------


@dataclass
class Reserve:
    item: str
    amount: int = 1


@dataclass
class Reserved:
    shelf: int


RESERVE = Topic("stock.reserve", Reserve, replies=Reserved, version=2)
ANSWERED = Topic("answered", Reserved)


@RESERVE.upcast(1)
def with_item(plain: str) -> dict[str, object]:
    return {"item": plain}


def typed(log: list[object]) -> Handlers:
    handlers = Handlers()

    @handlers.on(RESERVE)
    def take(message: Message[Reserve], _connection: Any) -> Reserved:
        log.append(message.value)
        if message.value.amount > 1:
            raise Reject({"left": 1})
        return Reserved(7)

    @handlers.on(ANSWERED)
    def go_on(message: Message[Reserved], _connection: Any) -> None:
        log.append(message.value)

    @handlers.on_error_reply(ANSWERED)
    def give_up(message: Message, _connection: Any) -> None:
        log.append((message.status, message.value))

    return handlers


def test_typed_command_goes_there_and_its_answer_comes_back(node: Node) -> None:
    log: list[object] = []
    with psycopg.connect(node.dsn) as connection:
        for amount in (1, 2):
            OUTBOX.command(connection, RESERVE, Reserve("teapot", amount), key="k", reply_to=ANSWERED)
        assert handle_all(connection, "stock", typed(log)) == 2
        assert handle_all(connection, "answers", typed(log)) == 2
    assert log == [Reserve("teapot", 1), Reserve("teapot", 2), Reserved(7), (400, {"left": 1})]


async def test_typed_command_of_an_async_handler(node: Node) -> None:
    handlers, log = AsyncHandlers(), []

    @handlers.on(RESERVE)
    async def take(message: Message[Reserve], _connection: Any) -> Reserved:
        log.append(message.value)
        return Reserved(7)

    command(node, value="an old teapot")  # of version 1
    async with opened_async(node.dsn, "psycopg") as connection:
        assert (await work_async(connection, "stock", handlers)).failures == []
        await connection.commit()
    assert log == [Reserve("an old teapot")]
    assert [(status, value) for _, status, value in answers(node)] == [(200, {"shelf": 7})]


def test_command_whose_value_does_not_fit_fails_alone(node: Node) -> None:
    bad, good = command(node, value=7, key="bad"), command(node, value="teapot", key="good")
    with psycopg.connect(node.dsn) as connection:
        worked = work(connection, "stock", typed([]))
        connection.commit()
        assert [(each.message.id, each.outcome, each.attempt) for each in worked.failures] == [(bad, "park", 1)]
        assert answers(node) == [(str(good), 200, {"shelf": 7})]
        Parked("stock").discard(connection, "bad", actor="ada")
    assert answers(node)[1:] == [(str(bad), 500, {"error": "DecodeError"})]


def test_answer_that_does_not_fit_is_a_failure(node: Node) -> None:
    command(node, value="teapot", key="k")
    handlers = Handlers()
    handlers.on(RESERVE)(lambda _message, _connection: "shelf 7")  # type: ignore[arg-type, return-value]
    with psycopg.connect(node.dsn) as connection:
        failures = work(connection, "stock", handlers).failures
    assert {type(failure.error).__name__ for failure in failures} == {"EncodeError"}
    assert answers(node) == []


def test_topic_and_its_name_are_one_pattern() -> None:
    with pytest.raises(ConfigurationError, match="already"):
        typed([]).on("stock.reserve")(lambda _message, _connection: None)
