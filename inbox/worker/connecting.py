"""Errors that are raised while a connection is got, which are never a message's fault and end no worker that runs.

Whatever the source does to connect may fail in any way: a pool that the application has used up, a function of the
user's that fetches a password. So it counts when an error is raised, and not of which class it is.
"""

import contextlib
from collections.abc import Iterator

import psycopg

from inbox.handling.frames import frames
from mailroom.errors import ConnectionFailed, MailroomError, coded
from mailroom.sql.sqlstate import Meaning, meaning


class NotConnected(Exception):
    """The source gave no connection; `error` says why. A later try may succeed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__)
        self.error = error


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Get a connection inside this context: raises `NotConnected`, or an error of ours that says what is wrong."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MailroomError) and not isinstance(error, ConnectionFailed):
            raise
        raise NotConnected(error) from error


def reason(error: BaseException) -> str:
    """Return what the log says of an error that no message caused: no password, and no text of the user's code."""
    if isinstance(error, MailroomError):
        return coded(str(error), error)
    name = type(error).__name__
    if isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] == "42":  # it names a table, or a missing right
        return f"{name}: {error.diag.message_primary}"
    return name if isinstance(error, Exception) and meaning(error) is not Meaning.OTHER else f"{name}{frames(error)}"
