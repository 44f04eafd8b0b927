"""What an error of the database means, whichever driver raised it and whether SQLAlchemy has wrapped it."""

from enum import Enum
from typing import Any

import psycopg

from mailroom.errors import ConnectionFailed

# Conflicts with another transaction: serialization failure, deadlock, lock timeout.
AGAIN = frozenset({"40001", "40P01", "55P03"})
SERIALIZATION = "40001"
RAISE = "exec_stmt_raise"  # what raises an error of PL/pgSQL, in the server's source
CANCELLED = "57014"  # a statement timeout, or a cancel request
ABORTED = "25P02"  # an earlier statement of the transaction failed
NOT_YOURS = "2D000"  # a COMMIT or ROLLBACK where none is allowed
NO_ROOM = "53200"  # in the server's memory, above all in its table of locks
NO_CURSOR = "34000"
NO_STATEMENT = "26000"  # user code has deallocated it: a session that knows of no prepared one is well
# What refuses, in the server's source, a statement whose rows a policy would choose. Its code is that of any missing
# right, and its text is in the server's language.
ROW_SECURITY = "check_enable_rls"
NO_SAVEPOINT = frozenset({"3B001", "25P01"})  # the second: nor a transaction
# The server ends the session: shutdown, crash, starting up, database dropped, idle timeouts.
LAST_WORDS = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"})
# Errors about the data, by the class of their SQLSTATE, with the name of the condition in PL/pgSQL. A trigger raises P0
# by default.
OF_THE_DATA = {
    "22": "data_exception",
    "23": "integrity_constraint_violation",
    "54": "program_limit_exceeded",
    "P0": "plpgsql_error",
}
# Insufficient resources, operator intervention, system error, snapshot too old, configuration file error.
OF_THE_SERVER = frozenset({"53", "57", "58", "72", "F0"})
CORRUPTED = frozenset({"XX001", "XX002"})
# Without an SQLSTATE, these mean that the session was lost or could not be made.
# D-statements-10: The meaning of an error is decided in one place.
OF_THE_SESSION = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError, OSError, ConnectionFailed)


class Meaning(Enum):
    """What an error means. Only the last two can be the fault of a message or an executable."""

    LOST = "the session did not outlive it, or could not be made"
    AGAIN = "a conflict with another transaction; a retry may succeed"
    SERVER = "the server lacks resources, has an error of its own, or was told to cancel"
    READ_ONLY = "the server is a standby: our sessions need the primary"
    DATA = "the database refuses the data, and would refuse it again"
    OTHER = "anything else, also errors that no database raised"


BLAMES = frozenset({Meaning.DATA, Meaning.OTHER})


def meaning_of_code(code: str) -> Meaning:
    """Return the meaning of a server error with that SQLSTATE."""
    if code == "25006":
        return Meaning.READ_ONLY
    if code[:2] == "08" or code in LAST_WORDS:
        return Meaning.LOST
    if code[:2] == "40" or code in AGAIN or code == NO_STATEMENT:
        return Meaning.AGAIN
    if code[:2] in OF_THE_SERVER or code in CORRUPTED:
        return Meaning.SERVER
    return Meaning.DATA if code[:2] in OF_THE_DATA else Meaning.OTHER


def meaning(error: BaseException, connection: object = None) -> Meaning:
    """Return the meaning of an error. Call it before `connection` is given back (see `is_lost`)."""
    if is_lost(error, connection):
        return Meaning.LOST
    if code := sqlstate(error):
        return meaning_of_code(code)
    # psycopg raises InternalError if the session ended right after a BEGIN or COMMIT, which gives two results.
    return Meaning.LOST if isinstance(_driver_s(error), OF_THE_SESSION) else Meaning.OTHER


def _driver_s(error: BaseException) -> BaseException:
    """Return the driver's error below one of SQLAlchemy or Django; any other one as it is."""
    below = error.__cause__ if type(error).__module__ == "django.db.utils" else _attribute(error, "orig")
    return below if isinstance(below, BaseException) else error


def _attribute(error: object, name: str) -> Any:
    """Return an attribute of an error, or None. Users' classes may have the drivers' names, for other things."""
    try:
        return getattr(error, name, None)
    except Exception:  # a property that fails
        return None


def _fields(error: BaseException) -> dict[object, object]:
    """Return the fields of the server's message, which pg8000 passes on as the error's argument."""
    arguments = _attribute(error, "args")
    fields = arguments[0] if isinstance(arguments, tuple) and arguments else None
    return fields if isinstance(fields, dict) and isinstance(fields.get("M"), str) else {}


def is_spent(error: BaseException) -> bool:
    """Return whether another session would do where this one, which lives, does not: a new one is to be opened."""
    code = sqlstate(error)
    return code == NO_STATEMENT or meaning_of_code(code) is Meaning.READ_ONLY


def is_held_up(error: BaseException) -> bool:
    """Return whether a statement met a conflict, took too long, or was cancelled.

    The session is still good: a new one would only wait again.
    """
    code = sqlstate(error)
    return code in AGAIN or code == CANCELLED


def sqlstate(error: BaseException) -> str:
    """Return the five characters of the server's error code, or "" if the error did not come from the server."""
    cause = _driver_s(error)
    for code in (_attribute(cause, "sqlstate"), _attribute(cause, "pgcode"), _fields(cause).get("C")):
        if isinstance(code, str) and len(code) == 5:
            return code
    return ""


def primary_message(error: BaseException) -> str:
    """Return the server's primary message, without context, detail, hint or the driver's additions."""
    cause = _driver_s(error)
    if isinstance(cause, psycopg.Error):
        return str(cause.diag.message_primary)
    if (diag := _attribute(cause, "diag")) is not None:  # psycopg2
        return str(diag.message_primary)
    return str(_fields(cause).get("M") or getattr(cause.__cause__, "message", None) or cause)  # pg8000, asyncpg


def is_of_row_security(error: BaseException) -> bool:
    """Return whether the server refused a statement because row security would choose its rows."""
    return _raised_by(error, ROW_SECURITY)


def is_unserializable(error: BaseException) -> bool:
    """Return whether the server could not put the transaction in an order with others, as its isolation level wants.

    A trigger or function that raises 40001 by itself is not that.
    """
    return sqlstate(error) == SERIALIZATION and not _raised_by(error, RAISE)


def _raised_by(error: BaseException, place: str) -> bool:
    """Return whether a function of the server's source raised the error."""
    cause = _driver_s(error)
    in_diag = _attribute(_attribute(cause, "diag"), "source_function")  # psycopg, psycopg2
    for function in (in_diag, _attribute(cause, "server_source_function"), _fields(cause).get("R")):
        if isinstance(function, str) and function == place:
            return True
    return False


def is_lost(error: BaseException, connection: object = None) -> bool:
    """Return whether the error ended the session.

    Ask before `connection` is given back: a pool or an engine closes it afterwards as a matter of course.
    """
    return bool(
        meaning_of_code(sqlstate(error)) is Meaning.LOST
        or was_invalidated(error)
        or getattr(connection, "broken", False)
        or getattr(connection, "invalidated", False)
    )


def was_invalidated(error: BaseException) -> bool:
    """Return whether SQLAlchemy has found with this error that the session is lost."""
    return _attribute(error, "connection_invalidated") is True
