"""The transactions in which `Requests.ask` sends, on whatever source; see `inbox.sessions.transactions`.

With a connection string they have a pool of their own, whose sessions are set up for requests alone.
"""

import asyncio
from typing import Any

from psycopg_pool import AsyncConnectionPool, ConnectionPool

from inbox.sessions.django import django_alias
from inbox.sessions.transactions import (
    AsyncSource,
    AsyncTransactions,
    Source,
    Transactions,
    async_transactions,
    async_transactions_of_ours,
    home_of,
    transactions,
    transactions_of_ours,
)
from mailroom.session import settings
from mailroom.sql.pooler import is_pooled

ASKING_SESSION = settings.SESSION | settings.UNDER_POLICIES


def asking(source: Source, inbox: str, connections: int, listen_dsn: str | None) -> Transactions:
    """Return the transactions on a source: `connections` at once, if it is a connection string."""
    if not isinstance(source, str) or django_alias(source) is not None:
        return transactions(source, inbox, connections, listen_dsn)
    pool = ConnectionPool(**_pool(source, inbox, connections), check=ConnectionPool.check_connection, open=False)
    pool.open(wait=True)  # if it were asked for one while it opens its first, it would open another
    return transactions_of_ours(home_of(source, listen_dsn), pool)


async def asking_async(source: AsyncSource, inbox: str, connections: int, listen_dsn: str | None) -> AsyncTransactions:
    """Return the transactions on an async source, as `asking` does."""
    if not isinstance(source, str):
        return await async_transactions(source, inbox, connections, listen_dsn)
    arguments = await asyncio.to_thread(_pool, source, inbox, connections)
    pool = AsyncConnectionPool(**arguments, check=AsyncConnectionPool.check_connection, open=False)
    await pool.open(wait=True)
    return async_transactions_of_ours(home_of(source, listen_dsn), pool)


def _pool(source: str, inbox: str, connections: int) -> dict[str, Any]:
    dsn = settings.dsn(source)
    # It raises the reason; a pool would only time out.
    with settings.connect(dsn, "requests", autocommit=True) as probe:
        pooled = is_pooled(probe)
    return {
        "conninfo": settings.session_dsn(dsn, f"requests ask {inbox}", ASKING_SESSION, pooled=pooled),
        "kwargs": {"prepare_threshold": None} if pooled else {},
        "min_size": 1,
        "max_size": connections,
    }
