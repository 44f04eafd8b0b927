"""What an error of the database says, whichever driver raised it and whether SQLAlchemy has wrapped it."""

from typing import Any

# Nobody's fault, and gone when the transaction is tried again: serialization, deadlock, lock timeout.
RETRIED = frozenset({"40001", "40P01", "55P03"})
CANCELLED = "57014"  # a timeout for statements, or somebody who cancelled it
# Somebody has what a statement waits for, or it took too long, or was cancelled. The session is as good as it was; made
# anew, it would take time and wait again.
HELD_UP = RETRIED | {CANCELLED}
ABORTED = "25P02"  # an earlier statement of the transaction had failed
NOT_YOURS = "2D000"  # a COMMIT or ROLLBACK by somebody whose transaction it is not to end
NO_CURSOR = "34000"
READ_ONLY = "25006"  # the server is a standby: its sessions are of no use to us
# The server's last words on a session: shut down, crashed, starting up, database dropped, idle for too long.
LAST_WORDS = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"})


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
    code = sqlstate(error)
    return bool(
        code[:2] == "08"
        or code in LAST_WORDS
        or getattr(error, "connection_invalidated", False)
        or getattr(connection, "broken", False)
        or getattr(connection, "invalidated", False)
    )
