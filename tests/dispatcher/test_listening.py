"""Lanes that share the session that listens: each is woken for its own table, whatever becomes of the session."""

import asyncio

import pytest

from dispatcher import Dispatcher, Executor
from dispatcher.lanes.listening import LaneListener
from mailroom.session import listener
from mailroom.session.home import Home
from outbox import Store
from tests.support.lanes import LISTENER, asleep, running
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually_async
from tests.support.working import NEVER_S

pytestmark = [pytest.mark.both_versions, pytest.mark.inbox("shipping")]


def lanes_of(node: Node) -> tuple[Dispatcher, Executor]:
    home = Home(node.dsn)
    return Dispatcher(home, poll_interval_s=NEVER_S), Executor(home, poll_interval_s=NEVER_S)


def is_asleep(node: Node) -> bool:
    """Tell whether nobody is awake, and one session listens."""
    return asleep(node) and len(node.sessions(LISTENER)) == 1


async def wakes_both(node: Node, nth: int) -> None:
    for what in ("message", "executable"):
        await eventually_async(lambda: is_asleep(node))
        if what == "message":
            node.send("shipping", key=f"k{nth}")
            await eventually_async(lambda: len(node.delivered()) == nth)
        else:
            with node.connection.transaction():
                Store().increment(node.connection, "counter")
            await eventually_async(lambda: Store().get(node.connection, "counter") == nth)


async def test_each_lane_is_woken_over_one_session_also_when_that_was_lost(node: Node) -> None:
    dispatcher, executor = lanes_of(node)
    async with running(dispatcher, executor):
        await wakes_both(node, 1)
        for nth in (2, 3):
            node.end_sessions(LISTENER)
            await wakes_both(node, nth)


@pytest.mark.parametrize("ends", ["dispatcher", "executor"])
async def test_lane_is_woken_when_the_other_has_ended(node: Node, ends: str) -> None:
    """One of them had opened the session."""
    lanes = lanes_of(node)
    async with running(*lanes) as tasks:
        await wakes_both(node, 1)
        ended = ["dispatcher", "executor"].index(ends)
        lanes[ended].stop()
        await asyncio.wait_for(asyncio.shield(tasks[ended]), WITHIN_S)
        await eventually_async(lambda: is_asleep(node))
        if ends == "executor":
            node.send("shipping", key="after")
            await eventually_async(lambda: len(node.delivered()) == 2)
        else:
            with node.connection.transaction():
                Store().increment(node.connection, "counter")
            await eventually_async(lambda: Store().get(node.connection, "counter") == 2)


async def test_whoever_comes_later_scans_what_came_before(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEARTBEAT_S", NEVER_S)  # a new connection would ring for all
    home = Home(node.dsn)
    first, second = (LaneListener(home, "mailroom", table) for table in ("outbox", "outbox_executable"))
    ring = first.next_ring()
    tasks = [asyncio.create_task(first.run())]
    await asyncio.wait_for(ring.wait(), WITHIN_S)  # it listens
    ring = second.next_ring()
    tasks.append(asyncio.create_task(second.run()))
    await asyncio.wait_for(ring.wait(), WITHIN_S)
    assert len(node.sessions(LISTENER)) == 1
    own, other = second.next_ring(), first.next_ring()
    node.connection.execute("SELECT pg_notify('mailroom:' || 'mailroom.outbox_executable'::regclass::oid, '')")
    await asyncio.wait_for(own.wait(), WITHIN_S)
    assert not other.is_set()
    ring = second.next_ring()
    tasks[0].cancel()
    await asyncio.wait_for(ring.wait(), WITHIN_S)  # it listens by itself now
    await eventually_async(lambda: len(node.sessions(LISTENER)) == 1)  # that of the other one has ended
    tasks[1].cancel()
    await asyncio.wait(tasks)
