"""How many sessions a program keeps, as docs/guides/sessions.md has it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from inbox import Message, Requests, Worker
from mailroom import create_inbox
from tests.support.node import Node
from tests.support.waiting import eventually
from tests.support.working import NEVER_S, deliver, is_asleep, working

pytestmark = pytest.mark.inbox("shipping", backoff_s=0)


def sessions(node: Node) -> list[str]:
    """Return the names of our sessions, but for the test's own."""
    rows = node.rows(
        "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend' ORDER BY 1"
    )
    return [name for (name,) in rows]


def handle(message: Message, connection: Any) -> None:
    """Do nothing."""


@contextlib.contextmanager
def asleep(node: Node, *workers: Worker) -> Iterator[None]:
    """Run workers that have each handled a message."""
    with contextlib.ExitStack() as running:
        for worker in workers:
            running.enter_context(working(worker))
        eventually(lambda: is_asleep(node))
        deliver(node, "a")
        eventually(lambda: node.delivered() == [])
        yield


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [4, 1])
def test_worker_keeps_its_lanes_and_two(node: Node, parallel: int) -> None:
    with asleep(node, Worker(node.dsn, "shipping", handle, parallel=parallel, poll_interval_s=NEVER_S)):
        eventually(lambda: len(sessions(node)) == parallel + 2)


@pytest.mark.inbox("billing")
def test_workers_of_a_process_that_dispatch_keep_six_more_between_them(node: Node) -> None:
    workers = [
        Worker(node.dsn, inbox, handle, dispatch=True, poll_interval_s=NEVER_S) for inbox in ("shipping", "billing")
    ]
    with asleep(node, *workers):
        eventually(lambda: len(sessions(node)) == 2 * 3 + 6)


def test_requests_keep_three_at_rest(node: Node) -> None:
    with node.connection.transaction():
        create_inbox(node.connection, "replies", expire_s=600)
    with Requests(node.dsn, "replies"):
        eventually(lambda: len(sessions(node)) == 3)
