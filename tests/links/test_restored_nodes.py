"""Several nodes that read each other, some of which are put back in time again and again: what holds for all of them.

What a node has sent and handled is noted in its own database, so a restore takes it back with the rest.
"""

import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from uuid import UUID

import psycopg
import pytest

from inbox import Inbox
from mailroom.embedded import Binaries
from mailroom.links.restored import saying_restored
from outbox import Outbox
from tests.links.test_diverged import Pair, transacted
from tests.support.databases import Databases
from tests.support.node import SCHEMA, Node

BILLING = Inbox("billing")
STEPS = 40
LEDGERS = (
    "CREATE TABLE mailroom.sent (message_id uuid PRIMARY KEY)",
    """CREATE TABLE mailroom.handled (
        nth bigint GENERATED ALWAYS AS IDENTITY, message_id uuid, key text, clock bigint, sent_clock bigint,
        origin uuid, cause uuid, cause_sent_at bigint, cause_clock bigint)""",
)


@dataclass(frozen=True)
class Handled:
    """A message that was handled, and what its sender knew of the one that it follows from, if it does."""

    id: UUID
    key: str
    clock: int
    sent_clock: int
    origin: UUID
    cause: UUID | None
    cause_sent_at: int | None
    cause_clock: int | None


class World:
    """Nodes, and who reads whom, drawn from a seed."""

    def __init__(self, nodes: dict[str, Node], binaries: Binaries, seed: int) -> None:
        self.chance = random.Random(seed)
        self.nodes = nodes
        ways = [(source, target) for source in nodes for target in nodes if source != target]
        chosen = sorted(self.chance.sample(ways, self.chance.randint(len(nodes), len(ways))))
        self.pairs = [Pair(nodes[s], nodes[t], binaries, name=s, reader=t) for s, t in chosen]
        for node in nodes.values():
            node.inbox("billing", "order.paid")
            for ledger in LEDGERS:
                node.connection.execute(ledger.encode())
        for pair in self.pairs:
            pair.link()
        self.dumps: dict[str, bytes] = {}
        self.restores = 0

    async def meet(self) -> None:
        """Let each source know its reader, so that it stamps from now on; it is put back to then at most."""
        for pair in self.pairs:
            assert await self.turn(pair)
        for name, node in self.nodes.items():
            self.dumps[name] = self.pairs[0].backup(node)

    def send(self, node: Node, cause: Any = None) -> None:
        value = None if cause is None else [str(cause.id), cause.sent_clock, cause.clock]
        id = Outbox().send(node.connection, "order.paid", value, key=self.chance.choice("xyz"))
        node.connection.execute("INSERT INTO mailroom.sent VALUES (%s)", [id])

    def handle(self, node: Node, effects: float) -> bool:
        """Handle what is there, and send with this chance what follows from it, in one transaction."""
        with node.connection.transaction():
            found = BILLING.reap_any(node.connection, 3, 2)
            for message in found:
                node.connection.execute(
                    "INSERT INTO mailroom.handled (message_id, key, clock, sent_clock, origin, cause, cause_sent_at, "
                    "cause_clock) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
                    [message.id, message.key, message.clock, message.sent_clock, message.origin,
                     *(message.value or [None] * 3)],
                )  # fmt: skip
                if self.chance.random() < effects:
                    self.send(node, message)
        return bool(found)

    async def step(self) -> None:
        name = self.chance.choice(sorted(self.nodes))
        node, pair = self.nodes[name], self.chance.choice(self.pairs)
        match self.chance.choice("ssddtttthhhbrr"):
            case "s":
                with node.connection.transaction():
                    self.send(node)
            case "d":
                node.deliver_all()
            case "t":
                await self.turn(pair)
            case "h":
                self.handle(node, 0.4)
            case "b":
                self.dumps[name] = pair.backup(node)
            case "r":
                pair.restore(node, self.dumps[name])
                self.restores += 1

    async def turn(self, pair: Pair) -> bool:
        """Do a turn; an operator does what a refusal asks for. Return whether all was read."""
        told = await pair.turn()
        if told == "claimed":
            await pair.housekeep()
        if above := re.search(r"mailroom node restored --above (\d+)$", told):
            transacted(pair.source, saying_restored(SCHEMA, above=int(above[1]), actor="ada"))
        else:
            refused = "mailroom dispatcher run" in told  # the next one starts it
            assert told in ("read", "claimed", "reconciled") or refused, told
        return told == "read"

    async def settle(self) -> None:
        for _ in range(20):
            is_quiet = True
            for node in self.nodes.values():
                node.deliver_all()
            for pair in self.pairs:
                is_quiet &= await self.turn(pair)
            for node in self.nodes.values():
                is_quiet &= not self.handle(node, 0)
            if is_quiet:
                return
        raise AssertionError("stuck")

    def check(self) -> None:
        sent = {name: {id for (id,) in node.rows("SELECT message_id FROM mailroom.sent")}
                for name, node in self.nodes.items()}  # fmt: skip
        for name, node in self.nodes.items():
            rows = node.rows(
                "SELECT message_id, key, clock, sent_clock, origin, cause, cause_sent_at, cause_clock "
                "FROM mailroom.handled ORDER BY nth"
            )
            handled = [Handled(*row) for row in rows]
            ids = [each.id for each in handled]
            assert len(set(ids)) == len(ids), "twice"
            for source in (name, *(pair.name for pair in self.pairs if pair.reader == name)):
                assert sent[source] <= set(ids), f"{name} lacks messages of {source}"
            here = node.value("SELECT id FROM mailroom.node")
            for each in handled:
                assert each.clock > each.sent_clock or (each.clock == each.sent_clock and each.origin == here)
                if each.cause_clock is not None:
                    assert each.clock >= each.sent_clock > each.cause_clock >= (each.cause_sent_at or 0)
            queues: dict[tuple[object, ...], list[Handled]] = {}
            for each in handled:
                queues.setdefault((each.key,), []).append(each)
                queues.setdefault((each.key, each.origin), []).append(each)
            for queue in queues.values():
                assert all(one.clock < other.clock for one, other in pairwise(queue))
            for (_, *origin), queue in queues.items():
                if origin:
                    assert all(one.sent_clock < other.sent_clock for one, other in pairwise(queue))


@pytest.fixture
def nodes(databases: Databases, binaries: Binaries) -> Iterator[dict[str, Node]]:
    if not (binaries.path / "pg_dump").exists():
        pytest.skip("this PostgreSQL has no pg_dump")
    with ExitStack() as closing:
        found = {}
        for name in "abc":
            dsn = databases.create(migrated=True)
            closing.callback(databases.drop, dsn)
            # A restore discards what the session has prepared.
            connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)
            found[name] = Node(dsn, closing.enter_context(connection))
        yield found


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.timeout(300)
async def test_messages_come_once_in_order_and_behind_their_causes_whoever_is_put_back(
    nodes: dict[str, Node], binaries: Binaries, seed: int
) -> None:
    names = "ab" if seed % 3 == 2 else "abc"
    world = World({name: nodes[name] for name in names}, binaries, seed)
    await world.meet()
    for _ in range(STEPS):
        await world.step()
    await world.settle()
    world.check()
    assert world.restores
