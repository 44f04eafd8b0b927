"""`python -m tests.faults`: the fault campaign; `make faults`, `make soak` and `make fault-mutants` call it."""

import faulthandler
import logging
import secrets
import signal
import sys

import click
from rich.console import Console

from tests.faults import disasters
from tests.faults.campaign import Campaign
from tests.faults.hunting import hunt_all
from tests.faults.report import Report
from tests.faults.stage import MOST_WAITING

DISASTERS = {"F15", "F21", "F22", "F33", "F35"}
DISASTERS_SHARE = 0.15  # of the time


@click.command()
@click.option("--seconds", default=240.0, show_default=True, help="How long faults are made.")
@click.option("--seed", type=int, help="The same seed makes the same faults in the same order; drawn if not given.")
@click.option("--floor", default=0, help="Go on until so many kinds were executed, of those under load.")
@click.option("--only", multiple=True, metavar="F1", help="These kinds only; `matrix` for the failpoints. Repeatable.")
@click.option("--mutants", "hunts", is_flag=True, help="Break one rule after the other instead: all must be caught.")
@click.option("--mutant", "names", multiple=True, metavar="NAME", help="This mutant only. Repeatable.")
@click.option("--logs", metavar="DIR", help="Keep what the processes and the server logged here.")
@click.option("--most-waiting", default=MOST_WAITING, show_default=True, help="Messages waiting at which writers rest.")
@click.option("--unknown", default=200, show_default=True, help="How many COMMITs are lost and resolved.")
def main(
    seconds: float, seed: int | None, floor: int, only: tuple[str, ...], unknown: int, hunts: bool,
    names: tuple[str, ...], logs: str | None, most_waiting: int,
) -> None:  # fmt: skip
    """Break a node under load in every way there is, and hold its ledgers against the guarantees."""
    # Ended like by Ctrl-C, with its processes and its server: by itself SIGTERM would leave them running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)  # says where its threads stand
    console = Console(width=160)
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it tells of every connection that was lost
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    click.echo(f"seed {seed}")
    if hunts or names:
        sys.exit(0 if hunt_all(names, seed, console) else 1)
    report = Report()
    # First what takes as long as it is told to: `make check` has lint beside it for some minutes.
    if not only or set(only) - DISASTERS:
        Campaign(report, seed, seconds * (1 - DISASTERS_SHARE), only, logs, floor, most_waiting).run()
    disasters.run(report, seed, seconds * DISASTERS_SHARE, unknown, only)
    report.print(console)
    click.echo(f"seed {seed}")
    if len(report.kinds) < floor:
        raise click.ClickException(f"only {len(report.kinds)} kinds of faults were executed, {floor} are demanded")
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
