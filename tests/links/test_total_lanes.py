"""Two nodes with daemons and workers, each with a total inbox of both: one order, and nothing waits for ever."""

import asyncio
import contextlib
from typing import Any

import psycopg
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


@pytest.mark.slow
async def test_two_daemons_bring_both_nodes_into_one_order(
    source: Node, target: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"north": source, "south": target}
    for name, node in nodes.items():
        monkeypatch.setenv(f"MAILROOM_DSN_{name.upper()}", node.dsn)
        run(node.connection, noting_place(SCHEMA))
    linked(source, target, [], name="north", reader="south")
    linked(target, source, [], name="south", reader="north")

    async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
        await connection.execute(
            "INSERT INTO given (sent_clock, origin, value) VALUES (%s, %s, %s)",
            [message.sent_clock, message.origin, message.value],
        )

    def given(node: Node) -> list[tuple[Any, ...]]:
        return node.rows("SELECT sent_clock, origin, value FROM given ORDER BY nth")

    async with contextlib.AsyncExitStack() as running:
        for node in nodes.values():
            node.connection.execute("CREATE TABLE given (nth bigserial, sent_clock bigint, origin uuid, value int)")
            node.inbox("ledger", "sale", order="total", origin="*")
            for daemon in (Dispatcher(node.dsn), LinksLane(node.dsn)):
                await running.enter_async_context(_running(daemon))
            await running.enter_async_context(working_async(AsyncWorker(node.dsn, "ledger", handle)))
        asked = "SELECT count(*) FROM mailroom.link_topic"
        await eventually_async(lambda: all(node.value(asked) == 1 for node in nodes.values()))
        for nth in range(MESSAGES):
            nodes["north" if nth % 3 else "south"].send("sale", nth, key=f"k{nth % 5}")
        await eventually_async(lambda: all(len(given(node)) >= MESSAGES for node in nodes.values()))
    assert given(source) == given(target) == sorted(given(source))
    assert sorted(value for _, _, value in given(source)) == [*range(MESSAGES)]


@contextlib.asynccontextmanager
async def _running(daemon: Any) -> Any:
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon
    finally:
        daemon.stop()
        await asyncio.wait_for(task, WITHIN_S)
