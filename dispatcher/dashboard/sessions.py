"""The database sessions of the dashboard: some that only read, kept open, and one for each act of an operator."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool

from mailroom.errors import MailroomError
from mailroom.schema import check
from mailroom.session import settings
from mailroom.sql.pooler import PooledConnection

LIMITS = settings.SESSION | {
    "statement_timeout": "2s",
    "lock_timeout": "500ms",
    "idle_in_transaction_session_timeout": "5s",
}
SESSIONS = 4
PATIENCE_S = 2.0


class NodeSessions:
    """The sessions of one node; threads share it. Those that read are at most four, and are kept until `close`."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn, self._schema = dsn, schema
        self._turns = threading.BoundedSemaphore(SESSIONS)
        self._lock = threading.Lock()
        self._idle: list[Connection[Any]] = []
        self._closed = False

    @contextmanager
    def reading(self) -> Iterator[Connection[Any]]:
        """Lend a session that cannot write, in autocommit: so it holds no lock or snapshot beyond a statement."""
        if not self._turns.acquire(timeout=PATIENCE_S):
            raise MailroomError("All sessions of the dashboard are busy. Try again.", code="MR-dashboard-busy")
        try:
            connection = self._taken() or self._opened()
            try:
                # Through a pooler the settings hold for a transaction.
                pooled = isinstance(connection, PooledConnection)
                with connection.transaction() if pooled else nullcontext():
                    yield connection
            finally:
                self._put(connection)
        finally:
            self._turns.release()

    # D-dashboard-6: An act has a session of its own.
    @contextmanager
    def operating(self) -> Iterator[Connection[Any]]:
        """Open a session for one act, in a transaction that is committed at the end."""
        with settings.connect(self._dsn, "dashboard operate", LIMITS, autocommit=True) as connection:
            check(connection, schema=self._schema)
            with connection.transaction():
                yield connection

    def close(self) -> None:
        """Close the sessions that are not in use, and each of the others after its use."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for connection in idle:
            connection.close()

    def _taken(self) -> Connection[Any] | None:
        """Return an idle session that still answers; the server may have ended some meanwhile."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            try:
                ConnectionPool.check_connection(connection)
            except psycopg.Error:
                connection.close()
            else:
                return connection

    def _opened(self) -> Connection[Any]:
        connection = settings.connect(self._dsn, "dashboard", LIMITS, autocommit=True)
        try:
            check(connection, schema=self._schema)
            if isinstance(connection, PooledConnection):
                connection.settings = LIMITS | {"transaction_read_only": "on"}
            else:
                connection.execute(settings.READ_ONLY)
        except BaseException:
            connection.close()
            raise
        return connection

    def _put(self, connection: Connection[Any]) -> None:
        with self._lock:
            if not self._closed and connection.info.transaction_status is TransactionStatus.IDLE:
                self._idle.append(connection)
                return
        connection.close()
