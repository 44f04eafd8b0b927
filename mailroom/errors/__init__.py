"""The errors that Mailroom raises itself. Each says what to do next and never contains a password or payload.

Each has a `code`, which stays the same when its text is worded anew: one of `mailroom.errors.codes`, with a section of
its own in docs/errors. Errors of psycopg and SQLAlchemy in the caller's transaction pass through unchanged.
"""

from copyreg import __newobj__  # type: ignore[attr-defined]  # pickle's own way to make an object without __init__
from typing import Any
from uuid import UUID

from mailroom.errors.codes import CODES

__all__ = [
    "CommitUnknown",
    "ConfigurationError",
    "ConnectionFailed",
    "DecodeError",
    "EmbeddedServerError",
    "EncodeError",
    "InvalidMessage",
    "InvalidName",
    "LinkRefused",
    "MailroomError",
    "NoHandler",
    "NotAtomic",
    "NotInTransaction",
    "NotSubscribed",
    "SchemaError",
    "TokenExpired",
    "UnknownBridge",
    "UnknownInbox",
    "UnknownLink",
    "UnknownPeriodic",
    "UnsupportedConnection",
]


class Coded(Exception):
    """An exception with a `code`, which names the situation. One of a class with several situations is given its own.

    A traceback ends with the code (as a note), and the command and the logs show it (`coded`). The text lacks it.
    """

    code = ""

    def __init__(self, *args: object, code: str | None = None) -> None:
        """`code` is one of `CODES`, by default that of the class."""
        super().__init__(*args)
        self.code = self.code if code is None else code
        if self.code not in CODES:
            raise TypeError(f"a {type(self).__name__} needs a code of mailroom.errors.codes, not {self.code!r}")
        self.add_note(f"{self.code}: see `mailroom explain {self.code}`")

    def __reduce__(self) -> tuple[Any, ...]:
        """Have it unpickled as it is: without a constructor, whose arguments differ from class to class."""
        return __newobj__, (type(self),), {**self.__dict__, "args": self.args}


def coded(text: str, error: BaseException) -> str:
    """Return `text`, which tells of an error, with the error's code after it; the text alone if it has none."""
    return f"{text} [{error.code}]" if isinstance(error, Coded) else text


class MailroomError(Coded):
    """Base class of all errors of Mailroom. `exit_code` is the exit code of the command."""

    exit_code = 1


class ConfigurationError(MailroomError):
    """No database is named, or a setting cannot be used."""

    exit_code = 2


class InvalidName(MailroomError, ValueError):
    """A schema, inbox or topic name outside its alphabet or length."""

    code = "MR-invalid-name"
    exit_code = 2


class InvalidMessage(MailroomError, ValueError):
    """A message exceeds a limit or has a part that cannot be sent. Nothing of the call was sent."""


class EncodeError(InvalidMessage):
    """A value does not survive a round trip through CBOR unchanged."""


class DecodeError(MailroomError, ValueError):
    """Bytes are not a valid value. Only this message fails; `Message.raw` still returns them."""

    code = "MR-value-unreadable"


class NoHandler(MailroomError):
    """None of the handlers is for a message of this topic. Only this message fails, and is not tried again."""

    code = "MR-no-handler"


class NotInTransaction(MailroomError):
    """A call that must share the caller's transaction was made on an autocommit connection outside of one."""

    code = "MR-not-in-transaction"


class NotAtomic(MailroomError):
    """The work given to `atomically` is not one transaction of its own. Nothing was committed by `atomically`."""


class CommitUnknown(MailroomError):
    """A COMMIT was sent, but its outcome could not be found out in time: the transaction may have committed or not.

    `token` names the transaction: `mailroom.resolve(connect, token)` returns its outcome, from any process.
    """

    code = "MR-commit-unknown"

    def __init__(self, token: UUID, reason: str) -> None:
        super().__init__(token, reason)
        self.token = token
        self._reason = reason

    def __str__(self) -> str:
        return (
            f"It is not known whether transaction {self.token} committed ({self._reason}). Do not run its work again "
            f"before you know. Once the database answers, mailroom.resolve(connect, {str(self.token)!r}) returns "
            "'committed' or 'rolled back'; run the work again only after 'rolled back'."
        )


class TokenExpired(MailroomError):
    """The token is too old: the outcome of its transaction is no longer recorded."""

    code = "MR-token-expired"

    def __init__(self, token: UUID, kept_days: int) -> None:
        super().__init__(token, kept_days)
        self.token = token
        self._kept_days = kept_days

    def __str__(self) -> str:
        return (
            f"Transaction {self.token} is too old: outcomes are kept for {self._kept_days} days. "
            "Check your own tables for what it was to write."
        )


class UnsupportedConnection(MailroomError, TypeError):
    """An object is not a connection of psycopg 3 or SQLAlchemy 2, nor one of Django on psycopg 3."""

    code = "MR-unsupported-connection"


class SchemaError(MailroomError):
    """The schema is missing, too old or too new for this release, or still holds messages."""


class UnknownInbox(MailroomError):
    """There is no inbox of that name in this schema."""

    code = "MR-unknown-inbox"


class LinkRefused(MailroomError):
    """Two nodes refuse each other, since going on could lose messages or take them twice. Nothing was read.

    `reason` says why, and `command` what to run to end it; `at` names the node on which.
    """

    def __init__(self, reason: str, at: str, command: str, *, code: str) -> None:
        super().__init__(reason, at, command, code=code)
        self.reason = reason
        self.at = at
        self.command = command

    def __str__(self) -> str:
        return f"{self.reason}; at {self.at}: {self.command}"


class UnknownBridge(MailroomError):
    """There is no bridge of that name in this schema."""

    code = "MR-unknown-bridge"


class UnknownLink(MailroomError):
    """There is no link to a reader, or from a source, of that name in this schema."""

    code = "MR-unknown-link"


class UnknownPeriodic(MailroomError):
    """There is no periodic message of that name in this schema."""

    code = "MR-unknown-periodic"


class NotSubscribed(MailroomError):
    """A subscription is here, and its source does not have it: in the given time it was not told, or it refuses it."""


class ConnectionFailed(MailroomError):
    """The database could not be reached or refused the login."""

    code = "MR-connection-failed"


class EmbeddedServerError(MailroomError):
    """The embedded PostgreSQL could not be found, started or stopped."""
