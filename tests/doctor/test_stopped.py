"""The doctor beside real processes that are killed, or paused so that their sessions live on."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mailroom.doctor import Finding, Limits, examine
from tests.support.command import process
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.inbox("shipping")]

OF_THE_SERVER = {"M028", "M029"}  # servers of tests are not durable
AT_ONCE: dict[str, Any] = {"unled_s": 0, "lease_s": 0, "batch_s": 0, "silent_s": 0}
WORKER = """
import sys, time
from inbox import Worker

def handle(message, connection):
    print("in hand", flush=True)
    time.sleep(600)

Worker(sys.argv[1], "shipping", handle).run()
"""


def found_in(node: Node) -> dict[str, Finding]:
    with node.connection.transaction():
        found = examine(node.connection, limits=Limits(**AT_ONCE))
    return {each.id: each for each in found if each.id not in OF_THE_SERVER}


@contextmanager
def ended(running: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill the process at the end, also one that is paused."""
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=WITHIN_S)


def leads(node: Node, running: subprocess.Popen[str]) -> bool:
    return node.rows("SELECT pid FROM mailroom.lease WHERE role = 'dispatcher' AND until > now()") == [(running.pid,)]


def test_a_leader_that_was_killed_is_missed_once_something_waits(node: Node) -> None:
    with ended(process("dispatcher", "run", dsn=node.dsn)) as leader:
        eventually(lambda: leads(node, leader))
        eventually(lambda: found_in(node) == {})
    assert "M022" not in found_in(node)  # nothing waits for it
    node.send("shipping")
    found = eventually(lambda: found if "M022" in (found := found_in(node)) else {})
    assert f"pid {leader.pid} led until" in found["M022"].evidence[0]


def test_a_leader_that_is_paused_is_named_with_the_session_that_lives_on(node: Node) -> None:
    with ended(process("dispatcher", "run", dsn=node.dsn)) as leader:
        eventually(lambda: leads(node, leader))
        os.kill(leader.pid, signal.SIGSTOP)
        found = eventually(lambda: found if "M024" in (found := found_in(node)) else {})
    assert any(f"pid {leader.pid}: lease expired" in line for line in found["M024"].evidence)
    assert "pg_terminate_backend" in found["M024"].command


def test_a_worker_whose_handler_hangs_or_that_is_paused_is_named_with_its_batch(node: Node) -> None:
    node.send("shipping", key="k")
    node.deliver_all()
    running = subprocess.Popen([sys.executable, "-c", WORKER, node.dsn], stdout=subprocess.PIPE, text=True)
    with ended(running) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "in hand\n"
        for stop in (None, signal.SIGSTOP):
            if stop is not None:
                os.kill(worker.pid, stop)
            found = eventually(lambda: found if {"M025", "M026"} & set(found := found_in(node)) else {})
            [batch] = [each for name, each in found.items() if name in ("M025", "M026")]
            assert f"pid {worker.pid}: 1 messages since" in batch.evidence[0]
            assert "pg_terminate_backend" in batch.command
