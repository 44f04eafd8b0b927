"""What is done to the nodes and to the broker between them."""

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from confluent_kafka import KafkaException

from tests.faults.actors import Actor
from tests.faults.bridges.broker import Auditor, CampaignBroker
from tests.faults.bridges.checks import EXACTLY, FOREIGN, LEAST, PARTITIONS, Place
from tests.faults.bridges.load import ForeignWriter
from tests.faults.bridges.losses import Losses, Operator
from tests.faults.bridges.mutants import ACKNOWLEDGE, BY_HAND, COMMITTING, CUT_BACK, REPEATED, SLOWLY, Aim
from tests.faults.bridges.networks import lose_answers
from tests.faults.bridges.nodes import InNode, OutNode
from tests.faults.bridges.segments import Partition
from tests.faults.failpoints import LINGERS_S, Failpoint
from tests.faults.links.strikes import LINGERS_S as READ_S
from tests.faults.links.strikes import OTHER_SERVER, OWN_SERVER, WAYS, Striker, Tally
from tests.faults.links.struck import LOST, StruckNode
from tests.faults.network import QUIET, Trouble
from tests.faults.role_bridged import BATCH, PRODUCE, RECORDS
from tests.support.kafka import Kafka

BROKER = "the broker killed behind it"
# A call of Kafka's client, and what is behind it: at these a process is killed or stopped.
CALL_WAYS = ("killed before it", "killed behind it", "paused", OWN_SERVER, OTHER_SERVER, BROKER)
RECORDS_WAYS = ("killed behind it", "paused behind it", OWN_SERVER, OTHER_SERVER, BROKER)
# Between the broker's acknowledgement and `acked`, between Kafka's commit and ours, and between a reception and the
# next read.
CENTRAL = (
    "dispatcher.links.at_source.acknowledge.ACKNOWLEDGE", "dispatcher.links.at_source.fetch.FETCH",
    "dispatcher.delivery.deliver.DELIVER_FULL", "dispatcher.links.receive.TAKE_IN", "mailroom.bridges.out.FLUSH",
    "mailroom.bridges.out.TAKE", "mailroom.bridges.into.MOVE", "mailroom.bridges.into.NOTE",
    "mailroom.bridges.into.POSITIONS", "mailroom.bridges.into.MARKS", "kafka init_transactions", "kafka poll",
    "kafka send_offsets_to_transaction", "kafka commit_transaction", "kafka consume", "kafka commit",
)  # fmt: skip
# The worst moments of each node. A paused daemon goes on once another one has worked, so it has been overtaken.
FLUSH, MOVE = "mailroom.bridges.out.FLUSH", "mailroom.bridges.into.MOVE"
WORST = {
    "out": (
        (ACKNOWLEDGE, "killed before it"), (ACKNOWLEDGE, "paused"), (ACKNOWLEDGE, OWN_SERVER),
        (COMMITTING, "killed behind it"), (COMMITTING, "paused"), (COMMITTING, BROKER), (COMMITTING, OWN_SERVER),
        ("kafka send_offsets_to_transaction", "killed behind it"), ("kafka poll", "killed before it"),
        ("kafka poll", "paused"), (FLUSH, "paused"), (FLUSH, OWN_SERVER),
    ),
    "into": (
        (MOVE, "killed behind it"), (MOVE, "paused"), (MOVE, OWN_SERVER), ("COMMIT", "killed behind it"),
        ("COMMIT", "sent and its answer lost"), (RECORDS, "paused behind it"), (RECORDS, "killed behind it"),
        (RECORDS, BROKER), ("kafka commit", "killed before it"), ("kafka commit", OWN_SERVER),
    ),
}  # fmt: skip
WORST_WEIGHT = 80
AIMED = 0.7  # of what is struck at a statement
AIMED_AT_MUTANT = 0.9
TURNS, TURNS_WEIGHT = 3, 4
PASSED_WITHIN_S = 3.0
HANDED_OVER = (5, 40)  # records of a batch, after which whoever hands it over lingers,
HANDED_OVER_THEN = 20  # and those after which it lingers once more
AWAY_SHARE = 0.8  # of that time
CAUGHT_UP_WITHIN_S = 5.0
DOWN_S = (0.0, 2.0)
AWAY_S = (0.3, 4.0)
STOPPED_WITHIN_S = 15.0
NOTICED_WITHIN_S = 90.0
WRITTEN_WITHIN_S = 20.0
MISSING = re.compile(r"\(([\d,]+)\) are deleted there")


class NodeStriker(Striker):
    """Strikes a node as in the campaign of links, and at its calls of Kafka's client."""

    central = CENTRAL
    ways = WAYS | {BROKER: ("after", "stop"), "paused behind it": ("after", "stop")}
    passed_within_s = PASSED_WITHIN_S

    def __init__(
        self, node: StruckNode, broker: CampaignBroker, tally: Tally, seed: int, aim: Aim | None = None
    ) -> None:
        super().__init__(node, tally, seed)
        self.turn = threading.Lock()  # held while it strikes
        self._broker = broker
        self._points = () if aim is None else aim.points.get(node.name, ())
        self._kinds[self._at_worst] = WORST_WEIGHT
        self._kinds[self._take_turns] = TURNS_WEIGHT

    def strike(self) -> None:
        """Make one fault, drawn from the seed."""
        with self.turn:
            if self._points and self._dice.random() < AIMED_AT_MUTANT:
                with contextlib.suppress(*LOST):
                    self._at_one_of(self._points)
            else:
                super().strike()

    def _take_turns(self) -> None:
        """Have the daemons take the lane from each other, back and forth: each finds what the other left under way."""
        for _ in range(TURNS):
            if (leader := self._node.leaders().get("links")) is None:
                return
            leader.signal(signal.SIGSTOP)
            if self._other_works(leader):
                self._tally.did("lane taken by the other daemon, in turns")

    def _at_worst(self) -> None:
        self._at_one_of(WORST[self._node.name])

    def _at_one_of(self, points: Sequence[tuple[str, str]]) -> None:
        leader = self._node.leaders().get("links")
        if leader is not None:
            self._strike_at(leader, *self._dice.choice(points))

    def _choice(self, passing: Sequence[str]) -> str:
        central = [name for name in passing if name in CENTRAL]
        return self._dice.choice(central) if central and self._dice.random() < AIMED else super()._choice(passing)

    def _way(self, name: str) -> str:
        if name == RECORDS:
            return self._dice.choice(RECORDS_WAYS)
        return self._dice.choice(CALL_WAYS if name.startswith("kafka ") else list(self.ways))

    def _struck(self, daemon: Actor, name: str, way: str, *, again: bool = False) -> None:
        if way != BROKER:
            super()._struck(daemon, name, way, again=again)
            return
        try:
            time.sleep(self._dice.uniform(0, READ_S))
            with _down(self._broker, self._dice) as server:
                server.kill()
        finally:
            daemon.signal(signal.SIGCONT)
        self._tally.struck(name, way, again=again)


class BrokerStriker:
    """Strikes the broker, its network and what it keeps for the bridges, one fault after the other."""

    def __init__(
        self, broker: CampaignBroker, auditor: Auditor, foreign: ForeignWriter, out: OutNode, into: InNode,
        strikers: Mapping[str, NodeStriker], tally: Tally, seed: int, aim: Aim | None = None,
    ) -> None:  # fmt: skip
        self.truncated: set[UUID] = set()  # of this round
        self.skipped: list[tuple[Place, int, int]] = []  # of this round: by hand, from one offset to another
        self._broker = broker
        self._auditor = auditor
        self._out = out
        self._into = into
        self._writer, self._reader = strikers["out"], strikers["into"]
        self._tally = tally
        self._dice = random.Random(f"{seed} broker")
        self.losses = Losses(
            broker, auditor, foreign, Operator(out, into, tally), self._standing, self._forget_left_out, tally,
            random.Random(f"{seed} losses"),
        )  # fmt: skip
        self._kinds: dict[Callable[[], None], int] = {
            self._kill: 8,
            self._stop: 2,
            self._pause: 10,
            self._cut: 14,
            self._black_hole: 8,
            self._lose_answers: 10,
            self._with_reader(self.losses.cut_back): 30,
            self._with_reader(self.losses.make_anew): 16,
            self._leave_open: 14,
            self._fence: 16,
            self._forget_readers: 4,
            self._truncate: 6,
            self._set_by_hand: 8,
            self._repeat: 10,
            self._hand_over_slowly: 10,
        }
        named = {
            REPEATED: self._repeat, SLOWLY: self._hand_over_slowly, BY_HAND: self._set_by_hand,
            CUT_BACK: self._with_reader(self.losses.cut_back),
        }  # fmt: skip
        self._aimed = None if aim is None else named.get(aim.fault)

    def strike(self) -> None:
        """Make one fault, drawn from the seed."""
        [kind] = self._dice.choices(list(self._kinds), list(self._kinds.values()))
        if self._aimed is not None and self._dice.random() < AIMED_AT_MUTANT:
            kind = self._aimed
        # Of the campaign's own clients, while the other strikers have the broker or a node down.
        with contextlib.suppress(*LOST, KafkaException, TimeoutError):
            kind()

    def _kill(self) -> None:
        with _down(self._broker, self._dice) as server:
            server.kill()
            time.sleep(self._dice.uniform(*DOWN_S))
        self._tally.did("broker killed")

    def _stop(self) -> None:
        with _down(self._broker, self._dice) as server:
            server.stop()
        self._tally.did("broker stopped")

    def _pause(self) -> None:
        paused = self._dice.choice((*([each] for each in self._broker.servers), self._broker.servers))
        with self._broker.down:
            for server in paused:
                server.pause()
            time.sleep(self._dice.uniform(*AWAY_S))
            for server in paused:
                server.resume()
        self._tally.did(f"{'one broker' if len(paused) == 1 else 'all brokers'} paused")

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

    def _lose_answers(self) -> None:
        if lose_answers(self._broker.network, self._dice):
            self._tally.did("answers of the broker lost")

    def _with_reader(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what does it while no other daemon that takes in is struck."""

        def done() -> None:
            with self._reader.turn:
                work()

        return done

    def put_back(self, meanwhile: Callable[[], object]) -> None:
        """Put the broker back to a copy of what it keeps."""
        with self._reader.turn:
            self.losses.put_back(meanwhile)

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

    # -- Combined with who publishes and who takes in ------------------------------------------------------------------

    def _repeat(self) -> None:
        """Have rows published twice, of which the one daemon takes the first in, and another one reads the second."""
        with self._writer.turn, self._reader.turn:
            if (leader := self._out.leaders().get("links")) is None:
                return
            others = [each for each in self._out.daemons if each is not leader]
            for each in others:
                each.signal(signal.SIGSTOP)
            is_struck = False
            try:
                is_struck = self._is_hit(leader, Failpoint(ACKNOWLEDGE, "before", "stop"))
                if is_struck:
                    self._catch_up()
                    for each in self._into.daemons:
                        each.restart()
            finally:
                if is_struck:
                    leader.signal(signal.SIGKILL)
                for each in others:
                    each.signal(signal.SIGCONT)
            if is_struck:
                self._tally.did("published again, to the next reader")

    def _is_hit(self, daemon: Actor, failpoint: Failpoint | None = None) -> bool:
        """Wait until the daemon is at the failpoint, or at the one that is armed already."""
        if (failpoint is None or daemon.arm(failpoint)) and daemon.hit.wait(PASSED_WITHIN_S + LINGERS_S):
            return True
        daemon.disarm()
        self._tally.missed_one()
        return False

    def _catch_up(self) -> None:
        deadline = time.monotonic() + CAUGHT_UP_WITHIN_S
        while self._behind() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _behind(self) -> dict[Place, tuple[int, int]]:
        """Return the partitions that are not taken in up to their end: the position, and the end."""
        positions = self._into.positions()
        self._auditor.read()
        ends = self._auditor.ends()
        return {place: (positions[place], end) for place, end in ends.items() if positions[place] < end}

    def _hand_over_slowly(self) -> None:
        """Take the broker away while a batch is handed to the client: the first records wait long, the last do not.

        It is back before the rest is handed over, and the client sends that before it can tell what became of the first
        ones: whoever gives those up has a gap in the log.
        """
        topic = LEAST if self._aimed is not None else self._dice.choice((LEAST, EXACTLY))
        with self._writer.turn, self._broker.down:
            leader = self._out.leaders().get("links")
            batch, record = (Failpoint(f"{kind} {topic}", "before", "linger") for kind in (BATCH, PRODUCE))
            # While it lingers over one batch, rows gather for the next one.
            if leader is None or not (self._is_hit(leader, batch) and self._is_hit(leader, batch)):
                return
            network = self._broker.network
            network.be(Trouble("black hole"))
            network.cut()
            try:
                is_away = self._is_hit(leader, replace(record, nth=self._dice.randint(*HANDED_OVER)))
                if is_away:
                    leader.arm(replace(record, nth=HANDED_OVER_THEN))
                    time.sleep(LINGERS_S * AWAY_SHARE)
            finally:
                network.cut()  # what was sent into it never comes
                network.be(QUIET)
            if is_away and self._is_hit(leader):
                self._tally.did("broker away while a batch is handed over")
                # A node that is put back in time must not have a dispatcher that still hands over what it lost.
                time.sleep(LINGERS_S)

    def _set_by_hand(self) -> None:
        """Set positions after what a daemon has just read: it may not take that in any more."""
        with self._reader.turn:
            leader = self._into.leaders().get("links")
            if leader is None or not self._is_hit(leader, Failpoint(RECORDS, "after", "stop")):
                return
            try:
                for place, (at, end) in self._behind().items():
                    offset = self._dice.randint(at + 1, end)
                    was = self._into.go_on(place, offset)
                    if was < offset:
                        self.skipped.append((place, was, offset))
                        self._tally.did("position set by hand")
            finally:
                leader.signal(signal.SIGCONT)

    def _leave_open(self) -> None:
        """Have a transaction given up, and take its end out of the log: no later commit may commit what was in it."""
        with self._writer.turn, self._reader.turn, self._standing() as stood, self._broker.down:
            leader = self._out.leaders().get("links")
            if not stood or leader is None or not self._is_hit(leader, Failpoint(COMMITTING, "before", "stop")):
                return
            [other] = [each for each in self._out.daemons if each is not leader]
            try:
                # Kafka has ended what was open when this call returns, and nothing is published yet.
                other.arm(Failpoint("kafka init_transactions", "after", "stop"))
                leader.signal(signal.SIGKILL)
                if other.hit.wait(STOPPED_WITHIN_S):
                    self._take_ends_away()
                else:
                    self._tally.missed_one()
            finally:
                other.disarm()

    def _take_ends_away(self) -> None:
        for server in self._broker.servers:
            server.kill()
        try:
            for place in [(EXACTLY, part) for part in range(PARTITIONS[EXACTLY])]:
                if (last := Partition(self._broker.at(place)[1]).given_up()) is not None:
                    os.truncate(last.file, last.place)
                    self._auditor.forget(place, last.first)
                    self._tally.did("end of a transaction that was given up lost")
        finally:
            for server in self._broker.servers:
                server.start()

    def _forget_left_out(self, places: Collection[Place]) -> set[UUID]:
        """Return what was left out there, whose log is another one from now on."""
        found = {
            id for place in places for at, id in self._auditor.places[place].items() if self._is_skipped(place, at)
        }  # fmt: skip
        self.skipped = [each for each in self.skipped if each[0] not in places]
        return found

    def left_out(self) -> tuple[set[UUID], set[UUID]]:
        """Return what stood in the records after which positions were set, in this round; and what stood only there.

        A repeat of the former may be taken in, if no later message of its link was taken in before it.
        """
        inside, outside = set[UUID](), set[UUID]()
        for place in {place for place, _, _ in self.skipped}:
            for at, id in self._auditor.places[place].items():
                (inside if self._is_skipped(place, at) else outside).add(id)
        return inside, inside - outside

    def _is_skipped(self, place: Place, at: int) -> bool:
        return any(place == each and was <= at < offset for each, was, offset in self.skipped)

    # -- What retention takes away ------------------------------------------------------------------------------------

    def _truncate(self) -> None:
        """Delete records that were not taken in: the bridge stops, says how many, and goes on where it is told to."""
        with self._reader.turn:
            with self._standing() as stood:
                place = self._deleted() if stood else None
            if place is None:
                self._tally.missed_one()
            else:
                self._go_on(*place)

    @contextlib.contextmanager
    def _standing(self) -> Iterator[bool]:
        """Have both daemons of the reader begin anew, and stand in this block before they know where; whether so."""
        daemons = self._into.daemons
        for daemon in daemons:
            daemon.restart(Failpoint("mailroom.bridges.into.POSITIONS", "before", "stop"))
        try:
            yield all(each.hit.wait(STOPPED_WITHIN_S) for each in daemons)
        finally:
            for daemon in daemons:
                daemon.disarm()
        self._tally.did("both daemons killed")

    def _deleted(self) -> tuple[Place, int] | None:
        """Delete something that was not taken in; return where, and up to which offset."""
        deadline = time.monotonic() + WRITTEN_WITHIN_S
        while time.monotonic() < deadline:
            behind = self._behind()
            places = [place for place in behind if place[0] == FOREIGN or not self.losses.keeps.is_set()]
            if places:
                place = self._dice.choice(places)
                at, end = behind[place]
                offset = self._dice.randint(at + 1, end)
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
def _down(broker: CampaignBroker, dice: random.Random) -> Iterator[Kafka]:
    server = dice.choice(broker.servers)
    with broker.down:
        yield server
        server.start()
