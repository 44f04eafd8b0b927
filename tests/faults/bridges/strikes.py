"""What is done to the nodes and to the broker between them."""

import contextlib
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from uuid import UUID

from confluent_kafka import KafkaException

from tests.faults.actors import Actor
from tests.faults.bridges.broker import Auditor, CampaignBroker
from tests.faults.bridges.checks import EXACTLY, Place
from tests.faults.bridges.nodes import InNode, OutNode
from tests.faults.failpoints import Failpoint
from tests.faults.links.strikes import LINGERS_S, OTHER_SERVER, OWN_SERVER, WAYS, Striker, Tally
from tests.faults.links.struck import LOST, StruckNode
from tests.faults.network import QUIET, Trouble

BROKER = "the broker killed behind it"
# A call of Kafka's client, and what is behind it: at these a process is killed or stopped.
CALL_WAYS = ("killed before it", "killed behind it", "paused", OWN_SERVER, OTHER_SERVER, BROKER)
# Between the broker's acknowledgement and `acked`, between Kafka's commit and ours, and between a reception and the
# next read.
CENTRAL = (
    "dispatcher.links.at_source.acknowledge.ACKNOWLEDGE", "dispatcher.links.at_source.fetch.FETCH",
    "dispatcher.delivery.deliver.DELIVER_FULL", "dispatcher.links.receive.RECEIVE", "mailroom.bridges.out.FLUSH",
    "mailroom.bridges.out.TAKE", "mailroom.bridges.into.MOVE", "mailroom.bridges.into.NOTE",
    "mailroom.bridges.into.POSITIONS", "mailroom.bridges.into.MARKS", "kafka init_transactions", "kafka poll",
    "kafka send_offsets_to_transaction", "kafka commit_transaction", "kafka consume",
)  # fmt: skip
# The worst moments of each node. A paused daemon goes on once another one has worked, so it has been overtaken.
ACKNOWLEDGE, FLUSH = "dispatcher.links.at_source.acknowledge.ACKNOWLEDGE", "mailroom.bridges.out.FLUSH"
MOVE, COMMITTING = "mailroom.bridges.into.MOVE", "kafka commit_transaction"
WORST = {
    "out": (
        (ACKNOWLEDGE, "killed before it"), (ACKNOWLEDGE, "paused"), (ACKNOWLEDGE, OWN_SERVER),
        (COMMITTING, "killed behind it"), (COMMITTING, "paused"), (COMMITTING, BROKER), (COMMITTING, OWN_SERVER),
        ("kafka send_offsets_to_transaction", "killed behind it"), ("kafka poll", "killed before it"),
        ("kafka poll", "paused"), (FLUSH, "paused"), (FLUSH, OWN_SERVER),
    ),
    "into": (
        (MOVE, "killed behind it"), (MOVE, "paused"), (MOVE, OWN_SERVER), ("COMMIT", "killed behind it"),
        ("COMMIT", "sent and its answer lost"), ("kafka consume", "paused"), ("kafka consume", "killed behind it"),
        ("kafka consume", BROKER),
    ),
}  # fmt: skip
WORST_WEIGHT = 80
AIMED = 0.7  # of what is struck at a statement
DOWN_S = (0.0, 2.0)
AWAY_S = (0.3, 4.0)
STOPPED_WITHIN_S = 15.0
NOTICED_WITHIN_S = 90.0
WRITTEN_WITHIN_S = 20.0
MISSING = re.compile(r"\(([\d,]+)\) are deleted there")


class NodeStriker(Striker):
    """Strikes a node as in the campaign of links, and at its calls of Kafka's client."""

    central = CENTRAL
    ways = WAYS | {BROKER: ("after", "stop")}
    passed_within_s = 3.0

    def __init__(self, node: StruckNode, broker: CampaignBroker, tally: Tally, seed: int) -> None:
        super().__init__(node, tally, seed)
        self.turn = threading.Lock()  # held while it strikes
        self._broker = broker
        self._kinds[self._at_worst] = WORST_WEIGHT

    def strike(self) -> None:
        """Make one fault, drawn from the seed."""
        with self.turn:
            super().strike()

    def _at_worst(self) -> None:
        leader = self._node.leaders().get("links")
        if leader is not None:
            self._strike_at(leader, *self._dice.choice(WORST[self._node.name]))

    def _choice(self, passing: Sequence[str]) -> str:
        central = [name for name in passing if name in CENTRAL]
        return self._dice.choice(central) if central and self._dice.random() < AIMED else super()._choice(passing)

    def _way(self, name: str) -> str:
        return self._dice.choice(CALL_WAYS if name.startswith("kafka ") else list(self.ways))

    def _struck(self, daemon: Actor, name: str, way: str, *, again: bool = False) -> None:
        if way != BROKER:
            super()._struck(daemon, name, way, again=again)
            return
        try:
            time.sleep(self._dice.uniform(0, LINGERS_S))
            with _down(self._broker):
                self._broker.kafka.kill()
        finally:
            daemon.signal(signal.SIGCONT)
        self._tally.struck(name, way, again=again)


class BrokerStriker:
    """Strikes the broker, its network and what it keeps for the bridges, one fault after the other."""

    def __init__(
        self, broker: CampaignBroker, auditor: Auditor, out: OutNode, into: InNode, reader: NodeStriker, tally: Tally,
        seed: int,
    ) -> None:  # fmt: skip
        self.truncated: set[UUID] = set()  # of this round
        self._broker = broker
        self._auditor = auditor
        self._out = out
        self._into = into
        self._reader = reader
        self._tally = tally
        self._dice = random.Random(f"{seed} broker")
        self._kinds: dict[Callable[[], None], int] = {
            self._kill: 8,
            self._stop: 2,
            self._pause: 10,
            self._cut: 16,
            self._black_hole: 8,
            self._fence: 16,
            self._forget_readers: 4,
            self._truncate: 6,
        }

    def strike(self) -> None:
        """Make one fault, drawn from the seed."""
        [kind] = self._dice.choices(list(self._kinds), list(self._kinds.values()))
        # Of the campaign's own clients, while the other strikers have the broker or a node down.
        with contextlib.suppress(*LOST, KafkaException, TimeoutError):
            kind()

    def _kill(self) -> None:
        with _down(self._broker):
            self._broker.kafka.kill()
            time.sleep(self._dice.uniform(*DOWN_S))
        self._tally.did("broker killed")

    def _stop(self) -> None:
        with _down(self._broker):
            self._broker.kafka.stop()
        self._tally.did("broker stopped")

    def _pause(self) -> None:
        with self._broker.down:
            self._broker.kafka.pause()
            time.sleep(self._dice.uniform(*AWAY_S))
            self._broker.kafka.resume()
        self._tally.did("broker paused")

    def _cut(self) -> None:
        self._broker.network.cut()
        self._tally.did("all connections to the broker cut")

    def _black_hole(self) -> None:
        self._broker.network.be(Trouble("black hole"))
        time.sleep(self._dice.uniform(*AWAY_S))
        self._broker.network.be(QUIET)
        if self._dice.random() < 0.5:
            self._broker.network.cut()
        self._tally.did("broker cut off")

    def _fence(self) -> None:
        with self._broker.down:
            self._broker.fence(self._out.own_id(EXACTLY), EXACTLY)
        self._tally.did("publisher fenced")

    def _forget_readers(self) -> None:
        group = f"mailroom.{self._into.id}.in.{self._dice.choice((1, 2))}"
        if self._broker.delete_group(group):
            self._tally.did("offsets of a bridge in deleted")

    def forget_mark(self) -> None:
        """Delete the mark at the broker, as its expiry does. Only at rest: what was not acknowledged would repeat."""
        if self._broker.delete_group(self._out.own_id(EXACTLY)):
            self._tally.did("mark at the broker deleted")

    # -- What retention takes away ------------------------------------------------------------------------------------

    def _truncate(self) -> None:
        """Delete records that were not taken in: the bridge stops, says how many, and goes on where it is told to."""
        with self._reader.turn:
            daemons = self._into.daemons
            for daemon in daemons:
                daemon.restart(Failpoint("mailroom.bridges.into.POSITIONS", "before", "stop"))
            try:
                place = self._deleted() if all(each.hit.wait(STOPPED_WITHIN_S) for each in daemons) else None
            finally:
                for daemon in daemons:
                    daemon.arm(None, 0.0)
                    daemon.signal(signal.SIGCONT)
            self._tally.did("both daemons killed")
            if place is None:
                self._tally.missed_one()
            else:
                self._go_on(*place)

    def _deleted(self) -> tuple[Place, int] | None:
        """Delete something that was not taken in; return where, and up to which offset."""
        deadline = time.monotonic() + WRITTEN_WITHIN_S
        while time.monotonic() < deadline:
            positions = self._into.positions()
            self._auditor.read()
            ends = self._auditor.ends()
            behind = [place for place in ends if ends[place] > positions.get(place, ends[place])]
            if behind:
                place = self._dice.choice(behind)
                offset = self._dice.randint(positions[place] + 1, ends[place])
                self._broker.truncate(place, offset)
                return place, offset
            time.sleep(0.2)
        return None

    def _go_on(self, place: Place, offset: int) -> None:
        deadline = time.monotonic() + NOTICED_WITHIN_S
        why = ""
        while not why:
            with contextlib.suppress(*LOST):
                why = self._into.why_stopped(place[0])
            if time.monotonic() > deadline:
                at = self._into.positions()[place]
                self._tally.violations.append(f"{place}: deleted up to {offset}, not noticed at {at}")
                return
            time.sleep(0.05)
        was = self._into.go_on(place, offset)
        said = MISSING.search(why)
        if said is None or int(said[1].replace(",", "")) != offset - was or f"={offset}" not in why:
            self._tally.violations.append(f"{place}: deleted from {was} up to {offset}, and it says: {why}")
        self.truncated |= {id for at, id in self._auditor.places[place].items() if was <= at < offset}
        self._tally.did("topic truncated before it was taken in")


@contextlib.contextmanager
def _down(broker: CampaignBroker) -> Iterator[None]:
    with broker.down:
        yield
        broker.kafka.start()
