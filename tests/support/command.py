"""The command `mailroom` as tests call it: in this process, or as one of its own where signals and pipes matter.

Also Alembic's, in the project's directory.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from alembic.config import main
from click.testing import CliRunner, Result

from mailroom.cli.root import root
from mailroom.session.settings import DSN_VARIABLE, LIBPQ_VARIABLES

CODE = re.compile(r" \[MR-[a-z-]+\]")


def mailroom(*arguments: str, dsn: str | None = None, stdin: bytes | None = None, **environment: str) -> Result:
    """Call the command; the environment names the database `dsn` and no other, and no width of the screen."""
    names: dict[str, str | None] = dict.fromkeys((DSN_VARIABLE, *LIBPQ_VARIABLES, "COLUMNS"))
    return CliRunner().invoke(root, arguments, input=stdin, env=names | {DSN_VARIABLE: dsn} | environment)


def done(*arguments: str, dsn: str, stdin: bytes | None = None, exit_code: int = 0, **environment: str) -> str:
    """Call the command, which must end with that exit code, and return what it printed."""
    result = mailroom(*arguments, dsn=dsn, stdin=stdin, **environment)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def json_of(*arguments: str, dsn: str, exit_code: int = 0) -> Any:
    """Call the command with --json and return its one document."""
    return json.loads(done(*arguments, "--json", dsn=dsn, exit_code=exit_code))


def error_of(result: Result) -> str:
    """Return the error of a call that failed as it should: on one line, nothing else on stderr, no traceback.

    Without its code: tests of an error's text leave that to `tests.test_errors`.
    """
    assert result.exit_code in (1, 2), result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("mailroom: error: ")
    return CODE.sub("", line.removeprefix("mailroom: error: "))


def untold(calls: Iterable[tuple[Sequence[str], int, str]], dsn: str | None = None) -> list[str]:
    """Make calls that must fail, each with its exit code and a part of its error; return what went another way."""
    found = []
    for arguments, code, told in calls:
        result = mailroom(*arguments, dsn=dsn)
        if result.exit_code != code or told not in error_of(result):
            found.append(f"{arguments}: {result.exit_code}: {result.output}")
    return found


def process(*arguments: str, dsn: str, **options: Any) -> subprocess.Popen[str]:
    """Start the command as a process; `options` are Popen's, stderr is a pipe if they do not say."""
    environment = {**os.environ, DSN_VARIABLE: dsn}
    environment.pop("PYTHONUNBUFFERED", None)  # as in a user's shell: what cannot be written stays in the buffer
    return subprocess.Popen(
        [sys.executable, "-m", "mailroom", *arguments],
        env=environment,
        text=True,
        **{"stderr": subprocess.PIPE, **options},
    )


def alembic(*arguments: str, **environment: str) -> str:
    """Call Alembic's command, with no database but one that is given, and return what it printed."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "MAILROOM"))}
    with mock.patch.dict(os.environ, others | environment, clear=True), redirect_stdout(StringIO()) as printed:
        main(["-c", str(project), *arguments])
    return printed.getvalue()
