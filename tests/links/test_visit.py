"""A visit to a source, step by step: what a reader does before it sleeps, where nothing wakes it by chance."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import GeneratorType
from typing import Any, cast

import psycopg
import pytest

from dispatcher.links import visit as visiting
from dispatcher.links.at_source.bounds import Position
from dispatcher.links.at_source.fetch import FetchedBatch
from dispatcher.links.at_source.source import Source, SourceFailed, open_source
from dispatcher.links.receive import RECEIVING_SESSION, Reception
from dispatcher.links.receiving import Receiving, Room
from dispatcher.links.visit import Notes, Visit, VisitTarget
from mailroom.links.handshake.target import reading_origins
from mailroom.links.start import noting_place
from mailroom.session import settings
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import run
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S
from tests.support.working import NEVER_S

TOPIC = "order.paid"


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a visit match its position and ask for topics once, however long it takes."""
    monkeypatch.setattr(visiting, "MATCH_S", NEVER_S)


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    """`south` reads `north`, whose messages of `order.paid` are stamped for it; both have started."""
    for node in (source, target):
        run(node.connection, noting_place(SCHEMA))
    pair = linked(source, target, [TOPIC])
    pair.inbox("shipping", TOPIC)
    for node in (source, target):
        node.allow_clocks()
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
        self.at: Mapping[str, Callable[[], Awaitable[None]]] = {}

    async def _passed(self, name: str) -> None:
        self.names.append(name)
        await self.act(len(self.names) - 1)
        if name in self.at:
            await self.at[name]()

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


async def _read() -> None:
    pass


async def _held_up(error: Exception) -> None:
    raise error


async def visit(
    pair: Linked,
    act: Callable[[int], Awaitable[None]] = _nothing,
    *,
    at: Mapping[str, Callable[[], Awaitable[None]]] | None = None,
    room: Room | None = None,
    on_received: Callable[[Reception], None] = lambda _: None,
    diverges: bool = False,
) -> list[str]:
    """Visit the source until nothing would wake the reader; return the steps.

    `act` is called at each, by its number, and what `at` has at each of this name. Nobody else tells the reader
    anything: neither the lane, nor what is made durable.
    """
    dsn = settings.session_dsn(pair.target.dsn, "links", settings.UNATTENDED | RECEIVING_SESSION)
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
        open_source(pair.source.dsn, SCHEMA) as source,
    ):
        receiving = Receiving(connection, SCHEMA)
        [origin] = await receiving.run(reading_origins(SCHEMA))
        notes = Notes()
        steps = Steps(source, notes)
        steps.act, steps.at = act, at or {}
        target = VisitTarget(pair.target.dsn, SCHEMA, receiving, room or Room(), NEVER_S, on_received)
        assert await Visit(steps, target, origin, notes, _read, _held_up).run(claims=False) == diverges
        return steps.names


# From hello to sleep, on an idle link. After it: what the reader does once it is rung.
IDLE = [
    "before naming_channel",
    "after naming_channel",
    "before bounding",
    "after bounding",
    "before checking_sight",
    "after checking_sight",
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


@pytest.mark.slow
async def test_row_that_is_stamped_while_the_reader_falls_asleep_is_found(pair: Linked) -> None:
    """At whatever step, each of them on a visit of its own."""
    for at in range(len(IDLE)):

        async def stamp(nth: int, at: int = at) -> None:
            if nth == at:
                pair.source.send(TOPIC, key=f"{at}")
                await asyncio.to_thread(pair.source.deliver)

        passed = await visit(pair, stamp)
        assert passed[: at + 1] == IDLE[: at + 1]
        assert pair.target.delivered("key")[at:] == [(f"{at}",)], f"stamped at step {at} of {passed}"


# -- The next batch is fetched while one is received ------------------------------------------------------------------

ROWS_EACH = 4
ROOM = Room(10_000, 5_000)  # a batch has four rows


def put(pair: Linked, rows: int) -> None:
    pair.put(*({"key": f"{nth}", "value": bytes(1_000)} for nth in range(rows)))


async def test_next_batch_is_fetched_while_one_is_received(pair: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    put(pair, 3 * ROWS_EACH)
    received: list[int] = []
    fetched = 0
    receive, next_is_here = Receiving.receive, asyncio.Event()

    async def fetch() -> None:
        nonlocal fetched
        fetched += 1
        if fetched == 2:
            next_is_here.set()

    async def receive_late(receiving: Receiving, origin: int, batch: FetchedBatch, position: Position) -> Reception:
        await asyncio.wait_for(next_is_here.wait(), WITHIN_S)
        return await receive(receiving, origin, batch, position)

    monkeypatch.setattr(Receiving, "receive", receive_late)
    passed = await visit(
        pair, at={"after fetching": fetch}, room=ROOM, on_received=lambda reception: received.append(reception.rows)
    )
    assert received == [ROWS_EACH] * 3
    assert fetched == 3
    assert passed.count("after bounding_ahead") == 2
    assert pair.target.delivered("key") == [(f"{nth}",) for nth in range(3 * ROWS_EACH)]


async def test_what_was_received_is_dealt_with_before_the_next_batch_is_here(pair: Linked) -> None:
    put(pair, 2 * ROWS_EACH)
    dealt = asyncio.Event()

    async def wait() -> None:
        await asyncio.wait_for(dealt.wait(), WITHIN_S)

    await visit(pair, at={"before bounding_ahead": wait}, room=ROOM, on_received=lambda _: dealt.set())
    assert len(pair.target.delivered("key")) == 2 * ROWS_EACH


async def test_batch_fetched_ahead_is_dropped_if_the_source_has_another_history_by_then(pair: Linked) -> None:
    put(pair, 2 * ROWS_EACH)
    fetched = 0

    async def restore() -> None:
        nonlocal fetched
        fetched += 1
        if fetched == 2:
            pair.source.connection.execute(
                "UPDATE mailroom.transit SET message_id = gen_random_uuid() WHERE seq = %s", [ROWS_EACH]
            )

    await visit(pair, at={"after fetching": restore}, room=ROOM, diverges=True)
    assert fetched == 2
    assert len(pair.target.delivered("key")) == ROWS_EACH


async def test_look_ahead_that_fails_is_made_again_as_a_look(pair: Linked) -> None:
    put(pair, 2 * ROWS_EACH)

    async def fail() -> None:
        raise SourceFailed(psycopg.errors.QueryCanceled())

    passed = await visit(pair, at={"before bounding_ahead": fail}, room=ROOM)
    assert passed.count("after fetching") == 2
    assert pair.target.delivered("key") == [(f"{nth}",) for nth in range(2 * ROWS_EACH)]


async def test_message_larger_than_a_batch_is_not_fetched_ahead(pair: Linked) -> None:
    """It takes its turn, so that one such at a time is in memory."""
    put(pair, ROWS_EACH)
    pair.put({"key": "large", "value": bytes(20_000)})
    passed = await visit(pair, room=ROOM)
    assert passed[passed.index("after bounding_ahead") + 1] != "before fetching"
    assert pair.target.delivered("key")[-1] == ("large",)
