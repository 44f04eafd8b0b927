"""Hunt for tests that pass by chance: `make hunt`, or `python -m tests.hunt --times 3 --seed 1 -- ARGUMENTS`."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from click import echo

from tests.hunt.load import busy_cores
from tests.hunt.rounds import Outcome, run


def main() -> int:
    """Return the exit code: 0 if all tests passed in all rounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="how often to run the tests")
    parser.add_argument("--seed", type=int, default=1, help="of the lot that says what is stopped, when and how long")
    parser.add_argument("arguments", nargs="+", help="pytest's; those of `make test` stand in the Makefile")
    options = parser.parse_args()
    # A shell has its jobs in the background ignore Ctrl-C; and all that is stopped has to go on when we are ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    outcomes: list[Outcome] = []
    try:
        with busy_cores():
            for nth in range(options.times):
                with tempfile.TemporaryDirectory(prefix="mailroom-hunt-") as directory:
                    lot = Random(f"{options.seed} {nth}")
                    outcomes.append(run(options.arguments, lot, Path(directory)))
                echo(f"round {nth + 1} of {options.times}: stopped {outcomes[-1].stops} times")
    except KeyboardInterrupt:
        echo("ended before its time")
        list_failures(outcomes)
        return 130
    return 1 if list_failures(outcomes) else 0


def list_failures(outcomes: Sequence[Outcome]) -> int:
    """Say which tests failed, in how many rounds, and how; return how many failures that were."""
    counts: dict[str, int] = {}
    tails: dict[str, str] = {}
    for outcome in outcomes:
        for test, tail in outcome.failed.items():
            counts[test] = counts.get(test, 0) + 1
            tails[test] = tail
    for test in sorted(counts, key=lambda test: (-counts[test], test)):
        echo(f"\n{test} failed in {counts[test]} of {len(outcomes)} rounds:\n{tails[test]}")
    failed = sum(counts.values())
    echo(f"{sum(len(outcome.passed) for outcome in outcomes)} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
