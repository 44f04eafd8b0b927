"""`python -m tests.faults.links`: the campaign of links; `make links-soak` calls it."""

import logging
import secrets
import signal
import sys
from pathlib import Path

import click

from tests.faults.links.campaign import NAMES, play
from tests.faults.links.hunting import hunt_all
from tests.faults.links.strikes import Tally

PAIR_SHARE = 1 / 3  # of the time, two nodes read each other; for the rest three do


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="How long faults are made.")
@click.option("--seed", type=int, help="The same seed draws the same faults; drawn if not given.")
@click.option("--nodes", type=click.IntRange(2, len(NAMES)), help="So many nodes only.")
@click.option("--mutants", "hunts", is_flag=True, help="Break one rule after the other instead: all must be caught.")
@click.option("--mutant", "broken", multiple=True, metavar="NAME", help="This mutant only. Repeatable.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep what the daemons logged here.")
def main(
    seconds: float, seed: int | None, nodes: int | None, hunts: bool, broken: tuple[str, ...], logs: Path | None
) -> None:
    """Break nodes that read each other and hold their ledgers against the guarantees."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # it tells of every connection that was lost
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    click.echo(f"seed {seed}")
    if hunts or broken:
        sys.exit(0 if hunt_all(broken, seed) else 1)
    tally, messages = Tally(), 0
    found: list[str] = []
    phases = {nodes: 1.0} if nodes else {2: PAIR_SHARE, len(NAMES): 1 - PAIR_SHARE}
    for size, share in phases.items():
        sent, violated = play(NAMES[:size], seconds * share, seed, tally, logs)
        messages += sent
        found += violated
    for kind, times in sorted(tally.kinds.items()):
        click.echo(f"{times:6,} x {kind}")
    click.echo(f"{len({name for name, _ in tally.points})} statements struck, {len(tally.points)} ways and statements")
    click.echo(f"{tally.missed} failpoints not passed in time, which are not counted")
    for each in found:
        click.echo(f"VIOLATED: {each}")
    click.echo(f"seed {seed}: {messages:,} messages, {sum(tally.kinds.values()):,} faults, {len(found)} violations")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
