"""Posting: statements that are sent and not waited for.

What the kernel has taken reaches the server even if this process dies the next moment, so what is only to outlive the
process costs it no trip. The answer is taken before the next statement is sent, and so is what went wrong. What was
lost with a session is sent again: only what may be done twice is posted.
"""

import contextlib
import re
import selectors
import threading
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus

from mailroom import settings
from mailroom.errors import ConnectionFailed
from mailroom.session.pooler import is_pooled
from mailroom.sql.operation import PARAMETER, Execute
from mailroom.sql.sqlstate import BLAMES, meaning

# For the server to answer what was sent before, and for the kernel to take what is sent.
WITHIN_S = 1.0


class Unanswered(psycopg.OperationalError):
    """What was sent before was not answered in time."""


class Unawaited:
    """One session, for any thread; lost, or of unknown state, it is made anew at the next use."""

    def __init__(self, dsn: str, role: str, session: Mapping[str, str]) -> None:
        self._dsn = dsn
        self._role = role
        self._settings = session
        self._connection: psycopg.Connection | None = None
        self._unanswered: Execute | None = None
        self._lock = threading.Lock()

    def send(self, step: Execute) -> None:
        """Send a statement, which commits by itself."""
        with self.session() as connection:
            self._unanswered = step
            send(connection, step)

    def settle(self) -> None:
        """See that what was sent last has arrived."""
        with self.session():
            pass

    @contextlib.contextmanager
    def session(self) -> Iterator[psycopg.Connection]:
        """Give the session, to nobody else meanwhile, with nothing under way on it."""
        with self._lock:
            connection = self._answered() or self._connect()
            try:
                yield connection
            except errors.LockNotAvailable:
                raise
            except BaseException:
                # Its state is unknown: left within a transaction, it would keep whatever comes next from committing.
                connection.close()
                raise

    def close(self) -> None:
        """Close the session, once what was sent last is answered."""
        try:
            if self._unanswered is not None:
                with contextlib.suppress(psycopg.OperationalError):
                    self.settle()
        finally:
            if self._connection is not None:
                self._connection.close()

    def _connect(self) -> psycopg.Connection:
        try:
            connection = settings.connect(self._dsn, self._role, self._settings, autocommit=True)
        except ConnectionFailed as failed:
            raise psycopg.OperationalError(str(failed)) from None  # worth another try, as on any other session
        self._connection = connection
        if self._unanswered is not None:
            try:
                send(connection, self._unanswered)
            except BaseException:
                connection.close()
                raise
            self._finish(connection)
        return connection

    def _answered(self) -> psycopg.Connection | None:
        """Return the session, None if there is none any more."""
        connection = self._connection
        if connection is None or connection.closed:
            return None
        try:
            self._finish(connection)
        except psycopg.Error as error:
            if isinstance(error, Unanswered) or not _is_lost(error):
                raise
            return None
        return connection

    def _finish(self, connection: psycopg.Connection) -> None:
        try:
            _take_answer(connection)
            self._unanswered = None
            connection.pgconn.consume_input()  # behind the answer the server may have hung up
        except psycopg.Error as error:
            connection.close()
            if not _is_lost(error):
                self._unanswered = None
            raise


def _is_lost(error: psycopg.Error) -> bool:
    """Tell whether a statement may do better on another session: not refused, but cut off, or in line for too long."""
    return meaning(error) not in BLAMES


def send(connection: psycopg.Connection, step: Execute) -> None:
    """Hand a statement to the kernel; `psycopg` has no way to do without the answer, libpq has."""
    query, names = _numbered(step.statement.sql)
    values = [step.values[name] for name in names]
    dumped = Transformer(connection).dump_sequence(values, [PyFormat.TEXT] * len(values))
    if is_pooled(connection):
        connection.pgconn.send_query_params(query, dumped)
    else:
        connection.pgconn.send_query_prepared(_prepared(connection, query), dumped)
    _flush(connection)


_names: WeakKeyDictionary[psycopg.Connection, dict[bytes, bytes]] = WeakKeyDictionary()


def _prepared(connection: psycopg.Connection, query: bytes) -> bytes:
    """Return the name of a statement, prepared once in its session: planned each time it would cost twice as much."""
    names = _names.setdefault(connection, {})
    if query not in names:
        name = f"post_{len(names)}".encode()
        connection.pgconn.send_prepare(name, query)
        _flush(connection)
        _take_answer(connection)
        names[query] = name
    return names[query]


def _flush(connection: psycopg.Connection) -> None:
    deadline = time.monotonic() + WITHIN_S
    while connection.pgconn.flush():
        _wait(connection, selectors.EVENT_WRITE, deadline)


def _take_answer(connection: psycopg.Connection) -> None:
    pgconn = connection.pgconn
    deadline = time.monotonic() + WITHIN_S
    pgconn.consume_input()  # by now it is there, as a rule
    while True:
        if pgconn.is_busy():
            _wait(connection, selectors.EVENT_READ, deadline)
            pgconn.consume_input()
        elif (result := pgconn.get_result()) is None:
            return
        elif result.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result)


def _wait(connection: psycopg.Connection, event: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise Unanswered("the server does not answer")


@lru_cache(maxsize=64)
def _numbered(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """Return a statement with its parameters in libpq's form, and their names in order."""
    names = tuple(dict.fromkeys(match[1] for match in PARAMETER.finditer(sql)))
    numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", sql)
    return numbered.replace("%%", "%").encode(), names
