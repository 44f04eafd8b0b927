"""`python -m tests.faults.bridges`: the campaign of bridges; `make bridges-soak` calls it."""

import logging
import secrets
import signal
import sys
from pathlib import Path

import click

from tests.faults.bridges.campaign import ROUND_S, play
from tests.faults.bridges.hunting import hunt_all
from tests.faults.links.strikes import Tally


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="How long faults are made.")
@click.option("--round", "round_s", default=ROUND_S, show_default=True, help="How long until everything must rest.")
@click.option("--seed", type=int, help="The same seed draws the same faults; drawn if not given.")
@click.option("--mutants", "hunts", is_flag=True, help="Break one rule after the other instead: all must be caught.")
@click.option("--mutant", "broken", multiple=True, metavar="NAME", help="This mutant only. Repeatable.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep what the daemons logged here.")
def main(
    seconds: float, round_s: float, seed: int | None, hunts: bool, broken: tuple[str, ...], logs: Path | None
) -> None:
    """Break two nodes and the Kafka between them, and hold ledgers and log against the guarantees."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # it tells of every connection that was lost
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    click.echo(f"seed {seed}")
    if hunts or broken:
        sys.exit(0 if hunt_all(broken, seed) else 1)
    tally = Tally()
    messages, found = play(seconds, seed, tally, logs, round_s)
    for kind, times in sorted(tally.kinds.items()):
        click.echo(f"{times:6,} x {kind}")
    click.echo(f"{len({name for name, _ in tally.points})} places struck, {len(tally.points)} ways and places")
    click.echo(f"{tally.missed} failpoints not passed in time, which are not counted")
    for each in found:
        click.echo(f"VIOLATED: {each}")
    click.echo(f"seed {seed}: {messages:,} messages, {sum(tally.kinds.values()):,} faults, {len(found)} violations")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
