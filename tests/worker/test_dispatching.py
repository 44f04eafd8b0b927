"""Workers of one process that dispatch: one of them does, and another goes on where it cannot."""

import asyncio
import gc
import os
import threading
from typing import Any

import pytest

from inbox import AsyncWorker, Message, Worker
from inbox.worker.dispatching import SILENT_S, Dispatching, Turn
from mailroom.errors import ConfigurationError
from mailroom.session.home import Home
from mailroom.session.repeats import Repeats
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually
from tests.support.working import NEVER_S, working

pytestmark = [pytest.mark.inbox("shipping"), pytest.mark.inbox("billing")]

LEADS = "SELECT count(*) FROM mailroom.lease WHERE role = 'dispatcher' AND until > clock_timestamp()"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lanes(node: Node) -> int:
    return len(node.sessions("mailroom dispatcher") + node.sessions("mailroom executor"))


def test_another_worker_dispatches_when_the_one_that_did_has_stopped(node: Node) -> None:
    first, second = (
        Worker(node.dsn, inbox, lambda message, connection: None, dispatch=True, poll_interval_s=NEVER_S)
        for inbox in ("shipping", "billing")
    )
    with working(second):
        with working(first):
            eventually(lambda: node.value(LEADS) == 1)
            node.send("billing", key="a")
            node.send("shipping", key="a")
            eventually(lambda: [node.waiting(), node.delivered()] == [[], []])
        node.send("billing", key="b")
        eventually(lambda: [node.waiting(), node.delivered()] == [[], []])
    assert node.value(LEADS) == 0


@pytest.mark.slow
def test_worker_whose_event_loop_stands_still_keeps_nobody_from_dispatching(node: Node) -> None:
    began, go_on = threading.Event(), threading.Event()
    handled: list[str] = []

    async def blocks(message: Message, connection: Any) -> None:
        began.set()
        assert go_on.wait(WITHIN_S)  # as a handler does that calls a service without await

    blocked = AsyncWorker(node.dsn, "shipping", blocks, dispatch=True, handle_signals=False)
    thread = threading.Thread(target=lambda: asyncio.run(blocked.run()))
    thread.start()
    try:
        eventually(lambda: node.value(LEADS) == 1)
        other = Worker(node.dsn, "billing", lambda message, _: handled.append(message.key), dispatch=True)
        with working(other):
            node.send("shipping", key="a")
            assert began.wait(WITHIN_S)
            node.send("billing", key="b")
            eventually(lambda: handled == ["b"], WITHIN_S)
            go_on.set()
            # It has lost its turn, and no longer stands by.
            eventually(lambda: lanes(node) == 6, WITHIN_S)
    finally:
        go_on.set()
        blocked.stop()
        thread.join(WITHIN_S)


class Broken:
    """A lane that cannot run, as behind a pooler."""

    async def run(self) -> None:
        raise ConfigurationError("This connection string leads through a pooler.", code="MR-pooler-in-the-way")

    def stop(self) -> None:
        pass


@pytest.mark.slow
async def test_lanes_that_all_fail_raise_one_error_and_leave_none_behind(caplog: pytest.LogCaptureFixture) -> None:
    dispatching = Dispatching("shipping", Home("host=h"), "mailroom", 1.0, Repeats())
    dispatching._make = lambda: [Broken(), Broken()]
    with pytest.raises(ConfigurationError):
        await dispatching.run()
    del dispatching
    gc.collect()
    assert caplog.records == []


def test_turn_is_one_worker_s_until_it_gives_it_up_or_is_silent() -> None:
    clock = Clock()
    one, two, other_node = (
        Turn(Home("host=h dbname=d password=a"), "mailroom", clock),
        Turn(Home("host=h dbname=d password=b"), "mailroom", clock),
        Turn(Home("host=h dbname=d"), "tenant", clock),
    )
    other_login = Turn(Home("host=h dbname=d user=u"), "mailroom", clock)
    try:
        assert [one.take(), two.take(), one.take()] == [True, False, True]
        assert [other_node.take(), other_login.take()] == [True, True]
        clock.now += SILENT_S / 2
        assert [one.take(), two.take()] == [True, False]
        clock.now += SILENT_S * 0.9
        assert not two.take()
        clock.now += SILENT_S * 0.1
        assert [two.take(), one.take()] == [True, False]
        one.give_up()
        assert [one.take(), two.take()] == [False, True]
        two.give_up()
        assert [one.take(), two.take()] == [True, False]
    finally:
        for turn in (one, two, other_node, other_login):
            turn.give_up()


def test_forked_process_has_turns_of_its_own() -> None:
    mine, its = (Turn(Home("host=h dbname=d"), "mailroom") for _ in range(2))
    assert mine.take()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if its.take() and not mine.take() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not its.take()
    finally:
        mine.give_up()
