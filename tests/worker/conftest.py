"""Fixtures of the workers' tests: every kind of source."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker


@pytest.fixture(params=["dsn", "pool", "engine", "sessionmaker"])
def source(request: pytest.FixtureRequest, dsn: str) -> Iterator[Any]:
    with contextlib.ExitStack() as closing:
        if request.param == "dsn":
            yield dsn
        elif request.param == "pool":
            yield closing.enter_context(ConnectionPool(dsn, min_size=1, max_size=2, open=True))
        else:
            engine = create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
            closing.callback(engine.dispose)
            yield engine if request.param == "engine" else sessionmaker(engine)


@pytest.fixture(params=["dsn", "pool", "engine", "sessionmaker", "asyncpg"])
async def async_source(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as closing:
        if request.param == "dsn":
            yield dsn
        elif request.param == "pool":
            yield await closing.enter_async_context(AsyncConnectionPool(dsn, min_size=1, max_size=2, open=False))
        else:
            driver = "asyncpg" if request.param == "asyncpg" else "psycopg"
            engine = create_async_engine(dsn.replace("postgresql:", f"postgresql+{driver}:"), poolclass=NullPool)
            closing.push_async_callback(engine.dispose)
            yield async_sessionmaker(engine) if request.param == "sessionmaker" else engine
