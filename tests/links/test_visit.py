"""A visit to a source, step by step: what a reader does before it sleeps, with nobody who would wake it by chance."""

import asyncio
from collections.abc import Awaitable, Callable
from types import GeneratorType
from typing import Any, cast

import psycopg
import pytest

from dispatcher.links.receive import SESSION
from dispatcher.links.receiving import Receiving, Room
from dispatcher.links.source import Source, open_source
from dispatcher.links.visit import Notes, Target, Visit
from mailroom import settings
from mailroom.links.start import noting_place
from mailroom.links.target import reading_origins
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node

NEVER_S = 3_600.0  # a poll that no test lives to see
TOPIC = "order.paid"


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    """`south` reads `north`, whose messages of `order.paid` are stamped for it; both have started."""
    for node in (source, target):
        run(node.connection, noting_place(SCHEMA))
    pair = linked(source, target, [TOPIC])
    pair.inbox("shipping", TOPIC)
    target.allow_clocks()
    return pair


class Steps(Source):
    """What one visit does at its source, step by step; a test acts between any two of them.

    The visit ends when it would sleep with nothing to wake it.
    """

    def __init__(self, source: Source, notes: Notes) -> None:
        super().__init__(source.connection, source.schema)
        self._notes = notes
        self.names: list[str] = []
        self.act: Callable[[int], Awaitable[None]] = _nothing

    async def _passed(self, name: str) -> None:
        self.names.append(name)
        await self.act(len(self.names) - 1)

    async def ask(self, operation: Operation[T], within_s: float | None = None) -> T:
        name = cast("GeneratorType[Any, Any, Any]", operation).gi_code.co_name
        await self._passed(f"before {name}")
        result = await super().ask(operation, within_s)
        await self._passed(f"after {name}")
        return result

    async def wait(self, rung: asyncio.Event, timeout_s: float) -> None:
        assert timeout_s == NEVER_S
        await self._passed("asleep")
        # A notification of a commit that was answered is in the server's queue: this statement's answer comes after it.
        await self.connection.execute("SELECT 1")
        rings = [each async for each in self.connection.notifies(timeout=0)]
        if not rings and not rung.is_set():
            self._notes.stopping = True
        rung.clear()


async def _nothing(nth: int) -> None:
    pass


async def visit(pair: Linked, act: Callable[[int], Awaitable[None]] = _nothing) -> list[str]:
    """Visit the source until nothing would wake the reader; return the steps. `act` is called at each, by its number.

    Nobody else tells the reader anything: neither the lane, nor what is made durable.
    """
    options = " ".join(f"-c {name}={value}" for name, value in (settings.UNATTENDED | SESSION).items())
    async with (
        await psycopg.AsyncConnection.connect(pair.target.dsn, autocommit=True, options=options) as connection,
        open_source(pair.source.dsn, SCHEMA) as source,
    ):
        receiving = Receiving(connection, SCHEMA)
        [origin] = await receiving.run(reading_origins(SCHEMA))
        notes = Notes([TOPIC])
        steps = Steps(source, notes)
        steps.act = act
        target = Target(pair.target.dsn, SCHEMA, receiving, Room(), NEVER_S, lambda _: None)
        assert not await Visit(steps, target, origin, notes, lambda: None).run(claims=False)
        return steps.names


# From hello to sleep, on an idle link. Behind it: what the reader does once it is rung.
IDLE = [
    "before naming_channel",
    "after naming_channel",
    "before bounding",
    "after bounding",
    "before matching",
    "after matching",
    "before falling_asleep",
    "after falling_asleep",
    "before bounding",
    "after bounding",
    "asleep",
]


async def test_reader_looks_once_more_before_it_sleeps(pair: Linked) -> None:
    assert await visit(pair) == IDLE


@pytest.mark.parametrize("at", range(len(IDLE)), ids=[f"{nth} {name}" for nth, name in enumerate(IDLE)])
async def test_row_that_is_stamped_while_the_reader_falls_asleep_is_found(pair: Linked, at: int) -> None:
    async def stamp(nth: int) -> None:
        if nth == at:
            pair.source.send(TOPIC, key="k")
            await asyncio.to_thread(pair.source.drain)

    passed = await visit(pair, stamp)
    assert pair.target.delivered("key") == [("k",)], f"stamped at step {at} of {passed}"
