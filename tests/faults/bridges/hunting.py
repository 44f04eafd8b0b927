"""The hunt for mutants: short campaigns over broken rules, each of which the checker has to notice."""

import time
from collections.abc import Sequence
from dataclasses import replace

import click

from tests.faults.bridges.campaign import HABITS, play
from tests.faults.bridges.mutants import MUTANTS
from tests.faults.links.strikes import Tally

CAUGHT_WITHIN_S = 180.0
ROUND_S = 30.0
SETTLED_WITHIN_S = 150.0


def hunt_all(names: Sequence[str], seed: int) -> bool:
    """Hunt each mutant, and print what was noticed; return whether all were caught."""
    caught = 0
    for name in names or list(MUTANTS):
        began = time.monotonic()
        _, found = play(
            CAUGHT_WITHIN_S, seed, Tally(), round_s=ROUND_S, settled_within_s=SETTLED_WITHIN_S,
            habits=replace(HABITS, bridge_mutant=name), aim=MUTANTS[name].aim,
        )  # fmt: skip
        caught += bool(found)
        click.echo(f"{name} ({MUTANTS[name].broken}): {time.monotonic() - began:.0f} s, {len(found)} violations")
        for each in found[:3]:
            click.echo(f"  {each[:300]}")
    click.echo(f"{caught} of {len(names or MUTANTS)} mutants caught")
    return caught == len(names or MUTANTS)
