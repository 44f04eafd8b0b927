"""A server whose table of locks is full: that is what is said, and everything goes on once there is room."""

import asyncio
import contextlib
from collections.abc import Iterator

import psycopg
import pytest

from dispatcher import Dispatcher, deliver_all
from mailroom import create_inbox
from mailroom.embedded import Server
from mailroom.errors import ConnectionFailed, SchemaError
from mailroom.schema import migrate
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually_async

pytestmark = pytest.mark.both_versions

INBOXES = 40


@pytest.fixture
def node(private_server: Server) -> Iterator[Node]:
    """Forty inboxes on `news`."""
    dsn = private_server.dsn("postgres")
    with psycopg.connect(dsn, autocommit=True) as connection:
        with connection.transaction():
            migrate(connection)
        for nth in range(INBOXES):
            with connection.transaction():
                create_inbox(connection, f"i{nth}", ["news"])
        yield Node(dsn, connection)


@contextlib.contextmanager
def full(node: Node, *, but: int = 40) -> Iterator[None]:
    """Fill the server's table of locks, but for this many."""
    with psycopg.connect(node.dsn, autocommit=True) as hoarder:
        with pytest.raises(psycopg.errors.OutOfMemory):
            hoarder.execute("SELECT pg_advisory_lock(nth) FROM generate_series(1, 1000000) AS nth")
        hoarder.execute("SELECT pg_advisory_unlock(nth) FROM generate_series(1, %s) AS nth", [but])
        yield
        hoarder.execute("SELECT pg_advisory_unlock_all()")


@pytest.mark.slow
def test_drain_says_what_the_server_lacks(node: Node) -> None:
    node.send("news", key="k")
    with full(node):
        with pytest.raises(ConnectionFailed, match=r"The server refused: out of shared memory \(53200\)") as raised:
            deliver_all(node.dsn)
        assert "max_locks_per_transaction" in str(raised.value)
        assert "Cannot connect" not in str(raised.value)
    assert deliver_all(node.dsn).delivered == INBOXES


@pytest.mark.slow
def test_too_many_new_inboxes_in_one_transaction_are_refused_with_what_to_do(node: Node) -> None:
    names = [f"n{nth}" for nth in range(20)]
    with full(node, but=60):
        with pytest.raises(SchemaError, match="no room for the locks of 20 new inboxes"), node.connection.transaction():
            create_inbox(node.connection, names)
        with node.connection.transaction():
            create_inbox(node.connection, names[:2])
    with node.connection.transaction():
        create_inbox(node.connection, names)


@pytest.mark.slow
async def test_dispatcher_says_what_the_server_lacks_and_goes_on(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher(node.dsn, poll_interval_s=0.2)
    task = asyncio.create_task(dispatcher.run())
    try:
        await eventually_async(lambda: dispatcher._has_begun, WITHIN_S)
        with full(node):
            node.connection.execute("SET mailroom.notify = off")
            node.send("news", key="k")
            await eventually_async(lambda: "out of shared memory (53200)" in caplog.text, WITHIN_S)
        await eventually_async(lambda: len(node.delivered()) == INBOXES, WITHIN_S)
    finally:
        dispatcher.stop()
        await asyncio.wait_for(task, WITHIN_S)
    assert "lost the database connection (OutOfMemory)" not in caplog.text
