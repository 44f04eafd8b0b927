"""The client encoding of our statements: UTF-8, because no other encoding can carry every key.

psycopg follows the session's `client_encoding`. So it is set around each of our statements, and the user's own value is
restored. Other drivers fix the encoding when they connect; they are only checked.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg.pq import TransactionStatus

from mailroom.errors import ConfigurationError
from mailroom.sql.operation import Operation, Sql

if TYPE_CHECKING:
    from sqlalchemy import Connection

PsycopgConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
UTF8 = "UTF8"

ENCODINGS = Sql("SELECT current_setting('client_encoding'), current_setting('server_encoding')", columns=("text",) * 2)


def checking() -> Operation[None]:
    """Raise `ConfigurationError` if the connection's encoding cannot carry all text of this database."""
    [(client, server)] = yield ENCODINGS.at()()
    if client not in (UTF8, server):
        raise ConfigurationError(
            f"These connections have the client_encoding {client}, which cannot carry every message. "
            "Have it UTF8: create_engine(..., client_encoding='utf8').",
            code="MR-client-encoding",
        )


_AS_IT_IS = nullcontext()


def in_utf8(connection: psycopg.Connection[Any]) -> AbstractContextManager[None]:
    """Set UTF-8 for a statement on a psycopg connection that runs in this block."""
    return _set(connection, before) if (before := _other(connection)) else _AS_IT_IS


@contextmanager
def _set(connection: psycopg.Connection[Any], before: str) -> Iterator[None]:
    connection.execute(_setting(UTF8, connection))
    try:
        yield
    finally:
        if _takes_statements(connection):
            connection.execute(_setting(before, connection))


def in_utf8_async(connection: psycopg.AsyncConnection[Any]) -> AbstractAsyncContextManager[None]:
    """The same, async."""
    return _set_async(connection, before) if (before := _other(connection)) else _AS_IT_IS


@asynccontextmanager
async def _set_async(connection: psycopg.AsyncConnection[Any], before: str) -> AsyncIterator[None]:
    await connection.execute(_setting(UTF8, connection))
    try:
        yield
    finally:
        if _takes_statements(connection):
            await connection.execute(_setting(before, connection))


@contextmanager
def in_utf8_sqlalchemy(connection: "Connection") -> Iterator[None]:
    """The same on a SQLAlchemy connection, whatever its driver."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection) or not (before := _other(driver)):
        yield
        return
    connection.exec_driver_sql(_setting(UTF8, driver))
    try:
        yield
    finally:
        if _takes_statements(driver):
            connection.exec_driver_sql(_setting(before, driver))


def _other(connection: PsycopgConnection) -> str | None:
    """Return the connection's encoding, or None if it is UTF-8."""
    found = (connection.pgconn.parameter_status(b"client_encoding") or b"").decode()
    return None if found == UTF8 else found


def _setting(encoding: LiteralString, connection: PsycopgConnection) -> LiteralString:
    # Local to the transaction if there is one, so that a rollback to a savepoint restores it too.
    is_alone = connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE
    return f"SELECT pg_catalog.set_config('client_encoding', '{encoding}', {'false' if is_alone else 'true'})"


def _takes_statements(connection: PsycopgConnection) -> bool:
    """Return whether statements can run; in a failed transaction its rollback restores the setting."""
    return connection.info.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS)
