"""Carried headers: from the message in hand onto all that is sent while it is handled, and onto nothing else."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest

from inbox import AsyncWorker, Inbox, Message, Worker
from mailroom import carrying, testing
from mailroom.errors import InvalidMessage
from mailroom.message.carry import MAX_CARRIED_BYTES, NAMES, headers_json
from mailroom.values.names import MAX_HEADERS_BYTES
from outbox import AsyncOutbox, AsyncStore, Executable, Outbox, Outgoing, Store
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.listed import listed
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import NEVER_S, working, working_async

pytestmark = [
    pytest.mark.inbox("shipping", "order.paid"), pytest.mark.inbox("billing"), pytest.mark.inbox("answers", "answers")
]  # fmt: skip

OUTBOX, STORE = Outbox(), Store()
CARRIED = {name: f"{name} €" for name in NAMES}
SECRET = "4711-secret"


@pytest.fixture
def connection(node: Node, connect: Connect) -> Iterator[psycopg.Connection[Any]]:
    """The test's own transaction, rolled back at its end."""
    with connect() as connection, connection.transaction(force_rollback=True):
        yield connection


def now() -> dict[str, str]:
    """Return the headers of a message that would be sent now without any."""
    found: dict[str, str] = json.loads(headers_json(None) or "{}")
    return found


def sent(connection: psycopg.Connection[Any], topic: str = "answers") -> list[dict[str, str]]:
    return [dict(each.headers) for each in testing.sent(connection, topic)]


# -- What is carried ---------------------------------------------------------------------------------------------------


def test_carried_headers_are_those_of_the_contract() -> None:
    assert " ".join(NAMES) == "saga user tenant transactions related_services traceparent tracestate baggage"


def send_everything(message: Message, connection: Any) -> None:
    OUTBOX.send(connection, "answers", 1)
    OUTBOX.send(connection, "answers", 1, once=str(message and message.id))
    OUTBOX.publish(connection, "answers", 1)
    OUTBOX.command(connection, "answers", 1)
    OUTBOX.send_many(connection, [Outgoing("answers", 1), Outgoing("answers", 1)])
    STORE.put(connection, "k", b"v")
    STORE.send_many(connection, [Executable("delete", "k")])


async def send_everything_async(message: Message, connection: Any) -> None:
    outbox, store = AsyncOutbox(), AsyncStore()
    await outbox.send(connection, "answers", 1)
    await outbox.send(connection, "answers", 1, once=str(message.id))
    await outbox.publish(connection, "answers", 1)
    await outbox.command(connection, "answers", 1)
    await outbox.send_many(connection, [Outgoing("answers", 1), Outgoing("answers", 1)])
    await store.put(connection, "k", b"v")
    await store.send_many(connection, [Executable("delete", "k")])


Run = Callable[[Any, str, Callable[[Message, Any], None]], object]
RunAsync = Callable[[Any, str, Callable[[Message, Any], Awaitable[object]]], Awaitable[object]]


def everything_sent(node: Node) -> list[dict[str, str]]:
    """Take what `send_everything` sent, six messages, delivered or not, and two executables; return their headers."""
    tables = [
        f"WITH taken AS (DELETE FROM mailroom.{table} RETURNING headers) SELECT headers FROM taken"
        for table in ("outbox", "inbox", "outbox_executable")
    ]
    waiting, delivered, executables = map(node.rows, tables)
    messages = waiting + delivered
    assert (len(messages), len(executables)) == (6, 2)
    return [headers for (headers,) in messages + executables]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_everything_that_a_handler_sends_carries_its_message_s_headers(node: Node, kind: str) -> None:
    runs: list[Run] = [testing.work, testing.handle_all]
    for run in runs:
        message_id = node.send("shipping", headers={**CARRIED, "other": "o", "correlation": "c", "schema": "2"})
        with opened(node.dsn, kind) as connection:
            run(connection, "shipping", send_everything)
            assert now() == {}
            connection.commit()
        assert everything_sent(node) == [{**CARRIED, "causation": str(message_id)}] * 8


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_everything_that_an_async_handler_sends_carries_its_message_s_headers(node: Node, kind: str) -> None:
    runs: list[RunAsync] = [testing.work_async, testing.handle_all_async]
    for run in runs:
        message_id = node.send("shipping", headers={**CARRIED, "other": "o", "correlation": "c", "schema": "2"})
        async with opened_async(node.dsn, kind) as connection:
            await run(connection, "shipping", send_everything_async)
            assert now() == {}
            await connection.commit()
        assert everything_sent(node) == [{**CARRIED, "causation": str(message_id)}] * 8


def test_what_a_worker_s_handler_sends_carries_its_message_s_headers(node: Node) -> None:
    message_id = node.send("shipping", headers=CARRIED)
    node.deliver_all()
    with working(Worker(node.dsn, "shipping", send_everything, poll_interval_s=NEVER_S)):
        eventually(lambda: node.waiting())
    assert everything_sent(node) == [{**CARRIED, "causation": str(message_id)}] * 8


async def test_what_an_async_worker_s_handler_sends_carries_its_message_s_headers(node: Node) -> None:
    message_id = node.send("shipping", headers=CARRIED)
    node.deliver_all()
    async with working_async(AsyncWorker(node.dsn, "shipping", send_everything_async, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: node.waiting())
    assert everything_sent(node) == [{**CARRIED, "causation": str(message_id)}] * 8


def test_outside_of_a_handler_nothing_is_carried(connection: psycopg.Connection[Any]) -> None:
    send_everything(None, connection)  # type: ignore[arg-type]  # it does not look at it
    assert sent(connection) == [{}] * 6
    assert connection.execute("SELECT headers FROM mailroom.outbox_executable").fetchall() == [(None,)] * 2


def test_what_follows_from_what_follows_has_them_too_and_names_its_own_cause(
    connection: psycopg.Connection[Any],
) -> None:
    with carrying(saga="s"):
        first = OUTBOX.send(connection, "shipping", 1)
    second: list[UUID] = []
    testing.handle_all(connection, "shipping", lambda _, conn: second.append(OUTBOX.send(conn, "billing", 1)))
    testing.handle_all(connection, "billing", lambda _, conn: OUTBOX.send(conn, "answers", 1))
    testing.deliver(connection)
    [third] = Inbox("answers").reap_any(connection)
    assert dict(third.headers) == {"causation": str(second[0]), "saga": "s"}
    assert first != second[0]


def test_headers_are_read_when_a_message_is_sent_and_not_when_it_is_made(
    connection: psycopg.Connection[Any],
) -> None:
    made = Outgoing("answers", "made before")
    later: list[Outgoing] = []
    message_id = OUTBOX.send(connection, "shipping", 1, headers={"saga": "s"})

    def handle(_message: Message, conn: Any) -> None:
        OUTBOX.send_many(conn, [made])
        later.append(Outgoing("late", "made in the handler"))

    testing.work(connection, "shipping", handle)
    OUTBOX.send_many(connection, later)
    [answer] = Inbox("answers").reap_any(connection)
    assert dict(answer.headers) == {"causation": str(message_id), "saga": "s"}
    assert sent(connection, "late") == [{}]


# -- What wins ---------------------------------------------------------------------------------------------------------


def test_given_headers_win_over_carrying_and_that_over_the_message_s(connection: psycopg.Connection[Any]) -> None:
    message_id = OUTBOX.send(connection, "shipping", 1, headers=dict.fromkeys(("saga", "user", "tenant"), "message"))
    found: list[list[dict[str, str]]] = []

    def handle(_message: Message, conn: Any) -> None:
        with carrying(saga="outer", user="outer", baggage="outer"):
            with carrying(user="inner"):
                OUTBOX.send(conn, "answers", 1, headers={"saga": "given", "own": "o"})
                OUTBOX.send(conn, "answers", 1, headers={"causation": "given"})
            OUTBOX.send(conn, "answers", 1)
        OUTBOX.send(conn, "answers", 1)
        found.append(sent(conn))

    testing.work(connection, "shipping", handle)
    cause = {"causation": str(message_id)}
    outer = {"saga": "outer", "user": "outer", "tenant": "message", "baggage": "outer"}
    assert found == [
        [
            {**cause, **outer, "saga": "given", "user": "inner", "own": "o"},
            {**outer, "user": "inner", "causation": "given"},
            {**cause, **outer},
            {**cause, "saga": "message", "user": "message", "tenant": "message"},
        ]
    ]


def test_handler_begins_with_its_message_alone_whatever_is_carried_around_it(
    connection: psycopg.Connection[Any],
) -> None:
    with carrying(user="ada"):
        message_id = OUTBOX.send(connection, "shipping", 1)
    found: list[dict[str, str]] = []
    with carrying(user="of the test", saga="of the test"):
        testing.work(connection, "shipping", lambda *_: found.append(now()))
        assert now() == {"user": "of the test", "saga": "of the test"}
    assert found == [{"causation": str(message_id), "user": "ada"}]


def test_reply_carries_on_the_headers_of_its_request_whichever_message_is_in_hand(
    connection: psycopg.Connection[Any],
) -> None:
    asked = OUTBOX.command(connection, "billing", 1, reply_to="answers", headers={"saga": "asked", "own": "o"})
    testing.deliver(connection)
    [request] = Inbox("billing").reap_any(connection)
    OUTBOX.send(connection, "shipping", 1, headers={"saga": "in hand", "user": "in hand"})
    found: list[list[dict[str, str]]] = []

    def handle(_message: Message, conn: Any) -> None:
        OUTBOX.reply(conn, request, 1)
        with carrying(tenant="t"):
            OUTBOX.reply(conn, request, 1, status=400, headers={"saga": "given", "correlation": "not this"})
        found.append(sent(conn))

    testing.work(connection, "shipping", handle)
    answer = {"correlation": str(asked), "causation": str(asked), "status": "200", "saga": "asked"}
    assert found == [[answer, {**answer, "status": "400", "saga": "given", "tenant": "t"}]]


class Asked(NamedTuple):
    """A request as a service has kept it."""

    id: UUID
    key: str
    headers: Any


def test_reply_to_a_request_of_one_s_own_making_is_checked_as_given_headers_are(
    connection: psycopg.Connection[Any],
) -> None:
    asked = Asked(UUID(int=1), "k", {"reply_to": "answers", "saga": "s", "own": 1})
    OUTBOX.reply(connection, asked, 1)
    with pytest.raises(InvalidMessage, match="Header 'saga' is not text to text"):
        OUTBOX.reply(connection, asked._replace(headers={"reply_to": "answers", "saga": 1}), 1)
    [headers] = sent(connection)
    assert headers == {"correlation": str(asked.id), "causation": str(asked.id), "status": "200", "saga": "s"}


# -- Nothing leaks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 10])
def test_handler_that_fails_or_never_leaves_carrying_leaves_nothing_to_the_next_one(node: Node, batch: int) -> None:
    found: dict[str, dict[str, str]] = {}

    def handle(message: Message, _connection: Any) -> None:
        found[message.key] = now()
        carrying(user="left behind").__enter__()
        if message.key == "fails":
            raise ValueError

    ids = {key: node.send("shipping", key=key, headers={"saga": key}) for key in ("a", "fails", "b")}
    ids["c"] = node.send("shipping", key="c")
    node.deliver_all()
    with working(Worker(node.dsn, "shipping", handle, batch=batch, poll_interval_s=NEVER_S)):
        eventually(lambda: len(found) == 4 and not node.delivered()[1:])
    assert found == {
        **{key: {"causation": str(ids[key]), "saga": key} for key in ("a", "fails", "b")},
        "c": {"causation": str(ids["c"])},
    }


def test_carrying_may_be_entered_again() -> None:
    ada = carrying(user="ada")
    for _ in range(2):
        with ada:
            with carrying(user="bob"), ada:
                assert now() == {"user": "ada"}
            assert now() == {"user": "ada"}
        assert now() == {}


async def test_tasks_may_share_what_they_carry() -> None:
    ada, inside = carrying(user="ada"), asyncio.Barrier(2)

    async def carry() -> dict[str, str]:
        with ada:
            await inside.wait()
            assert now() == {"user": "ada"}
        return now()

    assert list(await asyncio.gather(carry(), carry())) == [{}, {}]


def test_carrying_that_is_left_after_its_handler_brings_nothing_back(connection: psycopg.Connection[Any]) -> None:
    """A generator may be closed at any time, and in the middle of another handler."""

    def open_block() -> Generator[None]:
        with carrying(user="ada"):
            yield

    blocks: list[Generator[None]] = []

    def handle(message: Message, _connection: Any) -> None:
        if blocks:
            blocks[0].close()
        else:
            blocks.append(open_block())
            next(blocks[0])
        seen.append((now().get("causation") == str(message.id), now().get("user")))

    seen: list[tuple[bool, str | None]] = []
    for nth in range(2):
        OUTBOX.send(connection, "shipping", nth)
    assert testing.handle_all(connection, "shipping", handle) == 2
    assert seen == [(True, "ada"), (True, None)]


def test_nothing_of_a_handler_is_left_when_it_has_ended(connection: psycopg.Connection[Any]) -> None:
    def handle(message: Message, _connection: Any) -> None:
        carrying(user="left behind").__enter__()
        if message.key == "fails":
            raise ValueError

    for key in ("a", "fails"):
        OUTBOX.send(connection, "shipping", 1, key=key, headers={"saga": "s"})
    worked = testing.work(connection, "shipping", handle)
    assert (len(worked.handled), len(worked.failures)) == (1, 1)
    assert now() == {}
    OUTBOX.send(connection, "billing", 1, key="fails")
    with pytest.raises(ValueError):
        testing.handle_all(connection, "billing", handle)
    assert now() == {}


def test_loops_of_a_worker_carry_each_its_own_message_s(node: Node) -> None:
    together, found = threading.Barrier(2, timeout=WITHIN_S), {}

    def handle(message: Message, _connection: Any) -> None:
        with carrying(user=message.key):
            together.wait()
            found[message.key] = now()
            together.wait()

    ids = {key: node.send("shipping", key=key, headers={"saga": key}) for key in ("a", "b")}
    node.deliver_all()
    with working(Worker(node.dsn, "shipping", handle, parallel=2, batch=1, poll_interval_s=NEVER_S)):
        eventually(lambda: len(found) == 2 and not node.delivered())
    assert found == {key: {"causation": str(ids[key]), "saga": key, "user": key} for key in ids}


async def test_loops_of_an_async_worker_carry_each_its_own_message_s(node: Node) -> None:
    # All of them are in one thread, and take turns while their messages are in hand.
    arrived: list[str] = []
    found: dict[str, dict[str, str]] = {}

    async def handle(message: Message, _connection: Any) -> None:
        with carrying(user=message.key):
            arrived.append(message.key)
            await eventually_async(lambda: len(arrived) >= 2)
            found[message.key] = now()
            await eventually_async(lambda: len(found) == 2)

    ids = {key: node.send("shipping", key=key, headers={"saga": key}) for key in ("a", "b")}
    node.deliver_all()
    async with working_async(AsyncWorker(node.dsn, "shipping", handle, parallel=2, batch=1, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: len(found) == 2 and not node.delivered())
    assert found == {key: {"causation": str(ids[key]), "saga": key, "user": key} for key in ids}


async def test_tasks_and_to_thread_inherit_the_message_and_executors_do_not(node: Node) -> None:
    found: dict[str, dict[str, str]] = {}
    late: list[asyncio.Task[dict[str, str]]] = []
    ended = asyncio.Event()

    async def look() -> dict[str, str]:
        return now()

    async def look_later() -> dict[str, str]:
        await ended.wait()
        return now()

    async def handle(message: Message, _connection: Any) -> None:
        loop = asyncio.get_running_loop()
        with carrying(user="ada"):
            found["task"] = await asyncio.create_task(look())
            found["to_thread"] = await asyncio.to_thread(now)
            found["executor"] = await loop.run_in_executor(None, now)
            found["executor, told"] = await loop.run_in_executor(None, copy_context().run, now)
            late.append(asyncio.create_task(look_later()))

    message_id = node.send("shipping", headers={"saga": "s"})
    async with opened_async(node.dsn, "psycopg") as connection:
        await testing.work_async(connection, "shipping", handle)
    ended.set()
    found["task that outlives the handler"] = await late[0]
    inherited = {"causation": str(message_id), "saga": "s", "user": "ada"}
    assert found == {
        **dict.fromkeys(("task", "to_thread", "executor, told", "task that outlives the handler"), inherited),
        "executor": {},
    }
    assert now() == {}


def test_threads_of_one_s_own_inherit_nothing_unless_they_are_told(connection: psycopg.Connection[Any]) -> None:
    found: list[dict[str, str]] = []

    def handle(_message: Message, _connection: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(now).result())
            found.append(pool.submit(copy_context().run, now).result())

    message_id = OUTBOX.send(connection, "shipping", 1, headers={"saga": "s"})
    testing.work(connection, "shipping", handle)
    assert found == [{}, {"causation": str(message_id), "saga": "s"}]


# -- How much ----------------------------------------------------------------------------------------------------------


def test_of_too_much_goes_what_fits_in_order_and_the_rest_is_logged_by_name_once(
    connection: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"saga": "s" * 3_000, "user": SECRET * 100, "tenant": "t", "traceparent": SECRET * 100, "baggage": "b"}
    headers["baggage"] = "b" * (MAX_HEADERS_BYTES - len(json.dumps(headers)) + 1)
    message_id = OUTBOX.send(connection, "shipping", 1, headers=headers)
    found: list[dict[str, str]] = []

    def handle(_message: Message, conn: Any) -> None:
        send_everything(_message, conn)
        found.extend(sent(conn))

    with caplog.at_level(logging.WARNING, "mailroom.carry"):
        assert testing.work(connection, "shipping", handle).failures == []
    fits = {"causation": str(message_id), "saga": "s" * 3_000, "tenant": "t"}
    assert found == [fits] * 6
    [record] = caplog.records
    assert (str(message_id) in record.getMessage(), SECRET in record.getMessage()) == (True, False)
    assert "its headers user, traceparent, baggage, which" in record.getMessage()


def test_just_4_kib_are_carried_and_a_byte_more_is_not(connection: psycopg.Connection[Any]) -> None:
    just = "s" * (MAX_CARRIED_BYTES - len('{"saga": ""}'))
    for saga in (just, just + "s"):
        OUTBOX.send(connection, "shipping", 1, key="k", headers={"saga": saga})
    found: list[str | None] = []
    testing.work(connection, "shipping", lambda *_: found.append(now().get("saga")))
    assert found == [just, None]
    with carrying(saga=just):
        assert now() == {"saga": just}
    with pytest.raises(InvalidMessage, match="4097 bytes as JSON; 4096"), carrying(saga=just + "s"):
        pass
    with carrying(saga=just[20:]), pytest.raises(InvalidMessage, match="4096 are allowed"), carrying(user="ada" * 9):
        pass
    assert now() == {}


@pytest.mark.parametrize("own", [8_000, 8_140, MAX_HEADERS_BYTES - len('{"own": ""}')])
def test_no_handler_fails_by_what_it_was_sent_however_much_it_gives_itself(
    connection: psycopg.Connection[Any], own: int
) -> None:
    message_id = OUTBOX.send(connection, "shipping", 1, headers={"saga": "s" * 3_000, "user": "ada"})
    found: list[dict[str, str]] = []

    def handle(_message: Message, conn: Any) -> None:
        OUTBOX.send(conn, "answers", 1, headers={"own": "o" * own})
        STORE.delete(conn, "k", headers={"own": "o" * own})
        found.extend(sent(conn))

    assert testing.work(connection, "shipping", handle).failures == []
    [headers] = found
    assert headers.pop("own") == "o" * own
    assert headers == {
        8_000: {"causation": str(message_id), "user": "ada"},
        8_140: {"user": "ada"},
    }.get(own, {})


def test_own_headers_over_the_limit_are_refused_in_a_handler_too(connection: psycopg.Connection[Any]) -> None:
    OUTBOX.send(connection, "shipping", 1, headers={"saga": "s"})
    bad: list[Any] = [{"own": "o" * 8_182}, {"own": 1}, {1: "own"}, [("own", "o")], {"own": "\0"}, {"own": "\ud800"}]

    def handle(_message: Message, conn: Any) -> None:
        for headers in bad:
            with pytest.raises(InvalidMessage):
                OUTBOX.send(conn, "answers", 1, headers=headers)
        assert sent(conn) == []

    assert testing.work(connection, "shipping", handle).failures == []


@listed(
    ("headers", "told"),
    [
        ({"sage": "s"}, "Header 'sage' is not carried; these are: saga, user, .* as one of its headers"),
        ({"reply_to": "answers"}, "Header 'reply_to' is not carried"),
        ({"causation": "c"}, "Header 'causation' is not carried"),
        ({"saga": UUID(int=1)}, "Header 'saga' is not text to text"),
        ({"saga": None}, "Header 'saga' is not text to text"),
        ({"user": "\0"}, "NUL"),
        ({"user": "\ud800"}, "not valid Unicode"),
    ],
)
def test_what_cannot_be_carried_is_refused(headers: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidMessage, match=told):
        carrying(**headers)
    assert now() == {}
