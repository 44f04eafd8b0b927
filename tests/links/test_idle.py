"""Linked nodes that have nothing to do write nothing, but for their leases."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack

import psycopg
import pytest

from dispatcher import Dispatcher, Executor
from dispatcher.lanes import leading
from dispatcher.lanes.leading import Leading
from dispatcher.links import lane, visit
from dispatcher.links.lane import LinksLane
from mailroom.embedded import Server
from mailroom.links.start import noting_place
from mailroom.sql.runner import run
from tests.support.databases import Databases
from tests.support.links import linked
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually_async

NEVER_S = 3_600.0
LOOKS = 40  # at each source


@pytest.fixture
def nodes(private_server: Server) -> Iterator[dict[str, Node]]:
    """Two nodes on a server of their own, where nobody else writes."""
    databases = Databases(private_server.dsn("postgres"), "idle")
    with ExitStack() as closing:
        closing.callback(databases.close)
        yield {
            name: Node(dsn, closing.enter_context(psycopg.connect(dsn, autocommit=True)))
            for name, dsn in ((name, databases.create(migrated=True)) for name in ("north", "south"))
        }


@contextlib.asynccontextmanager
async def running(daemons: Sequence[Leading]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each.run()) for each in daemons]
    try:
        yield
    finally:
        for each in daemons:
            each.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), WITHIN_S)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Look often, renew no lease, and count how often each origin was looked at, by its name."""
    found: dict[str, int] = {}
    look = visit.Visit._look

    async def counting(self: visit.Visit, *arguments: object) -> object:
        found[self._origin.name] = found.get(self._origin.name, 0) + 1
        return await look(self, *arguments)  # type: ignore[arg-type]  # whatever it takes

    monkeypatch.setattr(visit.Visit, "_look", counting)
    for module, name, seconds in (
        (leading, "RENEW_S", NEVER_S), (lane, "FOLLOW_S", 0.05), (lane, "ACKNOWLEDGE_S", 0.05),
        (lane, "MARKS_S", 0.05), (visit, "MATCH_S", 0.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    return found


@pytest.mark.slow
async def test_idle_nodes_take_no_transaction_id(
    nodes: dict[str, Node], looks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    north, south = nodes.values()
    for statement in ("ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()"):
        north.connection.execute(statement.encode())
    for name, node in nodes.items():
        monkeypatch.setenv(f"MAILROOM_DSN_{name.upper()}", node.dsn)
        run(node.connection, noting_place(SCHEMA))
    linked(north, south, [], name="north", reader="south")
    linked(south, north, [], name="south", reader="north")
    for node in nodes.values():
        node.inbox("shipping", "order.paid", origin="*")
        node.inbox("ledger", "sale", order="total", origin="*")

    def written() -> int:
        """The next writer takes the next one."""
        return int(north.value("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))

    kinds = (Dispatcher, Executor, LinksLane)
    daemons = [kind(node.dsn, poll_interval_s=0.02) for node in nodes.values() for kind in kinds]
    async with running(daemons):
        asked = "SELECT count(*) FROM mailroom.link_topic"
        await eventually_async(lambda: all(node.value(asked) == 2 for node in nodes.values()))
        for node in nodes.values():
            node.send("order.paid", key="a")
            node.send("sale", key="a")
        came = "SELECT count(*) FROM mailroom.inbox"
        told = "SELECT acked = (SELECT max(seq) FROM mailroom.transit) FROM mailroom.link"
        await eventually_async(lambda: all(node.value(came) == 4 for node in nodes.values()))
        await eventually_async(lambda: all(node.value(told) for node in nodes.values()))

        async def is_idle() -> bool:
            before, began = written(), dict(looks)
            await eventually_async(lambda: all(looks[name] - began[name] > LOOKS for name in nodes))
            return written() == before

        async with asyncio.timeout(WITHIN_S):
            while not await is_idle():
                pass
