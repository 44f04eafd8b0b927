"""Which processes of a test run may be stopped: what its tests started, and the backends of its servers.

Never pytest and its workers, nor a postmaster, nor what belongs to another run.
"""

import contextlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil

_POSTGRES = "postgres"
_SESSION = re.compile(r"^postgres: .*(\[local\]|\(\d+\))")  # its title names the client, and a port unless it is local
_RUN_LOCK = "run.lock"  # tests/support/postgres.py: pytest keeps it open, in the directory of its servers
_EXECNET = "exec(eval(sys.stdin.readline()))"  # how pytest-xdist starts a worker
_STOPPING = ("SIGSTOP", ".pause()")


class Run:
    """The processes of a run of pytest, which is process `pid` and has the directory `base` for what is temporary."""

    def __init__(self, pid: int, base: Path) -> None:
        self._pytest = psutil.Process(pid)
        self._homes = [base]

    def stoppable(self) -> list[psutil.Process]:
        """Return what runs now and may be stopped, in the order of process ids."""
        found: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):  # pytest has ended
            found |= {each for each in self._pytest.children(recursive=True) if _is_of_a_test(each)}
            found -= {each for each in self._pytest.children() if _is_worker(each)}
        return sorted(found | {*self._backends()}, key=lambda each: each.pid)

    def _backends(self) -> Iterator[psutil.Process]:
        """Yield the sessions of servers whose data is in a directory of this run; they descend from no test.

        Not the servers' own processes, such as the checkpointer: all tests would wait for one.
        """
        homes = self._directories()
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if each.name() == _POSTGRES and _SESSION.search(" ".join(each.cmdline())):
                    directory = Path(each.cwd())
                    if any(directory.is_relative_to(home) for home in homes):
                        yield each

    def _directories(self) -> list[Path]:
        if len(self._homes) == 1:
            with contextlib.suppress(psutil.Error):
                opened = [Path(file.path) for file in self._pytest.open_files()]
                self._homes += [file.parent for file in opened if file.name == _RUN_LOCK]
        return self._homes


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(_EXECNET in argument for argument in process.cmdline())
    return True


def _is_of_a_test(process: psutil.Process) -> bool:
    """Tell whether the tests may have it stopped; a server's processes are found by its directory."""
    with contextlib.suppress(psutil.Error):
        return process.name() != _POSTGRES and not _stops_its_own(process.environ().get("PYTEST_CURRENT_TEST", ""))
    return False


@cache
def _stops_its_own(test: str) -> bool:
    """Tell whether the test stops processes itself: what we continue would not stay stopped for it."""
    file = Path(__file__).parents[2] / test.partition("::")[0]
    return file.is_file() and any(word in file.read_text() for word in _STOPPING)
