"""The sessions in which messages of webhooks are committed: of the user's pool, or of our own.

Nothing here waits for longer than a sender does.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from uuid import UUID

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from mailroom.errors import ConfigurationError
from mailroom.schema import check_async
from mailroom.session import settings
from mailroom.session.addressed import is_addressed
from mailroom.session.disconnect import answered_within
from mailroom.sql.pooler import AsyncPooledConnection, is_pooled
from outbox.outbox import AsyncOutbox

Source: TypeAlias = "str | AsyncConnectionPool[Any]"

ANSWER_S = 10.0  # for all that the database has to do with a request; senders give up after 15 to 30 s
CLOSE_S = 2.0
# How long our own pool tries to replace a lost session; after that it tries when a request asks for one.
RECONNECT_S = 10.0
# Another request with the same id holds it until its transaction ends. This comes before ANSWER_S, which costs a
# session. Set in each transaction, since the sessions may be the user's, or a pooler's.
PATIENCE = "SET LOCAL lock_timeout = '5s'"
WEBHOOK_SESSION = settings.UNATTENDED | settings.UNDER_POLICIES


def usable(source: object) -> Source:
    """Return `source` if it can be used, else raise `ConfigurationError`."""
    if isinstance(source, AsyncConnectionPool):
        return source
    if isinstance(source, str):
        return settings.dsn(source)
    raise ConfigurationError(
        f"A WebhookApp cannot use a {type(source).__qualname__} as its source: give a connection string, or a psycopg "
        "AsyncConnectionPool.",
        code="MR-unsupported-source",
    )


class Sessions:
    """Sends, each message in a transaction of its own. The first use opens the pool, and checks the schema."""

    def __init__(self, source: Source, schema: str, parallel: int) -> None:
        self._source = source
        self._outbox = AsyncOutbox(schema=schema)
        self._parallel = parallel
        # A request with a slot has a session soon; only then is its body read: values are larger than their source.
        self._slots = asyncio.Semaphore(parallel if isinstance(source, str) else source.max_size)
        self._lock = asyncio.Lock()
        self._pool: AsyncConnectionPool[Any] | None = None

    async def open(self) -> AsyncConnectionPool[Any]:
        """Return the pool. Raises `ConnectionFailed`, or `SchemaError` if nothing can be sent to this schema."""
        async with self._lock:
            if self._pool is None:
                source = self._source
                self._pool = await (self._made(source) if isinstance(source, str) else self._checked(source))
            return self._pool

    async def close(self) -> None:
        """Close our own pool. The next use opens another one."""
        async with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None and isinstance(self._source, str):
                await pool.close(CLOSE_S)

    async def send(
        self, topic: str, read: Callable[[], object], key: str | None, headers: Mapping[str, str], once: str
    ) -> UUID:
        """Commit one message, once for this text, and return its id. Its value is what `read` returns.

        Raises what that or the database does, in `ANSWER_S`.
        """
        async with asyncio.timeout(ANSWER_S), self._slots:
            value = read()
            pool = await self.open()
            async with pool.connection(timeout=ANSWER_S) as connection:
                # A server that does not answer is cut off, also when this task is cancelled.
                sending = self._sending(connection, topic, value, key, headers, once)
                return await answered_within(connection, sending, ANSWER_S)

    async def _sending(
        self,
        connection: AsyncConnection[Any],
        topic: str,
        value: object,
        key: str | None,
        headers: Mapping[str, str],
        once: str,
    ) -> UUID:
        async with connection.transaction():
            await connection.execute(PATIENCE)
            return await self._outbox.send(connection, topic, value, key=key, headers=headers or None, once=once)

    async def _checked(self, pool: AsyncConnectionPool[Any]) -> AsyncConnectionPool[Any]:
        async with pool.connection(timeout=ANSWER_S) as connection:
            await answered_within(connection, self._checking(connection), ANSWER_S)
        return pool

    async def _checking(self, connection: AsyncConnection[Any]) -> None:
        async with connection.transaction():
            await check_async(connection, schema=self._outbox.schema)

    async def _made(self, dsn: str) -> AsyncConnectionPool[Any]:
        # It raises the reason; a pool would only time out.
        probe = await settings.connect_async(dsn, "bridge serve", WEBHOOK_SESSION)
        try:
            pooled = is_pooled(probe)
            await answered_within(probe, self._checking(probe), ANSWER_S)
        finally:
            await probe.close()
        pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
            settings.session_dsn(dsn, "bridge serve", WEBHOOK_SESSION, pooled=pooled),
            connection_class=AsyncPooledConnection if pooled else AsyncConnection,
            kwargs={"prepare_threshold": None} if pooled else {},
            configure=_set,
            check=_check,
            min_size=1,
            max_size=self._parallel,
            reconnect_timeout=RECONNECT_S,
            open=False,
        )
        await pool.open()
        return pool


async def _set(connection: AsyncConnection[Any]) -> None:
    if isinstance(connection, AsyncPooledConnection):
        connection.settings = WEBHOOK_SESSION


async def _check(connection: AsyncConnection[Any]) -> None:
    if is_addressed(connection):
        await AsyncConnectionPool.check_connection(connection)
