"""Take-over: how soon a link is read again after its daemon was killed, or after either server is back.

It starts two servers of its own, one for each node. A message is stamped when the daemon was killed, when the source's
server is back, and while the target's is down; the time is that until it has come.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mailroom.embedded import Server, find_binaries
from mailroom.errors import EmbeddedServerError, MailroomError

from .linked import FAR, link, received, wait_asked
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline

_LOOK_S = 0.01
_WITHIN_S = 60.0


def _missing() -> str | None:
    try:
        find_binaries()
    except EmbeddedServerError as error:
        return str(error)
    return None


@contextmanager
def _server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # root's server runs as another account
        with Server(Path(directory, "server"), binaries=find_binaries()) as server:
            yield server


def _stamp(node: Node) -> None:
    node.send(1, topic=FAR)
    node.deliver()


def _seconds(began: float, done: Callable[[], bool]) -> float:
    while not done():
        if time.monotonic() - began > _WITHIN_S:
            raise MailroomError(f"The link was not read again within {_WITHIN_S:.0f} seconds.", code="MR-bench-failed")
        time.sleep(_LOOK_S)
    return time.monotonic() - began


def _restart(server: Server, meanwhile: Callable[[], None] = lambda: None) -> float:
    """Return when it was back."""
    server.stop()
    meanwhile()
    server.start()
    return time.monotonic()


def _kill_leader(node: Node) -> float:
    with node.connect() as connection:
        [(pid,)] = connection.execute(f"SELECT pid FROM {node.schema}.lease WHERE role = 'links'".encode()).fetchall()
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def _run(_setup: Setup) -> Values:
    with (
        _server() as at_source, _server() as at_target,
        fresh_node(at_source.dsn()) as source, fresh_node(at_target.dsn()) as target,
        Pipeline(target) as pipeline,
    ):  # fmt: skip
        link({"source": source}, "target", target)
        pipeline.dispatch({"source": source.dsn})
        wait_asked(pipeline, {"source": source})
        pipeline.dispatch({"source": source.dsn})  # the standby
        _stamp(source)
        pipeline.wait(lambda: received(target) == 1)
        began = _kill_leader(target)
        _stamp(source)
        lane = _seconds(began, lambda: received(target) == 2)
        began = _restart(at_source)
        _stamp(source)
        source_back = _seconds(began, lambda: received(target) == 3)
        began = _restart(at_target, lambda: _stamp(source))
        target_back = _seconds(began, lambda: received(target) == 4)
    return {"daemon killed": lane, "source's server back": source_back, "target's server back": target_back}


_SOON = Bar(at_most=5)

MEASUREMENT = Measurement(
    "take-over",
    "a link after its daemon or a server has died",
    tuple(
        Line(name, unit="s", bar=_SOON) for name in ("daemon killed", "source's server back", "target's server back")
    ),
    _run,
    _missing,
)
