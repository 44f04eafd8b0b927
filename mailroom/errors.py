"""Every error Mailroom raises itself. Each text says what to do next and never holds a password or a payload.

Errors of psycopg and SQLAlchemy that arise in the caller's transaction pass through as they are.
"""

from uuid import UUID


class MailroomError(Exception):
    """Anything Mailroom refuses or cannot do. `exit_code` is what the command ends with."""

    exit_code = 1


class ConfigurationError(MailroomError):
    """No database is named, or a setting cannot be used."""

    exit_code = 2


class InvalidName(MailroomError, ValueError):
    """A schema, inbox or topic name outside its alphabet or length."""

    exit_code = 2


class InvalidMessage(MailroomError, ValueError):
    """A message over a limit, or with a part that cannot be sent; nothing of the call was sent."""


class EncodeError(InvalidMessage):
    """A value that CBOR cannot carry and give back equal."""


class DecodeError(MailroomError, ValueError):
    """Bytes that are not a value of ours. Only this message fails; `Message.raw` still reads them."""


class NotInTransaction(MailroomError):
    """A call that must share the caller's transaction was made on an autocommit connection outside of one."""


class NotAtomic(MailroomError):
    """What `atomically` was to commit is not one whole transaction of its own; it did not commit it."""


class CommitUnknown(MailroomError):
    """A COMMIT was sent, no answer came, and nobody could be asked in time: it may have committed or not.

    `token` names the transaction: `mailroom.resolve(connect, token)` tells how it ended, from any process.
    """

    def __init__(self, token: UUID, reason: str) -> None:
        super().__init__(token, reason)  # what pickle makes it from, in another process
        self.token = token
        self._reason = reason

    def __str__(self) -> str:
        return (
            f"It is not known whether transaction {self.token} committed ({self._reason}). Do not run its work again "
            f"before you know: once the database answers, mailroom.resolve(connect, {str(self.token)!r}) returns "
            "'committed' or 'rolled back', and only after 'rolled back' may the work be run again."
        )


class TokenExpired(MailroomError):
    """Too long ago: how the transaction of this token ended is not recorded any more."""

    def __init__(self, token: UUID, kept_days: int) -> None:
        super().__init__(token, kept_days)
        self.token = token
        self._kept_days = kept_days

    def __str__(self) -> str:
        return (
            f"Transaction {self.token} is too old to be looked up: how one ended is kept for {self._kept_days} days. "
            "Look in your own tables for what it was to write."
        )


class UnsupportedConnection(MailroomError, TypeError):
    """An object that is no connection of psycopg 3 or of SQLAlchemy 2."""


class SchemaError(MailroomError):
    """The schema is missing, too old or too new for this release, or still holds messages."""


class UnknownInbox(MailroomError):
    """No inbox of that name in this schema."""


class ConnectionFailed(MailroomError):
    """The database could not be reached or refused the login."""


class EmbeddedServerError(MailroomError):
    """The embedded PostgreSQL could not be found, started or stopped."""
