"""A machine that is too small: a disk that takes its time, and cores that others have."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

SOURCE = Path(__file__).with_name("slow_disk.c")
# Of each tenth of a second everybody stands still for so long, as on cores that ten times as many want.
TURN_S, STILL_S = 0.1, 0.085


class SlowDisk:
    """Under a server that is started within `beneath`: each flush of the WAL lasts longer, as long as it is told to.

    It is a library that the server's processes load, made by the C compiler of this machine.
    """

    @staticmethod
    def available() -> bool:
        """Tell whether there is a compiler."""
        return shutil.which("cc") is not None

    def __init__(self, home: Path) -> None:
        self._library = home / "slow_disk.so"
        self._file = home / "slow_disk.ms"
        self.be(0)
        self._file.chmod(0o644)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True)
        self._library.chmod(0o755)

    def be(self, flush_s: float) -> None:
        """Have each flush that begins from now on last so much longer."""
        # In place, so that it is never without content for long: the server reads it each time.
        self._file.write_text(f"{round(1000 * flush_s):08}")

    @contextlib.contextmanager
    def beneath(self) -> Iterator[None]:
        """Start a server within."""
        before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "SLOW_DISK_FILE")}
        others = before["LD_PRELOAD"]
        os.environ["LD_PRELOAD"] = f"{self._library}:{others}" if others else str(self._library)
        os.environ["SLOW_DISK_FILE"] = str(self._file)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def busy_cores(pids: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Let the processes `pids` run for a moment only, again and again: whatever they do takes many times as long."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            still = list(pids())
            _signal(still, signal.SIGSTOP)
            over.wait(STILL_S)
            _signal(still, signal.SIGCONT)
            over.wait(TURN_S - STILL_S)

    thread = threading.Thread(target=work, name="busy cores", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def family(first: psutil.Process) -> list[int]:
    """Return a process and all that come from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [first.pid, *(each.pid for each in first.children(recursive=True))]
    return []
