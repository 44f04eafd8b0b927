"""`python -m tests.spark.campaign`, as `make spark-soak` runs it; ends with 1 if a row is lost, doubled or moved."""

import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from tests.spark.campaign.kinds import KINDS
from tests.spark.campaign.stage import NotSettled, Stage

MEAN_PAUSE_S = 5.0


@click.command()
@click.option("--seconds", type=float, default=1_800.0, show_default=True, help="For how long faults strike.")
@click.option("--seed", type=int, help="Fixes what is fed and what goes wrong; one is chosen and printed if left out.")
def main(seconds: float, seed: int | None) -> None:
    """Break everything that Spark's writers need while they write, and count what arrived."""
    seed = random.randrange(10**6) if seed is None else seed
    click.echo(f"seed {seed}")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="mailroom-spark-campaign-") as directory:
        home = Path(directory)
        home.chmod(0o755)  # root's server runs as another account
        stage = Stage(home, random.Random(seed))
        with stage.running():
            struck = _strike(stage, seconds)
            try:
                for lane in stage.lanes:
                    lane.finish()
                wrong = stage.wrong()
            except NotSettled as error:
                wrong = [str(error)]
        _tell(stage, struck, wrong)
    sys.exit(1 if wrong else 0)


def _strike(stage: Stage, seconds: float) -> Counter[str]:
    struck: Counter[str] = Counter()
    began = told = time.monotonic()
    next_at = began + 20  # Spark starts first
    while time.monotonic() - began < seconds:
        stage.keep_up()
        if time.monotonic() >= next_at:
            kind = stage.lot.choice(KINDS)
            if kind(stage) is not None:
                struck[kind.__name__] += 1
            next_at = time.monotonic() + stage.lot.expovariate(1 / MEAN_PAUSE_S)
        if time.monotonic() - told >= 60:
            told = time.monotonic()
            sent = {lane.name: lane.sent for lane in stage.lanes}
            click.echo(f"{told - began:.0f} s: {struck.total()} faults, fed {sent}")
        time.sleep(0.1)
    return struck


def _tell(stage: Stage, struck: Counter[str], wrong: list[str]) -> None:
    for kind, count in sorted(struck.items()):
        click.echo(f"{count:5} x {kind.replace('_', ' ')}")
    for lane in stage.lanes:
        click.echo(f"{lane.name}: {lane.sent:,} rows, started {lane.starts} times")
    for line in wrong:
        click.echo(f"WRONG {line}")
    sent = sum(lane.sent for lane in stage.lanes)
    click.echo(f"{struck.total()} faults of {len(struck)} kinds, {sent:,} rows, {len(wrong)} violations")


if __name__ == "__main__":
    main()
