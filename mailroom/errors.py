"""The errors that Mailroom raises itself. Each says what to do next and never contains a password or payload.

Errors of psycopg and SQLAlchemy in the caller's transaction pass through unchanged.
"""

from uuid import UUID

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
    "UnknownInbox",
    "UnknownLink",
    "UnsupportedConnection",
]


class MailroomError(Exception):
    """Base class of all errors of Mailroom. `exit_code` is the exit code of the command."""

    exit_code = 1


class ConfigurationError(MailroomError):
    """No database is named, or a setting cannot be used."""

    exit_code = 2


class InvalidName(MailroomError, ValueError):
    """A schema, inbox or topic name outside its alphabet or length."""

    exit_code = 2


class InvalidMessage(MailroomError, ValueError):
    """A message exceeds a limit or has a part that cannot be sent. Nothing of the call was sent."""


class EncodeError(InvalidMessage):
    """A value does not survive a round trip through CBOR unchanged."""


class DecodeError(MailroomError, ValueError):
    """Bytes are not a valid value. Only this message fails; `Message.raw` still returns them."""


class NoHandler(MailroomError):
    """None of the handlers is for a message of this topic. Only this message fails, and is not tried again."""


class NotInTransaction(MailroomError):
    """A call that must share the caller's transaction was made on an autocommit connection outside of one."""


class NotAtomic(MailroomError):
    """The work given to `atomically` is not one transaction of its own. Nothing was committed by `atomically`."""


class CommitUnknown(MailroomError):
    """A COMMIT was sent, but its outcome could not be found out in time: the transaction may have committed or not.

    `token` names the transaction: `mailroom.resolve(connect, token)` returns its outcome, from any process.
    """

    def __init__(self, token: UUID, reason: str) -> None:
        super().__init__(token, reason)  # so that it can be unpickled in another process
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


class SchemaError(MailroomError):
    """The schema is missing, too old or too new for this release, or still holds messages."""


class UnknownInbox(MailroomError):
    """There is no inbox of that name in this schema."""


class LinkRefused(MailroomError):
    """Two nodes refuse each other, since going on could lose messages or take them twice. Nothing was read.

    `reason` says why, and `command` what to run to end it; `at` names the node on which.
    """

    def __init__(self, reason: str, at: str, command: str) -> None:
        super().__init__(reason, at, command)  # so that it can be unpickled in another process
        self.reason = reason
        self.at = at
        self.command = command

    def __str__(self) -> str:
        return f"{self.reason}; at {self.at}: {self.command}"


class UnknownLink(MailroomError):
    """There is no link to a reader, or from a source, of that name in this schema."""


class NotSubscribed(MailroomError):
    """A subscription is here, and its source does not have it: in the given time it was not told, or it refuses it."""


class ConnectionFailed(MailroomError):
    """The database could not be reached or refused the login."""


class EmbeddedServerError(MailroomError):
    """The embedded PostgreSQL could not be found, started or stopped."""
