"""What to do where the server refuses for lack of a right: the grant that the refused role needs.

The one place that says so: for commands, which end with an error, and for workers and dispatchers, whose error gets a
note, and whose logs say it.
"""

import shlex

from mailroom.roles.matrix import PURPOSES
from mailroom.schema.acts import ACTS
from mailroom.sql.sqlstate import is_of_row_security, sqlstate
from mailroom.values.names import DEFAULT_SCHEMA

DENIED = "42501"
SOMEBODY = "ROLE"  # where only the server knows as whom it was
RUN = "Run, as the role that ran `mailroom migrate`: "
# What the commands are for, by their first words. All others are the owner's.
COMMANDS = {
    **{act.words: act.purpose for act in ACTS if act.purpose},
    "outbox": "writer",
    "inbox reap": "reaper",
    "inbox peek": "reaper",
    "inbox list": "metrics",
    "inbox paused": "auditor",
    "inbox failing": "auditor",
    "tail": "reaper",
    "periodic list": "auditor",
    "periodic next": "operator",
    "link status": "auditor",
    "bridge status": "auditor",
    "dispatcher status": "metrics",
    "dispatcher": "dispatcher",
    "executor status": "metrics",
    "executor run": "executor",
    "executor execute-all": "executor",
    "parked list": "auditor",
    "parked show": "operator",
    "archive list": "auditor",
    "dead-letter list": "auditor",
    "dead-letter show": "operator",
    "status": "metrics",
    "statistics": "metrics",
    "top": "auditor",
    "trace": "auditor",
    "worker list": "auditor",
}


def purpose_of(command: str) -> str | None:
    """Return what a command is for, by its words without options; None if it is the owner's."""
    return next((purpose for words, purpose in COMMANDS.items() if f"{command} ".startswith(f"{words} ")), None)


def is_denied(error: BaseException) -> bool:
    """Return whether the server refused a statement for lack of a right that can be granted."""
    return sqlstate(error) == DENIED and not is_of_row_security(error)


def grant_command(purpose: str, role: str | None, *, inbox: str | None = None, schema: str = DEFAULT_SCHEMA) -> str:
    """Return the command that gives a role what it needs for a purpose."""
    named = SOMEBODY if role is None else shlex.quote(role)
    takes = PURPOSES[purpose].inboxes in ("named", "named or all")
    option = f" --inbox {inbox}" if takes and inbox is not None else " --inbox INBOX" if takes else ""
    elsewhere = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
    return f"mailroom grant {purpose} {named}{option}{elsewhere}"


def advice(purpose: str | None, role: str | None, *, inbox: str | None = None, schema: str = DEFAULT_SCHEMA) -> str:
    """Return what to do, as a sentence. Without a purpose, only the owner of the schema may do it."""
    if purpose is None:
        return "Do it as the role that ran `mailroom migrate`. What others may do: `mailroom grant --help`."
    return f"{RUN}{grant_command(purpose, role, inbox=inbox, schema=schema)}"


def advise(error: BaseException, purpose: str, *, inbox: str | None = None, schema: str) -> str | None:
    """Add to an error of the server's, as a note, what to grant to the process that it ended; return that.

    None, and no note, if the error is about something else.
    """
    if not is_denied(error):
        return None
    text = advice(purpose, None, inbox=inbox, schema=schema)
    if noted(error) is None:
        error.add_note(text)
    return text


def noted(error: BaseException) -> str | None:
    """Return what `advise` has added to an error, if it has."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(RUN)), None)
