"""`mailroom dashboard` in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Statements may take a minute, as in `conftest.py`.
RUN = (
    "from dispatcher.dashboard.sessions import LIMITS; LIMITS['statement_timeout'] = '60s'; "
    "from dispatcher.cli.dashboard import dashboard; from mailroom.cli.options import share; share(dashboard); "
    "dashboard(prog_name='mailroom dashboard')"
)


@contextmanager
def running(dsn: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield it and its address once it listens."""
    call = subprocess.Popen(
        [sys.executable, "-c", RUN, "--port", "0", *arguments],
        env={**os.environ, "MAILROOM_DSN": dsn},
        text=True,
        stderr=subprocess.PIPE,
    )
    try:
        assert call.stderr is not None
        line = call.stderr.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/", line)
        assert found, line + call.stderr.read()
        yield call, found[1]
    finally:
        call.kill()
        call.communicate()
