"""Lanes of a daemon under test: as tasks or as a process, and what the node shows of them."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from dispatcher.lanes import leading, lease
from dispatcher.lanes.leading import Leading
from mailroom.sql import locks
from tests.support.node import Node
from tests.support.waiting import WITHIN_S
from tests.support.working import NEVER_S

LISTENER = "mailroom dispatcher listener"
EXPIRE = "UPDATE mailroom.lease SET until = clock_timestamp() - interval '1 ms'"
DAEMON = "import sys; from dispatcher.daemon import run; run(sys.argv[1], poll_interval_s=0.05)"
# For a process, what `be_patient` does for lanes of the test's own.
PATIENT = f"""
from dispatcher.lanes import leading, lease
lease.LEASE_S = {NEVER_S}
leading.FINISH_WITHIN_S = leading.DISCONNECT_AFTER_S = {WITHIN_S}
"""


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave to the test who leads: no lease expires by itself, and a lane that stops gives its own up in any case."""
    monkeypatch.setattr(lease, "LEASE_S", NEVER_S)
    for bound in ("FINISH_WITHIN_S", "DISCONNECT_AFTER_S"):
        monkeypatch.setattr(leading, bound, WITHIN_S)


@contextlib.asynccontextmanager
async def running(*lanes: Leading) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run lanes as tasks, and stop them at the end."""
    tasks = [asyncio.create_task(lane.run()) for lane in lanes]
    try:
        yield tasks
    finally:
        for lane in lanes:
            lane.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), 2 * WITHIN_S)


@contextlib.contextmanager
def daemon(dsn: str, before: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """Run a daemon in a process of its own, which does `before` first; it is killed at the end if it still runs."""
    with subprocess.Popen([sys.executable, "-c", before + DAEMON, dsn]) as started:
        try:
            yield started
        finally:
            started.kill()
            started.wait()


def leaders(node: Node) -> dict[str, int]:
    """Return the roles that are led, each with the process that leads."""
    return dict(node.rows("SELECT role, pid FROM mailroom.lease WHERE until > clock_timestamp()"))


def asleep(node: Node, *roles: str) -> bool:
    """Tell whether these roles are led, a session listens, and nobody is awake: only a notification wakes them."""
    awake = node.rows(
        "SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = %s "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        locks.AWAKE,
    )
    return not awake and {*roles} <= leaders(node).keys() and node.sessions(LISTENER) != []


def is_replaced(node: Node, before: int, after: int) -> bool:
    """Expire the leases of the process `before`, and tell whether `after` delivers in its place.

    Ask again and again: a process that is killed or paused may have left a renewal behind, which the server still does.
    """
    node.connection.execute(f"{EXPIRE} WHERE pid = {before}".encode())
    return leaders(node).get("dispatcher") == after
