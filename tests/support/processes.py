"""Servers that tests start as processes: each ends with the process that started it, however that one ends."""

import contextlib
import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mailroom.embedded.account import Account
from tests.support.waiting import WITHIN_S, eventually

# It reads until the pipe from the test's process closes, which also a SIGKILL cannot prevent.
_WATCH = 'read -r group; cat; kill -s KILL -- "-$group"'


class ServerProcess:
    """A command that runs in a process group of its own, whose output goes to a file."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        account: Account | None = None,
    ) -> None:
        other = account if account is not None and account.switched else None
        self._log = log
        self._watch = subprocess.Popen(["/bin/sh", "-c", _WATCH], stdin=subprocess.PIPE, start_new_session=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd="/",
                env=None if environment is None else {**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                user=other.uid if other else None,
                group=other.gid if other else None,
                extra_groups=[] if other else None,
                start_new_session=True,
            )
        assert self._watch.stdin is not None
        self._watch.stdin.write(f"{self._process.pid}\n".encode())
        self._watch.stdin.flush()

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    def check(self) -> None:
        """Fail if it has ended, and say what it said last."""
        ended = self._process.poll()
        said = self._log.read_text(errors="replace")[-2_000:]
        assert ended is None, f"{self._process.args!r} ended with {ended}: {said}"

    def ended(self) -> int:
        """Wait until it has ended, and return its exit code."""
        return self._process.wait(WITHIN_S)

    def pause(self) -> None:
        """Stop all its processes where they are: connections stay open and nothing answers."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ask it to end, and wait until it has; end it if it does not."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)  # one that is paused would not hear
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(WITHIN_S)
        self.kill()

    def kill(self) -> None:
        """End all its processes at once, as a crash does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # Before its id is given up, which another group may get.
        self._watch.kill()
        self._watch.communicate()
        self._process.wait()


class Broker(ABC):
    """A broker on 127.0.0.1, at the same port for as long as the object lives; as a context manager it is started."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(exist_ok=True)
        self._process: ServerProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def log(self) -> Path:
        """What its processes said, since the first start."""
        return self._directory / "log"

    @property
    def process(self) -> ServerProcess:
        """The process that runs."""
        assert self._process is not None, "it is not running"
        return self._process

    def start(self) -> None:
        """Start it, with what it kept when it ended last, and wait until it serves."""
        assert self._process is None, "it is running"
        self._process = self._launch()
        try:
            eventually(self._serves)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.process.kill()
        self._process = None

    def stop(self) -> None:
        """Have it shut down."""
        self.process.stop()
        self._process = None

    def pause(self) -> None:
        """Stop it where it is: connections stay open and nothing answers."""
        self.process.pause()

    def resume(self) -> None:
        """Let it go on."""
        self.process.resume()

    def close(self) -> None:
        """End it for good, if it runs."""
        if self._process is not None:
            self.kill()

    def _serves(self) -> bool:
        self.process.check()
        return self._answers()

    @abstractmethod
    def _launch(self) -> ServerProcess:
        """Start the process."""

    @abstractmethod
    def _answers(self) -> bool:
        """Tell whether it serves by now."""


def answer(port: int, greeting: bytes = b"") -> bytes:
    """Return the first bytes that the server at this port sends, after `greeting`; none if there is no server yet."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(greeting)
        return connection.recv(64)
    return b""
