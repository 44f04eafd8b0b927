"""Our connections: each finds out that it is of no use any more, and none of them holds anybody up."""

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

from dispatcher import Dispatcher, daemon
from dispatcher.lanes import leading
from inbox import AsyncInbox, Inbox, Worker
from inbox.sessions.unawaited import Unawaited
from inbox.sessions.wakeup import InboxListener
from mailroom import create_inbox
from mailroom.embedded import Binaries, Server
from mailroom.errors import ConnectionFailed
from mailroom.schema import migrate
from mailroom.session import backoff, settings
from mailroom.session import listener as listening
from mailroom.session.listener import Listener
from mailroom.session.repeats import Repeats
from mailroom.sql import locks
from mailroom.sql.operation import Sql
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.proxy import proxied
from tests.support.standby import standby_of
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import LEDGER, NEVER_S, ledger_keys, working, write_ledger

pytestmark = pytest.mark.inbox("shipping")

POLL_S = 0.05


@contextlib.asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncIterator[None]:
    task = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        dispatcher.stop()
        await asyncio.wait_for(task, WITHIN_S)


@contextlib.asynccontextmanager
async def ringing(listener: Listener) -> AsyncIterator[None]:
    task = asyncio.create_task(listener.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def is_delivered(node: Node, key: str) -> bool:
    return (key,) in node.delivered("key")


def warnings_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == logger and record.levelname == "WARNING"]


# -- Settings ---------------------------------------------------------------------------------------------------------


async def test_each_session_of_ours_has_its_settings(dsn: str) -> None:
    for session in (
        settings.SESSION, settings.UNATTENDED, leading.LANE, leading.KEEPER, daemon.DRAIN, daemon.EXECUTOR,
        listening.LISTENER_SESSION,
    ):  # fmt: skip
        async with await settings.connect_async(dsn, "test", session) as connection:
            for name, value in {**session, **settings.PEER}.items():
                # Set once more, it is as it was: units and all.
                both = "SELECT current_setting(%s), set_config(%s, %s, false)"
                found = await (await connection.execute(both, [name, name, value])).fetchone()
                assert found is not None
                assert found[0] == found[1], name
            assert session["search_path"] == "pg_catalog,pg_temp"


def test_worker_s_session_keeps_the_user_s_settings_and_notices_a_peer_that_is_gone(node: Node) -> None:
    node.connection.execute("CREATE TABLE found (name text, value text)")

    def tells(message: Any, connection: Any) -> None:
        for name in ("search_path", "statement_timeout", "idle_in_transaction_session_timeout", "tcp_keepalives_idle"):
            connection.execute("INSERT INTO public.found VALUES (%s, current_setting(%s))", [name, name])

    dsn = make_conninfo(node.dsn, options="-c statement_timeout=7s -c search_path=theirs")
    node.send("shipping")
    node.deliver_all()
    with working(Worker(dsn, "shipping", tells)):
        eventually(lambda: node.rows("SELECT FROM found"))
    assert dict(node.rows("SELECT name, value FROM found")) == {
        "search_path": "theirs",
        "statement_timeout": "7s",
        "idle_in_transaction_session_timeout": "0",
        "tcp_keepalives_idle": "10",
    }


@pytest.mark.parametrize("flavour", ["sync", "async"])
async def test_session_after_a_claim_is_one_that_the_server_ends_when_it_idles_too_long(
    node: Node, flavour: str
) -> None:
    """A paused consumer gives its key up, if its session says when. The server counts while it says "idle"."""
    node.send("shipping", key="k")
    node.deliver_all()
    dsn = make_conninfo(node.dsn, options="-c idle_in_transaction_session_timeout=1h")
    show = "SHOW idle_in_transaction_session_timeout"
    with contextlib.ExitStack() as closing:
        if flavour == "sync":
            connection = closing.enter_context(contextlib.closing(psycopg.connect(dsn)))
            assert Inbox("shipping").reap(connection, key="k")
            idles = is_idle(node, connection.info.backend_pid)
            allowed = connection.execute(show).fetchone()
        else:
            asynchronous = await psycopg.AsyncConnection.connect(dsn)
            assert await AsyncInbox("shipping").reap(asynchronous, key="k")
            idles = is_idle(node, asynchronous.info.backend_pid)
            allowed = await (await asynchronous.execute(show)).fetchone()
            await asynchronous.close()
    assert (idles, allowed) == (True, ("1h",))


def is_idle(node: Node, pid: int) -> bool:
    return node.rows("SELECT state FROM pg_stat_activity WHERE pid = %s", pid) == [("idle in transaction",)]


# -- The queue of notifications ---------------------------------------------------------------------------------------


@pytest.fixture
def clogged(node: Node, connect: Connect) -> Iterator[None]:
    """Four pages of notifications that a stranger's session, listening within a transaction, does not take."""
    stranger = connect(autocommit=True)
    stranger.execute("LISTEN strange")
    with stranger.transaction():
        stranger.execute("SELECT 1")
        for _ in range(5):
            node.connection.execute("SELECT pg_notify('strange', repeat('x', 7000))")
        yield


@pytest.mark.usefixtures("clogged")
async def test_queue_of_notifications_that_fills_up_is_warned_of(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    duty = mock.Mock()
    async with await settings.connect_async(dsn, "test", leading.KEEPER) as keeper:
        for warn_at, warnings in ((0.10, 0), (1e-6, 1)):
            monkeypatch.setattr(leading, "WARN_AT", warn_at)
            await Dispatcher(dsn)._check_queue(keeper, duty)
            assert len(warnings_of(caplog, "mailroom.dispatcher")) == warnings
    assert "notification queue is 0 % full" in caplog.text
    duty.listen_anew.assert_not_called()


@pytest.mark.usefixtures("clogged")
async def test_dispatcher_drops_its_own_listener_when_the_queue_fills_up_further(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "CHECK_INTERVAL_S", 0.1)
    async with running(Dispatcher(node.dsn, poll_interval_s=NEVER_S)):
        [listener] = await eventually_async(lambda: node.sessions("mailroom dispatcher listener"))
        monkeypatch.setattr(leading, "WARN_AT", 1e-6)
        monkeypatch.setattr(leading, "DROP_AT", 1e-6)
        await eventually_async(lambda: listener not in node.sessions("mailroom dispatcher listener"))
        monkeypatch.setattr(leading, "DROP_AT", 1)
        await eventually_async(lambda: node.sessions("mailroom dispatcher listener"))
        node.send("shipping", key="k")
        await eventually_async(lambda: is_delivered(node, "k"))


# -- Listening --------------------------------------------------------------------------------------------------------


async def test_listen_that_fails_leaves_polling_and_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(listening, "LISTEN", psycopg.sql.SQL("LISTEN {} could not access status of transaction"))
        async with running(Dispatcher(node.dsn, poll_interval_s=POLL_S)):
            for key in "abc":
                node.send("shipping", key=key)
                await eventually_async(partial(is_delivered, node, key))
            await eventually_async(lambda: warnings_of(caplog, "mailroom.session.listener"))
            broken.undo()
            await eventually_async(lambda: listens(node))
    assert "not listening, polling meanwhile (SyntaxError)" in caplog.text


def listens(node: Node) -> bool:
    [*found] = node.rows(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query ^@ 'LISTEN' AND query !~ 'access'"
    )
    return bool(found)


async def test_session_that_has_ceased_to_listen_is_replaced(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEARTBEAT_S", 0.1)
    listener = Listener(node.dsn, SCHEMA, "outbox", "test listener")
    async with ringing(listener):
        [first] = await eventually_async(lambda: node.sessions("mailroom test listener"))
        await eventually_async(lambda: listener._connection)
        assert listener._connection is not None
        await listener._connection.execute("UNLISTEN *")
        await eventually_async(lambda: node.sessions("mailroom test listener") not in ([], [first]))
        ring = listener.next_ring()
        channel = locks.channel("'mailroom.outbox'::regclass")
        node.connection.execute(f"SELECT pg_notify({channel}, '')".encode())
        await asyncio.wait_for(ring.wait(), WITHIN_S)


@pytest.mark.slow
async def test_worker_s_bell_finds_a_black_hole_also_while_all_lanes_work(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "ANSWER_S", 1.0)
    monkeypatch.setattr("inbox.sessions.wakeup.HEARTBEAT_S", 0.1)
    with proxied(node.dsn) as (network, dsn):
        async with ringing(InboxListener(dsn, SCHEMA, "shipping")):
            # A beat is bounded; the LISTEN before it is only by what TCP notices, which a proxy hides.
            await eventually_async(lambda: node.sessions("mailroom worker listener", "query ~ 'listening_channels'"))
            [first] = node.sessions("mailroom worker listener shipping")
            network.black_hole()
            await eventually_async(lambda: network.swallowed)
            network.forward()
            await eventually_async(lambda: node.sessions("mailroom worker listener shipping") not in ([], [first]))


async def test_worker_s_bell_takes_what_rings_for_others_while_all_lanes_work(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inbox.sessions.wakeup.HEARTBEAT_S", 0.05)
    listener = InboxListener(node.dsn, SCHEMA, "shipping")
    async with ringing(listener):
        await eventually_async(lambda: listens(node))
        channel = locks.channel("'mailroom.inbox_shipping'::regclass")
        node.connection.execute(f"SELECT pg_notify({channel}, n::text) FROM generate_series(1, 1000) AS n".encode())
        for _ in range(2):
            now = node.value("SELECT clock_timestamp()")
            await eventually_async(partial(node.sessions, "mailroom worker listener", f"query_start > '{now}'"))
        # Not at once: what comes with a beat's own answer is taken after it.
        await eventually_async(lambda: listener._connection is not None and not listener._connection._notifies_backlog)


async def test_row_that_fires_no_trigger_is_delivered_by_the_poll(node: Node) -> None:
    """What logical replication applies is such a row."""
    node.connection.execute("SET session_replication_role = replica")
    async with running(Dispatcher(node.dsn, poll_interval_s=POLL_S)):
        for key in "abc":
            node.send("shipping", key=key)
            await eventually_async(partial(is_delivered, node, key))


LISTENER = """
import asyncio, sys
from mailroom.session import settings
from mailroom.session.listener import Listener

settings.PEER.update({name: "1000" for name in settings.PEER if name == "tcp_user_timeout"})
asyncio.run(Listener(sys.argv[1], "mailroom", "outbox", "test listener").run())
"""


@pytest.mark.slow
def test_paused_listener_is_ended_by_the_server(node: Node) -> None:
    """Else it would hold back vacuum, and all notifications, for as long as it sleeps."""
    channel = locks.channel("'mailroom.outbox'::regclass")
    notify = f"SELECT pg_notify({channel}, n || repeat('x', 7000)) FROM generate_series(1, 500) AS n".encode()
    with subprocess.Popen([sys.executable, "-c", LISTENER, node.dsn]) as started:
        try:
            eventually(lambda: listens(node))
            [listener] = node.sessions("mailroom test listener")
            started.send_signal(signal.SIGSTOP)
            # Until the kernel's buffers are full and the server's process waits for its client.
            waits = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'ClientWrite'"
            eventually(lambda: node.connection.execute(notify) and node.rows(waits, listener))
            eventually(lambda: listener not in node.sessions("mailroom test listener"))
        finally:
            started.kill()
            started.wait()


# -- A server that is not a primary any more --------------------------------------------------------------------------


@pytest.fixture
def private(private_server: Server) -> Iterator[Node]:
    """A node on a server of the test's own."""
    engine = sqlalchemy.create_engine(private_server.dsn().replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        migrate(connection)
        create_inbox(connection, "shipping")
    engine.dispose()
    with psycopg.connect(private_server.dsn(), autocommit=True) as own:
        yield Node(private_server.dsn(), own)


@contextlib.contextmanager
def read_only(node: Node) -> Iterator[None]:
    """Let the server of the test's own write nothing, in sessions that there are as well."""
    node.connection.execute("SET default_transaction_read_only = off")
    node.connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    node.connection.execute("SELECT pg_reload_conf()")
    with psycopg.connect(node.dsn, autocommit=True) as other:
        eventually(lambda: other.execute("SHOW default_transaction_read_only").fetchone() == ("on",))
    yield
    node.connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
    node.connection.execute("SELECT pg_reload_conf()")


@pytest.mark.slow
async def test_dispatcher_leaves_a_server_that_is_read_only_and_comes_back(
    private: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []
    connect_async = settings.connect_async

    async def counted(text: str, role: str, *rest: Any) -> psycopg.AsyncConnection:
        tries.append(role)
        return await connect_async(text, role, *rest)

    monkeypatch.setattr(settings, "connect_async", counted)
    monkeypatch.setattr(backoff, "pause_s", lambda failures, longest_s: 0.01)
    async with running(Dispatcher(private.dsn)):
        await eventually_async(lambda: private.sessions("mailroom dispatcher listener"))
        before = private.sessions()
        with read_only(private):
            await eventually_async(lambda: not {*before} & {*private.sessions()})
            tries.clear()
            await eventually_async(lambda: len(tries) > 10)
        private.send("shipping", key="k")
        await eventually_async(lambda: is_delivered(private, "k"), WITHIN_S)
    # Tried again and again; said once for each cause, by name of the lane.
    first, *rest = warnings_of(caplog, "mailroom.dispatcher")
    assert first == "dispatcher: lost the database connection (ReadOnlySqlTransaction), reconnecting"
    assert ["session is read-only" in line for line in rest] == [True][: len(rest)]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["dsn", "pool", "engine"])
def test_worker_leaves_a_server_that_is_read_only_and_comes_back(private: Node, kind: str) -> None:
    private.connection.execute(LEDGER)
    private.send("shipping", key="a")
    private.deliver_all()
    dsn, name = f"{private.dsn}?application_name=lane", "mailroom worker shipping" if kind == "dsn" else "lane"
    with contextlib.ExitStack() as closing:
        source: Any = dsn
        if kind == "pool":
            source = closing.enter_context(ConnectionPool(dsn, min_size=1, open=True))
        elif kind == "engine":
            source = sqlalchemy.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
            closing.callback(source.dispose)
        with working(Worker(source, "shipping", write_ledger, poll_interval_s=POLL_S)):
            eventually(lambda: ledger_keys(private) == ["a"])
            [before] = private.sessions(name)
            with read_only(private):
                eventually(lambda: before not in private.sessions(name))
            private.send("shipping", key="b")
            private.deliver_all()
            eventually(lambda: ledger_keys(private) == ["a", "b"])
    assert private.rows("SELECT FROM mailroom.key_state") == []


@pytest.mark.slow
def test_what_a_read_only_server_refused_to_take_is_posted_to_the_next_one(private: Node) -> None:
    private.connection.execute("CREATE TABLE posted (n bigint)")
    sender = Unawaited(private.dsn, "sender", {})
    posted = Sql("INSERT INTO {schema}.posted VALUES (%(n)s::bigint)").at(schema="public")
    sender.send(posted(n=1))
    sender.settle()
    with read_only(private):
        sender.send(posted(n=2))
        with pytest.raises(psycopg.OperationalError):
            sender.settle()
    sender.settle()
    sender.close()
    assert private.rows("SELECT n FROM posted ORDER BY n") == [(1,), (2,)]


@pytest.mark.slow
def test_standby_is_refused_and_the_message_says_what_to_do(private: Node) -> None:
    with read_only(private):
        with pytest.raises(ConnectionFailed, match="name the primary"):
            settings.connect(private.dsn, "test")
        settings.connect(make_conninfo(private.dsn, target_session_attrs="any"), "test").close()


@pytest.mark.slow
async def test_dispatcher_follows_the_primary(
    private: Node, private_server: Server, server_home: Path, binaries: Binaries
) -> None:
    primary = conninfo_to_dict(private.dsn)
    with standby_of(private_server, server_home / "standby", binaries) as standby:
        standby.await_replay(private.connection)
        both = make_conninfo(private.dsn, host="127.0.0.1,127.0.0.1", port=f"{standby.port},{primary['port']}")
        async with running(Dispatcher(both, poll_interval_s=POLL_S)):
            private.send("shipping", key="a")
            await eventually_async(lambda: is_delivered(private, "a"))
            standby.await_replay(private.connection)
            await asyncio.to_thread(private_server.stop)
            await asyncio.to_thread(standby.promote)
            with psycopg.connect(standby.dsn, autocommit=True) as connection:
                promoted = Node(standby.dsn, connection)
                promoted.send("shipping", key="b")
                await eventually_async(lambda: is_delivered(promoted, "b"))
                assert [key for (key,) in promoted.delivered("key")] == ["a", "b"]


def test_repeated_failure_is_logged_once_for_each_cause_and_then_how_often() -> None:
    now = [0.0]
    repeats = Repeats(lambda: now[0])
    assert [repeats.struck(why) for why in ("lost", "lost", "refused", "lost")] == ["", None, "", None]
    now[0] = 60.0
    assert repeats.struck("lost") == ", 3 times in 60 s"
    assert repeats.struck("lost") is None
    repeats.over()
    assert repeats.struck("lost") == ""


async def test_connection_that_is_given_up_while_it_is_made_is_closed_at_once() -> None:
    """Also as long as somebody keeps the cancellation, such as the task of a worker that has ended by an error."""
    came, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_024):
            came.set()
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        dsn = f"host=127.0.0.1 port={port} sslmode=disable gssencmode=disable"
        task = asyncio.create_task(settings.connect_async(dsn, "test"))
        await asyncio.wait_for(came.wait(), WITHIN_S)
        gc.disable()
        try:
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as kept:
                await task
            await asyncio.wait_for(closed.wait(), WITHIN_S)
        finally:
            gc.enable()
        assert kept.value is not None
