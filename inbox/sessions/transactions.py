"""A worker's transactions, from a connection string, a psycopg pool, a SQLAlchemy engine or a sessionmaker, or Django.

Where they are is taken from connections that the source has opened (`mailroom.session.home`), never from its URL.
"""

import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, sessionmaker

from inbox.sessions.django import DjangoTransactions, django_alias
from inbox.sessions.hold import COMMIT, releasing
from mailroom.errors import ConfigurationError
from mailroom.session import settings
from mailroom.session.addressed import is_addressed
from mailroom.session.home import Home
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import AsyncPlainCursor, DjangoConnection, PlainCursor, is_django, run, run_async
from mailroom.sql.sqlstate import is_spent

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

Source: TypeAlias = "str | ConnectionPool[Any] | Engine | sessionmaker[Any] | DjangoConnection"
AsyncSource: TypeAlias = "str | AsyncConnectionPool[Any] | AsyncEngine | async_sessionmaker[Any]"

log = logging.getLogger("mailroom.worker")

# A worker's sessions also run the user's statements, so they keep the user's search_path and timeouts.
BATCH_SESSION = {"jit": "off"}
# How long our own pool tries to replace a lost connection in the background; after that it tries when a loop asks for
# one. By default the pool doubles its pauses up to minutes, and would keep pausing long after the server is back.
RECONNECT_S = 10.0
# The time for our own pool to give a connection; also the longest that a stopping worker waits for one.
ANSWER_S = 5.0
SHORT_S = 1.0  # the time to get a session of its own for a failing key, which can also use another one
# How long a session for failing keys is kept that no key needs. There is none at first.
# D-workers-7: Failing keys may get a session of their own.
FAILING_IDLE_S = 60.0


class Transactions(Protocol):
    """A source of transactions: each begins on entering and commits on leaving, or rolls back on an exception.

    `home` is where they are, as far as they were visited.
    """

    home: Home

    def begin(self, *, failing: bool = False, within_s: float | None = None) -> AbstractContextManager[Any]:
        """Begin a transaction and give the connection or session that the handler gets.

        `failing` is for failing keys, which may roll back again and again. With a connection string they have a pool of
        their own, opened when needed: psycopg forgets its prepared statements at each rollback, and the other
        batches would be planned anew.

        A pool of psycopg waits for a connection for `within_s` seconds at most (None: for as long as it is set up to).
        """
        ...

    def commit(self, connection: Any) -> None:
        """Commit a transaction that a claim holds (`inbox.sessions.hold`), or release it to be committed on leaving."""
        ...

    def spare(self, connections: int) -> None:
        """Allow that many connections more (or less), which abandoned handlers keep; in our own pools."""
        ...

    def close(self) -> None:
        """Close what was opened here, but never the user's pool or engine."""
        ...


class AsyncTransactions(Protocol):
    """`Transactions` for async sources."""

    home: Home

    def begin(self, *, failing: bool = False, within_s: float | None = None) -> AbstractAsyncContextManager[Any]:
        """Begin a transaction and give the connection or session that the handler gets."""
        ...

    async def commit(self, connection: Any) -> None:
        """Commit a transaction that a claim holds, or release it to be committed on leaving."""
        ...

    async def spare(self, connections: int) -> None:
        """Allow that many connections more (or less), as `Transactions.spare` does."""
        ...

    async def close(self) -> None:
        """Close what was opened here, but never the user's pool or engine."""
        ...


def usable(source: object, who: str = "A Worker") -> Source:
    """Return `source` if a `Worker` can use it, or `who` can, else raise `ConfigurationError`."""
    if isinstance(source, str | ConnectionPool | Engine | sessionmaker) or is_django(source):
        return source
    wanted = (
        "a connection string, a psycopg ConnectionPool, a SQLAlchemy Engine, a sessionmaker, or for a connection of "
        "Django its alias, such as django:default"
    )
    raise ConfigurationError(
        f"{who} cannot use a {_kind(source)} as its source: give {wanted}.", code="MR-unsupported-source"
    )


def usable_async(
    source: object, who: str = "An AsyncWorker", sync: str = "a Worker, with a sync handler"
) -> AsyncSource:
    """Return `source` if an `AsyncWorker` can use it, or `who` can, else raise `ConfigurationError`.

    `sync` is what takes a connection of Django in its place.
    """
    if is_django(source) or (isinstance(source, str) and django_alias(source) is not None):
        raise ConfigurationError(
            f"Django has no async connections: give this source to {sync}.", code="MR-async-mismatch"
        )
    if isinstance(source, (str, AsyncConnectionPool, _of_async_sqlalchemy())):
        return source
    wanted = "a connection string, a psycopg AsyncConnectionPool, a SQLAlchemy AsyncEngine or an async_sessionmaker"
    raise ConfigurationError(
        f"{who} cannot use a {_kind(source)} as its source: give {wanted}.", code="MR-unsupported-source"
    )


def _of_async_sqlalchemy() -> "tuple[type[AsyncEngine], type[async_sessionmaker[Any]]] | tuple[()]":
    # Importing it needs greenlet, which SQLAlchemy does not install. If it is not imported yet, no source can be of it.
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return ()
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

    return AsyncEngine, async_sessionmaker


def _kind(source: object) -> str:
    return type(source).__qualname__


def transactions(source: Source, inbox: str, parallel: int, listen_dsn: str | None = None) -> Transactions:
    """Return the transactions of `source`; our own sessions connect to `listen_dsn`, or to where the source does."""
    if isinstance(source, str):
        if (alias := django_alias(source)) is not None:
            return DjangoTransactions(alias, Home(listen_dsn, apart=True))
        pool, failing = (
            ConnectionPool(**each, check=_check, open=True) for each in _pools_of_ours(source, inbox, parallel)
        )
        return _Pool(home_of(source, listen_dsn), pool, failing, is_ours=True)
    if isinstance(source, ConnectionPool):
        return _Pool(Home(listen_dsn, apart=True), source)
    if isinstance(source, Engine | sessionmaker):
        return _Factory(Home(listen_dsn, apart=True), source)
    return DjangoTransactions(source.alias, Home(listen_dsn, apart=True))


async def async_transactions(
    source: AsyncSource, inbox: str, parallel: int, listen_dsn: str | None = None
) -> AsyncTransactions:
    """Return the transactions of `source`, as `transactions` does."""
    if isinstance(source, str):
        pool, failing = (
            AsyncConnectionPool(**each, check=_check_async, open=False)
            for each in _pools_of_ours(source, inbox, parallel)
        )
        async with contextlib.AsyncExitStack() as unless_open:
            for each in (pool, failing):
                unless_open.push_async_callback(each.close)
                await each.open()
            unless_open.pop_all()
        return _AsyncPool(home_of(source, listen_dsn), pool, failing, is_ours=True)
    if isinstance(source, AsyncConnectionPool):
        return _AsyncPool(Home(listen_dsn, apart=True), source)
    return _AsyncFactory(Home(listen_dsn, apart=True), source)


def transactions_of_ours(home: Home, pool: "ConnectionPool[Any]") -> Transactions:
    """Return the transactions of a pool that was opened for them; they close it."""
    return _Pool(home, pool, is_ours=True)


def async_transactions_of_ours(home: Home, pool: "AsyncConnectionPool[Any]") -> AsyncTransactions:
    """Return the transactions of an async pool that was opened for them; they close it."""
    return _AsyncPool(home, pool, is_ours=True)


def home_of(dsn: str, listen_dsn: str | None) -> Home:
    """Return where our own sessions connect, beside the transactions of a connection string."""
    return Home(listen_dsn or settings.dsn(dsn), apart=listen_dsn is not None)


def _pools_of_ours(source: str, inbox: str, parallel: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the pool for batches and of the one for failing keys."""
    dsn = settings.dsn(source)
    # It raises the reason; a pool would only time out.
    with settings.connect(dsn, "worker", autocommit=True) as probe:
        pooled = is_pooled(probe)

    def arguments(role: str, connections: int) -> dict[str, Any]:
        return {
            "conninfo": settings.session_dsn(dsn, role, BATCH_SESSION, pooled=pooled),
            "kwargs": {"prepare_threshold": None} if pooled else {},
            "min_size": connections,
            "max_size": parallel,
            "max_idle": FAILING_IDLE_S,
            "timeout": ANSWER_S,
            "reconnect_timeout": RECONNECT_S,
        }

    return arguments(f"worker {inbox}", parallel), arguments(f"worker failing {inbox}", 0)


# D-workers-6: Idle sessions are checked by poll(2).
def _check(connection: "psycopg.Connection[Any]") -> None:
    """Raise an error if the session was lost while it was idle. It takes a round trip only if there is reason to."""
    if is_addressed(connection):
        ConnectionPool.check_connection(connection)


async def _check_async(connection: "psycopg.AsyncConnection[Any]") -> None:
    if is_addressed(connection):
        await AsyncConnectionPool.check_connection(connection)


class _Pool:
    def __init__(
        self, home: Home, pool: "ConnectionPool[Any]", failing: "ConnectionPool[Any] | None" = None, *,
        is_ours: bool = False,
    ) -> None:  # fmt: skip
        """`is_ours`: the pools were opened for this, which closes them."""
        self.home = home
        self._pool = pool
        self._failing = failing
        self._ours = [each for each in (pool, failing) if is_ours and each is not None]

    @contextlib.contextmanager
    def begin(self, *, failing: bool = False, within_s: float | None = None) -> Iterator["psycopg.Connection[Any]"]:
        # Not `connection.transaction()`, which would send a second COMMIT after the one that ends the batch.
        with contextlib.ExitStack() as stack:
            connection = self._connection(stack, failing, within_s)
            if autocommit := connection.autocommit:
                connection.autocommit = False
            try:
                yield connection
                connection.commit()
                if self.home.renews():
                    connection.close()
            except BaseException as error:
                with contextlib.suppress(psycopg.Error):  # the connection is lost: the pool replaces it
                    connection.rollback()
                if is_spent(error):
                    connection.close()
                raise
            finally:
                if autocommit and _is_idle(connection):
                    connection.autocommit = True

    def _connection(
        self, stack: contextlib.ExitStack, failing: bool, within_s: float | None
    ) -> "psycopg.Connection[Any]":
        if failing and self._failing is not None:
            try:
                return stack.enter_context(self._failing.connection(timeout=SHORT_S))
            except PoolTimeout:
                log.debug("the server gives no session for failing keys: they use those of the others")
        return stack.enter_context(self._pool.connection(timeout=within_s))

    def commit(self, connection: Any) -> None:
        with PlainCursor(connection) as cursor:
            cursor.execute(COMMIT)

    def spare(self, connections: int) -> None:
        for pool in self._ours:
            pool.resize(pool.min_size, pool.max_size + connections)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for pool in self._ours:
                closing.callback(pool.close)


class _AsyncPool:
    def __init__(
        self, home: Home, pool: "AsyncConnectionPool[Any]", failing: "AsyncConnectionPool[Any] | None" = None, *,
        is_ours: bool = False,
    ) -> None:  # fmt: skip
        """`is_ours`: the pools were opened for this, which closes them."""
        self.home = home
        self._pool = pool
        self._failing = failing
        self._ours = [each for each in (pool, failing) if is_ours and each is not None]

    @contextlib.asynccontextmanager
    async def begin(
        self, *, failing: bool = False, within_s: float | None = None
    ) -> AsyncIterator["psycopg.AsyncConnection[Any]"]:
        async with contextlib.AsyncExitStack() as stack:
            connection = await self._connection(stack, failing, within_s)
            if autocommit := connection.autocommit:
                await connection.set_autocommit(False)
            try:
                yield connection
                await connection.commit()
                if self.home.renews():
                    await connection.close()
            except BaseException as error:
                with contextlib.suppress(psycopg.Error):
                    await connection.rollback()
                if is_spent(error):
                    await connection.close()
                raise
            finally:
                if autocommit and _is_idle(connection):
                    await connection.set_autocommit(True)

    async def _connection(
        self, stack: contextlib.AsyncExitStack, failing: bool, within_s: float | None
    ) -> "psycopg.AsyncConnection[Any]":
        if failing and self._failing is not None:
            try:
                return await stack.enter_async_context(self._failing.connection(timeout=SHORT_S))
            except PoolTimeout:
                log.debug("the server gives no session for failing keys: they use those of the others")
        return await stack.enter_async_context(self._pool.connection(timeout=within_s))

    async def commit(self, connection: Any) -> None:
        async with AsyncPlainCursor(connection) as cursor:
            await cursor.execute(COMMIT)

    async def spare(self, connections: int) -> None:
        for pool in self._ours:
            await pool.resize(pool.min_size, pool.max_size + connections)

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            for pool in self._ours:
                closing.push_async_callback(pool.close)


def _is_idle(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> bool:
    return connection.info.transaction_status is TransactionStatus.IDLE


class _Factory:
    def __init__(self, home: Home, factory: "Engine | sessionmaker[Any]") -> None:
        self.home = home
        self._factory = factory

    @contextlib.contextmanager
    def begin(self, *, failing: bool = False, within_s: float | None = None) -> Iterator[Any]:
        with self._factory.begin() as connection:
            if isinstance(connection, Session):
                connection.connection()  # else it would connect at its first statement
            try:
                yield connection
                if self.home.renews():
                    _replaced_later(connection)
            except Exception as error:
                if is_spent(error):
                    connection.invalidate()
                raise

    def commit(self, connection: Any) -> None:
        run(connection, releasing())

    def spare(self, connections: int) -> None:
        """Do nothing: the engine is the user's."""

    def close(self) -> None:
        """Do nothing: the engine is the user's."""


class _AsyncFactory:
    def __init__(self, home: Home, factory: "AsyncEngine | async_sessionmaker[Any]") -> None:
        self.home = home
        self._factory = factory

    @contextlib.asynccontextmanager
    async def begin(self, *, failing: bool = False, within_s: float | None = None) -> AsyncIterator[Any]:
        async with self._factory.begin() as connection:
            if hasattr(connection, "sync_session"):
                await connection.connection()
            try:
                yield connection
                if self.home.renews():
                    _replaced_later(connection)
            except Exception as error:
                if is_spent(error):
                    await connection.invalidate()
                raise

    async def commit(self, connection: Any) -> None:
        await run_async(connection, releasing())

    async def spare(self, connections: int) -> None:
        """Do nothing: the engine is the user's."""

    async def close(self) -> None:
        """Do nothing: the engine is the user's."""


def _replaced_later(connection: Any) -> None:
    """Let the engine's pool open another connection in place of this one, once it has been returned."""
    found: Any = getattr(connection, "sync_session", None) or getattr(connection, "sync_connection", None) or connection
    found = found if isinstance(found, Connection) else found.connection()
    found.connection.invalidate(soft=True)
