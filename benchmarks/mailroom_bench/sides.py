"""Sides: this checkout and another one, measured in turn on one server, each with its own code and migrations.

`X, before` is the figure of the other checkout, and `X : before` ours divided by it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, cast

import mailroom
from mailroom.errors import ConfigurationError, MailroomError

from .measure import Line, Measurement, Setup, Values

_ALIAS = "mailroom_benchmarks_of_ours"
_END_S = 60.0
_turn = count()


class Side:
    """One checkout, in a process of its own that measures a part when asked."""

    def __init__(self, setup: Setup, product: Path, directory: str) -> None:
        # The other checkout may have benchmarks too, so ours get a name of their own there.
        Path(directory, _ALIAS).symlink_to(Path(__file__).parent, target_is_directory=True)
        # -P: the current directory is not in the path.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", f"{_ALIAS}.side"],
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
                f"Measuring {part} failed: look at what its process printed above.", code="MR-bench-failed"
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


def measured(setup: Setup, against: Path | None = None, *, parts: Sequence[str], alone: Collection[str] = ()) -> Values:
    """Return what this checkout finds in its parts, and another one in all but those `alone`."""
    own = Path(mailroom.__file__).resolve().parents[1]
    values: dict[str, float] = {}
    turn = next(_turn)
    with ExitStack() as stack:
        sides = [stack.enter_context(_side(setup, product)) for product in (own, against) if product is not None]
        for nth, part in enumerate(parts, start=turn):
            # Who is first changes from run to run: that one finds the server as the part before has left it.
            order = sides[:1] if part in alone else sides[::-1] if nth % 2 else sides
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


def beside(
    measurement: Measurement, run: Callable[..., Values], directory: Path, ours: Collection[str] = ()
) -> Measurement:
    """Return a measurement with the figures of the checkout in `directory` beside ours, but for the lines `ours`.

    `run` is `measured` with its parts. Raises `ConfigurationError` if there is no such checkout.
    """
    if not (directory / "mailroom" / "__init__.py").is_file():
        raise ConfigurationError(
            f"{directory} is not a checkout of Mailroom: it has no package mailroom.", code="MR-invalid-argument"
        )
    lines = (
        each
        for line in measurement.lines
        for each in (line, Line(_before(line.name), line.unit), Line(_ratio(line.name), ""))
        if each is line or line.name not in ours
    )
    return replace(measurement, lines=tuple(lines), run=partial(run, against=directory.resolve()))
