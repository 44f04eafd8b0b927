"""What is recorded of a bridge that stands still, and that it is mended."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import pytest

from dispatcher.bridges import publishing as publishing_module
from dispatcher.bridges import tending
from dispatcher.bridges.lane import BridgesBeside
from dispatcher.bridges.publishing import Publishing
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.out import finding_out, noting_trouble
from mailroom.bridges.publisher import BrokerTrouble, OutBridge
from mailroom.bridges.record import Record
from mailroom.bridges.settings import OutSettings
from mailroom.sql.runner import run
from tests.bridges.tasks import receiving, tended
from tests.support.node import SCHEMA, Node
from tests.support.port import free_port
from tests.support.waiting import eventually_async


class Quiet:
    """A publisher to which nothing is given."""

    trouble: str | None = None

    def __init__(self, bridge: OutBridge) -> None:
        self.bridge = bridge

    async def open(self) -> int:
        return 0

    async def published(self, after: int, since: datetime) -> list[tuple[int, UUID]]:
        raise AssertionError

    async def publish(self, records: Sequence[Record]) -> None:
        raise AssertionError

    async def keep(self) -> None:
        raise AssertionError

    async def close(self) -> None:
        pass


class Deaf(Quiet):
    """A publisher that reaches nobody."""

    def __init__(self, bridge: OutBridge) -> None:
        super().__init__(bridge)
        self.closed = asyncio.Event()

    async def open(self) -> int:
        await self.closed.wait()
        raise BrokerTrouble("given up")

    async def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def bridge(node: Node) -> None:
    settings = OutSettings(f"{__name__}:{Quiet.__name__}", "nowhere")
    with node.connection.transaction():
        Bridges().out(node.connection, "own", settings, actor="tests")


async def test_trouble_that_a_daemon_notes_which_no_longer_leads_is_mended(node: Node) -> None:
    """A daemon that was paused while it waited for the broker notes that once it goes on."""
    async with receiving(node) as receives:
        beside = BridgesBeside(node.dsn, SCHEMA, poll_interval_s=0.05, on_received=lambda _: None)
        try:
            await beside.follow(receives)
            await eventually_async(lambda: node.rows("SELECT FROM mailroom.link WHERE run IS NOT NULL"))
            for _ in range(2):  # also when it was mended before
                with node.connection.transaction():
                    run(node.connection, noting_trouble(SCHEMA, 1, "unreachable", "of the past", 3.0))
                await beside.follow(receives)
                await eventually_async(lambda: node.rows("SELECT why FROM mailroom.bridge_out") == [(None,)])
        finally:
            await beside.end()


async def test_database_that_takes_no_session_is_told_in_a_line(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    row = run(node.connection, finding_out(SCHEMA, "own"))
    bridge = OutBridge(row.name, row.link, row.node_id, row.node, row.settings)

    def told_of() -> list[logging.LogRecord]:
        return [each for each in caplog.records if "is not published" in each.message]

    async with receiving(node) as receives:
        elsewhere = f"postgresql://127.0.0.1:{free_port()}/none"
        publishing = Publishing(row, lambda: Quiet(bridge), elsewhere, SCHEMA, receives, 60.0)
        async with tended(publishing):
            await eventually_async(told_of)
    [told] = told_of()
    assert "this node's database: Cannot connect" in told.message
    assert not told.exc_info


async def test_client_that_reaches_nobody_is_made_anew_since_its_options_may_be_right_by_now(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATIENCE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(tending, name, 0.02)
    monkeypatch.setattr(publishing_module, "OPEN_S", 0.05)
    row = run(node.connection, finding_out(SCHEMA, "own"))
    made: list[Deaf] = []

    def make() -> Deaf:
        made.append(Deaf(OutBridge(row.name, row.link, row.node_id, row.node, row.settings)))
        return made[-1]

    async with receiving(node) as receives, tended(Publishing(row, make, node.dsn, SCHEMA, receives, 60.0)):
        await eventually_async(lambda: len(made) > 2)
        [(trouble, why)] = node.rows("SELECT trouble, why FROM mailroom.bridge_out")
        assert (trouble, why) == ("unreachable", "the broker has not answered")
    assert all(each.closed.is_set() for each in made)
