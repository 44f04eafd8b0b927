"""Every error Mailroom raises itself. Each text says what to do next and never holds a password or a payload.

Errors of psycopg and SQLAlchemy that arise in the caller's transaction pass through as they are.
"""


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
