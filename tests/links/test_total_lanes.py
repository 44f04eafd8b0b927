"""Two nodes with daemons and workers, each with a total inbox of both: one order, and nothing waits for ever."""

import asyncio
import contextlib
from typing import Any

import pytest

from dispatcher import Dispatcher
from dispatcher.links.lane import LinksLane
from inbox import AsyncWorker, Message
from mailroom.links.start import noting_place
from mailroom.sql.runner import run
from tests.support.links import linked
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually_async
from tests.support.working import working_async

MESSAGES = 60


async def test_two_daemons_bring_both_nodes_into_one_order(
    source: Node, target: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"north": source, "south": target}
    for name, node in nodes.items():
        monkeypatch.setenv(f"MAILROOM_DSN_{name.upper()}", node.dsn)
        run(node.connection, noting_place(SCHEMA))
    linked(source, target, [], name="north", reader="south")
    linked(target, source, [], name="south", reader="north")
    given: dict[str, list[Any]] = {name: [] for name in nodes}

    def handler(name: str) -> Any:
        async def handle(message: Message, _: object) -> None:
            given[name].append((message.sent_clock, message.origin, message.value))

        return handle

    async with contextlib.AsyncExitStack() as running:
        for name, node in nodes.items():
            node.inbox("ledger", "sale", order="total", origin="*")
            for daemon in (Dispatcher(node.dsn), LinksLane(node.dsn)):
                await running.enter_async_context(_running(daemon))
            await running.enter_async_context(working_async(AsyncWorker(node.dsn, "ledger", handler(name))))
        asked = "SELECT count(*) FROM mailroom.link_topic"
        await eventually_async(lambda: all(node.value(asked) == 1 for node in nodes.values()))
        for nth in range(MESSAGES):
            nodes["north" if nth % 3 else "south"].send("sale", nth, key=f"k{nth % 5}")
        await eventually_async(lambda: all(len(each) == MESSAGES for each in given.values()))
    assert given["north"] == given["south"] == sorted(given["north"])
    assert {value for _, _, value in given["north"]} == set(range(MESSAGES))


@contextlib.asynccontextmanager
async def _running(daemon: Any) -> Any:
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon
    finally:
        daemon.stop()
        await asyncio.wait_for(task, WITHIN_S)
