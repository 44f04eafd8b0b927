"""How a call that failed ends: one line on stderr that says what to do, never a password, and an exit code."""

import os
import re
import sys

import click
import psycopg
from click.exceptions import NoArgsIsHelpError

from mailroom.cli.output import one_line
from mailroom.errors import MailroomError
from mailroom.settings import connection_failed

# A URL's password ends at the last @ before a blank, and one in key=value form at a blank unless it is quoted.
URL_PASSWORD = re.compile(r"(\w+://[^\s:@/]*):\S*@")
PASSWORD = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|\S+)", re.IGNORECASE)


class Interrupted(click.ClickException):
    """Somebody pressed Ctrl-C."""

    exit_code = 130


def tell(error: Exception) -> int:
    """Print one line that says what went wrong and return the exit code; raises what is nobody's fault but ours."""
    if isinstance(error, NoArgsIsHelpError):
        error.show()
        return error.exit_code
    if isinstance(error, Interrupted | click.Abort):
        click.echo("mailroom: interrupted", err=True)
        return Interrupted.exit_code
    text, code = _told(error)
    click.echo(f"mailroom: error: {one_line(redacted(text))}", err=True)
    return code


def redacted(text: str) -> str:
    """Return `text` without the passwords of the connection strings in it."""
    return PASSWORD.sub(r"\1***", URL_PASSWORD.sub(r"\1:***@", text))


def drop_output() -> None:
    """Send whatever is still to be written to stdout nowhere: nobody reads it, and Python would complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    os.close(nowhere)


def _told(error: Exception) -> tuple[str, int]:
    match error:
        case click.UsageError(ctx=click.Context() as context):
            return f"{error.format_message().rstrip('.')}. See: {context.command_path} --help", error.exit_code
        case click.ClickException():
            return error.format_message(), error.exit_code
        case MailroomError():
            return str(error), error.exit_code
        case psycopg.Error():
            return _told_by_database(error), 1
        case OSError():
            return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1
    return _told_by_library(error), 1


def _told_by_database(error: psycopg.Error) -> str:
    if error.sqlstate is None:
        return str(connection_failed(error)) if isinstance(error, psycopg.OperationalError) else str(error)
    # Not str(error): its DETAIL repeats the row.
    hint = f" {error.diag.message_hint}" if error.diag.message_hint else ""
    return f"The database refused: {error.diag.message_primary} ({error.sqlstate}).{hint}"


def _told_by_library(error: Exception) -> str:
    # Imported only now: most calls need neither.
    from alembic.util import CommandError
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    match error:
        case DBAPIError(orig=psycopg.Error() as cause):
            return _told_by_database(cause)
        case DBAPIError():
            return f"The database refused: {type(error.orig).__name__}"
        case SQLAlchemyError() | CommandError():
            return str(error)
    raise error
