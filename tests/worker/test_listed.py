"""Who works at a node is listed: also idle workers, and dispatchers that stand by."""

import os
import platform
import threading
from contextlib import ExitStack
from typing import Any

import mailroom
from dispatcher import Dispatcher
from inbox import Message, Worker
from mailroom.node.workers import AtWork, at_work
from tests.support.command import done, json_of
from tests.support.lanes import running
from tests.support.node import Node
from tests.support.roles import rights, role
from tests.support.waiting import eventually, eventually_async
from tests.support.working import NEVER_S, SHIPPING_WITH_LEDGER, deliver, working, write_ledger

pytestmark = SHIPPING_WITH_LEDGER


def states(node: Node) -> list[tuple[str, str, int]]:
    return [(each.inbox, each.state, each.messages) for each in at_work(node.connection).workers]


def test_idle_and_busy_workers_are_listed_each_by_itself(node: Node) -> None:
    assert "No worker is there" in done("worker", "list", dsn=node.dsn)
    assert at_work(node.connection) == AtWork((), ())
    node.inbox("billing")
    held, go_on = threading.Event(), threading.Event()

    def handle(message: Message, connection: Any) -> None:
        held.set()
        assert go_on.wait(60)
        write_ledger(message, connection)

    with ExitStack() as workers:
        workers.callback(go_on.set)
        for inbox in ("billing", "shipping", "shipping"):
            workers.enter_context(working(Worker(node.dsn, inbox, handle, poll_interval_s=NEVER_S)))
        idle = [("billing", "idle", 0), ("shipping", "idle", 0), ("shipping", "idle", 0)]
        eventually(lambda: states(node) == idle)
        deliver(node, "a")
        assert held.wait(60)
        eventually(
            lambda: sorted(states(node)) == [("billing", "idle", 0), ("shipping", "busy", 1), ("shipping", "idle", 0)]
        )
        with role(node.dsn, *rights("auditor")) as (_, given):
            told = json_of("worker", "list", dsn=given)["workers"]
        [busy] = [each for each in told if each["state"] == "busy"]
        ours = (platform.node(), os.getpid(), mailroom.__version__)
        assert {(each["host"], each["pid"], each["release"]) for each in told} == {ours}
        assert busy["last_batch_at"] is not None
        go_on.set()
        eventually(lambda: states(node) == idle)
    eventually(lambda: states(node) == [])


async def test_dispatchers_lead_or_stand_by(node: Node) -> None:
    def lanes() -> list[tuple[str, str]]:
        return sorted((each.role, each.state) for each in at_work(node.connection).lanes)

    async with running(Dispatcher(node.dsn), Dispatcher(node.dsn)):
        await eventually_async(lambda: lanes() == [("dispatcher", "leading"), ("dispatcher", "standing by")])
        told = {(each.process, each.release) for each in at_work(node.connection).lanes}
        assert told == {(f"{os.getpid()}@{platform.node()}", mailroom.__version__)}
        assert "standing by" in done("worker", "list", dsn=node.dsn, COLUMNS="160")
    await eventually_async(lambda: lanes() == [])
