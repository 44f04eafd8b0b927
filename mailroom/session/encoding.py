"""The encoding of text on its way to a client: UTF-8, since in no other one every key can be sent or read.

psycopg goes by what the server says of a session's `client_encoding`, so for one of its connections it is set around a
statement of ours, and what its user had set comes back. Other drivers fix it when they connect, and are only asked.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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
    """Raise `ConfigurationError` if the connection is one on which some text of this database could not be read."""
    [(client, server)] = yield ENCODINGS.at()()
    if client not in (UTF8, server):
        raise ConfigurationError(
            f"These connections have the client_encoding {client}, in which not every message can be read. "
            "Have it UTF8: create_engine(..., client_encoding='utf8')."
        )


@contextmanager
def in_utf8(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Run a statement on a psycopg connection within."""
    if before := _other(connection):
        connection.execute(_setting(UTF8, connection))
    try:
        yield
    finally:
        if before and _takes_statements(connection):
            connection.execute(_setting(before, connection))


@asynccontextmanager
async def in_utf8_async(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[None]:
    """The same, async."""
    if before := _other(connection):
        await connection.execute(_setting(UTF8, connection))
    try:
        yield
    finally:
        if before and _takes_statements(connection):
            await connection.execute(_setting(before, connection))


@contextmanager
def in_utf8_sqlalchemy(connection: "Connection") -> Iterator[None]:
    """The same on a connection of SQLAlchemy's, whatever its driver."""
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
    """Return the connection's encoding if it is another one than UTF-8."""
    found = connection.info.parameter_status("client_encoding")
    return None if found == UTF8 else found


def _setting(encoding: LiteralString, connection: PsycopgConnection) -> LiteralString:
    # For the transaction where there is one, so that it does not outlive a roll-back to a savepoint.
    is_alone = connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE
    return f"SELECT pg_catalog.set_config('client_encoding', '{encoding}', {'false' if is_alone else 'true'})"


def _takes_statements(connection: PsycopgConnection) -> bool:
    """Tell whether the transaction has not failed; if it has, its roll-back sets back what was set in it."""
    return connection.info.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS)
