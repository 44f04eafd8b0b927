"""The hunt for mutants: short campaigns over broken rules, each of which the checker has to notice."""

import time
from collections.abc import Sequence

import click

from tests.faults.links.campaign import NAMES, play
from tests.faults.links.mutants import MUTANTS
from tests.faults.links.strikes import Tally
from tests.faults.task import Habits

CAUGHT_WITHIN_S = 120.0
ROUND_S = 12.0
SETTLED_WITHIN_S = 45.0


def hunt_all(names: Sequence[str], seed: int) -> bool:
    """Hunt each mutant, and print what was noticed; return whether all were caught."""
    caught = 0
    for name in names or list(MUTANTS):
        began = time.monotonic()
        _, found = play(
            NAMES, CAUGHT_WITHIN_S, seed, Tally(), habits=Habits(link_mutant=name), aim=MUTANTS[name].aim,
            round_s=ROUND_S, settled_within_s=SETTLED_WITHIN_S,
        )  # fmt: skip
        caught += bool(found)
        click.echo(f"{name} ({MUTANTS[name].broken}): {time.monotonic() - began:.0f} s, {len(found)} violations")
        for each in found[:3]:
            click.echo(f"  {each[:300]}")
    click.echo(f"{caught} of {len(names or MUTANTS)} mutants caught")
    return caught == len(names or MUTANTS)
