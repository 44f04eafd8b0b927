"""Connections of every kind and driver that an application may hand over."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run, run_async
from mailroom.sql.savepoint import savepoint, savepoint_async

SYNC = [
    "psycopg",
    *(f"{kind} {driver}" for kind in ("Connection", "Session") for driver in ("psycopg", "psycopg2", "pg8000")),
]
ASYNC = [
    "psycopg",
    *(f"{kind} {driver}" for kind in ("AsyncConnection", "AsyncSession") for driver in ("psycopg", "asyncpg")),
]
KINDS = [*SYNC, *(f"async {kind}" for kind in ASYNC)]


def url(dsn: str, driver: str) -> sa.URL:
    return make_url(dsn).set(drivername=f"postgresql+{driver}")


@contextmanager
def opened(dsn: str, kind: str, **options: Any) -> Iterator[Any]:
    if kind == "psycopg":
        with psycopg.connect(dsn, **options) as connection:
            yield connection
        return
    name, driver = kind.split()
    engine = sa.create_engine(url(dsn, driver), poolclass=sa.NullPool, **options)
    with engine.connect() if name == "Connection" else Session(engine) as connection:
        yield connection


@asynccontextmanager
async def opened_async(dsn: str, kind: str, **options: Any) -> AsyncIterator[Any]:
    if kind == "psycopg":
        async with await psycopg.AsyncConnection.connect(dsn, **options) as connection:
            yield connection
        return
    name, driver = kind.split()
    engine = create_async_engine(url(dsn, driver), poolclass=sa.NullPool, **options)
    async with engine.connect() if name == "AsyncConnection" else AsyncSession(engine) as connection:
        yield connection


class Caller:
    """A user of a connection, sync or async, under one interface: what an async one has to await is awaited in here."""

    def __init__(self, connection: Any, runner: asyncio.Runner | None) -> None:
        self.connection = connection
        self._runner = runner

    def done(self, result: Any) -> Any:
        """Return the result of a call; that of an async connection's is awaited first."""
        return result if self._runner is None else self._runner.run(_awaited(result))

    def run(self, operation: Operation[T]) -> T:
        found: T = self.done((run if self._runner is None else run_async)(self.connection, operation))
        return found

    def call(self, sync: Callable[..., Any], asynchronous: Callable[..., Any], *arguments: Any) -> Any:
        """Call what there is in two forms with the connection."""
        return self.done((sync if self._runner is None else asynchronous)(self.connection, *arguments))

    def execute(self, statement: str) -> None:
        """Run a statement of the user's own."""
        is_psycopg = isinstance(self.connection, psycopg.Connection | psycopg.AsyncConnection)
        self.done(self.connection.execute(statement if is_psycopg else sa.text(statement)))

    def commit(self) -> None:
        self.done(self.connection.commit())

    def rollback(self) -> None:
        self.done(self.connection.rollback())

    def savepoint(self, name: str) -> Any:
        return self.call(savepoint, savepoint_async, name)


async def _awaited(result: Any) -> Any:
    return await result


@contextmanager
def calling(dsn: str, kind: str, **options: Any) -> Iterator[Caller]:
    """Open a connection of one of `KINDS`."""
    if not kind.startswith("async "):
        with opened(dsn, kind, **options) as connection:
            yield Caller(connection, None)
        return
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        entering = stack.enter_async_context(opened_async(dsn, kind.removeprefix("async "), **options))
        try:
            yield Caller(runner.run(entering), runner)
        finally:
            runner.run(stack.aclose())
