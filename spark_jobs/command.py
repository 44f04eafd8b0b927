"""What the command lines of all jobs share: `python -m spark_jobs.<job>`, or the same file for spark-submit."""

import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from mailroom.cli.call import Call
from mailroom.cli.failures import Interrupted, tell
from mailroom.cli.options import share
from mailroom.errors import ConfigurationError, MailroomError
from mailroom.errors.codes import CODES
from spark_jobs.node import Node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
OURS = re.compile(r"^\s*(?:\w+: )?(?:mailroom|spark_jobs)\.[\w.]+: (.*)$", re.MULTILINE)
CODE = re.compile(r"(MR-[a-z-]+): see `mailroom explain")  # the note of such an error
# Spark's own names of errors, and the Java exceptions that caused one another.
NAMED = re.compile(r"(?<=\[)[A-Z_]{4,}(?:\.[A-Z_]+)*(?=\])|(?<=Caused by: )[\w.]+")


def job(name: str, **attributes: Any) -> Callable[[F], click.Command]:
    """Make a click command of a function, with the options that the commands of `mailroom` share."""

    def decorated(function: F) -> click.Command:
        # Inside of click, which would print a line of its own at an interrupt.
        @wraps(function)
        def callback(*values: Any, **named: Any) -> Any:
            with _terminated_like_interrupted():
                return function(*values, **named)

        command: click.Command = click.command(name, click.Command, context_settings=SETTINGS, **attributes)(callback)
        share(command)
        return command

    return decorated


dsn_variable = click.option(
    "--dsn-variable",
    metavar="NAME",
    help="An environment variable, of driver and executors, with the connection string.",
)


def node_of(call: Call, variable: str | None, *, travels: bool = True) -> Node:
    """Return the node that a job's options name; one that `travels` to tasks is named without a password."""
    if variable is not None and call.names_database:
        raise ConfigurationError(
            "--dsn-variable and --dsn name two databases: give one of them.", code="MR-two-databases-named"
        )
    if variable is None and not travels:
        return Node(call.schema, call.dsn())
    options = {"schema": call.schema, "dsn": call.dsn() if call.names_database else None, "dsnVariable": variable}
    return Node.of({name: value for name, value in options.items() if value is not None})


@contextmanager
def session(name: str) -> "Iterator[SparkSession]":
    """Give the existing Spark session, or one that ends with the job; an error of Spark becomes one line."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no types
    from pyspark.errors import AnalysisException, PySparkException
    from pyspark.sql import SparkSession

    from spark_jobs.session import spark_session

    # It logs a whole stack in one line; the error has that.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    is_ours = SparkSession.getActiveSession() is None
    spark = spark_session(name)
    try:
        yield spark
    except (PySparkException, Py4JJavaError) as error:
        raise _failure(str(error), is_of_plan=isinstance(error, AnalysisException)) from error
    finally:
        if is_ours:
            spark.stop()


def _failure(text: str, *, is_of_plan: bool) -> MailroomError:
    """Return an error that says in one line why a job failed: our own, taken from a traceback of Spark, or Spark's.

    Spark's text about a plan is shown. Its text about a query that ran may repeat a row: only the errors are named.
    """
    ours = OURS.search(text)
    code = CODE.search(text, ours.end()) if ours else None
    if ours:
        reason = ours[1].strip()
    elif is_of_plan:
        reason = f"Spark refused: {text.strip().splitlines()[0]}"
    else:
        names = dict.fromkeys(NAMED.findall(text))
        reason = f"Spark failed: {', '.join(names) or 'it did not say why'}. Its log has more."
    return MailroomError(reason, code=code[1] if code and code[1] in CODES else "MR-spark-failed")


def main(command: click.Command) -> NoReturn:
    """Run a job's command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = command.main(prog_name=f"python -m spark_jobs.{command.name}", standalone_mode=False)
    except Exception as error:
        code = tell(error)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    finally:
        signal.signal(signal.SIGTERM, before)
