"""Cost: the microseconds of processor time that a message takes, by process.

Rates depend on what else a machine does; processor time does so much less. Clients and server processes are read apart.
Bare statements run in the same session as ours and in turn with them: an INSERT of the same rows, ready, into the
outbox's columns and key, and a DELETE .. RETURNING. `and commit` is a transaction for each; claims and deliveries
include theirs. Deliveries of 1, 10, 100 and 10,000 rows are given per message.

With `--against` another checkout does everything too, with its own code and migrations on the same server, and both
take turns for each part. `X, before` is its figure, and `X : before` ours divided by it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, cast

import mailroom
from mailroom.errors import ConfigurationError, MailroomError

from . import processor
from .measure import Bar, Line, Measurement, Setup, Values

METERED = "metered"  # beside the same without metrics, and not beside another checkout, which may have none
UNMETERED = ("bulk, worker", "bulk, all")
PARTS = ("bulk", METERED, "send", "deliver", "claim")
_ALIAS = "mailroom_cost_benchmarks"
_END_S = 60.0
_turn = count()


class Side:
    """One checkout, in a process of its own that measures a part when asked."""

    def __init__(self, setup: Setup, product: Path, directory: str) -> None:
        # The other checkout may have benchmarks too, so ours get a name of their own there.
        Path(directory, _ALIAS).symlink_to(Path(__file__).parent, target_is_directory=True)
        # -P: the current directory is not in the path.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", f"{_ALIAS}.cost_side"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(product), directory])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # Not as arguments, which everybody on this machine can read.
        self._ask({"dsn": setup.dsn, "messages": setup.messages, "product": str(product)})

    def measured(self, part: str) -> dict[str, float]:
        """Measure one part."""
        self._ask(part)
        answer = cast(IO[str], self._process.stdout).readline()
        if not answer:
            raise MailroomError(
                f"Measuring the cost of {part} failed: look at what its process printed above.", code="MR-bench-failed"
            )
        found: dict[str, float] = json.loads(answer)
        return found

    def _ask(self, what: object) -> None:
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise MailroomError(
                "The process that measures ended: look at what it printed above.", code="MR-bench-failed"
            ) from None

    def stop(self) -> None:
        """Interrupt it."""
        self._process.terminate()

    def end(self) -> None:
        """Let it drop its schema and end."""
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextmanager
def _side(setup: Setup, product: Path) -> Iterator[Side]:
    with tempfile.TemporaryDirectory() as directory:
        side = Side(setup, product, directory)
        try:
            yield side
        except BaseException:
            side.stop()
            raise
        finally:
            side.end()


def _run(setup: Setup, against: Path | None = None) -> Values:
    own = Path(mailroom.__file__).resolve().parents[1]
    values: dict[str, float] = {}
    turn = next(_turn)
    with ExitStack() as stack:
        sides = [stack.enter_context(_side(setup, product)) for product in (own, against) if product is not None]
        for nth, part in enumerate(PARTS, start=turn):
            # Who is first changes from run to run: that one finds the server as the part before has left it.
            order = sides[:1] if part == METERED else sides[::-1] if nth % 2 else sides
            found = {side: side.measured(part) for side in order}
            ours, *others = (found[side] for side in sides if side in found)
            values |= ours
            for theirs in others:
                values |= {_before(name): value for name, value in theirs.items()}
                values |= {_ratio(name): ours[name] / value for name, value in theirs.items()}
    return values


def _before(name: str) -> str:
    return f"{name}, before"


def _ratio(name: str) -> str:
    return f"{name} : before"


def _pair(
    name: str, baseline: str | None = None, backend: Bar | None = None, client: Bar | None = None
) -> Iterator[Line]:
    for process, bar in (("backend", backend), ("client", client)):
        yield Line(f"{name}, {process}", "us", baseline and f"{baseline}, {process}", bar)


_BULK = (
    "publisher",
    "publisher's backend",
    "dispatcher",
    "dispatcher's backends",
    "worker",
    "worker's backends",
    "all",
)

MEASUREMENT = Measurement(
    "cost",
    "the processor time of a message, by process",
    (
        *(Line(f"bulk, {process}", "us") for process in _BULK),
        Line("bulk with metrics, worker", "us", UNMETERED[0]),
        Line("bulk with metrics, all", "us", UNMETERED[1], Bar(ratio_at_most=1.03)),
        *_pair("INSERT"),
        *_pair("send", "INSERT", Bar(ratio_at_most=2.0), Bar(ratio_at_most=2.6)),
        *_pair("INSERT and commit"),
        *_pair("send and commit", "INSERT and commit", Bar(ratio_at_most=1.5), Bar(ratio_at_most=1.7)),
        *(line for rows in ("1", "10", "100", "10,000") for line in _pair(f"deliver {rows}")),
        *_pair("DELETE of 1"),
        *_pair("claim of 1", "DELETE of 1"),
        *_pair("DELETE of 1,000"),
        *_pair("claim of 1,000", "DELETE of 1,000"),
    ),
    _run,
    processor.missing,
)


def against(directory: Path) -> Measurement:
    """Return the measurement with the figures of the checkout in `directory` beside ours.

    Raises `ConfigurationError` if there is none.
    """
    if not (directory / "mailroom" / "__init__.py").is_file():
        raise ConfigurationError(
            f"{directory} is no checkout of Mailroom: it has no package mailroom.", code="MR-invalid-argument"
        )
    beside = (
        each
        for line in MEASUREMENT.lines
        for each in (line, Line(_before(line.name), line.unit), Line(_ratio(line.name), ""))
        if each is line or line.baseline not in UNMETERED
    )
    return replace(MEASUREMENT, lines=tuple(beside), run=partial(_run, against=directory.resolve()))
