"""A savepoint in the caller's transaction, sync or async, on psycopg, SQLAlchemy or Django.

On psycopg it is SAVEPOINT itself: `Connection.transaction()` commits where it is the outermost, and ends a transaction
in which a statement failed, both in silence. On SQLAlchemy it is `begin_nested`, so that a session also forgets the
objects of what is undone. On Django it is SAVEPOINT again; undone, Django forgets that the transaction was to be rolled
back, as it does at the end of its own `atomic`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import psycopg

from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import (
    AnyAsyncConnection,
    AnyConnection,
    AsyncPlainCursor,
    DjangoConnection,
    PlainCursor,
    django_over,
    is_django,
    is_pipelined,
    run,
    run_async,
    unwrapped,
)
from mailroom.sql.sqlstate import NO_SAVEPOINT, sqlstate

if TYPE_CHECKING:
    from sqlalchemy import Connection, NestedTransaction
    from sqlalchemy.orm import Session, SessionTransaction

SAVE = Sql("SAVEPOINT mailroom_{name}")
RELEASE = Sql("RELEASE SAVEPOINT mailroom_{name}")
UNDO = Sql("ROLLBACK TO SAVEPOINT mailroom_{name}")


class SavepointGone(Exception):
    """The transaction in which the savepoint was made has ended."""


class Savepoint(Protocol):
    """One savepoint. End it once, or leave it to the end of the transaction."""

    def release(self) -> None:
        """Keep what was done since. Raises `SavepointGone`, and 25P02 if a statement failed in it."""
        ...

    def undo(self) -> None:
        """Undo what was done since, also if a statement failed in it. Raises `SavepointGone`."""
        ...


class AsyncSavepoint(Protocol):
    """`Savepoint` on an async connection."""

    async def release(self) -> None:
        """See `Savepoint.release`."""
        ...

    async def undo(self) -> None:
        """See `Savepoint.undo`."""
        ...


def savepoint(connection: AnyConnection, name: str) -> Savepoint:
    """Make a savepoint. Raises `NotInTransaction` on an autocommit connection outside a transaction.

    One of the same name that is made inside this one, and left open, would take its place. So `name`, an identifier, is
    the maker's own.
    """
    plain = unwrapped(connection)
    if isinstance(plain, psycopg.Connection):
        run(plain, _requiring_transaction())
        django = connection if is_django(connection) else django_over(plain)  # a handler gets psycopg's
        own = _OfPsycopg(plain, name) if django is None else _OfDjango(django, plain, name)
        own.make()
        return own
    run(connection, _requiring_transaction())
    return _Nested(_session_of_thread(connection))


async def savepoint_async(connection: AnyAsyncConnection, name: str) -> AsyncSavepoint:
    """`savepoint` on an async connection."""
    if isinstance(connection, psycopg.AsyncConnection):
        await run_async(connection, _requiring_transaction())
        own_savepoint = _OfAsyncPsycopg(connection, name)
        await own_savepoint.make()
        return own_savepoint
    await run_async(connection, _requiring_transaction())
    own = _session_of_task(connection)
    return _AsyncNested(own, await own.run_sync(_Nested))


def _requiring_transaction() -> Operation[None]:
    yield IN_TRANSACTION


def _undoing(is_pipelined: bool, name: str) -> Iterator[str]:
    """Yield the queries that undo: a simple one, so one round trip, and two in a pipeline, which takes no such one."""
    undo, release = UNDO.at(name=name).sql, RELEASE.at(name=name).sql
    yield from (undo, release) if is_pipelined else (f"{undo}; {release}",)


@contextmanager
def _if_gone() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if sqlstate(error) in NO_SAVEPOINT:
            raise SavepointGone from error
        raise


class _OfPsycopg:
    """Its statements are simple queries of one cursor: a command that is answered waits for two of them."""

    def __init__(self, connection: "psycopg.Connection[Any]", name: str) -> None:
        self._cursor = PlainCursor(connection)
        self._name = name

    def make(self) -> None:
        self._cursor.execute(SAVE.at(name=self._name).sql, prepare=False)

    def release(self) -> None:
        with _if_gone():
            self._cursor.execute(RELEASE.at(name=self._name).sql, prepare=False)

    def undo(self) -> None:
        with _if_gone():
            for query in _undoing(is_pipelined(self._cursor.connection), self._name):
                self._cursor.execute(query, prepare=False)


class _OfDjango(_OfPsycopg):
    def __init__(self, django: DjangoConnection, connection: "psycopg.Connection[Any]", name: str) -> None:
        super().__init__(connection, name)
        self._django = django
        self._needed_rollback = django.needs_rollback

    def undo(self) -> None:
        super().undo()
        if self._django.in_atomic_block:
            self._django.set_rollback(self._needed_rollback)  # else Django would refuse every further query


class _OfAsyncPsycopg:
    def __init__(self, connection: "psycopg.AsyncConnection[Any]", name: str) -> None:
        self._cursor = AsyncPlainCursor(connection)
        self._name = name

    async def make(self) -> None:
        await self._cursor.execute(SAVE.at(name=self._name).sql, prepare=False)

    async def release(self) -> None:
        with _if_gone():
            await self._cursor.execute(RELEASE.at(name=self._name).sql, prepare=False)

    async def undo(self) -> None:
        with _if_gone():
            for query in _undoing(is_pipelined(self._cursor.connection), self._name):
                await self._cursor.execute(query, prepare=False)


class _Nested:
    def __init__(self, connection: "Connection | Session") -> None:
        self._connection = connection
        self._nested = connection.begin_nested()
        self._transaction = connection.get_transaction()

    def release(self) -> None:
        self._check()
        with _if_gone():
            for inner in self._left_open():
                inner.commit()
            self._nested.commit()

    def undo(self) -> None:
        self._check()
        with _if_gone():
            for inner in self._left_open():
                inner.rollback()
            self._nested.rollback()

    def _left_open(self) -> "Iterator[NestedTransaction | SessionTransaction]":
        # PostgreSQL ends them together with this one, of which a Connection would know nothing.
        while (inner := self._connection.get_nested_transaction()) not in (None, self._nested):
            yield inner

    def _check(self) -> None:
        # SQLAlchemy ends in silence a savepoint whose transaction is over, and would go on in a new one.
        if self._connection.get_transaction() is not self._transaction:
            raise SavepointGone


class _AsyncNested:
    def __init__(self, connection: Any, nested: _Nested) -> None:
        self._connection = connection
        self._nested = nested

    async def release(self) -> None:
        await self._connection.run_sync(lambda _: self._nested.release())

    async def undo(self) -> None:
        await self._connection.run_sync(lambda _: self._nested.undo())


def _session_of_thread(connection: Any) -> "Connection | Session":
    from sqlalchemy.orm import scoped_session

    found: Connection | Session = connection() if isinstance(connection, scoped_session) else connection
    return found


def _session_of_task(connection: Any) -> Any:
    asyncio_part = sys.modules["sqlalchemy.ext.asyncio"]  # imported, since `connection` is of it
    return connection() if isinstance(connection, asyncio_part.async_scoped_session) else connection
