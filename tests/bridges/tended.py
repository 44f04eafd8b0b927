"""Bridges of a node that are tended in the test's own process, as the lane of links does."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, Unpack

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.bridges.lane import BridgesBeside
from dispatcher.lanes.leading import LANE, open_session
from dispatcher.links.receive import RECEIVING_SESSION, Reception
from dispatcher.links.receiving import Receiving
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Form
from mailroom.bridges.settings import BridgeSettings, InSettings, OnFailure, OutSettings
from mailroom.bridges.states import InState, OutState
from tests.bridges.log import LOGS, Log
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S

T = TypeVar("T")
PUBLISHER, NUMBERED, SOURCE = (
    "tests.bridges.log:LogPublisher",
    "tests.bridges.log:NumberedLogPublisher",
    "tests.bridges.log:LogSource",
)


@dataclass
class Lane:
    """What tends the bridges, and what it has received. `follow` is its next look."""

    beside: BridgesBeside
    receiving: Receiving
    received: list[Reception]

    async def follow(self) -> None:
        """Look at the bridges anew."""
        await self.beside.follow(self.receiving)

    async def follow_until(self, predicate: Callable[[], bool]) -> None:
        """Look again and again, as the lane does, until this is so."""
        deadline = time.monotonic() + WITHIN_S
        while not predicate():
            assert time.monotonic() < deadline, f"not within {WITHIN_S} s"
            await self.follow()
            await asyncio.sleep(0.02)


async def beside(node: Node, do: Callable[[Connection[TupleRow]], T]) -> T:
    """Do something in a transaction beside those who tend the bridges: in a thread, since they may hold its locks."""

    def run() -> T:
        with node.connection.transaction():
            return do(node.connection)

    return await asyncio.to_thread(run)


@asynccontextmanager
async def tended(node: Node) -> AsyncIterator[Lane]:
    """Tend the node's bridges in this block; no dispatcher runs beside it."""
    received: list[Reception] = []
    async with open_session(node.dsn, "links", LANE | RECEIVING_SESSION) as connection:
        beside = BridgesBeside(node.dsn, SCHEMA, poll_interval_s=3_600.0, on_received=received.append)
        lane = Lane(beside, Receiving(connection, SCHEMA), received)
        await lane.follow()
        try:
            yield lane
        finally:
            await beside.end()


def bridge_out(
    node: Node, *, name: str = "out", exactly_once: bool = False, on_failure: OnFailure = "stop",
    topics: tuple[str, ...] = ("#",), max_rows: int | None = None, form: Form | None = None, publisher: str = PUBLISHER,
) -> Log:  # fmt: skip
    """Make a bridge to a log of its own, which is returned."""
    address = node.dsn.replace(" ", ",").replace("@", "") + name
    log = LOGS.setdefault(address, Log())
    settings = OutSettings(
        publisher, address, form or Form("log"), exactly_once, "log" if exactly_once else None, on_failure
    )
    with node.connection.transaction():
        Bridges().out(node.connection, name, settings, topics=topics, max_rows=max_rows, actor="test")
    return log


def bridge_in(
    node: Node, *topics: str, name: str = "in", on_failure: OnFailure = "skip", max_origins: int = 1_000
) -> Log:
    """Make a bridge from a log of its own, which is returned; the topic is "log" unless others are given."""
    address = node.dsn.replace(" ", ",").replace("@", "") + name
    log = LOGS.setdefault(address, Log())
    topics = topics or ("log",)
    for topic in topics:
        log.parts.setdefault((topic, 0), [])
    with node.connection.transaction():
        Bridges().into(
            node.connection,
            name,
            InSettings(SOURCE, address, topics, on_failure=on_failure, max_origins=max_origins),
            actor="test",
        )
    return log


def set_bridge(node: Node, name: str, **settings: Unpack[BridgeSettings]) -> None:
    """Change settings of a bridge."""
    with node.connection.transaction():
        Bridges().set(node.connection, name, actor="test", **settings)


def out_state(node: Node) -> OutState:
    """Return the state of the only bridge out."""
    with node.connection.transaction():
        [state] = Bridges().status(node.connection).out
    return state


def in_state(node: Node) -> InState:
    """Return the state of the only bridge in."""
    with node.connection.transaction():
        [state] = Bridges().status(node.connection).into
    return state


def why_stopped(node: Node, of: Callable[[Node], InState | OutState] = in_state) -> str:
    """Return why the only bridge in is stopped, or the one out; nothing while it is not."""
    state = of(node)
    return (state.why or "") if state.state == "stopped" else ""
