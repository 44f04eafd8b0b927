"""What an error of the database means, whichever driver raised it and whether SQLAlchemy has wrapped it."""

from enum import Enum
from typing import Any

import psycopg

from mailroom.errors import ConnectionFailed

# Lost to another transaction, or to somebody who holds a lock: serialization, deadlock, lock timeout.
AGAIN = frozenset({"40001", "40P01", "55P03"})
CANCELLED = "57014"  # a timeout for statements, or somebody who cancelled it
ABORTED = "25P02"  # an earlier statement of the transaction had failed
NOT_YOURS = "2D000"  # a COMMIT or ROLLBACK by somebody whose transaction it is not to end
NO_CURSOR = "34000"
# The server's last words on a session: shut down, crashed, starting up, database dropped, idle for too long.
LAST_WORDS = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"})
# Errors about what is written, by the class of their code and the condition's name in PL/pgSQL. The last one is what a
# trigger raises that says nothing else.
OF_THE_DATA = {
    "22": "data_exception",
    "23": "integrity_constraint_violation",
    "54": "program_limit_exceeded",
    "P0": "plpgsql_error",
}
# Resources, intervention, system, a snapshot too old, the configuration file.
OF_THE_SERVER = frozenset({"53", "57", "58", "72", "F0"})
CORRUPTED = frozenset({"XX001", "XX002"})
# Without a code of the server, these say that the session was lost or could not be made.
OF_THE_SESSION = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError, OSError, ConnectionFailed)


class Meaning(Enum):
    """What an error means for what was tried. Only the last two can be the fault of a message or an executable."""

    LOST = "the session did not outlive it, or could not be made"
    AGAIN = "another transaction was in the way, and may be gone the next time"
    SERVER = "the server is short of something, in trouble, or was told to cancel"
    READ_ONLY = "the server is a standby: its sessions are of no use to us"
    DATA = "the database refuses what is written, and would refuse it again"
    OTHER = "something else, or no error of a database at all"


BLAMES = frozenset({Meaning.DATA, Meaning.OTHER})


def meaning_of_code(code: str) -> Meaning:
    """Return what an error of the server with that SQLSTATE means."""
    if code == "25006":
        return Meaning.READ_ONLY
    if code[:2] == "08" or code in LAST_WORDS:
        return Meaning.LOST
    if code[:2] == "40" or code in AGAIN:
        return Meaning.AGAIN
    if code[:2] in OF_THE_SERVER or code in CORRUPTED:
        return Meaning.SERVER
    return Meaning.DATA if code[:2] in OF_THE_DATA else Meaning.OTHER


def meaning(error: BaseException, connection: object = None) -> Meaning:
    """Return what an error means. Ask before `connection` is given back, as for `is_lost`."""
    if is_lost(error, connection):
        return Meaning.LOST
    if code := sqlstate(error):
        return meaning_of_code(code)
    # psycopg's own: a session that ended right behind a BEGIN or COMMIT gave two answers to it (InternalError).
    return Meaning.LOST if isinstance(getattr(error, "orig", None) or error, OF_THE_SESSION) else Meaning.OTHER


def is_held_up(error: BaseException) -> bool:
    """Tell whether a statement waited in vain, took too long, or was cancelled.

    The session is as good as it was; made anew, it would take time and wait again.
    """
    code = sqlstate(error)
    return code in AGAIN or code == CANCELLED


def sqlstate(error: BaseException) -> str:
    """Return the five characters of the server's error code, or "" if the error did not come from the server."""
    cause: Any = getattr(error, "orig", None) or error
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if code is None and cause.args and isinstance(cause.args[0], dict):
        code = cause.args[0].get("C")  # pg8000 hands on the fields of the server's message
    return code or ""


def primary_message(error: BaseException) -> str:
    """Return the server's message without what stands around it: context, detail, hint, the driver's own words."""
    cause: Any = getattr(error, "orig", None) or error
    if getattr(cause, "diag", None) is not None:
        return str(cause.diag.message_primary)
    if cause.args and isinstance(cause.args[0], dict):
        return str(cause.args[0]["M"])  # pg8000
    return str(getattr(cause.__cause__, "message", None) or cause)  # asyncpg, behind SQLAlchemy's adapter


def is_lost(error: BaseException, connection: object = None) -> bool:
    """Tell whether the session did not outlive the error.

    Ask before `connection` is given back: a pool or an engine closes it afterwards as a matter of course.
    """
    return bool(
        meaning_of_code(sqlstate(error)) is Meaning.LOST
        or getattr(error, "connection_invalidated", False)
        or getattr(connection, "broken", False)
        or getattr(connection, "invalidated", False)
    )
