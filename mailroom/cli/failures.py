"""How a failed call ends: with an exit code and one line on stderr that says what to do, never with a password."""

import os
import re
import sys

import click
import psycopg
from click.exceptions import NoArgsIsHelpError

from mailroom.cli.call import Call
from mailroom.cli.logs import error_line
from mailroom.cli.output import one_line
from mailroom.errors import Coded, MailroomError, coded
from mailroom.roles.advice import advice, noted, purpose_of
from mailroom.session.settings import connection_failed
from mailroom.sql.sight import ADVICE
from mailroom.sql.sqlstate import is_of_row_security

# A URL's password ends at the last @ before a blank, and one in key=value form at a blank unless it is quoted.
URL_PASSWORD = re.compile(r"(\w+://[^\s:@/]*):\S*@")
PASSWORD = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|\S+)", re.IGNORECASE)

DENIED = re.compile(r"permission denied for (?P<kind>\w+) ")  # the text of servers that speak English
RIGHTS = {"schema": "USAGE or CREATE", "database": "CREATE", "function": "EXECUTE"}  # for a table the server names none


class Interrupted(click.ClickException):
    """The user pressed Ctrl-C."""

    exit_code = 130


def tell(error: Exception, call: Call | None = None) -> int:
    """Print one line that says what went wrong, and return the exit code. An error that is our bug is raised again."""
    if isinstance(error, NoArgsIsHelpError):
        error.show()
        return error.exit_code
    call = call or Call()
    if isinstance(error, Interrupted | click.Abort):
        click.echo("mailroom: interrupted", err=True)
        return Interrupted.exit_code
    text, code = text_of(error, call)
    line = one_line(redacted(text))
    if call.log_format == "json":
        click.echo(error_line(line, error.code if isinstance(error, Coded) else None), err=True)
    else:
        click.echo(f"mailroom: error: {line}", err=True)
    return code


def redacted(text: str) -> str:
    """Return `text` without the passwords of connection strings."""
    return PASSWORD.sub(r"\1***", URL_PASSWORD.sub(r"\1:***@", text))


def drop_output() -> None:
    """Discard what is still to be written to stdout: no one reads it, and Python would report an error at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    os.close(nowhere)


def text_of(error: Exception, call: Call) -> tuple[str, int]:
    """Return what went wrong, without values of a row, and the exit code. An error that is our bug is raised again."""
    match error:
        case click.UsageError(ctx=click.Context() as context):
            message = error.format_message()
            return f"{message}{'' if message[-1] in '.?' else '.'} See: {context.command_path} --help", error.exit_code
        case click.ClickException():
            return error.format_message(), error.exit_code
        case MailroomError():
            return coded(str(error), error), error.exit_code
        case psycopg.Error():
            return _text_of_database_error(error, call), 1
        case OSError():
            return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1
    return _text_of_library_error(error, call), 1


def _text_of_database_error(error: psycopg.Error, call: Call) -> str:
    if error.sqlstate is None:
        failed = connection_failed(error) if isinstance(error, psycopg.OperationalError) else error
        return coded(str(failed), failed)
    # Not str(error): its DETAIL repeats the row.
    hint = f" {error.diag.message_hint}" if error.diag.message_hint else ""
    if is_of_row_security(error):
        hint = f" {ADVICE}"
    elif isinstance(error, psycopg.errors.InsufficientPrivilege):
        hint += _grant(error, call)
    elif isinstance(error, psycopg.errors.LockNotAvailable):
        hint += "".join(f" {told}" for told in getattr(error, "__notes__", ())) + " See: mailroom doctor"
    return f"The database refused: {error.diag.message_primary} ({error.sqlstate}).{hint}"


def _grant(error: psycopg.Error, call: Call) -> str:
    """Return which privilege is missing, if the server says so, and the command that grants it."""
    found = DENIED.match(error.diag.message_primary or "")
    right = f"{RIGHTS.get(found['kind'], 'a grant')} on this {found['kind']}" if found else "the right to do it"
    purpose = purpose_of(call.command)
    # A worker knows better than its command what it is. A daemon has several lanes, any of which may be the first.
    known = noted(error) if purpose is None else None
    what = known or advice(purpose, call.user, inbox=call.inbox, schema=call.schema)
    return f" {'The user' if call.user is None else f'User {call.user}'} lacks {right}. {what}"


def _text_of_library_error(error: Exception, call: Call) -> str:
    # Imported only now: most calls need neither.
    from alembic.util import CommandError
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    match error:
        case DBAPIError(orig=psycopg.Error() as cause):
            return _text_of_database_error(cause, call)
        case DBAPIError():
            return f"The database refused: {type(error.orig).__name__}"
        case SQLAlchemyError() | CommandError():
            return str(error)
    raise error
