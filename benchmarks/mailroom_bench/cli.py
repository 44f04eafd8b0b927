"""`mailroom bench`."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mailroom.cli import Call, pass_call
from mailroom.cli.output import document, note
from mailroom.cli.parameters import OneOf, WholeNumber
from mailroom.errors import ConfigurationError
from mailroom.session import settings

from . import (
    bridges,
    bulk,
    cost,
    dead_source,
    deliver,
    doorbell,
    drain,
    executables,
    floors,
    flow,
    growth,
    guarded,
    handlers,
    held,
    hot,
    inboxes,
    latency,
    links,
    links_latency,
    links_rate,
    live,
    logs,
    mail,
    memory,
    patterns,
    peers,
    poison,
    publish,
    reap,
    refused,
    report,
    requests,
    ring,
    spark,
    stuck,
    take_over,
    waiting,
    watched,
)
from .measure import Figure, Measurement, Setup, measure
from .server import durable_server

MODULES = (
    floors,
    cost,
    publish,
    doorbell,
    deliver,
    patterns,
    links,
    links_rate,
    links_latency,
    bridges,
    ring,
    dead_source,
    take_over,
    reap,
    flow,
    live,
    handlers,
    latency,
    peers,
    requests,
    mail,
    poison,
    stuck,
    waiting,
    refused,
    hot,
    held,
    growth,
    inboxes,
    logs,
    memory,
    executables,
    guarded,
    drain,
    spark,
    bulk,
    watched,
)
MEASUREMENTS: dict[str, Measurement] = {module.MEASUREMENT.name: module.MEASUREMENT for module in MODULES}
AGAINST = {module.MEASUREMENT.name: module.against for module in (cost, live)}
FEWEST_MESSAGES = 300


def _help() -> str:
    return "\n".join(f"  {name:<14} {measurement.about}" for name, measurement in MEASUREMENTS.items())


@click.command(
    epilog=f"\b\nMeasurements:\n{_help()}",
)
@click.option(
    "--only",
    multiple=True,
    type=OneOf(tuple(MEASUREMENTS)),
    help="Measure this alone; may be given several times.",
)
@click.option("--runs", type=WholeNumber(1, 100), default=5, show_default=True, help="Runs to take the median of.")
@click.option(
    "--messages",
    type=WholeNumber(FEWEST_MESSAGES, 10_000_000),
    default=100_000,
    show_default=True,
    help="Messages per run; some measurements use ten times as many.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --only cost or live: measure the checkout in this directory too, in turn with this one.",
)
@pass_call
def bench(call: Call, only: Sequence[str], runs: int, messages: int, against: Path | None) -> None:
    """Measure Mailroom on this machine and compare it with the limits of the machine.

    Every figure is the median of several runs with its spread (smallest..largest); a ratio divides two figures of the
    same run. Without --dsn a durable embedded server is started and removed afterwards. In a given database each run
    creates a schema of its own and drops it; the role must be allowed to CHECKPOINT. All measurements take about half
    an hour on two cores.

    \b
    Examples:
      mailroom bench
      mailroom bench --only deliver --only flow --runs 3
      mailroom bench --only cost --against ../before
      mailroom bench --json > bench.json
    """
    chosen = _chosen(only)
    if against is not None:
        if any(each.name not in AGAINST for each in chosen):
            raise click.UsageError("--against is for --only cost and --only live, and for nothing beside them.")
        chosen = [AGAINST[each.name](against) for each in chosen]
    with _terminated_like_interrupted(), _database(call) as dsn:
        with settings.connect(dsn, "bench") as connection:
            postgres = connection.info.parameter_status("server_version") or "unknown"
        figures = _measured([_with_peers(each, dsn) for each in chosen], Setup(dsn, messages), runs)
    if call.json:
        document(report.document(figures, postgres=postgres, runs=runs, messages=messages))
        return
    report.show(figures)
    note(f"PostgreSQL {postgres}, median of {runs} runs with {messages:,} messages; a ratio is taken within each run.")


def _chosen(only: Sequence[str]) -> list[Measurement]:
    """Return what to measure. What this machine cannot run is left out unless it was asked for by name."""
    chosen = []
    for name, measurement in MEASUREMENTS.items():
        missing = measurement.missing() if not only or name in only else None
        if missing and only:
            raise ConfigurationError(f"{name} cannot be measured here. {missing}", code="MR-bench-unavailable")
        if missing:
            note(f"{name} is left out. {missing}")
        elif not only or name in only:
            chosen.append(measurement)
    return chosen


def _with_peers(measurement: Measurement, dsn: str) -> Measurement:
    absent = measurement.absent(dsn)
    for peer, how_to_get in absent.items():
        note(f"{peer} is left out. {how_to_get}")
    return measurement.without(absent)


def _measured(chosen: Sequence[Measurement], setup: Setup, runs: int) -> list[Figure]:
    console = Console(stderr=True)
    console.quiet = not console.is_terminal  # Rich before 14.3 ends a disabled bar with an empty line
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    figures: list[Figure] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=runs * len(chosen))
        for measurement in chosen:
            progress.update(bar, description=f"{measurement.name}: {measurement.about}")
            figures += measure(measurement, setup, runs, lambda: progress.advance(bar))
    return figures


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    # Without a handler SIGTERM would end this process only, and leave its children and its server running.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _database(call: Call) -> Iterator[str]:
    # Not from the environment: a benchmark loads its server, so the user must name it.
    if call.names_database:
        yield call.dsn()
    else:
        with durable_server() as dsn:
            yield dsn
