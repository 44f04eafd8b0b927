"""Hold: ending the transaction of its batch is a failure of that handler, and nothing else is lost or doubled."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import NullPool, create_engine, exc, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from inbox import AsyncWorker, Message, Worker
from inbox.sessions import hold
from tests.support.drivers import url
from tests.support.node import Node
from tests.support.pgbouncer import pgbouncer
from tests.support.waiting import eventually, eventually_async
from tests.support.working import (
    SHIPPING_WITH_LEDGER,
    deliver,
    failing_keys,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = [pytest.mark.sample(1), *SHIPPING_WITH_LEDGER]

KEYS = ["a", "b", "c", "d", "e"]
ATTEMPTS = 2
SQLALCHEMY = [f"{kind} {driver}" for kind in ("engine", "sessionmaker") for driver in ("psycopg", "psycopg2", "pg8000")]
ASYNC_SQLALCHEMY = [f"{kind} {driver}" for kind in ("engine", "sessionmaker") for driver in ("psycopg", "asyncpg")]
COMMITS = ["COMMIT", "End", "commit and chain", "/* done */ COMMIT WORK", "PREPARE TRANSACTION 'mine'"]
ROLLBACKS = ["ROLLBACK", "abort", "ROLLBACK AND CHAIN"]


@contextlib.contextmanager
def opened(dsn: str, kind: str) -> Iterator[Any]:
    """Return a source of this kind."""
    if kind == "dsn":
        yield dsn
    elif "pool" in kind:
        with ConnectionPool(
            dsn, kwargs={"autocommit": "autocommit" in kind}, max_size=2, min_size=1, open=True
        ) as pool:
            yield pool
    else:
        made, driver = kind.split()
        engine = create_engine(url(dsn, driver))
        yield engine if made == "engine" else sessionmaker(engine)
        engine.dispose()


@contextlib.asynccontextmanager
async def opened_async(dsn: str, kind: str) -> AsyncIterator[Any]:
    if kind == "dsn":
        yield dsn
    elif "pool" in kind:
        autocommit = {"autocommit": "autocommit" in kind}
        async with AsyncConnectionPool(dsn, kwargs=autocommit, max_size=2, min_size=1, open=False) as pool:
            yield pool
    else:
        made, driver = kind.split()
        # A session that has ended gives its connection back: here it is closed by then, and may not be asked.
        poolclass = NullPool if made == "sessionmaker" else None
        engine = create_async_engine(url(dsn, driver), poolclass=poolclass)
        yield engine if made == "engine" else async_sessionmaker(engine)
        await engine.dispose()


def execute(connection: Any, statement: str) -> None:
    connection.execute(statement if isinstance(connection, psycopg.Connection) else text(statement))


async def execute_async(connection: Any, statement: str) -> None:
    await connection.execute(statement if isinstance(connection, psycopg.AsyncConnection) else text(statement))


def driver_of(connection: Any) -> Any:
    """Return the driver's connection, as users reach it."""
    if isinstance(connection, Session):
        connection = connection.connection()
    return connection.connection.driver_connection


def run_raw(statement: bytes) -> Callable[[Any], None]:
    def run(connection: Any) -> None:
        if isinstance(connection, psycopg.Connection):
            connection.pgconn.exec_(statement)
        else:
            cursor = driver_of(connection).cursor()
            cursor.execute(statement.decode())

    return run


def swallowing(connection: Any) -> None:
    with contextlib.suppress(psycopg.Error, exc.SQLAlchemyError):
        execute(connection, "COMMIT")


def going_on(connection: Any) -> None:
    """End the transaction where SQLAlchemy does not see it, and continue."""
    run_raw(b"ROLLBACK")(connection)
    execute(connection, "SELECT 1")


def behind_another_statement(connection: Any) -> None:
    """Begin another one in the same query, so that the driver does not see the end."""
    run_raw(b"SELECT 1; COMMIT; BEGIN; SELECT 2")(connection)


WAYS: dict[str, Callable[[Any], None]] = {
    "commit()": lambda connection: connection.commit(),
    "rollback()": lambda connection: connection.rollback(),
    **{statement: partial(execute, statement=statement) for statement in COMMITS + ROLLBACKS},
    "raw COMMIT": run_raw(b"COMMIT"),
    "raw ROLLBACK": run_raw(b"ROLLBACK"),
    "swallowed": swallowing,
    "going on": going_on,
}
OF_DRIVERS: dict[str, Callable[[Any], None]] = {
    "commit() of the driver": lambda connection: driver_of(connection).commit(),
    "rollback() of the driver": lambda connection: driver_of(connection).rollback(),
}


def cases(kinds: Iterable[str], *in_ci: str) -> list[Any]:
    """Return the kinds, of which those run at night that are not named."""
    return [pytest.param(kind, marks=[] if kind in in_ci else [pytest.mark.nightly]) for kind in kinds]


def deliver_between(node: Node, ways: Iterable[str]) -> None:
    """Deliver a message of each way to end the transaction, which is its key, between others."""
    deliver(node, *KEYS[:2], *ways, *KEYS[2:])


def assert_only_the_enders_failed(node: Node, ways: Iterable[str]) -> None:
    assert sorted(ledger_keys(node)) == KEYS
    assert node.delivered() == []
    assert {key for (key,) in node.rows("SELECT key FROM mailroom.parked")} == {*ways}
    assert {*failing_keys(node)} == {(way, ATTEMPTS) for way in ways}
    history = node.rows("SELECT key, attempt, error FROM mailroom.attempt")
    assert sorted(row[:2] for row in history) == sorted(product(ways, range(1, 1 + ATTEMPTS)))
    # The server has another message for PREPARE.
    spelled = [row for row in history if not row[0].startswith("PREPARE")]
    assert [row for row in spelled if "leave COMMIT and ROLLBACK to the worker" not in row[2]] == []
    assert node.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()") == []


def is_over(node: Node, ways: Collection[str]) -> bool:
    parked: int = node.value("SELECT count(*) FROM mailroom.parked")
    return len(ledger_keys(node)) >= len(KEYS) and parked == len(ways)


@pytest.mark.slow
@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", cases(("dsn", "pool", "autocommit pool", *SQLALCHEMY), "dsn", "engine psycopg2"))
def test_handler_that_ends_the_transaction_fails_alone(node: Node, kind: str) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=ATTEMPTS)
    ways = WAYS | (OF_DRIVERS if kind in SQLALCHEMY else {})
    if kind in ("dsn", "engine psycopg2"):
        ways |= {"behind another statement": behind_another_statement}
    deliver_between(node, ways)

    def handle(message: Message, connection: Any) -> None:
        write_ledger(message, connection)
        if message.key in ways:
            ways[message.key](connection)

    with opened(node.dsn, kind) as source, working(Worker(source, "shipping", handle, poll_interval_s=0.02)):
        eventually(lambda: is_over(node, ways))
    assert_only_the_enders_failed(node, ways)


AsyncWay = Callable[[Any], Awaitable[object]]


async def raw_async(connection: Any, word: str) -> None:
    if isinstance(connection, psycopg.AsyncConnection):
        connection.pgconn.exec_(word.encode())
        return
    if isinstance(connection, AsyncSession):
        connection = await connection.connection()
    driver = (await connection.get_raw_connection()).driver_connection
    await driver.execute(word)


ASYNC_WAYS: dict[str, AsyncWay] = {
    "commit()": lambda connection: connection.commit(),
    "rollback()": lambda connection: connection.rollback(),
    **{statement: partial(execute_async, statement=statement) for statement in COMMITS + ROLLBACKS},
    "raw COMMIT": lambda connection: raw_async(connection, "COMMIT"),
    "raw ROLLBACK": lambda connection: raw_async(connection, "ROLLBACK"),
}


ASYNC = ("dsn", "pool", "autocommit pool", *ASYNC_SQLALCHEMY)


@pytest.mark.slow
@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", cases(ASYNC, "sessionmaker psycopg", "engine asyncpg"))
async def test_async_handler_that_ends_the_transaction_fails_alone(node: Node, kind: str) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=ATTEMPTS)
    deliver_between(node, ASYNC_WAYS)

    async def handle(message: Message, connection: Any) -> None:
        await write_ledger_async(message, connection)
        if message.key in ASYNC_WAYS:
            await ASYNC_WAYS[message.key](connection)

    async with (
        opened_async(node.dsn, kind) as source,
        working_async(AsyncWorker(source, "shipping", handle, poll_interval_s=0.02)),
    ):
        await eventually_async(lambda: is_over(node, ASYNC_WAYS))
    assert_only_the_enders_failed(node, ASYNC_WAYS)


# -- Behind a pooler --------------------------------------------------------------------------------------------------


def handle_or_end(message: Message, connection: Any) -> None:
    """Execute the key, if that is a statement."""
    write_ledger(message, connection)
    if message.key not in KEYS:
        execute(connection, message.key)


def test_end_of_the_transaction_is_found_behind_a_pooler(node: Node, server_home: Path) -> None:
    node.inbox("shipping", backoff_s=0, max_attempts=ATTEMPTS)
    ways = ("COMMIT", "ROLLBACK", "ROLLBACK AND CHAIN")
    deliver_between(node, ways)
    with (
        pgbouncer(node.dsn, server_home) as pooled,
        working(Worker(pooled, "shipping", handle_or_end, poll_interval_s=0.02)),
    ):
        eventually(lambda: is_over(node, ways))
    assert_only_the_enders_failed(node, ways)


@pytest.mark.parametrize("kind", ["dsn", "engine psycopg2", "engine pg8000"])
def test_end_that_is_not_reported_is_found_before_anything_is_committed(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A pooler may withhold the server's reports; then all are tried alone to find the handler."""
    monkeypatch.setattr(hold, "reading_reported", lambda *_: lambda: "off")
    node.inbox("shipping", backoff_s=0, max_attempts=ATTEMPTS)
    ways = ("ROLLBACK AND CHAIN",)
    deliver_between(node, ways)
    with opened(node.dsn, kind) as source, working(Worker(source, "shipping", handle_or_end, poll_interval_s=0.02)):
        eventually(lambda: is_over(node, ways))
    assert_only_the_enders_failed(node, ways)


# -- What may go on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dsn", *SQLALCHEMY])
def test_handler_may_use_savepoints(node: Node, kind: str) -> None:
    deliver(node, *KEYS)

    def handle(message: Message, connection: Any) -> None:
        if isinstance(connection, psycopg.Connection):
            with connection.transaction(force_rollback=True):
                write_ledger(message, connection)
        else:
            connection.begin_nested().rollback()
        for statement in ("SAVEPOINT mine", "SELECT 1", "ROLLBACK TO mine", "RELEASE mine", "SET LOCAL jit = on"):
            execute(connection, statement)
        write_ledger(message, connection)

    with opened(node.dsn, kind) as source, working(Worker(source, "shipping", handle, poll_interval_s=0.02)):
        eventually(lambda: len(ledger_keys(node)) == len(KEYS))
    assert ledger_keys(node) == KEYS
    assert len(node.rows("SELECT DISTINCT xact FROM ledger")) == 1
    assert node.rows("SELECT FROM mailroom.attempt") == []


def test_connections_of_the_user_s_pool_are_as_they_were(node: Node) -> None:
    deliver_between(node, ["COMMIT"])
    with opened(node.dsn, "autocommit pool") as pool:
        with working(Worker(pool, "shipping", handle_or_end, poll_interval_s=0.02)):
            eventually(lambda: len(ledger_keys(node)) == len(KEYS))
        with pool.connection() as one, pool.connection() as other:
            assert (one.autocommit, other.autocommit) == (True, True)
            found = "SELECT current_setting('default_transaction_read_only'), (SELECT count(*) FROM pg_cursors)"
            assert one.execute(found).fetchone() == other.execute(found).fetchone() == ("off", 0)
