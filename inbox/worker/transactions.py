"""A worker's transactions, from a connection string, a psycopg pool, a SQLAlchemy engine or a sessionmaker."""

import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from inbox.worker.hold import COMMIT, releasing
from mailroom import settings
from mailroom.errors import ConfigurationError
from mailroom.session.pooler import is_pooled
from mailroom.sql.runner import AsyncPlainCursor, PlainCursor, run, run_async
from mailroom.sql.sqlstate import Meaning, meaning_of_code, sqlstate

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

Source: TypeAlias = "str | ConnectionPool[Any] | Engine | sessionmaker[Any]"
AsyncSource: TypeAlias = "str | AsyncConnectionPool[Any] | AsyncEngine | async_sessionmaker[Any]"

# A worker's sessions also run the user's statements, so they keep the user's search_path and timeouts.
SESSION = {"jit": "off"}
# How long a pool of ours tries to replace a lost connection in the background; after that it tries when a loop asks for
# one. By default the pool doubles its pauses up to minutes, and would keep pausing long after the server is back.
RECONNECT_S = 10.0
ANSWER_S = (
    5.0  # the time for a pool of ours to give a connection; also the longest that a stopping worker waits for one
)


class Transactions(Protocol):
    """A source of transactions: each begins on entering and commits on leaving, or rolls back on an exception."""

    @property
    def dsn(self) -> str:
        """Where to listen; raises `ConfigurationError` if the source does not tell."""
        ...

    def begin(self, *, failing: bool = False) -> AbstractContextManager[Any]:
        """Begin a transaction and give the connection or session that the handler gets.

        `failing` is for failing keys, which may roll back again and again. With a connection string they have a pool of
        their own, of one connection at first: psycopg forgets its prepared statements at each rollback, and the other
        batches would be planned anew.
        """
        ...

    def commit(self, connection: Any) -> None:
        """Commit a transaction that a claim holds (`inbox.worker.hold`), or release it to be committed on leaving."""
        ...

    def close(self) -> None:
        """Close what was opened here, but never the user's pool or engine."""
        ...


class AsyncTransactions(Protocol):
    """`Transactions` for async sources."""

    @property
    def dsn(self) -> str:
        """Where to listen; raises `ConfigurationError` if the source does not tell."""
        ...

    def begin(self, *, failing: bool = False) -> AbstractAsyncContextManager[Any]:
        """Begin a transaction and give the connection or session that the handler gets."""
        ...

    async def commit(self, connection: Any) -> None:
        """Commit a transaction that a claim holds, or release it to be committed on leaving."""
        ...

    async def close(self) -> None:
        """Close what was opened here, but never the user's pool or engine."""
        ...


def usable(source: object) -> Source:
    """Return `source` if a `Worker` can use it, else raise `ConfigurationError`."""
    if not isinstance(source, str | ConnectionPool | Engine | sessionmaker):
        wanted = "a connection string, a psycopg ConnectionPool, a SQLAlchemy Engine or a sessionmaker"
        raise ConfigurationError(f"A Worker cannot use a {_kind(source)} as its source: give {wanted}.")
    return source


def usable_async(source: object) -> AsyncSource:
    """Return `source` if an `AsyncWorker` can use it, else raise `ConfigurationError`."""
    if isinstance(source, (str, AsyncConnectionPool, _of_async_sqlalchemy())):
        return source
    wanted = "a connection string, a psycopg AsyncConnectionPool, a SQLAlchemy AsyncEngine or an async_sessionmaker"
    raise ConfigurationError(f"An AsyncWorker cannot use a {_kind(source)} as its source: give {wanted}.")


def _of_async_sqlalchemy() -> "tuple[type[AsyncEngine], type[async_sessionmaker[Any]]] | tuple[()]":
    # Importing it needs greenlet, which SQLAlchemy does not install. If it is not imported yet, no source can be of it.
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return ()
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

    return AsyncEngine, async_sessionmaker


def _kind(source: object) -> str:
    return type(source).__qualname__


def transactions(source: Source, inbox: str, parallel: int) -> Transactions:
    """Return the transactions of `source`."""
    if isinstance(source, str):
        pool, failing = (ConnectionPool(**each, open=True) for each in _pools_of_ours(source, inbox, parallel))
        return _Pool(pool, failing)
    if isinstance(source, ConnectionPool):
        return _Pool(source)
    return _Factory(source)


async def async_transactions(source: AsyncSource, inbox: str, parallel: int) -> AsyncTransactions:
    """Return the transactions of `source`."""
    if isinstance(source, str):
        pool, failing = (AsyncConnectionPool(**each, open=False) for each in _pools_of_ours(source, inbox, parallel))
        async with contextlib.AsyncExitStack() as unless_open:
            for each in (pool, failing):
                unless_open.push_async_callback(each.close)
                await each.open()
            unless_open.pop_all()
        return _AsyncPool(pool, failing)
    if isinstance(source, AsyncConnectionPool):
        return _AsyncPool(source)
    return _AsyncFactory(source)


def _pools_of_ours(source: str, inbox: str, parallel: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the pool for batches and of the one for failing keys."""
    dsn = settings.dsn(source)
    with settings.connect(
        dsn, "worker", autocommit=True
    ) as probe:  # raises the reason, where a pool would only time out
        pooled = is_pooled(probe)

    def arguments(role: str, connections: int) -> dict[str, Any]:
        return {
            "conninfo": settings.session_dsn(dsn, role, SESSION, pooled=pooled),
            "kwargs": {"prepare_threshold": None} if pooled else {},
            "min_size": connections,
            "max_size": parallel,
            "timeout": ANSWER_S,
            "reconnect_timeout": RECONNECT_S,
        }

    return arguments(f"worker {inbox}", parallel), arguments(f"worker failing {inbox}", 1)


class _Pool:
    def __init__(self, pool: "ConnectionPool[Any]", failing: "ConnectionPool[Any] | None" = None) -> None:
        """If `failing` is given, we have opened both pools and close them."""
        self._pool = pool
        self._failing = failing

    @property
    def dsn(self) -> str:
        return _pool_dsn(self._pool)

    @contextlib.contextmanager
    def begin(self, *, failing: bool = False) -> Iterator["psycopg.Connection[Any]"]:
        # Not `connection.transaction()`, which would send a second COMMIT after the one that ends the batch.
        with ((failing and self._failing) or self._pool).connection() as connection:
            if autocommit := connection.autocommit:
                connection.autocommit = False
            try:
                yield connection
                connection.commit()
            except BaseException as error:
                with contextlib.suppress(psycopg.Error):  # the connection is lost: the pool replaces it
                    connection.rollback()
                if meaning_of_code(sqlstate(error)) is Meaning.READ_ONLY:
                    connection.close()
                raise
            finally:
                if autocommit and _is_idle(connection):
                    connection.autocommit = True

    def commit(self, connection: Any) -> None:
        with PlainCursor(connection) as cursor:
            cursor.execute(COMMIT)

    def close(self) -> None:
        if self._failing is not None:
            try:
                self._pool.close()
            finally:
                self._failing.close()


class _AsyncPool:
    def __init__(self, pool: "AsyncConnectionPool[Any]", failing: "AsyncConnectionPool[Any] | None" = None) -> None:
        """If `failing` is given, we have opened both pools and close them."""
        self._pool = pool
        self._failing = failing

    @property
    def dsn(self) -> str:
        return _pool_dsn(self._pool)

    @contextlib.asynccontextmanager
    async def begin(self, *, failing: bool = False) -> AsyncIterator["psycopg.AsyncConnection[Any]"]:
        async with ((failing and self._failing) or self._pool).connection() as connection:
            if autocommit := connection.autocommit:
                await connection.set_autocommit(False)
            try:
                yield connection
                await connection.commit()
            except BaseException as error:
                with contextlib.suppress(psycopg.Error):
                    await connection.rollback()
                if meaning_of_code(sqlstate(error)) is Meaning.READ_ONLY:
                    await connection.close()
                raise
            finally:
                if autocommit and _is_idle(connection):
                    await connection.set_autocommit(True)

    async def commit(self, connection: Any) -> None:
        async with AsyncPlainCursor(connection) as cursor:
            await cursor.execute(COMMIT)

    async def close(self) -> None:
        if self._failing is not None:
            try:
                await self._pool.close()
            finally:
                await self._failing.close()


def _is_idle(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> bool:
    return connection.info.transaction_status is TransactionStatus.IDLE


class _Factory:
    def __init__(self, factory: "Engine | sessionmaker[Any]") -> None:
        self._factory = factory

    @property
    def dsn(self) -> str:
        return _engine_dsn(self._factory)

    @contextlib.contextmanager
    def begin(self, *, failing: bool = False) -> Iterator[Any]:
        with self._factory.begin() as connection:
            if isinstance(connection, Session):
                connection.connection()  # else it would connect at its first statement
            try:
                yield connection
            except Exception as error:
                if meaning_of_code(sqlstate(error)) is Meaning.READ_ONLY:
                    connection.invalidate()
                raise

    def commit(self, connection: Any) -> None:
        run(connection, releasing())

    def close(self) -> None:
        """Do nothing: the engine is the user's."""


class _AsyncFactory:
    def __init__(self, factory: "AsyncEngine | async_sessionmaker[Any]") -> None:
        self._factory = factory

    @property
    def dsn(self) -> str:
        return _engine_dsn(self._factory)

    @contextlib.asynccontextmanager
    async def begin(self, *, failing: bool = False) -> AsyncIterator[Any]:
        async with self._factory.begin() as connection:
            if hasattr(connection, "sync_session"):
                await connection.connection()
            try:
                yield connection
            except Exception as error:
                if meaning_of_code(sqlstate(error)) is Meaning.READ_ONLY:
                    await connection.invalidate()
                raise

    async def commit(self, connection: Any) -> None:
        await run_async(connection, releasing())

    async def close(self) -> None:
        """Do nothing: the engine is the user's."""


def _libpq(options: dict[str, Any]) -> dict[str, Any]:
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    return {name: value for name, value in options.items() if name in known and value is not None}


def _pool_dsn(pool: "ConnectionPool[Any] | AsyncConnectionPool[Any]") -> str:
    text: object = pool.conninfo
    options: object = pool.kwargs or {}
    if not isinstance(text, str) or not isinstance(options, dict):
        raise ConfigurationError("This pool computes its connection string: give the worker listen_dsn too.")
    return conninfo.make_conninfo(text, **_libpq(options))


def _engine_dsn(factory: "Engine | sessionmaker[Any] | AsyncEngine | async_sessionmaker[Any]") -> str:
    engine: Any = factory.kw.get("bind") if hasattr(factory, "kw") else factory
    if not hasattr(engine, "url"):
        raise ConfigurationError("This sessionmaker is not bound to an engine: create it with sessionmaker(engine).")
    url = engine.url
    parts = {"host": url.host, "port": url.port, "user": url.username, "password": url.password, "dbname": url.database}
    return conninfo.make_conninfo(**_libpq({**url.query, **parts}))
