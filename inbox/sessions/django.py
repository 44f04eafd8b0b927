"""A worker's transactions on connections of Django, so that what the ORM writes is in the transaction of the batch.

Each loop is a thread, and Django has a connection per thread and alias. The handler gets psycopg's connection below it,
as everywhere; the ORM uses the same one. Django itself is imported only here, for a source that names it.
"""

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from inbox.sessions.hold import releasing
from mailroom.errors import ConfigurationError
from mailroom.session.home import Home
from mailroom.sql.runner import run, unwrapped
from mailroom.sql.sqlstate import is_spent

SCHEME = "django:"


def django_alias(source: str) -> str | None:
    """Return the alias that a source `django:ALIAS` names; None for a connection string."""
    return source.removeprefix(SCHEME) or "default" if source.startswith(SCHEME) else None


class DjangoTransactions:
    """Transactions in `atomic`, on the connection that Django has for the thread."""

    def __init__(self, alias: str, home: Home) -> None:
        """Raise `ConfigurationError` unless Django is installed, set up, and knows the alias."""
        self.home = home
        self._alias = alias
        self._opened: set[Any] = set()
        try:
            self._connections: Any = import_module("django.db").connections
            self._atomic: Any = import_module("django.db.transaction").atomic
            known = alias in self._connections
        except Exception as error:
            raise ConfigurationError(
                f"The source django:{alias} needs Django, set up before the worker runs: django.setup() "
                f"({type(error).__name__}).",
                code="MR-django-database",
            ) from error
        if not known:
            raise ConfigurationError(
                f"Django has no database {alias!r}: DATABASES of its settings names "
                f"{', '.join(sorted(self._connections))}.",
                code="MR-django-database",
            )

    @contextlib.contextmanager
    def begin(self, *, failing: bool = False, within_s: float | None = None) -> Iterator[Any]:
        """Begin a transaction on this thread's connection, and give psycopg's below it."""
        django = self._connections[self._alias]
        for other in self._others():
            other.close_if_unusable_or_obsolete()  # as between requests: those that a handler reads on, too
        found = {other for other in self._others() if other.connection is not None}
        if django.connection is None:
            self._opened.add(django)
        elif django.connection.closed:
            django.close()  # lost; Django opens it again
        try:
            with self._atomic(using=self._alias, durable=True):
                yield unwrapped(django)
        except BaseException as error:
            if is_spent(error):
                django.close()
            raise
        finally:
            self._opened |= {other for other in self._others() if other.connection is not None} - found
        if self.home.renews():
            django.close()

    def _others(self) -> list[Any]:
        """Return the connections that this thread has besides, of other aliases."""
        return [each for each in self._connections.all(initialized_only=True) if each.alias != self._alias]

    def commit(self, connection: Any) -> None:
        """Release the transaction to be committed by `atomic`."""
        self._connections[self._alias].validate_no_broken_transaction()  # `atomic` would roll back in silence
        run(connection, releasing())

    def spare(self, connections: int) -> None:
        """Do nothing: each thread has a connection of its own."""

    def close(self) -> None:
        """Close the connections that were opened here. Their threads have ended, and Django would not close them."""
        for django in self._opened:
            django.inc_thread_sharing()
            try:
                django.close()
            finally:
                django.dec_thread_sharing()
