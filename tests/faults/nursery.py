"""The nursery: forks the roles of a campaign from one process that has imported everything.

A fault kills a process every second or so; starting Python anew each time would cost more than the faults. Each child
has a socket to the campaign, a line of JSON per message; its end is the child's end, in both directions.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.task import Task, told

READY = b"."


class Nursery:
    """The campaign's end. Children log to files in `home`; `environment` is added to their own."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._home = home
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], env={**os.environ, **environment}, cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        if ours.recv(1) != READY:
            raise RuntimeError("the roles cannot be imported: see above")

    def start(self, task: Task) -> socket.socket:
        """Start a role and return the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            log = os.open(self._home / f"{task.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                socket.send_fds(self._socket, [json.dumps(task.fields()).encode()], [theirs.fileno(), log])
            finally:
                os.close(log)
        return ours

    def close(self) -> None:
        """End the nursery; children end with their sockets."""
        self._socket.close()
        self._process.wait(10)


def _serve(requests: socket.socket) -> None:
    from tests.faults import role

    role.preload()
    requests.sendall(READY)
    while True:
        readable, _, _ = select.select([requests], [], [], 0.1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not readable:
            continue
        data, descriptors, _, _ = socket.recv_fds(requests, 65_536, 2)
        if not data:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        requests.close()
        code = 1
        try:
            code = _child(json.loads(data), *descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _child(fields: dict[str, Any], control: int, log: int) -> int:
    from tests.faults import role

    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the campaign
    return role.main(told(fields), socket.socket(fileno=control))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
