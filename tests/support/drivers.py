"""Connections of every kind and driver that an application may hand over."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

SYNC = [
    "psycopg",
    *(f"{kind} {driver}" for kind in ("Connection", "Session") for driver in ("psycopg", "psycopg2", "pg8000")),
]
ASYNC = [
    "psycopg",
    *(f"{kind} {driver}" for kind in ("AsyncConnection", "AsyncSession") for driver in ("psycopg", "asyncpg")),
]


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
