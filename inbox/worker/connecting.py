"""Errors that are raised while connecting, which are never a message's fault and never end a running worker.

Whatever the source does to connect may fail in any way: a pool may be used up by the application, or a user's function
that fetches a password may fail. So what counts is when an error is raised, not its class.
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


# D-workers-5: An error counts as a lost connection by when it is raised.
@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Get a connection inside this context: raises `NotConnected`, or a Mailroom error that says what is wrong."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MailroomError) and not isinstance(error, ConnectionFailed):
            raise
        raise NotConnected(error) from error


def reason(error: BaseException) -> str:
    """Return what the log says about an error that no message caused: no password, and no text of the user's code."""
    if isinstance(error, MailroomError):
        return coded(str(error), error)
    name = type(error).__name__
    if isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] == "42":  # it names a table, or a missing right
        return f"{name}: {error.diag.message_primary}"
    return name if isinstance(error, Exception) and meaning(error) is not Meaning.OTHER else f"{name}{frames(error)}"
