"""Poolers: how to detect one, and what our sessions do differently behind it.

A pooler in transaction mode, such as PgBouncer, runs each transaction on whatever server connection is free. Session
state is lost or leaks to others: start-up options, prepared statements, session locks, LISTEN. Our sessions through a
pooler use none of these; they apply their settings per transaction.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

# The wording of PgBouncer, any version, and of the Amazon RDS proxy.
REFUSAL = re.compile(r"unsupported startup parameter|support command-line options")


def refuses_options(error: psycopg.OperationalError) -> bool:
    """Return whether connecting failed because of start-up options, which poolers refuse."""
    return REFUSAL.search(str(error)) is not None


class PooledConnection(psycopg.Connection[TupleRow]):
    """A session through a pooler; `settings` are applied in each `transaction()`."""

    settings: Mapping[str, str] = {}

    @contextlib.contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        """Begin a transaction, or a savepoint in one."""
        begins = self.info.transaction_status is TransactionStatus.IDLE
        with super().transaction(savepoint_name, force_rollback) as transaction:
            if begins and self.settings:
                self.execute(_setting(self.settings))
            yield transaction


class AsyncPooledConnection(psycopg.AsyncConnection[TupleRow]):
    """The same, async."""

    settings: Mapping[str, str] = {}

    @contextlib.asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        """Begin a transaction, or a savepoint in one."""
        begins = self.info.transaction_status is TransactionStatus.IDLE
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            if begins and self.settings:
                await self.execute(_setting(self.settings))
            yield transaction


def is_pooled(connection: object) -> bool:
    """Return whether a session that `mailroom.session.settings` opened leads through a pooler."""
    return isinstance(connection, PooledConnection | AsyncPooledConnection)


def lone_statement(connection: psycopg.AsyncConnection) -> contextlib.AbstractAsyncContextManager[object]:
    """Run one statement of an autocommit session inside this context: a transaction only where settings need one."""
    return connection.transaction() if is_pooled(connection) else contextlib.nullcontext()


def beginning(connection: psycopg.AsyncConnection) -> bytes:
    """Return what begins a transaction on an autocommit session, with its settings if they need one."""
    if isinstance(connection, AsyncPooledConnection) and connection.settings:
        return b"BEGIN ISOLATION LEVEL READ COMMITTED; " + _setting(connection.settings).as_bytes(connection)
    return b"BEGIN"


def _setting(settings: Mapping[str, str]) -> sql.Composed:
    each = (sql.SQL("set_config({}, {}, true)").format(name, value) for name, value in settings.items())
    return sql.SQL("SELECT {}").format(sql.SQL(", ").join(each))
