"""A bridge that is tended while a test looks at it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psycopg

from dispatcher.bridges.tending import Tending
from dispatcher.links.receiving import Receiving
from tests.support.node import SCHEMA, Node


@contextlib.asynccontextmanager
async def receiving(node: Node) -> AsyncIterator[Receiving]:
    async with await psycopg.AsyncConnection.connect(node.dsn, autocommit=True) as connection:
        yield Receiving(connection, SCHEMA)


@contextlib.asynccontextmanager
async def tended(tending: Tending) -> AsyncIterator[None]:
    task = asyncio.create_task(tending.run())
    try:
        yield
    finally:
        tending.stop()
        await task
