"""Strangers: roles that may connect, and no more. Whatever locks they take, messages are delivered and handled."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from dispatcher import Dispatcher
from dispatcher.daemon import Executor
from inbox import Inbox, Message, Worker
from mailroom.sql import locks
from outbox import Store
from tests.interleavings.sessions import sessions
from tests.support.databases import Connect
from tests.support.executing import store_of
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import working

TURNS = ("dispatch_turn", "execute_turn")


pytestmark = [pytest.mark.inbox("shipping"), pytest.mark.inbox("ledger", "shipping", order="total")]


@pytest.fixture
def stranger(node: Node) -> Iterator[psycopg.Connection[Any]]:
    """A session of a role without any right at the node."""
    name, password = f"mailroom_test_{secrets.token_hex(8)}", secrets.token_hex(8)
    node.connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'".encode())
    try:
        dsn = make_conninfo(node.dsn, user=name, password=password)
        with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as connection:
            yield connection
        eventually(lambda: not node.value("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", name))
    finally:
        node.connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def key_of(node: Node, table: str) -> int:
    regclass = f"'{SCHEMA}.{table}'::regclass"
    return int(node.value(f"SELECT {locks.key(regclass)}"))


def take_all(node: Node, stranger: psycopg.Connection[Any], *, shared: bool = False) -> None:
    """Lock all that a stranger can name: it may read the oids of tables in the catalog, and guess the rest."""
    tables = ("outbox", "outbox_executable", "inbox_shipping", "inbox_ledger", "transit", *TURNS)
    numbers = range(locks.AWAKE - 10, locks.AWAKE + 20)
    for table in tables:
        key = key_of(node, table)
        for number in numbers:
            stranger.execute(f"SELECT pg_try_advisory_lock{'_shared' * shared}({number}, {key})".encode())


@contextlib.asynccontextmanager
async def running(*lanes: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(lane.run()) for lane in lanes]
    try:
        yield
    finally:
        for lane in lanes:
            lane.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), WITHIN_S)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
async def test_stranger_with_every_advisory_lock_stops_neither_deliveries_nor_executions(
    node: Node, stranger: psycopg.Connection[Any], connect: Connect, shared: bool
) -> None:
    take_all(node, stranger, shared=shared)
    async with running(Dispatcher(node.dsn), Executor(node.dsn)):
        for key in "abc":
            node.send("shipping", key=key)
            with connect() as connection:
                Store().put(connection, key, key.encode())
            await eventually_async(lambda key=key: (key,) in node.delivered("key"))  # type: ignore[misc]
            await eventually_async(lambda key=key: key in store_of(node.connection))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("inbox", ["shipping", "ledger"])
def test_stranger_with_every_advisory_lock_stops_no_worker(
    node: Node, stranger: psycopg.Connection[Any], inbox: str
) -> None:
    take_all(node, stranger)
    handled: list[str] = []

    def handle(message: Message, _: Any) -> None:
        handled.append(message.key)

    # It cannot fall asleep, so nobody notifies it: its poll finds what is there.
    with working(Worker(node.dsn, inbox, handle, poll_interval_s=0.1)):
        for key in "abc":
            node.send("shipping", key=key)
            node.deliver_all()
            eventually(lambda key=key: key in handled, WITHIN_S)  # type: ignore[misc]


def test_stranger_with_every_advisory_lock_stops_no_claim_by_hand(
    node: Node, stranger: psycopg.Connection[Any], connect: Connect
) -> None:
    take_all(node, stranger)
    node.send("shipping", key="a")
    node.deliver_all()
    assert [each.key for each in Inbox("ledger").reap_any(connect())] == ["a"]


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("right", [None, "SELECT", "INSERT", "REFERENCES"])
def test_turn_can_be_locked_only_with_a_right_to_it(
    node: Node, stranger: psycopg.Connection[Any], turn: str, right: str | None
) -> None:
    name = stranger.info.user
    node.connection.execute(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {name}".encode())
    if right is not None:
        node.connection.execute(f"GRANT {right} ON {SCHEMA}.{turn} TO {name}".encode())
    stranger.autocommit = False
    for statement in (
        f"LOCK TABLE {SCHEMA}.{turn} IN SHARE UPDATE EXCLUSIVE MODE",
        f"LOCK TABLE {SCHEMA}.{turn} IN ACCESS EXCLUSIVE MODE",
        f"SELECT {SCHEMA}.take_{turn}()",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stranger.execute(statement.encode())
        stranger.rollback()
    if right in ("SELECT", "INSERT"):
        # What they may lock is in nobody's way.
        stranger.execute(
            f"LOCK TABLE {SCHEMA}.{turn} IN {'ACCESS SHARE' if right == 'SELECT' else 'ROW EXCLUSIVE'} MODE".encode()
        )
        node.connection.execute(f"SET lock_timeout = '5s'; SELECT {SCHEMA}.take_{turn}()".encode())
        stranger.rollback()


@pytest.mark.parametrize("turn", TURNS)
def test_one_delivers_at_a_time_beside_a_stranger(node: Node, stranger: psycopg.Connection[Any], turn: str) -> None:
    take_all(node, stranger)
    taking = f"SELECT {SCHEMA}.take_{turn}()".encode()
    with sessions(node.dsn, node.connection, "first", "second") as opened:
        assert opened["first"].start(lambda connection: connection.execute(taking))
        assert not opened["second"].start(lambda connection: connection.execute(taking))
        opened["first"].start(lambda connection: connection.commit())
        eventually(opened["second"].settled)
