"""The demo's child processes: one dispatcher and the workers, each with a log of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_WITHIN_S = 60.0


class Process:
    """A command of `mailroom` that runs until it is stopped, and can be killed and started again."""

    def __init__(self, name: str, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "mailroom", *arguments]
        self._environment = {**os.environ, **environment}
        self._log = log
        self._process = self._started()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return what it ended with; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()

    def start_again(self) -> None:
        """Start it as a supervisor would, after its end."""
        self._process = self._started()

    def terminate(self) -> None:
        """Ask it to finish its batch and end."""
        self._process.terminate()

    def wait(self) -> None:
        """Wait for its end, and kill it if that does not come in time or Ctrl-C is pressed meanwhile."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_WITHIN_S)
        finally:
            self.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which ends its children in order.
            return subprocess.Popen(  # noqa: S603 - our own command
                self._command,
                env=self._environment,
                # Modules are looked for in the working directory first, and the user's may hold an `examples` too.
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Processes:
    """A dispatcher and `workers` workers on a node, from entering the context to leaving it. Logs go to `logs`."""

    def __init__(self, dsn: str, node: str, logs: Path, workers: int) -> None:
        # By the environment, since the dsn may hold a password and everybody can read a command line.
        self._environment = {"MAILROOM_DSN": dsn, "MAILROOM_DEMO_SCHEMA": node}
        self._node = node
        self._logs = logs
        self._names = [f"worker {number}" for number in range(1, workers + 1)]
        self.dispatcher: Process
        self.workers: list[Process] = []

    def __enter__(self) -> Self:
        self.dispatcher = self._process("dispatcher", ["dispatcher", "run", "--schema", self._node])
        try:
            for name in self._names:
                self.workers.append(self._process(name, ["worker", "run", f"{__package__}.worker:worker"]))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask all to end, and see them end."""
        with contextlib.ExitStack() as waits:
            for process in (*self.workers, self.dispatcher):
                waits.callback(process.wait)
                process.terminate()

    def ended(self) -> list[Process]:
        """Return those that ended by themselves, which none should."""
        return [process for process in (self.dispatcher, *self.workers) if process.exit_code() is not None]

    def _process(self, name: str, arguments: list[str]) -> Process:
        return Process(name, arguments, self._environment, self._logs / f"{name.replace(' ', '-')}.log")
