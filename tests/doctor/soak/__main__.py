"""`python -m tests.doctor.soak`: a node is broken in each way, then left alone; `make doctor-soak` calls it."""

import signal
import sys
from contextlib import nullcontext

import click
from rich.console import Console
from rich.table import Table

from tests.doctor.soak.breaking import Named, broken, lasting
from tests.doctor.soak.healthy import Calm, watched
from tests.doctor.soak.prometheus import available, prometheus
from tests.doctor.soak.scene import START_S, Scene
from tests.doctor.soak.ways import WAYS
from tests.faults.pooler import Pooler
from tests.faults.stage import home_of_campaign
from tests.support.waiting import eventually

NONE = "none"


@click.command()
@click.option(
    "--minutes", default=10.0, show_default=True, help="How long the healthy node is watched; 0 leaves it out."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*(way.name for way in WAYS), NONE]),
    metavar="WAY",
    help="Break it in this way only, or in `none`. Repeatable.",
)
def main(minutes: float, only: tuple[str, ...]) -> None:
    """See that the doctor or an alert names all that is wrong with a node, and nothing on one that is well."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended like by Ctrl-C, with its processes
    console = Console(width=120)
    if not available():
        console.print("Prometheus is not installed, so only the doctor looks: make promtool")
    ways = [way for way in WAYS if not only or way.name in only]
    if not Pooler.available():
        console.print("PgBouncer is not installed, so no pooler is in between: make pgbouncer")
        ways = [way for way in ways if way.name != "pooler in between"]
    results: list[Named] = []
    calm: Calm | None = None
    with home_of_campaign() as home, Scene(home / "scene") as scene:
        scene.start()
        if ways:
            with (
                prometheus(home / "hasty", scene.ports.values(), hasty=True) if available() else nullcontext() as rules
            ):
                if left := lasting(scene, rules, START_S):
                    raise click.ClickException(f"the node is not well before it is broken: {left}")
                for way in ways:
                    results.append(broken(scene, way, rules))
                    console.print(": ".join(row(results[-1])))
        if minutes:
            scene.widen()
            with (
                prometheus(home / "calm", scene.ports.values(), hasty=False) if available() else nullcontext() as rules
            ):
                console.print("Alone from here on")
                # Before the first scrape it counts as down, and an alert on what is absent as pending.
                eventually(lambda: rules is None or not (rules.down() or rules.alerts()), START_S)
                calm = watched(scene, rules, minutes, console.print)
    if results:
        console.print(table(results))
    if calm:
        console.print(
            f"Healthy for {minutes:g} minutes: {calm.looks} looks, the slowest {calm.slowest_s:.1f} s, "
            f"{calm.done:,} messages handled, {calm.alarms.total()} false alarms"
        )
    failed = not all(result.is_well for result in results) or bool(calm and (calm.alarms or not calm.done))
    sys.exit(1 if failed else 0)


def table(results: list[Named]) -> Table:
    """Return what became of each way."""
    shown = Table("way", "named by, after s", "mended, after s", "what else was named")
    for each in results:
        shown.add_row(*row(each), " ".join(sorted(each.also)))
    return shown


def row(result: Named) -> tuple[str, str, str]:
    """Return the name of a way, what named it, and whether it was mended."""
    wanted = [name for name in (*result.way.findings, *result.way.alerts) if name in result.named]
    named = [f"{name} {result.named[name]:.1f}" for name in wanted]
    missing = [f"[bold red]not {name}[/]" for name in sorted(result.missing)]
    left = " ".join(sorted(result.left))
    return result.way.name, ", ".join(named + missing), f"[bold red]not {left}[/]" if left else f"{result.mended_s:.1f}"


if __name__ == "__main__":
    main()
