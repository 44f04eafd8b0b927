"""Where a worker's transactions come from: a connection string, a psycopg pool, a SQLAlchemy engine or sessionmaker."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg import conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker

from mailroom import settings
from mailroom.errors import ConfigurationError
from mailroom.pooler import is_pooled
from mailroom.sqlstate import READ_ONLY, sqlstate

Source: TypeAlias = "str | ConnectionPool[Any] | Engine | sessionmaker[Any]"
AsyncSource: TypeAlias = "str | AsyncConnectionPool[Any] | AsyncEngine | async_sessionmaker[Any]"

# A worker's sessions run the user's statements too, so they keep the user's search_path and timeouts.
SESSION = {"jit": "off"}
ANSWER_S = 5.0  # for a pool of ours to give a connection; a worker that is told to stop waits no longer either


class Transactions(Protocol):
    """Gives transactions: each begins on entering and commits on leaving, or rolls back on an exception."""

    @property
    def dsn(self) -> str:
        """Where to listen; raises `ConfigurationError` if the source does not tell."""
        ...

    def begin(self) -> AbstractContextManager[Any]:
        """Begin one; what it gives is what the handler gets."""
        ...

    def close(self) -> None:
        """Close what was opened here, never what the user gave."""
        ...


class AsyncTransactions(Protocol):
    """The same, async."""

    @property
    def dsn(self) -> str:
        """Where to listen; raises `ConfigurationError` if the source does not tell."""
        ...

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """Begin one; what it gives is what the handler gets."""
        ...

    async def close(self) -> None:
        """Close what was opened here, never what the user gave."""
        ...


def transactions(source: Source, inbox: str, parallel: int) -> Transactions:
    """Return what gives transactions on `source`."""
    if isinstance(source, str):
        return _Pool(ConnectionPool(**_pool_of_ours(source, inbox, parallel), open=True), owned=True)
    if isinstance(source, ConnectionPool):
        return _Pool(source, owned=False)
    if isinstance(source, Engine | sessionmaker):
        return _Factory(source)
    raise _unusable(source, "a connection string, a psycopg ConnectionPool, a SQLAlchemy Engine or a sessionmaker")


async def async_transactions(source: AsyncSource, inbox: str, parallel: int) -> AsyncTransactions:
    """Return what gives transactions on `source`."""
    if isinstance(source, str):
        pool = AsyncConnectionPool(**_pool_of_ours(source, inbox, parallel), open=False)
        await pool.open()
        return _AsyncPool(pool, owned=True)
    if isinstance(source, AsyncConnectionPool):
        return _AsyncPool(source, owned=False)
    if isinstance(source, AsyncEngine | async_sessionmaker):
        return _AsyncFactory(source)
    raise _unusable(
        source, "a connection string, a psycopg AsyncConnectionPool, a SQLAlchemy AsyncEngine or an async_sessionmaker"
    )


def _pool_of_ours(source: str, inbox: str, parallel: int) -> dict[str, Any]:
    dsn = settings.dsn(source)
    with settings.connect(dsn, "worker", autocommit=True) as probe:  # says why, where a pool would only time out
        pooled = is_pooled(probe)
    return {
        "conninfo": settings.session_dsn(dsn, f"worker {inbox}", SESSION, pooled=pooled),
        "kwargs": {"prepare_threshold": None} if pooled else {},
        "min_size": parallel,
        "max_size": parallel,
        "timeout": ANSWER_S,
    }


class _Pool:
    def __init__(self, pool: "ConnectionPool[Any]", *, owned: bool) -> None:
        self._pool = pool
        self._owned = owned

    @property
    def dsn(self) -> str:
        return _pool_dsn(self._pool)

    @contextlib.contextmanager
    def begin(self) -> Iterator["psycopg.Connection[Any]"]:
        with self._pool.connection() as connection:
            try:
                with connection.transaction():
                    yield connection
            except Exception as error:
                if sqlstate(error) == READ_ONLY:
                    connection.close()
                raise

    def close(self) -> None:
        if self._owned:
            self._pool.close()


class _AsyncPool:
    def __init__(self, pool: "AsyncConnectionPool[Any]", *, owned: bool) -> None:
        self._pool = pool
        self._owned = owned

    @property
    def dsn(self) -> str:
        return _pool_dsn(self._pool)

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator["psycopg.AsyncConnection[Any]"]:
        async with self._pool.connection() as connection:
            try:
                async with connection.transaction():
                    yield connection
            except Exception as error:
                if sqlstate(error) == READ_ONLY:
                    await connection.close()
                raise

    async def close(self) -> None:
        if self._owned:
            await self._pool.close()


class _Factory:
    def __init__(self, factory: "Engine | sessionmaker[Any]") -> None:
        self._factory = factory

    @property
    def dsn(self) -> str:
        return _engine_dsn(self._factory)

    @contextlib.contextmanager
    def begin(self) -> Iterator[Any]:
        with self._factory.begin() as connection:
            try:
                yield connection
            except Exception as error:
                if sqlstate(error) == READ_ONLY:
                    connection.invalidate()
                raise

    def close(self) -> None:
        """Leave the user's engine alone."""


class _AsyncFactory:
    def __init__(self, factory: "AsyncEngine | async_sessionmaker[Any]") -> None:
        self._factory = factory

    @property
    def dsn(self) -> str:
        return _engine_dsn(self._factory)

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self._factory.begin() as connection:
            try:
                yield connection
            except Exception as error:
                if sqlstate(error) == READ_ONLY:
                    await connection.invalidate()
                raise

    async def close(self) -> None:
        """Leave the user's engine alone."""


def _libpq(options: dict[str, Any]) -> dict[str, Any]:
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    return {name: value for name, value in options.items() if name in known and value is not None}


def _pool_dsn(pool: "ConnectionPool[Any] | AsyncConnectionPool[Any]") -> str:
    text: object = pool.conninfo
    options: object = pool.kwargs or {}
    if not isinstance(text, str) or not isinstance(options, dict):
        raise ConfigurationError("This pool's connection string is made at run time: give the worker listen_dsn too.")
    return conninfo.make_conninfo(text, **_libpq(options))


def _engine_dsn(factory: "Engine | sessionmaker[Any] | AsyncEngine | async_sessionmaker[Any]") -> str:
    engine = factory if isinstance(factory, Engine | AsyncEngine) else factory.kw.get("bind")
    if not isinstance(engine, Engine | AsyncEngine):
        raise ConfigurationError("This sessionmaker is not bound to an engine: make it with sessionmaker(engine).")
    url = engine.url
    parts = {"host": url.host, "port": url.port, "user": url.username, "password": url.password, "dbname": url.database}
    return conninfo.make_conninfo(**_libpq({**url.query, **parts}))


def _unusable(source: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"A worker cannot use a {type(source).__qualname__}: give {wanted}.")
