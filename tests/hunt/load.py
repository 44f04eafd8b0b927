"""Processes that want to run all the time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PER_CORE = 4
# Ends by itself if the process that started it is gone, however that ended.
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep all cores busy, with several processes each."""
    count = PER_CORE * (os.cpu_count() or 1)
    started: list[subprocess.Popen[bytes]] = []
    try:
        # In sessions of their own: Ctrl-C is for the caller, who ends them.
        started += (subprocess.Popen([sys.executable, "-c", _BUSY], start_new_session=True) for _ in range(count))
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()
