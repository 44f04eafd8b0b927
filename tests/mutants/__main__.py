"""`python -m tests.mutants`: break each rule once and see its test fail; `make mutants` calls it."""

import os
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from tests.mutants.mutant import Mutant, stored_mutants
from tests.mutants.runner import Copy, RunnerError, Verdict

ROOT = Path(__file__).parents[2]
JOBS = 2 * (os.cpu_count() or 1)  # much of a test of a broken rule is to wait for what does not come


@click.command()
@click.option("--only", metavar="NAME", multiple=True, help="A mutant, by its name or a part of it; may be repeated.")
@click.option("--some", type=click.IntRange(1), metavar="N", help="So many of them, drawn by lot.")
@click.option("--seed", type=int, help="Fixes which are drawn; one is chosen and printed if it is left out.")
@click.option("--jobs", type=click.IntRange(1), default=JOBS, show_default=True, help="So many side by side.")
@click.option("--list", "listed", is_flag=True, help="Name the rules, mutants and tests, and run nothing.")
def main(only: tuple[str, ...], some: int | None, seed: int | None, jobs: int, listed: bool) -> None:
    """Break each rule of Mailroom once, in a copy, and see the test of that rule fail."""
    console = Console()
    mutants = [mutant for mutant in stored_mutants() if not only or any(part in mutant.name for part in only)]
    if not mutants:
        raise click.UsageError(f"No mutant is named like {', '.join(only)}; see those there are: --list")
    if some is not None and some < len(mutants):
        seed = random.randrange(10**6) if seed is None else seed
        click.echo(f"seed {seed}", err=True)
        mutants = random.Random(seed).sample(mutants, some)
    if listed:
        console.print(_table(mutants))
        return
    try:
        verdicts = _verdicts(mutants, min(jobs, len(mutants)))
    except RunnerError as error:
        raise click.ClickException(str(error)) from None
    console.print(_table(mutants, verdicts))
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        if not verdict.caught:
            console.rule(mutant.name)
            console.print(verdict.output, markup=False, highlight=False)
    caught = sum(verdict.caught for verdict in verdicts)
    click.echo(f"{caught} passed, {len(verdicts) - caught} failed")
    sys.exit(0 if caught == len(verdicts) else 1)


def _verdicts(mutants: list[Mutant], jobs: int) -> list[Verdict]:
    """Judge each mutant: `jobs` shares of them side by side, each in a copy of its own."""
    with ThreadPoolExecutor(jobs) as pool:
        shares = list(pool.map(_judged, (mutants[nth::jobs] for nth in range(jobs))))
    verdicts = {name: verdict for share in shares for name, verdict in share.items()}
    return [verdicts[mutant.name] for mutant in mutants]


def _judged(mutants: list[Mutant]) -> dict[str, Verdict]:
    with tempfile.TemporaryDirectory(prefix="mailroom-mutants-") as directory:
        copy = Copy(ROOT, Path(directory))
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        click.echo(f"{len(tests)} tests on the source as it is", err=True)
        copy.check_tests_pass(tests)
        verdicts = {}
        for mutant in mutants:
            verdicts[mutant.name] = copy.judge(mutant)
            click.echo(f"{mutant.name}: {verdicts[mutant.name].reason}", err=True)
        return verdicts


def _table(mutants: list[Mutant], verdicts: list[Verdict] | None = None) -> Table:
    titles = ["rule", "mutant", "test", *(["caught"] if verdicts is not None else [])]
    table = Table(*(Column(title, overflow="fold") for title in titles), show_lines=True)
    for nth, mutant in enumerate(mutants):
        verdict = [verdicts[nth].reason] if verdicts is not None else []
        table.add_row(*(_plain(cell) for cell in (mutant.rule, mutant.name, "\n".join(mutant.tests), *verdict)))
    return table


def _plain(cell: str) -> str:
    return cell.replace("[", r"\[")


if __name__ == "__main__":
    main()
