"""Causality between nodes: whatever reads whom and whatever goes wrong, no effect comes before its cause.

Messages are handled, and what a handler sends follows from all that its message followed from. Each step is one that a
daemon or a worker takes, so it can be rolled back as a crash does.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from uuid import UUID

import psycopg
import pytest

from inbox import Inbox, Message
from mailroom.links.start import noting_place, starting
from mailroom.sql.runner import run
from outbox import Outbox
from tests.links.test_total_nodes import dispatch, mark, turn
from tests.support.databases import Databases
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node

INBOXES = {"plain": Inbox("plain"), "ledger": Inbox("ledger")}  # by key, and in total order
STEPS = 150
KEYS = "xyz"


@dataclass
class Member:
    """A node, what it has sent, and what its inboxes have given out: all that was committed."""

    name: str
    node: Node
    sent: list[UUID] = field(default_factory=list)
    given: dict[str, list[Message]] = field(default_factory=lambda: {name: [] for name in INBOXES})

    @property
    def id(self) -> UUID:
        found: UUID = self.node.value("SELECT id FROM mailroom.node")
        return found


class World:
    """Nodes and links between them, drawn from a seed, which work in steps."""

    def __init__(self, nodes: list[Node], seed: int) -> None:
        self.chance = random.Random(seed)
        self.members = [Member("abcd"[nth], node) for nth, node in enumerate(nodes)]
        self.causes: dict[UUID, set[UUID]] = {}
        for member in self.members:
            run(member.node.connection, noting_place(SCHEMA))
        ways = [(s, t) for s in self.members for t in self.members if s is not t]
        chosen = self.chance.sample(ways, self.chance.randint(len(nodes) - 1, len(ways)))
        self.links = [
            (linked(s.node, t.node, [], name=s.name, reader=t.name), s, t)
            for s, t in sorted(chosen, key=lambda way: (way[0].name, way[1].name))
        ]
        for member in self.members:
            for name in INBOXES:
                member.node.inbox(name, "news", order="total" if name == "ledger" else "key", origin="*")
            self.start(member)
        for link, _, _ in self.links:
            turn(link)

    # -- Steps --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        member = self.chance.choice(self.members)
        link, _, _ = self.chance.choice(self.links)
        match self.chance.choice("sddfffmhhhhc"):
            case "s":
                self.send(member)
            case "d":
                self.deliver(member)
            case "f":
                self.receive(link)
            case "m":
                turn(link)
                mark(link.source)
            case "h":
                self.handle(member, self.chance.choice(list(INBOXES)))
            case "c":
                self.crash(member)

    def fails(self) -> bool:
        """Whether this step is undone, as by a crash before its commit is durable."""
        return self.chance.random() < 0.25

    def send(self, member: Member) -> None:
        with member.node.connection.transaction(force_rollback=(fails := self.fails())):
            ids = [self._send(member, set()) for _ in range(self.chance.randint(1, 2))]
        member.sent += [] if fails else ids

    def _send(self, member: Member, causes: set[UUID]) -> UUID:
        id = Outbox().send(member.node.connection, "news", None, key=self.chance.choice(KEYS))
        self.causes[id] = causes
        return id

    def deliver(self, member: Member) -> None:
        with member.node.connection.transaction(force_rollback=self.fails()):
            member.node.deliver(rows=self.chance.randint(1, 4))

    def receive(self, link: Linked) -> None:
        with link.target.connection.transaction(force_rollback=self.fails()):
            position = link.position()
            if link.source.rows("SELECT FROM mailroom.transit WHERE link = %s AND seq > %s", link.link, position.seq):
                assert link.take(rows=self.chance.randint(1, 3)).outcome == "taken"

    def handle(self, member: Member, inbox: str) -> bool:
        """Handle what is there; what follows from it is sent in the same transaction."""
        sent = []
        with member.node.connection.transaction(force_rollback=(fails := self.fails())):
            found = INBOXES[inbox].reap_any(member.node.connection, 2, 2)
            for message in found:
                if self.chance.random() < 0.5:
                    sent.append(self._send(member, self.causes[message.id] | {message.id}))
        if not fails:
            member.given[inbox] += found
            member.sent += sent
        return bool(found)

    def crash(self, member: Member) -> None:
        """Start a node again: at the same server, or after that was started again."""
        if self.chance.random() < 0.3:
            member.node.connection.execute("UPDATE mailroom.node SET started_at = started_at - interval '1 s'")
        self.start(member)

    def start(self, member: Member) -> None:
        connection = member.node.connection
        connection.execute("UPDATE mailroom.node SET clock_ceiling = (SELECT last_value + 1000 FROM mailroom.clock)")
        run(connection, starting(SCHEMA))
        member.node.allow_clocks(2**61)

    # -- The end ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Go on until nothing is left, without failures; nothing new is sent that does not follow from something."""
        self.chance.random = lambda: 0.5  # type: ignore[method-assign]
        for _ in range(40):
            is_busy = False
            for member in self.members:
                dispatch(member.node)
            for link, _, _ in self.links:
                turn(link)
            for member in self.members:
                for inbox in INBOXES:
                    is_busy |= self.handle(member, inbox)
            if not is_busy and all(self.left(member) == 0 for member in self.members):
                return
        raise AssertionError(f"stuck: {[(each.name, self.left(each)) for each in self.members]}")

    def left(self, member: Member) -> int:
        return int(member.node.value("SELECT count(*) FROM mailroom.inbox"))

    def check(self) -> None:
        """Hold what was given out against what was sent."""
        sent_clocks = {each.id: each.sent_clock for member in self.members for each in member.given["plain"]}
        for member in self.members:
            sources = [member, *(source for _, source, target in self.links if target is member)]
            expected = sorted(id for source in sources for id in source.sent)
            for given in member.given.values():
                assert sorted(each.id for each in given) == expected, "lost, or twice"
                self.check_clocks(member, given)
                for each in given:
                    causes = self.causes[each.id] & sent_clocks.keys()
                    assert all(sent_clocks[cause] < each.sent_clock for cause in causes), "sent before its cause"
            check_queues(member.given["plain"])
            self.check_order(member.given["ledger"])
            assert member.node.dead() == []

    def check_clocks(self, member: Member, given: list[Message]) -> None:
        """Another node's message is received later than it was sent, and so is the reply to an own one."""
        here = member.id
        own = {each.id: each.clock for each in given if each.origin == here}
        for each in given:
            assert each.clock == each.sent_clock if each.origin == here else each.clock > each.sent_clock
            requests = self.causes[each.id] & own.keys()
            assert all(own[request] < each.clock for request in requests), "a reply before its request"

    def check_order(self, given: list[Message]) -> None:
        """A total inbox gives out all nodes' messages in one order, each after what it follows from."""
        order = [(each.sent_clock, each.origin) for each in given]
        assert order == sorted(order)
        place = {each.id: nth for nth, each in enumerate(given)}
        for each in given:
            causes = self.causes[each.id] & place.keys()
            assert all(place[cause] < place[each.id] for cause in causes), "an effect before its cause"


def check_queues(given: list[Message]) -> None:
    """An inbox by key gives out each key by clock, and each sender's messages of a key as they were sent."""
    queues: dict[tuple[str, UUID | None], list[Message]] = {}
    for each in given:
        for origin in (None, each.origin):
            queues.setdefault((each.key, origin), []).append(each)
    for (_, origin), queue in queues.items():
        assert all(one.clock < other.clock for one, other in pairwise(queue))
        assert origin is None or all(one.sent_clock < other.sent_clock for one, other in pairwise(queue))


@pytest.fixture
def nodes(databases: Databases) -> Iterator[list[Node]]:
    with ExitStack() as closing:
        nodes = []
        for _ in range(4):
            dsn = databases.create(migrated=True)
            closing.callback(databases.drop, dsn)
            nodes.append(Node(dsn, closing.enter_context(psycopg.connect(dsn, autocommit=True))))
        yield nodes


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [1, 0, 2, 3])
def test_no_effect_comes_before_its_cause_whoever_reads_whom(nodes: list[Node], seed: int) -> None:
    world = World(nodes[: 2 + seed % 3], seed)
    for _ in range(STEPS):
        world.step()
    world.settle()
    world.check()
    assert any(world.causes.values()), "nothing followed from anything"
