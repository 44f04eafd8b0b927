"""Run an operation in the caller's transaction, on psycopg, SQLAlchemy or Django, sync or async.

On a psycopg connection we use a plain cursor of our own: tuples, binary results, psycopg's own adapters and prepared
statements, whatever row factory, cursor class or loaders the user has set. SQLAlchemy connections and sessions run
bound `text()`, on any PostgreSQL driver. Errors of the driver pass through unchanged. Below a connection of Django is
one of psycopg; its errors are raised as Django's, as everywhere else in a Django program.

Never begin a pipeline: psycopg ends it with a Flush, after which the server does not count the timeout for sessions
that idle in a transaction. A process paused at that moment would keep its locks for ever.
"""

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators, postgres
from psycopg.adapt import AdaptersMap, Dumper, Loader, PyFormat, Transformer
from psycopg.pq import ExecStatus, Format, PipelineStatus, TransactionStatus
from psycopg.rows import TupleRow, tuple_row
from psycopg.types import array

from mailroom.errors import Coded, NotInTransaction, UnsupportedConnection
from mailroom.sql.apart import is_set_up, refusing
from mailroom.sql.encoding import in_utf8, in_utf8_async, in_utf8_sqlalchemy
from mailroom.sql.operation import Execute, Fill, Operation, Statement, Step, Together, Undecoded
from mailroom.sql.pooler import beginning, is_pooled

if TYPE_CHECKING:
    from psycopg.abc import Buffer, PQGen
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

PlainConnection: TypeAlias = "psycopg.Connection[Any] | Connection | Session | scoped_session[Any]"
AnyConnection: TypeAlias = "PlainConnection | DjangoConnection"
AnyAsyncConnection: TypeAlias = (
    "psycopg.AsyncConnection[Any] | AsyncConnection | AsyncSession | async_scoped_session[Any]"
)
T = TypeVar("T")


class DjangoConnection(Protocol):
    """What we use of a connection of Django, such as `django.db.connection`; Django itself is imported nowhere."""

    @property
    def alias(self) -> str: ...  # noqa: D102
    @property
    def connection(self) -> Any: ...  # noqa: D102
    @property
    def in_atomic_block(self) -> bool: ...  # noqa: D102
    @property
    def needs_rollback(self) -> bool: ...  # noqa: D102
    @property
    def wrap_database_errors(self) -> Any: ...  # noqa: D102
    def ensure_connection(self) -> None: ...  # noqa: D102
    def set_rollback(self, rollback: bool) -> None: ...  # noqa: D102
    def validate_no_broken_transaction(self) -> None: ...  # noqa: D102


# D-schema-5: Django is recognised by what its connections have.
def is_django(connection: object) -> TypeGuard[DjangoConnection]:
    """Return whether this is a connection of Django, or the proxy of one."""
    return not isinstance(connection, psycopg.Connection) and hasattr(connection, "wrap_database_errors")


def unwrapped(connection: AnyConnection) -> PlainConnection:
    """Return psycopg's connection below one of Django, which is opened if need be; any other one as it is."""
    if not is_django(connection):
        return cast(PlainConnection, connection)
    connection.ensure_connection()
    driver = connection.connection
    if isinstance(driver, psycopg.Connection):
        return driver
    raise UnsupportedConnection(
        f"Cannot use Django's connection {connection.alias!r} here: it is one of {type(driver).__module__}. "
        "Let it be of django.db.backends.postgresql, with psycopg 3."
    )


def django_over(connection: "psycopg.Connection[Any]") -> DjangoConnection | None:
    """Return this thread's connection of Django that has this one of psycopg below it, if there is one."""
    if "django.db" in sys.modules and is_set_up():
        for django in sys.modules["django.db"].connections.all(initialized_only=True):
            if django.connection is connection:
                found: DjangoConnection = django
                return found
    return None


class StatementsGone(Coded, psycopg.OperationalError):
    """Other code has deallocated what psycopg had prepared in the session; a rollback has psycopg forget it, too."""

    code = "MR-statements-gone"


def _gone(error: psycopg.Error, *, prepared: bool) -> psycopg.Error:
    if not prepared:
        return error  # it is of a statement of the other code's own
    return StatementsGone(
        f"{error.diag.message_primary}: a function, trigger or handler has run DEALLOCATE or DISCARD in this session. "
        "Roll back and try again."
    )


def run(
    connection: AnyConnection, operation: Operation[T], cursors: "type[PlainCursor] | None" = None, *,
    prepared: bool = True,
) -> T:  # fmt: skip
    """Run `operation` on a sync connection and return its result.

    On psycopg `cursors` replaces our cursor class, and statements are prepared only if `prepared`: what follows other
    code in its transaction must not rest on what was prepared before.
    """
    perform: Callable[[Step], list[Any]]
    if isinstance(connection, psycopg.Connection):
        perform = partial(_psycopg_step, connection, cursors=cursors or PlainCursor, prepared=prepared)
    elif is_django(connection):
        with connection.wrap_database_errors:
            return run(unwrapped(connection), refusing(connection, operation), cursors, prepared=prepared)
    else:
        perform = partial(_sqlalchemy_step, _sqlalchemy_connection(connection))
    resume: Callable[[Any], Step] = operation.send
    given: Any = None
    while True:
        try:
            step = resume(given)
        except StopIteration as stop:
            return cast(T, stop.value)
        try:
            resume, given = operation.send, perform(step)
        except Exception as error:  # the operation may continue, from a savepoint
            resume, given = operation.throw, error


async def run_async(connection: AnyAsyncConnection, operation: Operation[T], *, prepared: bool = True) -> T:
    """`run` on an async connection."""
    perform: Callable[[Step], Awaitable[list[Any]]]
    if isinstance(connection, psycopg.AsyncConnection):
        perform = partial(_async_psycopg_step, connection, prepared=prepared)
    else:
        perform = partial(_async_sqlalchemy_step, await _async_sqlalchemy_connection(connection))
    return await _performing(perform, operation)


# D-statements-5: Our transactions begin with their first statement.
async def run_in_transaction(
    connection: "psycopg.AsyncConnection[Any]", operation: Operation[T], *, prepared: bool = True
) -> T:
    """Run `operation` on one of our autocommit connections, in a transaction of its own; return its result.

    BEGIN goes with the first statement in one round trip. `prepared` is that of `run`. After a `Together` that was a
    transaction by itself, what follows is another.
    """

    async def perform(step: Step) -> list[Any]:
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            return await _async_psycopg_step(connection, step, prepared=prepared)
        if isinstance(step, Together) and prepared and not is_pooled(connection):
            return await _whole_step(connection, step)
        return await _beginning_step(connection, step, prepared=prepared)

    try:
        result = await _performing(perform, operation)
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            await connection.commit()
    except BaseException:
        with suppress(psycopg.Error):  # the session is lost, and with it the transaction
            await connection.rollback()
        raise
    return result


async def _performing(perform: Callable[[Step], Awaitable[list[Any]]], operation: Operation[T]) -> T:
    resume: Callable[[Any], Step] = operation.send
    given: Any = None
    while True:
        try:
            step = resume(given)
        except StopIteration as stop:
            return cast(T, stop.value)
        try:
            resume, given = operation.send, await perform(step)
        except Exception as error:  # the operation may continue, from a savepoint
            resume, given = operation.throw, error


def driver_of(connection: object) -> object:
    """Return the driver's own connection below a connection or session on which something has run."""
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        return connection
    if is_django(connection):
        return unwrapped(connection)
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session

    found: Any = getattr(connection, "sync_session", None) or getattr(connection, "sync_connection", None) or connection
    if isinstance(found, Session | scoped_session):
        found = found.connection()  # it has one by now, so there is nothing to wait for
    return found.connection.driver_connection if isinstance(found, Connection) else None


def reading_reported(driver: Any, name: str) -> Callable[[], object]:
    """Return what reads the last value that the server reported of a setting; it takes no round trip.

    It returns None if the server reports none, or the driver does not tell.
    """
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return partial(driver.pgconn.parameter_status, name.encode())
    if (info := getattr(driver, "info", None)) is not None:
        return partial(info.parameter_status, name)  # psycopg2
    if (settings := getattr(driver, "get_settings", None)) is not None:
        return lambda: getattr(settings(), name, None)  # asyncpg
    return partial(getattr(driver, "parameter_statuses", {}).get, name)  # pg8000


def is_closed(driver: Any) -> bool | None:
    """Return whether a driver's connection is closed, by us or by the server; None if the driver does not know."""
    for name in ("is_closed", "closed"):
        if (found := getattr(driver, name, None)) is not None:
            return bool(found() if callable(found) else found)
    return None


def is_well(driver: object) -> bool:
    """Return whether a driver's connection is in a transaction in which nothing failed; false if it does not know."""
    return _status(driver) == TransactionStatus.INTRANS


def reading_status(driver: Any) -> Callable[[], int | None]:
    """Return what reads the `TransactionStatus` of a driver's connection, as a plain number; None if it does not know.

    It is for those who read it for each message: building the enumeration's member is what costs most of it.
    """
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return partial(getattr, driver.pgconn, "transaction_status")
    return partial(_status, driver)


def _status(driver: object) -> int | None:
    found: int | None = getattr(getattr(driver, "info", None), "transaction_status", None)  # of psycopg and psycopg2
    return found


# D-statements-4: Our own cursor and adapters on psycopg.
class _PsycopgOwn:
    """psycopg's default adapters, created again, without what users have changed on a connection or globally."""

    connection = None
    adapters = AdaptersMap(types=postgres.types)


class _JsonbText(Dumper):
    """JSON text for COPY: the binary form of jsonb is a version byte and the text."""

    oid = postgres.types["jsonb"].oid
    format = Format.BINARY

    def dump(self, obj: str) -> bytes:
        return b"\x01" + obj.encode()


class _Id(Dumper):
    """A UUID or its bytes for COPY."""

    oid = postgres.types["uuid"].oid
    format = Format.BINARY

    def dump(self, obj: UUID | bytes) -> bytes:
        return obj if isinstance(obj, bytes) else obj.bytes


class _PassedOn(Dumper):
    """A value as a server sent it: of its own type, whatever that is."""

    format = Format.BINARY

    def get_key(self, obj: Undecoded, format: PyFormat) -> Any:
        return (self.cls, obj.oid)

    def upgrade(self, obj: Undecoded, format: PyFormat) -> "_PassedOn":
        dumper = _PassedOn(self.cls)
        dumper.oid = obj.oid
        return dumper

    def dump(self, obj: Undecoded) -> bytes:
        return obj.data


class _Kept(Loader):
    """Leaves a value as the server sent it."""

    format = Format.BINARY

    def load(self, data: "Buffer") -> Undecoded:
        return Undecoded(self.oid, bytes(data))


COPIED = {'"char"': "text"}  # one ASCII letter is the same in both, and psycopg has a dumper for text only

postgres.register_default_adapters(_PsycopgOwn())
array.register_all_arrays(_PsycopgOwn())
_PsycopgOwn.adapters.register_dumper(None, _JsonbText)
_PsycopgOwn.adapters.register_dumper(None, _Id)
_PsycopgOwn.adapters.register_dumper(Undecoded, _PassedOn)
_PsycopgOwn.adapters.register_dumper(list, array.ListBinaryDumper)  # as text, the server may read NULL as a word
_UNDECODED = AdaptersMap(_PsycopgOwn.adapters)
for _type in _PsycopgOwn.adapters.types:
    _UNDECODED.register_loader(_type.oid, _Kept)
    _UNDECODED.register_loader(_type.array_oid, _Kept)


class PlainCursor(psycopg.RawCursor[TupleRow]):
    """A cursor with psycopg's default adapters and rows as tuples.

    It takes statements as `Statement.numbered` has them: psycopg parses its own form each time, if it is a long one.
    """

    adapters = _PsycopgOwn.adapters  # replaces the property that returns the connection's

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)


class UndecodedCursor(PlainCursor):
    """A cursor that returns values as the server sent them."""

    adapters = _UNDECODED


class AsyncPlainCursor(psycopg.AsyncRawCursor[TupleRow]):
    """The same, async."""

    adapters = _PsycopgOwn.adapters  # replaces the property that returns the connection's

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)


class AsyncUndecodedCursor(AsyncPlainCursor):
    """The same, async."""

    adapters = _UNDECODED


@contextmanager
def end_of_copy(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> Iterator[None]:
    """Raise `OperationalError` if the server ends the session right after a COPY, as for any other statement.

    psycopg 3.3 expects one result at the end of a COPY. If it gets two, "done" and "your session is terminated", it
    raises ValueError.
    """
    try:
        yield
    except ValueError as error:
        if not connection.broken:
            raise
        raise psycopg.OperationalError("the server ended the session at the end of a COPY") from error


def is_pipelined(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> bool:
    """Return whether the user has begun a pipeline on it, which takes neither a COPY nor several statements at once."""
    return connection.pgconn.pipeline_status != PipelineStatus.OFF


# The tables, by their COPY, that were seen without row security on a connection: to ask costs half as much as to send
# a few messages. What a role may do otherwise is asked each time, since sessions change their role.
# D-statements-2: A runner never begins a pipeline.
_FREE: "WeakKeyDictionary[psycopg.Connection[Any] | psycopg.AsyncConnection[Any], set[Statement]]" = WeakKeyDictionary()


def _allows_copy(answer: list[Any], copy: Statement, free: set[Statement]) -> bool:
    """Return whether the answer of `Fill.bound` allows the COPY, and note if it does for every role."""
    [(has_row_security, is_bound)] = answer
    if not has_row_security:
        free.add(copy)
    return not is_bound


@contextmanager
def _asked_again(copy: Statement, free: set[Statement]) -> Iterator[None]:
    """Forget what was noted of the table if the server refuses its COPY: it has got row security since."""
    try:
        yield
    except psycopg.errors.FeatureNotSupported:
        free.discard(copy)
        raise


def _begins(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> bool:
    """Return whether psycopg would send BEGIN before the next statement, and nothing more than that."""
    return (
        connection.pgconn.transaction_status == TransactionStatus.IDLE
        and not connection.autocommit
        and (connection.isolation_level, connection.read_only, connection.deferrable) == (None, None, None)
        and not is_pipelined(connection)
        and not is_pooled(connection)
    )


def _beginning_with(
    connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]", query: bytes
) -> "PQGen[None]":
    """Run a statement without values or rows and the BEGIN before it in one simple query, a round trip less."""
    connection.pgconn.send_query(b"BEGIN; " + query)
    for result in (yield from generators.execute(connection.pgconn)):
        if result.status == ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result, encoding=connection.info.encoding)


def _psycopg_step(
    connection: psycopg.Connection[Any], step: Step, cursors: type[PlainCursor] = PlainCursor, *, prepared: bool = True
) -> list[Any]:
    match step:
        case Execute(statement, values) if not (values or statement.columns) and _begins(connection):
            with connection.lock:  # its text is ASCII: to set UTF-8 first would begin the transaction
                connection.wait(_beginning_with(connection, statement.numbered[0]))
        case Execute(statement, values):
            query, names = statement.numbered
            kind = UndecodedCursor if statement.undecoded else cursors
            with in_utf8(connection):
                cursor = kind(connection)
                try:
                    cursor.execute(query, [values[name] for name in names], prepare=prepared, binary=True)
                except psycopg.errors.InvalidSqlStatementName as error:
                    raise _gone(error, prepared=prepared) from None
                return cursor.fetchall() if statement.columns else []
        case Together(steps):
            return [_psycopg_step(connection, each, cursors, prepared=prepared) for each in steps][-1]
        case Fill(bound, copy, unnest, columns, rows):
            free = _FREE.setdefault(connection, set())
            if is_pipelined(connection) or (
                copy not in free and not _allows_copy(_psycopg_step(connection, bound()), copy, free)
            ):
                return _psycopg_step(connection, unnest(**_by_column(columns, rows)), cursors, prepared=prepared)
            with (
                in_utf8(connection),
                _asked_again(copy, free),
                end_of_copy(connection),
                PlainCursor(connection) as cursor,
                cursor.copy(copy.sql) as stream,
            ):
                stream.set_types([COPIED.get(kind, kind) for _, kind in columns])
                for row in rows:
                    stream.write_row(row)
        case _:
            _refuse_lone_statements(connection.autocommit, connection.pgconn.transaction_status)
    return []


async def _async_psycopg_step(
    connection: psycopg.AsyncConnection[Any], step: Step, *, prepared: bool = True
) -> list[Any]:
    match step:
        case Execute(statement, values) if not (values or statement.columns) and _begins(connection):
            async with connection.lock:
                await connection.wait(_beginning_with(connection, statement.numbered[0]))
        case Execute(statement, values):
            query, names = statement.numbered
            kind = AsyncUndecodedCursor if statement.undecoded else AsyncPlainCursor
            async with in_utf8_async(connection):
                cursor = kind(connection)
                try:
                    await cursor.execute(query, [values[name] for name in names], prepare=prepared, binary=True)
                except psycopg.errors.InvalidSqlStatementName as error:
                    raise _gone(error, prepared=prepared) from None
                return await cursor.fetchall() if statement.columns else []
        case Together(steps):
            return [await _async_psycopg_step(connection, each, prepared=prepared) for each in steps][-1]
        case Fill(bound, copy, unnest, columns, rows):
            free = _FREE.setdefault(connection, set())
            if is_pipelined(connection) or (
                copy not in free and not _allows_copy(await _async_psycopg_step(connection, bound()), copy, free)
            ):
                return await _async_psycopg_step(connection, unnest(**_by_column(columns, rows)), prepared=prepared)
            with _asked_again(copy, free), end_of_copy(connection):
                async with (
                    in_utf8_async(connection),
                    AsyncPlainCursor(connection) as cursor,
                    cursor.copy(copy.sql) as stream,
                ):
                    stream.set_types([COPIED.get(kind, kind) for _, kind in columns])
                    for row in rows:
                        await stream.write_row(row)
        case _:
            _refuse_lone_statements(connection.autocommit, connection.pgconn.transaction_status)
    return []


async def _beginning_step(connection: psycopg.AsyncConnection[Any], step: Step, *, prepared: bool = True) -> list[Any]:
    """Begin a transaction and do its first step, in one round trip if that is a statement without values."""
    cursor = AsyncPlainCursor(connection)
    if not isinstance(step, Execute) or step.values:
        await cursor.execute(beginning(connection))
        return await _async_psycopg_step(connection, step, prepared=prepared)
    await cursor.execute(beginning(connection) + b"; " + step.statement.numbered[0])
    while cursor.nextset():
        pass
    return await cursor.fetchall() if step.statement.columns else []


@dataclass(slots=True)
class _Named:
    """What was prepared for `_whole_step` on a connection: the names by statement, of which none is used again."""

    names: dict[bytes, bytes] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)


_NAMED: "WeakKeyDictionary[psycopg.AsyncConnection[Any], _Named]" = WeakKeyDictionary()


async def _whole_step(connection: psycopg.AsyncConnection[Any], step: Together) -> list[Any]:
    """Run statements and their BEGIN and COMMIT in one simple query; return the rows of the last.

    That costs half of three round trips. The values stand in its text, so let them be few and short.
    """
    try:
        return await _run_whole(connection, step)
    except psycopg.errors.InvalidSqlStatementName:
        # Nothing was done. Once psycopg has prepared a statement, it sends DEALLOCATE ALL after each ROLLBACK.
        await connection.rollback()
        _NAMED[connection].names.clear()
    try:
        return await _run_whole(connection, step)
    except psycopg.errors.InvalidSqlStatementName as error:
        raise _gone(error, prepared=True) from None


async def _run_whole(connection: psycopg.AsyncConnection[Any], step: Together) -> list[Any]:
    texts = [await _executed(connection, each) for each in step.steps]
    cursor = AsyncPlainCursor(connection)
    await cursor.execute(b"; ".join((beginning(connection), *texts, b"COMMIT")))
    rows: list[Any] = []
    while True:
        if cursor.pgresult is not None and cursor.pgresult.status == ExecStatus.TUPLES_OK:
            rows = await cursor.fetchall()
        if not cursor.nextset():
            return rows


async def _executed(connection: psycopg.AsyncConnection[Any], step: Execute) -> bytes:
    """Return the text that runs a statement, which is prepared under a name of our own first."""
    query, names = step.statement.numbered
    named = _NAMED.setdefault(connection, _Named())
    if query not in named.names:
        name = f"mailroom_{next(named.numbers)}".encode()
        await AsyncPlainCursor(connection).execute(b"PREPARE " + name + b" AS " + query)
        named.names[query] = name
    run = b"EXECUTE " + named.names[query]
    if not names:
        return run
    transformer = Transformer(connection)
    return run + b"(" + b", ".join(transformer.as_literal(step.values[name]) for name in names) + b")"


def _refuse_lone_statements(autocommit: bool, status: int | None = None) -> None:
    if autocommit and status in (None, TransactionStatus.IDLE):
        raise NotInTransaction(
            "This connection is in autocommit mode and not inside a transaction, so the call would commit by itself, "
            "apart from your data. Wrap both in one transaction: `with conn.transaction(): ...` (psycopg), "
            "`with engine.begin() as conn: ...` (SQLAlchemy) or `with transaction.atomic(): ...` (Django)."
        )


# The user's connection may stream through a server-side cursor, which cannot return the rows of a DELETE.
WHOLE = {"stream_results": False, "yield_per": None}


def _sqlalchemy_step(connection: "Connection", step: Step) -> list[Any]:
    match step:
        case Execute(statement, values):
            with in_utf8_sqlalchemy(connection), _reading_nulls(connection, values):
                result = connection.execute(statement.text, values, execution_options=WHOLE)
                return [tuple(row) for row in result] if result.returns_rows else []
        case Together(steps):
            return [_sqlalchemy_step(connection, each) for each in steps][-1]
        case Fill(_, _, unnest, columns, rows):
            driver = connection.connection.driver_connection
            if isinstance(driver, psycopg.Connection):
                if not connection.in_transaction():
                    connection.begin()  # as SQLAlchemy's own statements do, so that its commit() includes ours
                return _psycopg_step(driver, step)
            return _sqlalchemy_step(connection, unnest(**_by_column(columns, rows)))
        case _:
            _refuse_lone_statements(connection.dialect.detect_autocommit_setting(_dbapi(connection)))
    return []


async def _async_sqlalchemy_step(connection: "AsyncConnection", step: Step) -> list[Any]:
    if isinstance(step, Fill):
        driver = (await connection.get_raw_connection()).driver_connection
        if isinstance(driver, psycopg.AsyncConnection):
            if not connection.in_transaction():
                await connection.begin()
            return await _async_psycopg_step(driver, step)
    return await connection.run_sync(_sqlalchemy_step, step)


def _dbapi(connection: "Connection") -> Any:
    return connection.connection.dbapi_connection


def _by_column(columns: tuple[tuple[str, str], ...], rows: "Any") -> dict[str, object]:
    """Return an array per column; none for a column of NULLs, which unnest fills up with them."""
    arrays: dict[str, list[object]] = {
        name: [_uuid(row[i]) for row in rows] if kind == "uuid" else [row[i] for row in rows]
        for i, (name, kind) in enumerate(columns)
    }
    return {name: None if array.count(None) == len(array) else array for name, array in arrays.items()}


# Drivers that send arrays as text, in which the server may read NULL as a word: all but asyncpg.
AS_TEXT = {"psycopg", "psycopg_async", "psycopg2", "pg8000"}
READ_NULLS = "SELECT pg_catalog.current_setting('array_nulls'), pg_catalog.set_config('array_nulls', 'on', true)"
READ_WORDS = "SELECT pg_catalog.set_config('array_nulls', 'off', true)"


@contextmanager
def _reading_nulls(connection: "Connection", values: dict[str, object]) -> "Iterator[None]":
    """Have a NULL in an array read as one, whatever the session's `array_nulls`; where no array has one, do nothing."""
    if connection.dialect.driver not in AS_TEXT or not any(
        isinstance(value, list) and None in value for value in values.values()
    ):
        yield
        return
    before = connection.exec_driver_sql(READ_NULLS).scalar_one()
    yield
    if before == "off":  # after an error the rollback does it
        connection.exec_driver_sql(READ_WORDS)


def _uuid(id: UUID | bytes) -> UUID:
    return UUID(bytes=id) if isinstance(id, bytes) else id


def _sqlalchemy_connection(connection: object) -> "Connection":
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(connection, Session | scoped_session):
        connection = connection.connection()
    if isinstance(connection, Connection) and connection.dialect.name == "postgresql":
        return connection
    raise _unsupported(
        connection,
        "psycopg.Connection, a SQLAlchemy Connection or Session on PostgreSQL, or a connection of Django",
        "an async connection is for the Async form of this, such as AsyncOutbox" if _is_async(connection) else "",
    )


async def _async_sqlalchemy_connection(connection: object) -> "AsyncConnection":
    # Without greenlet, an optional dependency of SQLAlchemy, this module cannot be imported. Then it is not used.
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

        if isinstance(connection, AsyncSession | async_scoped_session):
            connection = await connection.connection()
        if isinstance(connection, AsyncConnection) and connection.dialect.name == "postgresql":
            return connection
    raise _unsupported(
        connection,
        "psycopg.AsyncConnection, or an AsyncConnection or AsyncSession of SQLAlchemy on PostgreSQL",
        "one that is not async is for the plain form of this, such as Outbox" if _is_async(connection) is False else "",
    )


def _is_async(connection: object) -> bool | None:
    """Return whether it is an async connection of some driver; None if it seems to be no connection."""
    rollback = getattr(type(connection), "rollback", None)
    return None if rollback is None else inspect.iscoroutinefunction(rollback)


def _unsupported(connection: object, wanted: str, otherwise: str) -> UnsupportedConnection:
    kind = type(connection)
    text = f"Cannot use a {kind.__module__}.{kind.__qualname__} here: give a {wanted}"
    return UnsupportedConnection(f"{text}; {otherwise}." if otherwise else f"{text}.")
