"""A small world of nodes that run the total-order protocol, by the functions of `tests.models.total_order`.

Each node is a database: every method below is one transaction of it, and an asynchronous commit is undone by a crash,
with all asynchronous ones behind it. A synchronous commit makes all before it durable, too, as one log does.
"""

from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

from mailroom.links.handshake.identity import jumped
from mailroom.order.clock import receive, tick
from tests.models.total_order import (
    Route,
    answered,
    bound,
    has_joined,
    joining,
    raised,
    routed,
    shown,
    wanted,
)

# The total inbox has two topics, which may be joined apart. The third is another inbox's.
TOPICS, PLAIN, MARK = (0, 1), 2, -1
NOTHING = (0, -1)
MAX_ROUNDS = 50


class Violation(AssertionError):
    """The protocol broke a promise."""


class Row(NamedTuple):
    """A row of transit, and a message in the inbox; ordered by clock and origin, as a total inbox is.

    `cause` has the clock and origin of the message that was handled last before it was sent.
    """

    clock: int
    origin: int
    topic: int
    cause: tuple[int, int] = NOTHING


class Node:
    """One node with a total inbox, and what its readers find in its transit."""

    def __init__(self, number: int, nodes: int) -> None:
        self.number = number
        self.clock = 0
        self.since: dict[int, dict[int, int]] = {}  # by origin and topic
        self.excluded: frozenset[int] = frozenset()
        self.position = [0] * nodes
        self.last: list[Row | None] = [None] * nodes  # received of each origin
        self.stable = 0
        self.inbox: list[Row] = []
        self.given: list[Row] = []
        self.dead: list[Row] = []
        self.transit: list[list[Row]] = [[] for _ in range(nodes)]  # by reader
        self.accepted: list[dict[int, int]] = [{} for _ in range(nodes)]  # by reader: since, by topic
        self.wanted = [0] * nodes  # by reader
        self.has_excluded = self.has_joined = False
        self.undone = 0  # crashes that undid something
        self.flush()

    # -- The log ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """All that was committed is durable from now on."""
        self.durable: tuple[Any, ...] = (
            *(self.clock, {origin: topics.copy() for origin, topics in self.since.items()}, self.excluded),
            *(self.position.copy(), self.last.copy(), self.stable, self.inbox.copy(), len(self.given), len(self.dead)),
            *([len(rows) for rows in self.transit], [topics.copy() for topics in self.accepted], self.wanted.copy()),
        )

    def crash(self, jumps: bool) -> None:
        """Undo what is not durable; with `jumps` the server has started anew, and the clock goes beyond all it lost."""
        before = (self.position, len(self.given))
        self.clock, since, self.excluded, position, last, self.stable, inbox, given, dead, transit, *rest = self.durable
        self.since = {origin: topics.copy() for origin, topics in since.items()}
        self.position, self.last, self.inbox = position.copy(), last.copy(), inbox.copy()
        del self.given[given:], self.dead[dead:]
        for rows, length in zip(self.transit, transit, strict=True):
            del rows[length:]
        self.accepted, self.wanted = [topics.copy() for topics in rest[0]], rest[1].copy()
        self.undone += before != (self.position, len(self.given))
        if jumps:
            self.clock = jumped(self.clock, 0)
            self.flush()

    # -- The inbox ----------------------------------------------------------------------------------------------------

    def received(self, origin: int) -> int:
        last = self.last[origin]
        return last.clock if last else 0

    def raise_stable(self) -> None:
        origins = self.since.keys() - self.excluded
        shows = [shown(self.received(origin), self.since[origin].values()) for origin in origins]
        now = raised(self.stable, bound(self.clock, shows))
        if now is not None:
            self.stable = now

    def put(self, row: Row) -> None:
        if row.clock <= self.stable:
            raise Violation(f"node {self.number} takes {row} into its inbox, and {self.stable} is stable")
        heappush(self.inbox, row)

    def claim(self) -> bool:
        if not self.inbox or self.inbox[0].clock > self.stable:
            return False
        row = heappop(self.inbox)
        if self.given and row <= self.given[-1]:
            raise Violation(f"node {self.number} gives out {row} behind {self.given[-1]}")
        self.given.append(row)
        return True

    # -- The source's side --------------------------------------------------------------------------------------------

    def send(self, topics: list[int]) -> None:
        """Stamp messages; what the consumer of the inbox handled last is their cause."""
        cause = self.given[-1][:2] if self.given else NOTHING
        carried = False
        for topic in topics:
            self.clock = tick(self.clock)
            row = Row(self.clock, self.number, topic, cause)
            if cause[0] >= row.clock:
                raise Violation(f"{row} is not later than its cause")
            for reader, accepted in enumerate(self.accepted):
                if topic in accepted:
                    if row.clock <= accepted[topic]:
                        raise Violation(f"{row} is no later than node {reader} wants it to be, {accepted[topic]}")
                    self.transit[reader].append(row)
                    carried = True
            if topic != PLAIN:
                self.put(row)
        self.raise_stable()
        if carried:
            self.flush()

    def accept(self, reader: "Node") -> bool:
        """The reader asks for its topics; return whether anything changes."""
        accepted, is_new = self.accepted[reader.number], False
        for topic, since in reader.since.get(self.number, {}).items():
            if accepted.get(topic) != since and has_joined(reader.received(self.number), since):
                accepted[topic] = since
                is_new = True
        return is_new

    def answer(self, reader: int) -> bool:
        """Append a mark if the reader wants one; return whether it did."""
        rows = self.transit[reader]
        mark = answered(self.clock, self.wanted[reader], rows[-1].clock if rows else 0)
        if mark is None:
            return False
        self.clock = mark.sent_clock
        rows.append(Row(mark.sent_clock, self.number, MARK))
        if mark.durable:
            self.flush()
        return True

    # -- The target's side --------------------------------------------------------------------------------------------

    def fetch(self, source: "Node", rows: int) -> bool:
        """Receive at most this many rows; return whether there were any."""
        number, position = source.number, self.position[source.number]
        transit = source.transit[self.number]
        if position and (position > len(transit) or transit[position - 1] is not self.last[number]):
            raise Violation(f"node {self.number} has received of node {number} what that has lost")
        batch = transit[position : position + rows]
        if not batch:
            return False
        since = self.since.get(number, {})
        for row in batch:
            self.clock = receive(self.clock, row.clock)
            if row.topic in since:
                route = routed(row.clock, since[row.topic], self.stable)
                if route is Route.INBOX:
                    self.put(row)
                elif route is Route.DEAD_LETTER:
                    self.dead.append(row)
        self.position[number] = position + len(batch)
        self.last[number] = batch[-1]
        self.raise_stable()
        return True

    def want(self, source: "Node") -> bool:
        """Write at the source that a mark is wanted; return whether that was new to it."""
        if source.number not in self.since or source.number in self.excluded:
            return False
        held = max(self.inbox).clock if self.inbox else 0
        clock = wanted(self.received(source.number), self.since[source.number].values(), held, self.stable)
        if clock is None or clock <= source.wanted[self.number]:
            return False
        source.wanted[self.number] = clock
        return True

    def join(self, source: int, topic: int) -> None:
        if topic not in self.since.setdefault(source, {}):
            self.since[source][topic] = joining(self.clock)
            self.has_joined = True

    def exclude(self, source: int) -> None:
        self.excluded |= {source}
        self.has_excluded = True
        self.raise_stable()

    def include(self, source: int) -> None:
        self.excluded -= {source}


class World:
    """Nodes that read each other, all of them or in a ring, and do what a seed says."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random
        count = self.below(3) + 2
        self.nodes = [Node(number, count) for number in range(count)]
        self.is_ring = self.random() < 0.3
        self.pairs = [
            (reader, source)
            for reader in self.nodes
            for source in self.nodes
            if source is not reader and (not self.is_ring or (source.number + 1) % count == reader.number)
        ]
        self.sending = [node for node in self.nodes if self.random() < 0.75]  # the others are idle
        late = 0.0 if self.random() < 0.6 else 0.4
        for reader, source in self.pairs:
            if self.random() < 0.3:
                source.accepted[reader.number][PLAIN] = 0
            for topic in TOPICS:
                if self.random() >= late:
                    reader.since.setdefault(source.number, {})[topic] = 0
                    source.accepted[reader.number][topic] = 0
                else:
                    reader.has_joined = True
        # How often a node is excluded: in most worlds never, since what it may break hides what it may not.
        self.exclusions = 0.0 if self.random() < 0.6 else 0.04
        for node in self.nodes:
            node.flush()

    def below(self, limit: int) -> int:
        return int(self.random() * limit)

    def step(self) -> None:
        what = self.random()
        reader, source = self.pairs[self.below(len(self.pairs))]
        changed = source
        if what < 0.30:
            if source.number not in reader.excluded:
                reader.fetch(source, 1 + self.below(4))
            changed = reader
        elif what < 0.52:
            if self.sending:
                changed = self.sending[self.below(len(self.sending))]
                changed.send([self.below(3) for _ in range(1 + self.below(2))])
        elif what < 0.68:
            reader.claim()
            changed = reader
        elif what < 0.76:
            reader.want(source)
        elif what < 0.84:
            source.answer(reader.number)
        elif what < 0.90:
            source.accept(reader)
        elif what < 0.93:
            reader.join(source.number, self.below(2))
            changed = reader
        elif what < 0.96:
            self.check_prefixes()
            source.crash(jumps=self.random() < 0.2)
        elif what < 0.96 + self.exclusions / 2:
            reader.exclude(source.number)
            changed = reader
        elif what < 0.96 + self.exclusions:
            reader.include(source.number)
            changed = reader
        if self.random() < 0.2:
            changed.flush()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.settle()
        self.check()

    def settle(self) -> None:
        """Nobody sends any more, and all else goes on until nothing is left to do."""
        for reader, source in self.pairs:
            if source.number in reader.excluded and self.random() < 0.5:
                reader.include(source.number)
        for _ in range(MAX_ROUNDS):
            is_busy = False
            for reader, source in self.pairs:
                is_busy |= source.accept(reader)
                if source.number not in reader.excluded:
                    is_busy |= reader.fetch(source, 1_000)
                    is_busy |= reader.want(source)
                is_busy |= source.answer(reader.number)
            for node in self.nodes:
                while node.claim():
                    is_busy = True
            if not is_busy:
                return
        raise Violation("idle nodes go on writing")

    # -- Promises -----------------------------------------------------------------------------------------------------

    def whole(self) -> list[Node]:
        """The nodes that take all of all others, from the beginning."""
        return [] if self.is_ring else [node for node in self.nodes if not node.has_joined and not node.has_excluded]

    def check_prefixes(self) -> None:
        """Whatever one node has given out is how the others begin."""
        longest: list[Row] = []
        for node in self.whole():
            shorter, longer = sorted((node.given, longest), key=len)
            if longer[: len(shorter)] != shorter:
                raise Violation(f"{shorter} is not how {longer} begins")
            longest = longer

    def check(self) -> None:
        for node in self.nodes:
            if node.inbox:
                raise Violation(f"node {node.number} never gives out {node.inbox}: only {node.stable} is stable")
            if node.dead and not node.has_excluded:
                raise Violation(f"node {node.number} excluded nobody, and {node.dead} came too late")
            place = {row[:2]: nth for nth, row in enumerate(node.given)}
            for nth, row in enumerate(node.given):
                if place.get(row.cause, -1) >= nth:
                    raise Violation(f"node {node.number} gave out {row} before its cause")
        for reader, source in self.pairs:
            since = reader.since.get(source.number, {})
            if source.number in reader.excluded:
                continue
            if any(source.accepted[reader.number].get(topic) != clock for topic, clock in since.items()):
                raise Violation(f"node {reader.number} never joins node {source.number}")
            there = {*reader.given, *reader.dead}
            for row in source.transit[reader.number]:
                if row.topic in since and row.clock > since[row.topic] and row not in there:
                    raise Violation(f"{row} never reached node {reader.number}")
        self.check_prefixes()
        if len({len(node.given) for node in self.whole()}) > 1:
            raise Violation("some nodes lack what others gave out")
