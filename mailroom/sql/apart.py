"""Writes by Django's ORM that would commit apart from the message in hand: detected, and refused before they are made.

A worker's batch is a transaction of its source. Django has connections of its own, and what a handler writes by the ORM
commits there, by itself, once per attempt. Django lets a function see each statement first (`execute_wrapper`), so a
write into the database of the batch fails the message. Django is imported nowhere here: if it was not imported,
it is not used.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from weakref import WeakKeyDictionary

from mailroom.errors import MailroomError
from mailroom.sql.operation import IN_TRANSACTION, Operation, Step, T

PLACE = (
    "SELECT oid::bigint, (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint "
    "FROM pg_database WHERE datname = current_database()"
)
# Statements that only read, or move within a transaction. Functions change data too, which cannot be seen from outside.
# D-schema-6: Django's writes are seen by `execute_wrapper`.
READS = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*\n|\()*"
    r"(?:SELECT|VALUES|TABLE|SHOW|SET|RESET|EXPLAIN|FETCH|DECLARE|CLOSE|SAVEPOINT|RELEASE|ROLLBACK|BEGIN|START|COMMIT)\b",
    re.I | re.S,
)
WITH = re.compile(r"(?:\s|/\*.*?\*/|--[^\n]*\n|\()*WITH\b", re.I | re.S)
CHANGES = re.compile(r"\b(?:INSERT|UPDATE|DELETE|MERGE)\b", re.I)
LOCKS = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b", re.I)


class WritesApart(MailroomError):
    """A handler writes on a connection of Django that is not the one of its message. Nothing was written."""

    code = "MR-writes-apart"


@dataclass(frozen=True, slots=True)
class _CurrentHandler:
    driver: object
    oid: int
    server_started_us: int


_in_hand: ContextVar[_CurrentHandler | None] = ContextVar("mailroom_in_hand", default=None)
_places: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def is_watched() -> bool:
    """Return whether Django is there, so that a place has to be known."""
    return "django.db" in sys.modules


@contextmanager
def in_hand(driver: object, oid: int, server_started: datetime) -> Iterator[None]:
    """Refuse within this context what Django would write into this database over another connection than `driver`."""
    if not is_watched():
        yield
        return
    _watch()
    token = _in_hand.set(_CurrentHandler(driver, oid, (server_started - EPOCH) // timedelta(microseconds=1)))
    try:
        yield
    finally:
        _in_hand.reset(token)


def refusing(django: Any, operation: Operation[T]) -> Operation[T]:
    """Run an operation on a connection of Django, unless it writes apart from the message in hand."""
    given: Any = None
    resume: Callable[[Any], Step] = operation.send
    while True:
        try:
            step = resume(given)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if step is IN_TRANSACTION:
            _refuse(django)
        try:
            resume, given = operation.send, (yield step)
        except Exception as error:
            resume, given = operation.throw, error


def writes(statement: str) -> bool:
    """Return whether a statement writes, as far as its text shows."""
    if WITH.match(statement):
        return CHANGES.search(LOCKS.sub("", statement)) is not None
    return READS.match(statement) is None


def _watch() -> None:
    """See the statements of this thread's connections, and of all that are opened from now on in any thread."""
    if is_set_up():
        for django in sys.modules["django.db"].connections.all(initialized_only=True):
            _see(connection=django)
    signals = sys.modules.get("django.db.backends.signals")
    if signals is not None:
        signals.connection_created.connect(_see, weak=False, dispatch_uid="mailroom")


def is_set_up() -> bool:
    """Return whether Django has settings: other packages import it to look whether it is there, as Sentry's does."""
    conf = sys.modules.get("django.conf")
    return conf is not None and (conf.settings.configured or bool(os.environ.get(conf.ENVIRONMENT_VARIABLE)))


def _see(*, connection: Any, **_: object) -> None:
    if _seeing not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, _seeing)


def _seeing(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    if _in_hand.get() is not None and writes(str(sql)):
        _refuse(context["connection"])
    return execute(sql, params, many, context)


def _refuse(django: Any) -> None:
    """Raise `WritesApart` if a message is in hand and this connection leads to the same database, apart from it."""
    message = _in_hand.get()
    if message is None or django.vendor != "postgresql":
        return
    django.ensure_connection()
    driver = django.connection
    if driver is message.driver:
        return
    if driver not in _places:
        with django.cursor() as cursor:
            cursor.execute(PLACE)
            _places[driver] = cursor.fetchone()
    if _places[driver] == (message.oid, message.server_started_us):
        raise WritesApart(
            f"the handler writes on Django's connection {django.alias!r}, which would commit apart from its message, "
            f"once more with each attempt: give the worker that connection, Worker('django:{django.alias}', ...), or "
            "write on the connection that the handler is given"
        )
