"""Sleep: a worker misses no delivery while it falls asleep, and a delivery wakes the workers that sleep."""

import asyncio
import contextlib
from collections.abc import Callable

import psycopg
import pytest

from inbox import AsyncWorker, Worker
from inbox.handling.batch import Batch
from inbox.sessions.wakeup import InboxListener
from inbox.worker import loop
from inbox.worker.in_flight import Entry
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    is_asleep,
    ledger_keys,
    working,
    working_async,
    write_ledger,
    write_ledger_async,
)

pytestmark = SHIPPING_WITH_LEDGER


class Watched(AsyncWorker):
    """A worker that reports where it is: before and after each scan, and when it waits for a notification."""

    def __init__(self, node: Node, act: Callable[[str], None], listens: asyncio.Event) -> None:
        super().__init__(node.dsn, "shipping", write_ledger_async, poll_interval_s=NEVER_S)
        self._act = act
        self._listens = listens

    async def _work(self, batch: Batch, entry: Entry) -> None:
        await self._listens.wait()  # the listener rings when it starts, which would wake the worker by chance
        self._act("before scan")
        await super()._work(batch, entry)
        self._act("after scan")


POINTS = ["before scan", "after scan", "before scan", "after scan", "waits"]


@pytest.mark.parametrize("delivered_at", range(len(POINTS)), ids=[f"{nth} {name}" for nth, name in enumerate(POINTS)])
async def test_delivery_is_found_without_the_poll_wherever_the_worker_is(
    node: Node, monkeypatch: pytest.MonkeyPatch, delivered_at: int
) -> None:
    """It never polls: either the scan after it counts as asleep sees the delivery, or the delivery notifies it."""
    passed: list[str] = []

    def act(point: str) -> None:
        passed.append(point)
        if len(passed) == delivered_at + 1:
            node.send("shipping", key="k")
            assert node.deliver().taken == 1

    async def heard(ring: asyncio.Event, timeout_s: float) -> bool:
        act("waits")
        await ring.wait()
        return True

    async def attend(listener: InboxListener, connection: psycopg.AsyncConnection) -> None:
        listens.set()
        await attend_as_ever(listener, connection)

    listens, attend_as_ever = asyncio.Event(), InboxListener.attend
    monkeypatch.setattr(InboxListener, "attend", attend)
    monkeypatch.setattr(loop, "heard", heard)
    node.allow_clocks()
    async with working_async(Watched(node, act, listens)):
        await eventually_async(lambda: ledger_keys(node) == ["k"])
        assert passed[: delivered_at + 1] == POINTS[: delivered_at + 1]


async def test_delivery_that_saw_nobody_asleep_is_waited_for_before_the_last_scan(node: Node, connect: Connect) -> None:
    """An open delivery that does not notify holds the lock "asleep", and a worker about to sleep waits for it."""
    node.allow_clocks()
    delivering = Node(node.dsn, connect(autocommit=True))
    node.send("shipping", key="k")
    async with contextlib.AsyncExitStack() as running:
        with delivering.connection.transaction():
            delivery = delivering.deliver()
            assert (delivery.taken, delivery.woken) == (1, 0)
            worker = AsyncWorker(node.dsn, "shipping", write_ledger_async, poll_interval_s=NEVER_S)
            await running.enter_async_context(working_async(worker))
            waits = (
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            await eventually_async(lambda: node.rows(waits))
        await eventually_async(lambda: ledger_keys(node) == ["k"])


def test_delivery_notifies_only_for_an_inbox_whose_worker_sleeps(node: Node) -> None:
    node.inbox("billing")
    node.allow_clocks()
    node.send("shipping")
    assert node.deliver().woken == 0
    with working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        eventually(lambda: len(ledger_keys(node)) == 1)
        eventually(lambda: is_asleep(node))
        node.send("billing")
        assert node.deliver().woken == 0
        node.send("shipping")
        assert node.deliver().woken == 1
        eventually(lambda: len(ledger_keys(node)) == 2)
