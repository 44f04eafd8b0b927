"""A source of connections is more than its URL: a worker's own sessions lead where its batches are, or nowhere."""

import contextlib
import dataclasses
import ssl
import types
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool, QueuePool

from inbox import AsyncWorker, Message, Worker
from mailroom import create_inbox
from mailroom.embedded import Server
from mailroom.errors import ConfigurationError
from mailroom.schema import migrate
from mailroom.session.home import Home, HomeDatabase
from mailroom.session.parameters import parameters
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    deliver,
    is_asleep,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = SHIPPING_WITH_LEDGER

DEAD = "127.0.0.1:1"  # nobody listens there


def parts(dsn: str) -> dict[str, str]:
    return {name: str(value) for name, value in conninfo_to_dict(dsn).items()}


def login(of: dict[str, str]) -> str:
    return f"{of['user']}:{of['password']}" if "password" in of else of["user"]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the URL alone leads to, where it says nothing: nowhere."""
    monkeypatch.setenv("PGHOST", "/nowhere")
    monkeypatch.setenv("PGDATABASE", "no_such_database")


def host_in_query(dsn: str) -> sa.Engine:
    of = parts(dsn)
    return sa.create_engine(f"postgresql+psycopg://{login(of)}@/{of['dbname']}?host={of['host']}&port={of['port']}")


def hosts_in_query(dsn: str) -> sa.Engine:
    of = parts(dsn)
    return sa.create_engine(
        f"postgresql+psycopg://{login(of)}@/{of['dbname']}?host={DEAD}&host={of['host']}:{of['port']}"
    )


def creator(dsn: str) -> sa.Engine:
    return sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))


def connect_args(dsn: str) -> sa.Engine:
    return sa.create_engine("postgresql+psycopg://", connect_args=parts(dsn))


def token(dsn: str) -> sa.Engine:
    engine = sa.create_engine("postgresql+psycopg://")

    @event.listens_for(engine, "do_connect")
    def give_token(_dialect: Any, _record: Any, _args: Any, named: dict[str, Any]) -> None:
        named.update(parts(dsn))

    return engine


def custom_pool(dsn: str) -> sa.Engine:
    connect: Any = lambda: psycopg.connect(dsn)  # noqa: E731
    return sa.create_engine("postgresql+psycopg://", pool=QueuePool(connect))


def no_pool(dsn: str) -> sa.Engine:
    return sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool)


def psycopg2_creator(dsn: str) -> sa.Engine:
    import psycopg2  # type: ignore[import-untyped]

    return sa.create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(dsn))


def pg8000_creator(dsn: str) -> sa.Engine:
    import pg8000  # type: ignore[import-untyped]

    of = parts(dsn)
    return sa.create_engine(
        "postgresql+pg8000://",
        creator=lambda: pg8000.dbapi.connect(
            of["user"], host=of["host"], port=int(of["port"]), database=of["dbname"], password=of.get("password")
        ),
    )


def sessions(dsn: str) -> Any:
    return sessionmaker(creator(dsn))


ENGINES = [
    host_in_query, hosts_in_query, creator, connect_args, token, custom_pool, no_pool, psycopg2_creator,
    pg8000_creator, sessions,
]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.__name__)
def test_worker_s_own_sessions_lead_to_where_the_engine_s_connections_are(
    node: Node, make: Callable[[str], Any]
) -> None:
    source = make(node.dsn)
    entries: list[int] = []

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        eventually(lambda: node.value("SELECT count(*) FROM mailroom.worker"))
        entries.append(node.value("SELECT count(*) FROM mailroom.worker"))

    try:
        with working(Worker(source, "shipping", handle, poll_interval_s=NEVER_S)):
            eventually(lambda: is_asleep(node))
            deliver(node, "a")  # woken: its listener is here
            eventually(lambda: ledger_keys(node) == ["a"])
    finally:
        (source.kw["bind"] if isinstance(source, sessionmaker) else source).dispose()
    assert entries == [1]


ASYNC_SOURCES = ["creator", "asyncpg", "asyncpg creator", "sessions", "configured pool", "computed pool"]


@contextlib.asynccontextmanager
async def async_source(dsn: str, kind: str) -> AsyncIterator[Any]:
    if kind in ("configured pool", "computed pool"):

        async def configured(connection: psycopg.AsyncConnection[Any]) -> None:
            await connection.execute("SET application_name = 'configured'")
            await connection.commit()

        async def computed() -> str:
            return dsn

        text: Any = computed if kind == "computed pool" else "dbname=" + parts(dsn)["dbname"]
        kwargs: Any = {} if kind == "computed pool" else parts(dsn)
        async with AsyncConnectionPool(text, kwargs=kwargs, configure=configured, min_size=1, open=False) as pool:
            yield pool
        return
    if kind.startswith("asyncpg"):
        import asyncpg

        plain = sa.make_url(dsn).set(drivername="postgresql").render_as_string(hide_password=False)
        engine = (
            create_async_engine(dsn.replace("postgresql:", "postgresql+asyncpg:"), poolclass=NullPool)
            if kind == "asyncpg"
            else create_async_engine(
                "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(plain), poolclass=NullPool
            )
        )
    else:
        engine = create_async_engine(
            "postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(dsn), poolclass=NullPool
        )
    yield async_sessionmaker(engine) if kind == "sessions" else engine
    await engine.dispose()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ASYNC_SOURCES)
async def test_async_worker_s_own_sessions_lead_there_too(node: Node, kind: str) -> None:
    async with async_source(node.dsn, kind) as source:
        worker = AsyncWorker(source, "shipping", write_ledger_async, poll_interval_s=NEVER_S)
        async with working_async(worker):
            await eventually_async(lambda: is_asleep(node))
            deliver(node, "a")
            await eventually_async(lambda: ledger_keys(node) == ["a"])


def test_pool_that_computes_its_connection_string_needs_no_listen_dsn(node: Node) -> None:
    with (
        ConnectionPool(lambda: node.dsn, min_size=1, open=True) as pool,
        working(Worker(pool, "shipping", write_ledger, poll_interval_s=NEVER_S)),
    ):
        eventually(lambda: is_asleep(node))
        deliver(node, "a")
        eventually(lambda: ledger_keys(node) == ["a"])


@pytest.mark.slow
def test_token_that_has_expired_since_the_source_connected_is_replaced(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else asks for a new one: the source's connection lives on, and only our sessions are refused."""
    monkeypatch.setattr("inbox.worker.in_flight.WITHOUT_S", 0)
    role = f"token_{node.value('SELECT pg_backend_pid()')}"
    tokens = ["one"]
    node.connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD 'one'".encode())
    engine = sa.create_engine("postgresql+psycopg://")

    @event.listens_for(engine, "do_connect")
    def give_token(_dialect: Any, _record: Any, _args: Any, named: dict[str, Any]) -> None:
        named.update(parts(node.dsn), user=role, password=tokens[0], application_name="source")

    entries: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        if message.key != "b":  # that may have none: it finds out that the token has expired
            eventually(lambda: node.value("SELECT count(*) FROM mailroom.worker"))
        entries.append(message.key)

    try:
        with working(Worker(engine, "shipping", handle, poll_interval_s=0.05)):
            deliver(node, "a")
            eventually(lambda: "a" in entries)
            tokens[0] = "two"
            node.connection.execute(f"ALTER ROLE {role} PASSWORD 'two'".encode())
            node.connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s "
                "AND application_name <> 'source'",
                [role],
            )
            for key in "bc":
                deliver(node, key)
                eventually(partial(entries.__contains__, key))
    finally:
        engine.dispose()
        eventually(lambda: not node.rows("SELECT FROM pg_stat_activity WHERE usename = %s", role))
        node.connection.execute(f"DROP ROLE {role}".encode())


@pytest.mark.parametrize("refused", ["coroutine", "certificates", "driver"])
def test_what_cannot_be_read_back_is_refused_by_an_error_that_names_listen_dsn(refused: str) -> None:
    async def password() -> str:
        return "token"

    class Asked:
        """As asyncpg's connection is, as far as it matters."""

        _addr = ("localhost", 5432)

        class _params:  # noqa: N801
            user, database, server_settings = "me", "shop", None
            password: Any = "secret"

        class _transport:  # noqa: N801
            @staticmethod
            def get_extra_info(_name: str) -> Any:
                tls = ssl.create_default_context()
                return types.SimpleNamespace(context=tls) if refused == "certificates" else None

    if refused == "coroutine":
        Asked._params.password = staticmethod(password)
    with pytest.raises(ConfigurationError, match="listen_dsn") as raised:
        parameters(object() if refused == "driver" else Asked(), "shop")
    assert "secret" not in str(raised.value)


# -- What leads elsewhere ---------------------------------------------------------------------------------------------


def test_own_sessions_that_lead_to_another_database_are_refused_by_an_error_that_names_listen_dsn(
    node: Node, target_dsn: str
) -> None:
    """The other one has a message of the same key and clock, which would be blamed."""
    other = Node(target_dsn, psycopg.connect(target_dsn, autocommit=True))
    with contextlib.closing(other.connection):
        other.inbox("shipping", backoff_s=0)
        for each in (node, other):
            deliver(each, "a")
        worker = Worker(node.dsn, "shipping", write_ledger, listen_dsn=target_dsn)
        with pytest.raises(ConfigurationError, match="listen_dsn"), working(worker) as thread:
            thread.join(WITHIN_S)
        assert other.value("SELECT count(*) FROM mailroom.worker") == 0
        assert ledger_keys(node) == []


def test_copy_of_the_server_is_another_database(node: Node, private_server: Server) -> None:
    """It may have the same names and oids, since it was restored; but it was started at another time."""
    with psycopg.connect(private_server.dsn()) as connection:
        migrate(connection)
        create_inbox(connection, "shipping")
    worker = Worker(node.dsn, "shipping", write_ledger, listen_dsn=private_server.dsn())
    with pytest.raises(ConfigurationError, match="listen_dsn"), working(worker) as thread:
        thread.join(WITHIN_S)


def test_server_of_another_start_is_another_database(node: Node) -> None:
    """A restored copy has the same names and oids, and the same messages."""
    [row] = node.rows("SELECT oid::bigint, pg_postmaster_start_time(), datname::text FROM pg_database LIMIT 1")
    here = HomeDatabase(*row)
    with pytest.raises(ConfigurationError, match="server of another start"):
        Home(node.dsn).compare(dataclasses.replace(here, server_started=here.server_started - timedelta(days=1)), here)


@pytest.mark.sample(1)
@pytest.mark.parametrize("lane", ["dispatch", "plain"])
def test_nothing_is_written_elsewhere_when_own_sessions_are_led_there_later(
    node: Node, target_dsn: str, lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Say a name that another server answers to: batches go on without entries, and the log says why."""
    other = Node(target_dsn, psycopg.connect(target_dsn, autocommit=True))
    with contextlib.closing(other.connection):
        other.inbox("shipping", backoff_s=0)
        other.send("shipping", key="theirs")
        worker = Worker(node.dsn, "shipping", write_ledger, dispatch=lane == "dispatch", poll_interval_s=0.05)
        with working(worker):
            eventually(lambda: is_asleep(node))
            deliver(node, "a")
            eventually(lambda: ledger_keys(node) == ["a"])
            worker._home._given = target_dsn
            node.connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND application_name !~ '^mailroom worker shipping'"
            )
            eventually(lambda: "listen_dsn" in caplog.text)
            deliver(node, "b")
            eventually(lambda: ledger_keys(node) == ["a", "b"])
            eventually(lambda: "working without in-flight entries" in caplog.text)
        assert other.value("SELECT count(*) FROM mailroom.worker") == 0
        assert other.value("SELECT count(*) FROM mailroom.lease") == 0
        assert other.value("SELECT count(*) FROM mailroom.outbox") == 1
