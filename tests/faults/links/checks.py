"""What must hold of the ledgers of all nodes after each round. Nothing here reads a database."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

PLAIN, TOTAL = "from_others", "in_order"  # inboxes
RING, ORDER = "ring", "order"  # their topics


@dataclass(frozen=True, slots=True)
class Sent:
    """A message. `nth` rises along each key of its sender; it is an answer if it has a `cause`."""

    id: UUID
    topic: str
    key: str
    nth: int
    cause: UUID | None = None


@dataclass(frozen=True, slots=True)
class Handled:
    """A message that was handled."""

    inbox: str
    id: UUID
    origin: UUID
    key: str
    clock: int
    sent_clock: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a node sent and handled in a round; `handled` in the order in which it did."""

    node: UUID
    sent: Sequence[Sent]
    handled: Sequence[Handled]


class Checker:
    """Checks round after round; `sources` says for each node whose messages its plain inbox gets."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._nth: dict[tuple[str, str, str], int] = {}  # of the last message of a node's inbox and key
        self._shown: dict[tuple[str, str], int] = {}  # the last sent_clock that a node's plain inbox got
        self._place: dict[str, tuple[int, UUID]] = {}  # where a node's total inbox is

    def check(self, ledgers: Mapping[str, Ledger]) -> list[str]:
        """Return what this round violates."""
        return list(self._violations(ledgers))

    def _violations(self, ledgers: Mapping[str, Ledger]) -> Iterator[str]:
        nth = {each.id: each.nth for ledger in ledgers.values() for each in ledger.sent}
        for name, ledger in ledgers.items():
            source = self._sources[name]
            plain = [each for each in ledger.handled if each.inbox == PLAIN]
            total = [each for each in ledger.handled if each.inbox == TOTAL]
            wanted = {each.id for each in ledgers[source].sent if each.topic == RING}
            ordered = {each.id: own.node for own in ledgers.values() for each in own.sent if each.topic == ORDER}
            yield from once(f"{name} from {source}", wanted, plain)
            yield from once(f"{name} in order", ordered.keys(), total)
            if any(each.origin != ledgers[source].node for each in plain):
                yield f"{name}: messages of another origin"
            if any(each.origin != ordered.get(each.id, each.origin) for each in total):
                yield f"{name}: messages in order with another origin"
            yield from self._keys(name, ledger.handled, nth)
            yield from self._clocks(name, plain)
            yield from self._order(name, total)
            # A message of the node itself is delivered at the very clock at which it is sent.
            if early := [e for e in ledger.handled if e.clock < e.sent_clock + (e.origin != ledger.node)]:
                yield f"{name}: {len(early)} effects before their causes, as {early[0]}"
        yield from _same(ledgers)
        yield from _causes(ledgers)

    def _keys(self, name: str, handled: Sequence[Handled], nth: Mapping[UUID, int]) -> Iterator[str]:
        """Along each key, what a sender sent is handled in its order."""
        for each in handled:
            place, number = (name, each.inbox, each.key), nth.get(each.id, 0)
            if number <= self._nth.get(place, 0):
                yield f"{name}: inversion in key {each.key} of {each.inbox}, at {each}"
            self._nth[place] = max(number, self._nth.get(place, 0))

    def _clocks(self, name: str, handled: Sequence[Handled]) -> Iterator[str]:
        """By this node's clock and by the sender's, messages have one order; along a key they are handled in it."""
        keys: dict[str, int] = {}
        for each in handled:
            if each.clock <= keys.get(each.key, 0):
                yield f"{name}: key {each.key} was handled against its clock, at {each}"
            keys[each.key] = each.clock
        by_clock = sorted(handled, key=lambda each: each.clock)
        for one, other in pairwise(by_clock):
            if one.clock == other.clock or one.sent_clock >= other.sent_clock:
                yield f"{name}: inversion of the origin, at {one} and {other}"
        if by_clock:
            place = (name, PLAIN)
            if by_clock[0].sent_clock <= self._shown.get(place, 0):
                yield f"{name}: inversion of the origin between rounds, at {by_clock[0]}"
            self._shown[place] = by_clock[-1].sent_clock

    def _order(self, name: str, handled: Sequence[Handled]) -> Iterator[str]:
        """A total inbox is handled by (sent_clock, origin)."""
        for each in handled:
            place = (each.sent_clock, each.origin)
            if name in self._place and place <= self._place[name]:
                yield f"{name}: inversion of the total order, at {each}"
            self._place[name] = place


def once(
    where: str, wanted: Collection[UUID], handled: Sequence[Handled], gone: Collection[UUID] = ()
) -> Iterator[str]:
    """Each message that is wanted is handled once; one of those that are `gone` at most once."""
    times = Counter(each.id for each in handled)
    if lost := set(wanted) - times.keys() - set(gone):
        yield f"{where}: {len(lost)} lost, as {min(lost)}"
    if foreign := times.keys() - set(wanted) - set(gone):
        yield f"{where}: {len(foreign)} handled that nobody sent in this round, as {min(foreign)}"
    if twice := [id for id, number in times.items() if number > 1]:
        yield f"{where}: {len(twice)} handled twice, as {min(twice)}"


def _same(ledgers: Mapping[str, Ledger]) -> Iterator[str]:
    """Every total inbox is handled in the same order."""
    orders = {name: [each.id for each in own.handled if each.inbox == TOTAL] for name, own in ledgers.items()}
    for one, other in pairwise(orders):
        if orders[one] != orders[other]:
            yield f"{one} and {other} handled the total order differently"


def _causes(ledgers: Mapping[str, Ledger]) -> Iterator[str]:
    """An answer is sent after its question was handled, and handled after it wherever it comes; also by the clocks."""
    clocks: dict[UUID, int] = {}  # the highest at which a message was handled
    stamps = {each.id: each.sent_clock for ledger in ledgers.values() for each in ledger.handled}
    for ledger in ledgers.values():
        for each in ledger.handled:
            clocks[each.id] = max(each.clock, clocks.get(each.id, 0))
    answers = {each.id: each.cause for ledger in ledgers.values() for each in ledger.sent if each.cause is not None}
    for name, ledger in ledgers.items():
        here = {each.id: each.clock for each in ledger.handled}
        sent = [each for each in ledger.sent if each.cause is not None and each.id in stamps]
        if before := [each for each in sent if each.cause is None or stamps[each.id] <= here.get(each.cause, 0)]:
            yield f"{name}: {len(before)} answers stamped before their question was handled, as {before[0]}"
        places = {each.id: place for place, each in enumerate(ledger.handled) if each.inbox == TOTAL}
        if early := [id for id in places if id in answers and places.get(answers[id], -1) >= places[id]]:
            yield f"{name}: {len(early)} answers handled before their question, as {early[0]}"
    plain = {each.id for ledger in ledgers.values() for each in ledger.handled if each.inbox == PLAIN}
    if late := [id for id in plain if id in answers and clocks[id] <= clocks.get(answers[id], 0)]:
        yield f"{len(late)} answers handled at a clock before that of their question, as {late[0]}"
