"""`atomically` and `resolve` on every kind of connection, under one interface; what tests run in it is an operation."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import sqlalchemy as sa
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from mailroom import Outcome, atomically, atomically_async, resolve, resolve_async
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run, run_async
from tests.support.drivers import url

# Besides the kinds of connection of `drivers`: what else gives connections.
WAYS = [
    "psycopg autocommit", "psycopg pool", "begin psycopg", "Session.begin psycopg", "async psycopg autocommit",
    "async psycopg pool", "async begin psycopg", "async Session.begin asyncpg",
]  # fmt: skip


class Client:
    """A caller of `atomically`, on connections of one kind."""

    def __init__(self, connect: Callable[[], Any], runner: "asyncio.Runner | None") -> None:
        self.connect = connect
        self._runner = runner

    def atomically(self, work: Callable[[], Operation[T]], **options: Any) -> T:
        """Run the operation that `work` makes, anew for each attempt."""
        if self._runner is None:
            return atomically(self.connect, lambda connection: run(connection, work()), **options)
        return self._runner.run(
            atomically_async(self.connect, lambda connection: run_async(connection, work()), **options)
        )

    def resolve(self, token: UUID | str, **options: Any) -> Outcome:
        if self._runner is None:
            return resolve(self.connect, token, **options)
        return self._runner.run(resolve_async(self.connect, token, **options))


@contextlib.contextmanager
def client(kind: str, dsn: str) -> Iterator[Client]:
    """Give a client whose connections go to the URL `dsn`; `kind` is one of `WAYS`, or of all kinds of connection."""
    with ExitStack() as stack:
        if not kind.startswith("async "):
            yield Client(_connect(kind, dsn, stack), None)
            return
        runner = stack.enter_context(asyncio.Runner())
        connect, close = runner.run(_connect_async(kind.removeprefix("async "), dsn))
        try:
            yield Client(connect, runner)
        finally:
            runner.run(close())


def _connect(kind: str, dsn: str, stack: ExitStack) -> Callable[[], Any]:
    if kind == "psycopg pool":
        return stack.enter_context(ConnectionPool(dsn, min_size=1, max_size=2, open=True)).connection
    if kind.startswith("psycopg"):
        return partial(psycopg.connect, dsn, autocommit=kind.endswith("autocommit"))
    how, driver = kind.split()
    engine = sa.create_engine(url(dsn, driver), pool_size=1)
    stack.callback(engine.dispose)
    sessions = sessionmaker(engine)
    made: dict[str, Callable[[], Any]] = {
        "Connection": engine.connect, "begin": engine.begin, "Session": sessions, "Session.begin": sessions.begin,
    }  # fmt: skip
    return made[how]


async def _connect_async(kind: str, dsn: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    if kind == "psycopg pool":
        pool = AsyncConnectionPool(dsn, min_size=1, max_size=2, open=False)
        await pool.open()
        return pool.connection, pool.close
    if kind.startswith("psycopg"):
        return partial(psycopg.AsyncConnection.connect, dsn, autocommit=kind.endswith("autocommit")), _nothing
    how, driver = kind.split()
    engine = create_async_engine(url(dsn, driver), pool_size=1)
    sessions = async_sessionmaker(engine)
    made: dict[str, Callable[[], Any]] = {
        "AsyncConnection": engine.connect, "begin": engine.begin, "AsyncSession": sessions,
        "Session.begin": sessions.begin,
    }  # fmt: skip
    return made[how], engine.dispose


async def _nothing() -> None:
    """Close nothing."""
