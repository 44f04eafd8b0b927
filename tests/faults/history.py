"""The clients' own log: when a transaction called send, and when it had the answer to its COMMIT.

Monotonic time is one for all processes of a machine. A line is written after the fact, in one write: a process that is
killed leaves no line, and its transaction says nothing about real time.
"""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import UUID

from tests.faults.invariants import Sent


class History:
    """The log of one process, in a file of its own in `home`."""

    def __init__(self, home: Path, name: str) -> None:
        path = home / f"{name}-{os.getpid()}.history"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def acknowledged(self, wtx: int, invoked: float) -> None:
        """Note that the transaction's COMMIT has just been answered; `invoked` is when it called send."""
        os.write(self._file, f"{wtx} {invoked:.9f} {time.monotonic():.9f}\n".encode())


class Observations:
    """The messages a process was given, and their clocks, whether it consumed them or not."""

    def __init__(self, home: Path, name: str) -> None:
        path = home / f"{name}-{os.getpid()}.observed"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def had(self, messages: Iterable[tuple[UUID, int]]) -> None:
        """Note message ids and clocks, before it is decided what becomes of them."""
        os.write(self._file, "".join(f"{mid}\t{clock}\n" for mid, clock in messages).encode())


def observed(home: Path) -> Iterator[bytes]:
    """Give what the processes of a campaign were given, as lines for COPY."""
    for path in sorted(home.glob("*.observed")):
        data = path.read_bytes()
        yield data[: data.rfind(b"\n") + 1]


def read(home: Path) -> Iterator[Sent]:
    """Give all that the processes of a campaign have written."""
    for path in sorted(home.glob("*.history")):
        for line in path.read_text().splitlines():
            wtx, invoked, acknowledged = line.split()
            yield Sent(int(wtx), float(invoked), float(acknowledged))
