"""A session whose statements are sent without waiting for their answers.

Data that the kernel has accepted reaches the server even if this process dies at once. So a statement that only has to
outlive the process costs no round trip. Its answer is read before the next statement is sent, which then raises the
error, if any. A statement that was lost with its session is sent again, so send only statements that may run twice.
"""

import contextlib
import selectors
import threading
import time
from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus, Format
from psycopg.rows import TupleRow

from mailroom.errors import ConfigurationError, ConnectionFailed, coded
from mailroom.session.home import PLACE, Elsewhere, Home, HomeDatabase
from mailroom.sql.operation import Execute
from mailroom.sql.pooler import is_pooled
from mailroom.sql.sqlstate import BLAMES, meaning

# The time for the server to answer the last statement, and for the kernel to accept a new one.
# D-workers-17: In-flight entries are sent and not waited for.
WITHIN_S = 1.0


class Unanswered(psycopg.OperationalError):
    """The server did not answer the last statement in time."""


class NoSession(psycopg.OperationalError):
    """There is no session now, and nothing was sent. Its text says why; `elsewhere` if it leads to another database."""

    def __init__(self, error: ConnectionFailed | ConfigurationError) -> None:
        super().__init__(coded(str(error), error))
        self.elsewhere = error if isinstance(error, Elsewhere) else None


class Unawaited:
    """One session. Threads may share it. If it is lost or in an unknown state, the next use opens a new one.

    It is used only where the batches are: at the place of `home`, or at the one that a thread has named (`at`).
    """

    def __init__(self, home: Home | str, role: str, session: Mapping[str, str]) -> None:
        self._home = Home.of(home)
        self._role = role
        self._settings = session
        self._connection: psycopg.Connection | None = None
        self._place: HomeDatabase | None = None
        self._wanted = threading.local()
        self._unanswered: Execute | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def at(self, place: HomeDatabase | None) -> Iterator[None]:
        """Use the session at that place only, in this thread within this context. None: where `home` is."""
        self._wanted.place = place
        try:
            yield
        finally:
            self._wanted.place = None

    @property
    def is_pooled(self) -> bool:
        """Whether the last session led through a pooler."""
        return self._connection is not None and is_pooled(self._connection)

    def send(self, step: Execute) -> None:
        """Send a statement, in autocommit, without waiting for its answer; raises the error of the last one."""
        with self.session(WITHIN_S) as connection:
            self._unanswered = step
            send(connection, step)

    def settle(self, within_s: float = -1) -> None:
        """Wait for the answer of the last statement; raises its error, and `Unanswered` as `session` does."""
        with self.session(within_s):
            pass

    @contextlib.contextmanager
    def session(self, within_s: float = -1) -> Iterator[psycopg.Connection]:
        """Give exclusive use of the session, with no answer outstanding. Raises `NoSession`.

        Raises `Unanswered` if another thread uses it for longer than `within_s` seconds; by default it waits for that.
        """
        if not self._lock.acquire(timeout=within_s):
            raise Unanswered("the session is in use")
        try:
            connection = self._opened(getattr(self._wanted, "place", None) or self._home.place)
            try:
                yield connection
            except errors.LockNotAvailable:
                raise
            except BaseException:
                # Its state is unknown: if it is left in a transaction, nothing sent later would be committed.
                connection.close()
                raise
        finally:
            # A thread that was still at work when `close` was called may have opened it anew.
            if self._is_closed and self._connection is not None:
                self._connection.close()
            self._lock.release()

    def close(self) -> None:
        """Wait for the answer of the last statement and close the session; used again, it is open for that use only.

        A use under way has `WITHIN_S` seconds to end, and is cut off then.
        """
        self._is_closed = True
        is_idle = self._lock.acquire(timeout=WITHIN_S)
        try:
            # Asked only now: a use that this has waited for may have taken the answer, and closed the session.
            if is_idle and self._unanswered is not None:
                with contextlib.suppress(psycopg.OperationalError):
                    self._opened(self._place)
        finally:
            if self._connection is not None:
                self._connection.close()
            if is_idle:
                self._lock.release()

    def _opened(self, place: HomeDatabase | None) -> psycopg.Connection:
        """Return the session at that place, with no answer outstanding."""
        connection = self._answered()
        try:
            self._home.check_room()
        except ConnectionFailed as failed:
            if connection is not None:
                connection.close()
            raise NoSession(failed) from None
        if connection is not None and place in (None, self._place):
            return connection
        if connection is not None:
            connection.close()  # of where the batches were before
        return self._connect(place)

    def _connect(self, wanted: HomeDatabase | None) -> psycopg.Connection:
        try:
            connection = self._home.connect(self._role, self._settings)
        except (ConnectionFailed, ConfigurationError) as failed:
            raise NoSession(failed) from None  # to be retried, as on any other session
        with contextlib.ExitStack() as unless_well:
            unless_well.callback(connection.close)
            # Once psycopg has prepared a statement, it sends DEALLOCATE ALL after each ROLLBACK, which takes ours too.
            connection.prepare_threshold = None
            if wanted is not None:
                found = _place(connection)
                try:
                    self._home.compare(found, wanted)
                except Elsewhere as elsewhere:
                    raise NoSession(elsewhere) from None
                if self._place not in (None, found):
                    self._unanswered = None  # it was for the messages of another place
                self._place = found
            self._connection = connection
            if self._unanswered is not None:
                send(connection, self._unanswered)
            unless_well.pop_all()
        if self._unanswered is not None:
            self._finish(connection)
        return connection

    def _answered(self) -> psycopg.Connection | None:
        """Return the session once its last statement is answered; None if there is no session or it was lost."""
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
            connection.pgconn.consume_input()  # the server may have closed the connection after the answer
        except psycopg.Error as error:
            connection.close()
            if not _is_lost(error):
                self._unanswered = None
            raise


def _is_lost(error: psycopg.Error) -> bool:
    """Return whether the statement may succeed on another session: it was not refused, but cut off or timed out."""
    return meaning(error) not in BLAMES


def send(connection: psycopg.Connection, step: Execute) -> None:
    """Pass a statement to the kernel; this uses libpq, since psycopg always waits for the answer."""
    query, names = step.statement.numbered
    values = [_numbers_as_text(step.values[name]) for name in names]
    # Texts of a list in their binary form: in the other psycopg looks into each for what to escape.
    formats = [PyFormat.BINARY if isinstance(value, list) else PyFormat.TEXT for value in values]
    transformer = Transformer(connection)
    dumped = transformer.dump_sequence(values, formats)
    if is_pooled(connection):
        connection.pgconn.send_query_params(query, dumped, param_formats=transformer.formats)
    else:
        connection.pgconn.send_query_prepared(_prepared(connection, query), dumped, transformer.formats)
    _flush(connection)


def _numbers_as_text(value: object) -> object:
    """Return an array of numbers as text, for a quarter of the time that psycopg takes; anything else as it is."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        return "{" + ",".join(map(str, value)) + "}"
    return value


_names: WeakKeyDictionary[psycopg.Connection, dict[bytes, bytes]] = WeakKeyDictionary()


def _prepared(connection: psycopg.Connection, query: bytes) -> bytes:
    """Return the name of the prepared statement; planning it each time would cost twice as much."""
    names = _names.setdefault(connection, {})
    if query not in names:
        name = f"unawaited_{len(names)}".encode()
        connection.pgconn.send_prepare(name, query)
        _flush(connection)
        _take_answer(connection)
        names[query] = name
    return names[query]


def _flush(connection: psycopg.Connection) -> None:
    deadline = time.monotonic() + WITHIN_S
    while connection.pgconn.flush():
        _wait(connection, selectors.EVENT_WRITE, deadline)


def _place(connection: psycopg.Connection) -> HomeDatabase:
    """Return where the session is. Raises `Unanswered`: behind a pooler the batches may hold all connections."""
    connection.pgconn.send_query_params(PLACE.at().numbered[0], None, result_format=Format.BINARY)
    _flush(connection)
    [row] = _take_answer(connection)
    return HomeDatabase(*row)


def _take_answer(connection: psycopg.Connection) -> list[TupleRow]:
    pgconn = connection.pgconn
    rows: list[TupleRow] = []
    deadline = time.monotonic() + WITHIN_S
    pgconn.consume_input()  # usually the answer has arrived by now
    while True:
        if pgconn.is_busy():
            _wait(connection, selectors.EVENT_READ, deadline)
            pgconn.consume_input()
        elif (result := pgconn.get_result()) is None:
            return rows
        elif result.status == ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result)
        elif result.status == ExecStatus.TUPLES_OK:
            answer = Transformer(connection)
            answer.set_pgresult(result)
            rows += answer.load_rows(0, result.ntuples, tuple)


def _wait(connection: psycopg.Connection, event: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise Unanswered("the server does not answer")
