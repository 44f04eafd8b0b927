"""Requests: a command is sent and its answer waited for, through one durable inbox for all processes of a service."""

import asyncio
import contextlib
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from dispatcher.housekeeping.janitor import Janitor
from inbox import AsyncRequests, ErrorReply, Handlers, Message, NoReply, Reject, Requests, Worker
from inbox.asking.requests import Pending
from mailroom import Topic, carrying, create_inbox
from mailroom.errors import ConfigurationError, InvalidMessage, NotInTransaction, UnknownInbox
from mailroom.schema import migrate
from mailroom.session import settings
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async, url
from tests.support.node import SCHEMA, Node
from tests.support.pgbouncer import pgbouncer
from tests.support.waiting import WITHIN_S, eventually
from tests.support.working import NEVER_S, working

REPLIES = "shop_replies"
CANARY = "canary-51d0"
SOON_S = 0.05  # how long to wait for what does not come
SENT_S = 0.5  # the same, but its INSERT begins by then, unless the machine is busy

pytestmark = [
    pytest.mark.sample(1),
    pytest.mark.inbox("stock", on_failure="skip", max_attempts=1, backoff_s=0),
    pytest.mark.inbox(REPLIES, expire_s=600),
]


@dataclass
class Reserve:
    item: str
    amount: int


@dataclass
class Reserved:
    shelf: int


reserve = Topic("stock", Reserve, replies=Reserved)


def take(message: Message[Reserve], _connection: Any) -> Reserved:
    if message.value.item == CANARY:
        raise Reject({"why": CANARY})
    if message.value.item == "broken":
        raise ValueError(CANARY)
    return Reserved(message.value.amount)


@contextlib.contextmanager
def answering(node: Node, *, poll_interval_s: float = NEVER_S) -> Iterator[None]:
    """Run the service that is asked, and the dispatcher."""
    handlers = Handlers()
    handlers.on(reserve)(take)
    worker = Worker(node.dsn, "stock", handlers, dispatch=True, poll_interval_s=poll_interval_s, handle_signals=False)
    with working(worker):
        yield


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def replies_left(node: Node) -> int:
    return int(node.value(f"SELECT count(*) FROM mailroom.inbox_{REPLIES}"))


def unasked(node: Node) -> Requests:
    """Requests that take replies as soon as a delivery tells, and otherwise never."""
    return Requests(node.dsn, REPLIES, poll_interval_s=NEVER_S)


# -- Asking -----------------------------------------------------------------------------------------------------------


def test_answer_comes_back_typed_and_is_taken(node: Node) -> None:
    with answering(node), unasked(node) as requests:
        assert requests.ask(reserve, Reserve("teapot", 2), timeout_s=WITHIN_S) == Reserved(2)
        assert requests.ask("stock", {"item": "cup", "amount": 3}, timeout_s=WITHIN_S) == {"shelf": 3}
    assert replies_left(node) == 0


@pytest.mark.parametrize(
    ("item", "status", "value"), [(CANARY, 400, {"why": CANARY}), ("broken", 500, {"error": "ValueError"})]
)
def test_another_status_is_refused_and_its_text_does_not_quote_the_value(
    node: Node, item: str, status: int, value: object
) -> None:
    with answering(node, poll_interval_s=0.05), unasked(node) as requests, pytest.raises(ErrorReply) as raised:
        requests.ask(reserve, Reserve(item, 1), timeout_s=WITHIN_S)
    assert (raised.value.status, raised.value.value) == (status, value)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.status, again.value) == (status, value)
    assert CANARY not in f"{raised.value} {raised.value!r}"


def test_request_in_the_callers_transaction_is_answered_after_its_commit(node: Node, connect: Connect) -> None:
    connection = connect()
    with answering(node), unasked(node) as requests:
        pending = requests.send(connection, reserve, Reserve("teapot", 2), key="order-42")
        with pytest.raises(NoReply):
            pending.wait(SOON_S)
        connection.commit()
        assert pending.wait(WITHIN_S) == Reserved(2)
        assert pending.wait(WITHIN_S) == Reserved(2)  # it has it


def test_request_that_is_rolled_back_is_not_sent_and_no_longer_waited_for(node: Node, connect: Connect) -> None:
    connection = connect()
    with unasked(node) as requests:
        pending = requests.send(connection, reserve, Reserve("teapot", 2))
        connection.rollback()
        assert node.waiting() == []
        assert len(requests._replies._keys()) == 1
        del pending
        assert requests._replies._keys() == []


def test_ask_that_comes_to_an_end_waits_no_longer_though_its_exception_is_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Pending._answer
    monkeypatch.setattr(Pending, "_answer", lambda pending, left_s, timeout_s: answer(pending, 0.0, timeout_s))
    with unasked(node) as requests:
        with pytest.raises(NoReply) as kept:  # its traceback refers to the request
            requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S)
        assert (kept.type, requests._replies._keys()) == (NoReply, [])


@pytest.mark.slow
def test_two_hundred_at_once_get_each_its_own_answer_and_make_no_table(node: Node) -> None:
    relations = "SELECT count(*) FROM pg_class"
    with answering(node), unasked(node) as requests, ThreadPoolExecutor(200) as threads:
        before = node.value(relations)
        asked = [threads.submit(requests.ask, reserve, Reserve("cup", nth), timeout_s=WITHIN_S) for nth in range(200)]
        assert [each.result() for each in asked] == [Reserved(nth) for nth in range(200)]
        assert node.value(relations) == before


@pytest.mark.slow
def test_two_instances_on_one_inbox_take_each_their_own(node: Node) -> None:
    with answering(node), unasked(node) as one, unasked(node) as other, ThreadPoolExecutor(20) as threads:
        asked = [
            threads.submit((one, other)[nth % 2].ask, reserve, Reserve("cup", nth), timeout_s=WITHIN_S)
            for nth in range(40)
        ]
        assert [each.result() for each in asked] == [Reserved(nth) for nth in range(40)]
    assert replies_left(node) == 0


ASK_AT_ONCE = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from inbox import Requests
first = int(sys.argv[2])
numbers = range(first, first + 20)
with Requests(sys.argv[1], "{REPLIES}", poll_interval_s={NEVER_S}) as requests, ThreadPoolExecutor(20) as threads:
    asked = [threads.submit(requests.ask, "stock", {{"item": "cup", "amount": each}}, timeout_s=60) for each in numbers]
    assert [each.result() for each in asked] == [{{"shelf": each}} for each in numbers]
"""


@pytest.mark.slow
def test_two_processes_on_one_inbox_take_each_their_own(node: Node) -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(python(ASK_AT_ONCE, node.dsn, str(first))) for first in (100, 200)]
        # Nobody answers before all are asked: so both wait for their replies at the same time.
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.outbox") == 40)
        with answering(node):
            said = [process.communicate(timeout=WITHIN_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert replies_left(node) == 0


# -- What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_late_reply_stays_until_the_janitor_drops_it(node: Node, connect: Connect) -> None:
    with unasked(node) as requests, connect() as connection:
        pending = requests.send(connection, reserve, Reserve(CANARY, 2))
        connection.commit()
        with pytest.raises(NoReply) as raised:
            pending.wait(SOON_S)
        assert isinstance(raised.value, TimeoutError)
        assert CANARY not in str(raised.value)
        del pending, raised  # nobody waits for it any longer
        with answering(node):
            eventually(lambda: replies_left(node) == 1)
            assert requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S) == Reserved(1)
        # Only now it is certain that nobody takes it: what took the other reply has seen this one, too.
        assert replies_left(node) == 1
    node.connection.execute("UPDATE mailroom.inbox SET delivered_at = delivered_at - interval '1 hour'")

    async def sweep() -> None:
        async with await settings.connect_async(node.dsn, "keeper") as connection:
            await Janitor(SCHEMA).run_once(connection)

    asyncio.run(sweep())
    assert replies_left(node) == 0


ASK = f"""
import sys
from inbox import Requests
with Requests(sys.argv[1], "{REPLIES}") as requests:
    requests.ask("stock", {{"item": "cup", "amount": 1}}, timeout_s=600)
"""


@pytest.mark.slow
def test_process_killed_while_it_waits_leaves_its_reply_and_disturbs_nobody(node: Node) -> None:
    with python(ASK, node.dsn) as asking:
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.outbox") == 1)
        asking.send_signal(signal.SIGKILL)
        asking.wait(WITHIN_S)
    with answering(node), unasked(node) as requests:
        assert requests.ask(reserve, Reserve("cup", 7), timeout_s=WITHIN_S) == Reserved(7)
        eventually(lambda: replies_left(node) == 1)


FORK = f"""
import os, sys
from inbox import Requests
from mailroom.errors import ConfigurationError
cup = {{"item": "cup", "amount": 1}}
with Requests(sys.argv[1], "{REPLIES}", poll_interval_s={NEVER_S}, connections=1) as requests:
    def backend():
        with requests._transactions.begin() as connection:
            return connection.info.backend_pid
    before = backend()
    child = os.fork()
    if child == 0:
        try:
            requests.ask("stock", cup, timeout_s=5)
        except ConfigurationError as error:
            assert "after the fork" in str(error)
        else:
            os._exit(3)
    else:
        assert os.waitpid(child, 0)[1] == 0
        assert backend() == before
        assert requests.ask("stock", cup, timeout_s=60) == {{"shelf": 1}}
if child == 0:
    sys.exit(0)
"""


@pytest.mark.slow
def test_forked_process_is_refused_and_leaves_the_other_one_s_sessions_alone(node: Node) -> None:
    with answering(node), python(FORK, node.dsn) as process:
        said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, said


@pytest.mark.slow
def test_session_that_is_lost_is_replaced(node: Node) -> None:
    with answering(node), unasked(node) as requests:
        assert requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S) == Reserved(1)
        node.end_sessions("mailroom requests")
        node.end_sessions("mailroom worker listener shop_replies")
        assert requests.ask(reserve, Reserve("cup", 2), timeout_s=WITHIN_S) == Reserved(2)


def test_connection_lost_at_the_commit_shows_by_the_reply(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(node), unasked(node) as requests:
        sending = requests.send

        def committed_and_lost(connection: Any, *arguments: Any, **fields: Any) -> Any:
            pending = sending(connection, *arguments, **fields)
            connection.commit()
            connection.execute("SELECT")  # so that the pool sends a COMMIT, which fails
            node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [connection.info.backend_pid])
            return pending

        monkeypatch.setattr(requests, "send", committed_and_lost)
        assert requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S) == Reserved(1)


def test_whoever_waits_when_they_are_closed_gets_no_reply(node: Node, connect: Connect) -> None:
    connection = connect()
    with unasked(node) as requests:
        pending = requests.send(connection, reserve, Reserve("cup", 1))
    with pytest.raises(NoReply, match="closed"):
        pending.wait(NEVER_S)
    for outside in (requests, unasked(node)):
        with pytest.raises(ConfigurationError, match="inside of `with Requests"):
            outside.send(connection, reserve, Reserve("cup", 1))
        with pytest.raises(ConfigurationError, match="inside of `with Requests"):
            outside.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S)


def test_inbox_that_would_keep_replies_for_ever_is_refused(node: Node) -> None:
    with pytest.raises(ConfigurationError, match="inbox set stock --expire-s 600"), Requests(node.dsn, "stock"):
        pass
    with pytest.raises(UnknownInbox), Requests(node.dsn, "nowhere"):
        pass


def test_what_cannot_be_sent_is_refused_at_once(node: Node, connect: Connect) -> None:
    with unasked(node) as requests:
        with pytest.raises(InvalidMessage):
            requests.ask("no topic", 1, timeout_s=WITHIN_S)
        with pytest.raises(InvalidMessage, match="text to text"):
            requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S, headers=[("saga", "s")])  # type: ignore[call-overload]
        with pytest.raises(ConfigurationError, match=r"timeout_s must be .* above 0, not 0"):
            requests.ask(reserve, Reserve("cup", 1), timeout_s=0)
        with pytest.raises(NotInTransaction):
            requests.send(connect(autocommit=True), reserve, Reserve("cup", 1))
        assert requests._replies._keys() == []


# -- Over every connection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SYNC)
def test_request_is_sent_over_every_connection(node: Node, kind: str) -> None:
    with unasked(node) as requests, opened(node.dsn, kind) as connection:
        undone = requests.send(connection, reserve, Reserve("cup", 1))
        connection.rollback()
        pending = requests.send(connection, reserve, Reserve("cup", 2), headers={"note": "null"}, key="k")
        connection.commit()
        with answering(node):
            assert pending.wait(WITHIN_S) == Reserved(2)
        with pytest.raises(NoReply):
            undone.wait(SOON_S)


@pytest.mark.parametrize("kind", ASYNC)
async def test_request_is_sent_over_every_async_connection(node: Node, kind: str) -> None:
    async with (
        AsyncRequests(node.dsn, REPLIES, poll_interval_s=NEVER_S) as requests,
        opened_async(node.dsn, kind) as connection,
    ):
        undone = await requests.send(connection, reserve, Reserve("cup", 1))
        await connection.rollback()
        pending = await requests.send(connection, reserve, Reserve("cup", 2), headers={"note": "null"}, key="k")
        await connection.commit()
        with answering(node):
            assert await pending.wait(WITHIN_S) == Reserved(2)
        with pytest.raises(NoReply):
            await undone.wait(SOON_S)


# -- On every source --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def source_of(node: Node, kind: str) -> Iterator[Any]:
    """Give a source with one connection."""
    if kind == "pool":
        with ConnectionPool(node.dsn, min_size=1, max_size=1, kwargs={"autocommit": True}, open=True) as pool:
            yield pool
        return
    name, driver = kind.split()
    engine = sa.create_engine(url(node.dsn, driver), pool_size=1, max_overflow=0)
    try:
        yield engine if name == "Engine" else sessionmaker(engine)
    finally:
        engine.dispose()


@contextlib.asynccontextmanager
async def async_source_of(node: Node, kind: str) -> AsyncIterator[Any]:
    if kind == "pool":
        async with AsyncConnectionPool(node.dsn, min_size=1, max_size=1, open=False) as pool:
            yield pool
        return
    name, driver = kind.split()
    engine = create_async_engine(url(node.dsn, driver), pool_size=1, max_overflow=0)
    try:
        yield engine if name == "AsyncEngine" else async_sessionmaker(engine)
    finally:
        await engine.dispose()


SOURCES = [
    "pool",
    *(f"{kind} {driver}" for kind in ("Engine", "sessionmaker") for driver in ("psycopg", "psycopg2", "pg8000")),
]
ASYNC_SOURCES = [
    "pool",
    *(f"{kind} {driver}" for kind in ("AsyncEngine", "async_sessionmaker") for driver in ("psycopg", "asyncpg")),
]


@pytest.mark.parametrize("kind", SOURCES)
def test_requests_are_asked_on_every_source_which_stays_open(node: Node, kind: str) -> None:
    """One connection of it is enough: what takes replies has a session of its own."""
    with source_of(node, kind) as source, answering(node):
        for nth in range(2):
            with Requests(source, REPLIES, poll_interval_s=NEVER_S) as requests:
                assert requests.ask(reserve, Reserve("cup", nth), timeout_s=WITHIN_S) == Reserved(nth)
                with pytest.raises(ErrorReply):
                    requests.ask(reserve, Reserve(CANARY, 1), timeout_s=WITHIN_S)
    assert replies_left(node) == 0
    assert node.sessions("mailroom requests ask") == []


@pytest.mark.parametrize("kind", ASYNC_SOURCES)
async def test_requests_are_asked_on_every_async_source_which_stays_open(node: Node, kind: str) -> None:
    async with async_source_of(node, kind) as source:
        with answering(node):
            for nth in range(2):
                async with AsyncRequests(source, REPLIES, poll_interval_s=NEVER_S) as requests:
                    asked = [requests.ask(reserve, Reserve("cup", each), timeout_s=WITHIN_S) for each in (nth, nth + 1)]
                    assert await asyncio.gather(*asked) == [Reserved(nth), Reserved(nth + 1)]
    assert replies_left(node) == 0


@pytest.mark.parametrize("kind", ["pool", "Engine psycopg"])
def test_ask_on_a_source_without_a_free_connection_says_that_nothing_was_sent_and_sends_nothing(
    node: Node, kind: str
) -> None:
    with source_of(node, kind) as source, Requests(source, REPLIES) as requests:
        with requests._transactions.begin(), pytest.raises(NoReply, match="was not sent"):
            requests.ask(reserve, Reserve("cup", 1), timeout_s=SOON_S)
        with answering(node):
            assert requests.ask(reserve, Reserve("cup", 2), timeout_s=WITHIN_S) == Reserved(2)
    assert node.value("SELECT last_value FROM mailroom.outbox_position_seq") == 2  # and the answer


async def test_ask_on_an_async_source_without_a_free_connection_says_that_nothing_was_sent(node: Node) -> None:
    async with (
        async_source_of(node, "AsyncEngine psycopg") as source,
        AsyncRequests(source, REPLIES, poll_interval_s=NEVER_S) as requests,
        requests._transactions.begin(),
    ):
        with pytest.raises(NoReply, match="was not sent"):
            await requests.ask(reserve, Reserve("cup", 1), timeout_s=SOON_S)
    assert node.waiting() == []


def test_connection_of_an_engine_that_is_lost_at_the_commit_shows_by_the_reply(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with source_of(node, "Engine psycopg") as source, answering(node), Requests(source, REPLIES) as requests:
        sending = requests.send

        def committed_and_lost(connection: Any, *arguments: Any, **fields: Any) -> Any:
            pending = sending(connection, *arguments, **fields)
            driver = connection.connection.driver_connection
            driver.commit()
            driver.execute("SELECT")  # so that a COMMIT is sent, which fails
            node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [driver.info.backend_pid])
            return pending

        monkeypatch.setattr(requests, "send", committed_and_lost)
        assert requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S) == Reserved(1)


@pytest.mark.parametrize("kind", ["pool", "Engine psycopg"])
def test_source_of_an_inbox_that_would_keep_replies_for_ever_is_refused(node: Node, kind: str) -> None:
    with source_of(node, kind) as source:
        with pytest.raises(ConfigurationError, match="inbox set stock --expire-s 600"), Requests(source, "stock"):
            pass
        with pytest.raises(UnknownInbox), Requests(source, "nowhere"):
            pass


@pytest.mark.slow
def test_own_sessions_that_lead_elsewhere_take_no_replies(node: Node, empty_dsn: str) -> None:
    """With a `listen_dsn` to another database they would wait there for ever, in silence."""
    migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as elsewhere:
        create_inbox(elsewhere, REPLIES, expire_s=600)
    with (
        source_of(node, "pool") as source,
        answering(node),
        Requests(source, REPLIES, listen_dsn=empty_dsn) as requests,
    ):
        with source.connection() as connection, connection.transaction():
            pending = requests.send(connection, reserve, Reserve("cup", 1))
        eventually(lambda: replies_left(node) == 1)
        with pytest.raises(NoReply):
            pending.wait(SOON_S)


def test_what_cannot_be_a_source_is_refused_at_once(node: Node) -> None:
    engine, async_engine = sa.create_engine(url(node.dsn, "psycopg")), create_async_engine(url(node.dsn, "psycopg"))
    wrong: Any
    for wrong in (async_engine, node.connection, 5):
        with pytest.raises(ConfigurationError, match="Requests cannot use a"):
            Requests(wrong, REPLIES)
    for wrong in (engine, node.connection, 5):
        with pytest.raises(ConfigurationError, match="AsyncRequests cannot use a"):
            AsyncRequests(wrong, REPLIES)
    with pytest.raises(ConfigurationError, match="give this source to Requests"):
        AsyncRequests("django:default", REPLIES)


# -- Behind a pooler --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replies_are_polled_for_behind_a_pooler(node: Node, server_home: Path) -> None:
    with (
        pgbouncer(node.dsn, server_home) as url,
        answering(node),
        Requests(url, REPLIES, poll_interval_s=0.05) as requests,
    ):
        for nth in range(3):
            assert requests.ask(reserve, Reserve("cup", nth), timeout_s=WITHIN_S) == Reserved(nth)


def test_with_listen_dsn_replies_are_told_of_behind_a_pooler(node: Node, server_home: Path) -> None:
    with (
        pgbouncer(node.dsn, server_home) as url,
        answering(node),
        Requests(url, REPLIES, poll_interval_s=NEVER_S, listen_dsn=node.dsn) as requests,
    ):
        assert requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S) == Reserved(1)


# -- Async ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_async_requests_do_the_same(node: Node) -> None:
    async with AsyncRequests(node.dsn, REPLIES, poll_interval_s=NEVER_S) as requests:
        with pytest.raises(NoReply):
            await requests.ask(reserve, Reserve("teapot", 2), timeout_s=SOON_S)
        connection = await psycopg.AsyncConnection.connect(node.dsn)
        async with connection:
            pending = await requests.send(connection, reserve, Reserve("cup", 5))
            with pytest.raises(NoReply):
                await pending.wait(SOON_S)
        assert isinstance(pending.id, UUID)
        with answering(node):
            assert await pending.wait(WITHIN_S) == Reserved(5)
            assert await pending.wait(WITHIN_S) == Reserved(5)
            with pytest.raises(ErrorReply) as raised:
                await requests.ask(reserve, Reserve(CANARY, 1), timeout_s=WITHIN_S)
            assert raised.value.status == 400
            asked = [requests.ask(reserve, Reserve("cup", nth), timeout_s=WITHIN_S) for nth in range(50)]
            assert await asyncio.gather(*asked) == [Reserved(nth) for nth in range(50)]


async def test_async_requests_are_refused_outside_of_their_block_and_in_a_forked_process(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = AsyncRequests(node.dsn, REPLIES)
    with pytest.raises(ConfigurationError, match="inside of `with Requests"):
        await requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S)
    async with requests:
        with monkeypatch.context() as patched:
            patched.setattr("os.getpid", lambda: -1)
            with pytest.raises(ConfigurationError, match="after the fork"):
                await requests.ask(reserve, Reserve("cup", 1), timeout_s=WITHIN_S)


async def test_async_waiter_that_is_cancelled_or_closed_ends(node: Node) -> None:
    async with AsyncRequests(node.dsn, REPLIES, poll_interval_s=NEVER_S) as requests:
        connection = await psycopg.AsyncConnection.connect(node.dsn)
        async with connection:
            pending = await requests.send(connection, reserve, Reserve("cup", 5))
        waiting = asyncio.create_task(pending.wait(NEVER_S))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        closed = asyncio.create_task(pending.wait(NEVER_S))
    with pytest.raises(NoReply, match="closed"):
        await closed


# -- No session for it, or not in time --------------------------------------------------------------------------------


async def taking_all(node: Node, sync: bool, ask: Callable[[Any], Any], **options: Any) -> str:
    """Return what `ask` of requests raises."""
    if sync:
        with Requests(node.dsn, REPLIES, **options) as requests:
            with requests._transactions.begin(), pytest.raises(NoReply) as raised:
                await asyncio.to_thread(ask, requests)
            return str(raised.value)
    async with AsyncRequests(node.dsn, REPLIES, **options) as asynchronous:
        async with asynchronous._transactions.begin():
            with pytest.raises(NoReply) as raised:
                await ask(asynchronous)
        return str(raised.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
async def test_ask_without_a_session_ends_at_its_own_time_out_and_says_that_nothing_was_sent(
    node: Node, sync: bool
) -> None:
    said = await taking_all(
        node, sync, lambda requests: requests.ask(reserve, Reserve("cup", 1), timeout_s=SOON_S), connections=1
    )
    assert "was not sent" in said
    assert "connections" in said
    assert node.waiting() == []


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
async def test_ask_that_is_held_up_by_a_lock_ends_at_its_own_time_out(node: Node, connect: Connect, sync: bool) -> None:
    holder = connect()
    holder.execute("LOCK TABLE mailroom.outbox")
    if sync:
        with Requests(node.dsn, REPLIES) as requests:
            with pytest.raises(NoReply) as raised:
                await asyncio.to_thread(requests.ask, reserve, Reserve("cup", 1), timeout_s=SENT_S)
            holder.rollback()
    else:
        async with AsyncRequests(node.dsn, REPLIES) as asynchronous:
            with pytest.raises(NoReply) as raised:
                await asynchronous.ask(reserve, Reserve("cup", 1), timeout_s=SENT_S)
            holder.rollback()
    # Usually it has come as far as to the lock.
    assert "may still be done" in str(raised.value) or node.waiting() == []


def test_ask_carries_what_its_caller_does(node: Node) -> None:
    with unasked(node) as requests, ThreadPoolExecutor() as threads:
        with carrying(user="ada"):
            asked = threads.submit(copy_context().run, requests.ask, reserve, Reserve("cup", 1), timeout_s=WITHIN_S)
        eventually(lambda: node.rows("SELECT headers ->> 'user' FROM mailroom.outbox") == [("ada",)])
        with answering(node):
            assert asked.result() == Reserved(1)
