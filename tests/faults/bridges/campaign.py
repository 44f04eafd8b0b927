"""Rounds of faults on two nodes and the brokers between them, each followed by a rest at which all has to hold."""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import click
from confluent_kafka import KafkaException

from tests.faults.actors import Actor
from tests.faults.bridges.broker import Auditor, CampaignBroker
from tests.faults.bridges.checks import BRIDGED, PARTITIONS, RABBIT, STREAM, Checker
from tests.faults.bridges.load import Load
from tests.faults.bridges.mutants import FORGOTTEN, Aim
from tests.faults.bridges.nodes import InNode, OutNode, into
from tests.faults.bridges.other_strikes import NatsStriker, RabbitStriker
from tests.faults.bridges.others import LOST as LOST_OTHERS
from tests.faults.bridges.others import NatsBroker, RabbitBroker
from tests.faults.bridges.strikes import BrokerStriker, NodeStriker
from tests.faults.links.campaign import close, keep_logs
from tests.faults.links.load import Signals
from tests.faults.links.strikes import Tally
from tests.faults.links.struck import DAEMONS, LOST
from tests.faults.nursery import Nursery
from tests.faults.report import unasked
from tests.faults.stage import home_of_campaign
from tests.faults.task import Habits, Task

WAITING = 8_000  # rows not published or not handled, at which writers rest
ROUND_S = 60.0
BROKER_LINES = 40  # of what the broker has logged, shown if something stands still
FLOWS_WITHIN_S = 60.0
SETTLED_WITHIN_S = 180.0
PAUSE_S = {"out": 0.2, "into": 0.5, "broker": 0.5, "NATS": 1.0, "RabbitMQ": 2.0}  # between two faults, at most
OPTIONS = {"RECONNECT_BACKOFF_MAX_MS": "500"}
BATCHES = {"BATCH_NUM_MESSAGES": "20"}  # several of a partition are under way at once
# A daemon that gets no processor for a second is no fault of it: a lease that is shorter than that goes to and fro, and
# none leads for as long as a publisher takes to begin.
HABITS = Habits(lease_s=2.0)


class Bridged:
    """The nodes, the broker, their load, and what is done to them."""

    def __init__(
        self, home: Path, out: OutNode, reader: InNode, broker: CampaignBroker, nats: NatsBroker, rabbit: RabbitBroker,
        tally: Tally, endings: Counter[str], seed: int, aim: Aim | None,
    ) -> None:  # fmt: skip
        self.sent = 0
        self.handled = 0
        self.truncated = 0
        self.skipped = 0
        self.lost = 0  # by the broker
        self.settled_s = 0.0  # how long the last round took to come to an end
        self.checker = Checker()
        self._copy = home / "copy"
        self._out = out
        self._into = reader
        self._broker = broker
        self._tally = tally
        self._endings = endings
        self._dice = random.Random(seed)
        self._signals = Signals()
        self._load = Load(out, reader, broker, self._signals, seed)
        self._auditor = Auditor(broker)
        self._strikers = {
            "out": NodeStriker(out, broker, tally, seed, aim),
            "into": NodeStriker(reader, broker, tally, seed, aim),
        }
        self._at_broker = BrokerStriker(
            broker, self._auditor, self._load.foreign, out, reader, self._strikers, tally, seed, aim
        )
        self._nats, self._rabbit = nats, rabbit
        self._works: dict[str, Callable[[], None]] = {name: each.strike for name, each in self._strikers.items()}
        self._works["broker"] = self._at_broker.strike
        losses, turn = self._at_broker.losses, self._strikers["into"].turn
        if aim is None or aim.fault == FORGOTTEN:
            self._works["NATS"] = NatsStriker(nats, losses, turn, tally, seed, aim).strike
        if aim is None:
            self._works["RabbitMQ"] = RabbitStriker(rabbit, tally, seed).strike
        self._undone: set[UUID] = set()
        self._errors: list[BaseException] = []

    @contextlib.contextmanager
    def under_load(self) -> Iterator[None]:
        """Have the load work in this block."""
        works = [sender.run for sender in self._load.senders]
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (*works, self._watch)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._signals.over.set()
            for thread in threads:
                thread.join()

    def round(self, seconds: float, settled_within_s: float) -> list[str]:
        """Strike for so long, let everything come to an end, and return what is violated."""
        self._at_broker.truncated.clear()
        self._at_broker.skipped.clear()
        self._at_broker.losses.forget()
        self._undone.clear()
        self._signals.rests.clear()
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._guarded, args=(self._strike, *each, end)) for each in self._works.items()
        ]
        put_back = self._put_back if self._dice.random() < 0.5 else self._put_broker_back
        threads.append(threading.Thread(target=self._guarded, args=(put_back, seconds)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        began = time.monotonic()
        stuck = self._settle(settled_within_s)
        self.settled_s = time.monotonic() - began
        if self._errors:
            raise self._errors[0]
        seen = [*self._tally.violations, *map(str, unasked(self._endings)), *stuck]
        sent = [*self._out.take_sent(), *self._into.take_sent(), *self._load.foreign.take_sent()]
        handled = [*self._into.take_handled(), *self._nats.take_bought()]
        log = self._auditor.take() | {STREAM: self._nats.take_stored()}
        for each in sent:
            if each.id in self._at_broker.losses.had:
                log[each.topic].setdefault(each.id, 1)
        truncated, (skipped, barred) = self._at_broker.truncated, self._at_broker.left_out()
        self.sent += len(sent)
        self.handled += len(handled)
        self.truncated += len(truncated)
        self.skipped += len(skipped)
        lost = set(self._at_broker.losses.lost)
        self.lost += len(lost)
        found = self.checker.check(sent, handled, log, {*truncated, *skipped, *lost}, self._undone, barred - lost)
        found = [*seen, *found, *self._out.dead(), *self._into.dead()]
        if not found:
            self._at_broker.forget_mark()
            for daemon in self._out.daemons:
                daemon.restart()
        return found

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._errors.append(error)

    def _strike(self, name: str, work: Callable[[], None], end: float) -> None:
        dice = random.Random(f"{self._dice.random()} {name}")
        while time.monotonic() < end and not self._errors and not self._signals.over.is_set():
            work()
            time.sleep(dice.uniform(0, PAUSE_S[name]))

    def _put_back(self, seconds: float) -> None:
        """Copy the server's files of the node that publishes, and put it back to them later in the round.

        What it had sent since is undone, whether or not it was published.
        """
        time.sleep(seconds / 4)
        self._at_broker.losses.keep()
        with self._strikers["out"].turn, self._out.server:
            self._out.copy(self._copy)
        time.sleep(seconds / 4)
        self._signals.rests.set()
        with self._strikers["out"].turn, self._out.server, ExitStack() as turns:
            for sender in self._load.at_nodes:
                turns.enter_context(sender.turn)
            before = self._out.sent_ids()
            self._out.put_back(self._copy)
            self._undone |= before - self._out.sent_ids()
        self._tally.did("node put back in time")
        self._signals.rests.clear()

    def _put_broker_back(self, seconds: float) -> None:
        """Copy what the broker keeps, and put it back to that later in the round."""
        time.sleep(seconds / 8)
        with contextlib.suppress(*LOST, KafkaException, TimeoutError):
            self._at_broker.put_back(lambda: time.sleep(seconds / 8))

    def _watch(self) -> None:
        """Let writers rest while more waits than is good, and publishers go on whose logs have lost records."""
        while not self._signals.over.wait(0.5):
            with contextlib.suppress(*LOST):
                self._at_broker.losses.resume_publishers()
                crowded = self._out.waiting() + self._into.waiting() > WAITING
                (self._signals.crowded.set if crowded else self._signals.crowded.clear)()

    def _settle(self, within_s: float) -> list[str]:
        """Wait until all is published, taken in and handled; return what is known if that does not happen."""
        self._signals.rests.set()
        for sender in self._load.senders:
            with sender.turn:  # nothing is being sent by who has not seen it
                pass
        deadline = time.monotonic() + within_s
        while not self._is_at_rest():
            if self._errors or time.monotonic() > deadline:
                return ["stuck:", self._situation()]
            if self._broker.mend():
                self._tally.did("broker that had broken itself started anew")
                deadline = time.monotonic() + within_s
            time.sleep(0.25)
        return []

    def _situation(self) -> str:
        """Return what there is to know when nothing comes to an end."""
        told = [self._out.situation(), self._into.situation(), f"log: {self._auditor.ends()}"]
        told += [f"end of the stream: {self._nats.end()}", f"queued: {len(self._queued())}", self._rabbit.situation()]
        said = [
            line for server in self._broker.servers
            for line in server.log.read_text(errors="replace").splitlines()[-BROKER_LINES:]
        ]  # fmt: skip
        return "\n".join([*told, f"broker: {self._broker.network.trouble}", *(f"  {line}" for line in said)])

    def _is_at_rest(self) -> bool:
        if self._out.waiting():
            return False
        self._auditor.read()
        with contextlib.suppress(*LOST_OTHERS):
            ends, positions = self._auditor.ends() | {(STREAM, 0): self._nats.end() + 1}, self._into.positions()
            if all(positions.get(place, 0) >= end for place, end in ends.items()) and not self._into.waiting():
                return self._nats.is_sold_out() and not self._queued()
        return False

    def _queued(self) -> set[UUID]:
        """Return what RabbitMQ has yet. It does not say what it gave to somebody who has not acknowledged it."""
        return self._out.sent_ids(RABBIT) - self._into.handled_ids(RABBIT)


@contextlib.contextmanager
def bridged(
    tally: Tally, seed: int, logs: Path | None = None, habits: Habits = HABITS, aim: Aim | None = None
) -> Iterator[Bridged]:
    """Make two nodes and a Kafka between them, with their daemons and under load."""
    endings: Counter[str] = Counter()
    with home_of_campaign() as home, ExitStack() as stack:
        stack.callback(keep_logs, home, logs)
        broker = CampaignBroker(home, seed)
        stack.callback(broker.close)
        broker.start()
        nats, rabbit = NatsBroker(home, seed), RabbitBroker(home, seed)
        for other in (nats, rabbit):
            stack.callback(other.close)
            other.start()
        out, reader = OutNode(home, "out", seed), InNode(home, "into", seed)
        out.others, reader.others = [reader], [out]
        for node in (out, reader):
            stack.callback(close, node)
            node.start()
            node.bridge(broker.address, nats.address, rabbit.address)
        names = [*BRIDGED, *map(into, PARTITIONS)]
        options = {
            f"MAILROOM_BRIDGE_{name.upper().replace('-', '_')}_{option}": value
            for name in names
            for option, value in (OPTIONS | (BATCHES if name in BRIDGED else {})).items()
        }
        for nth in range(DAEMONS):
            nursery = Nursery(home, options)
            stack.callback(nursery.close)
            for node in (out, reader):
                task = Task(
                    "bridged", f"{node.name}-{nth}", node.dsn(nth), node.host.dsn, str(home), seed, "", False, 0.0,
                    habits,
                )  # fmt: skip
                node.daemons.append(Actor(task, nursery, endings))
        _await_positions(reader)
        made = Bridged(home, out, reader, broker, nats, rabbit, tally, endings, seed, aim)
        with made.under_load():
            yield made


def _await_positions(reader: InNode) -> None:
    """Wait until it knows where it begins: what comes before that is not taken in."""
    deadline = time.monotonic() + FLOWS_WITHIN_S
    while len(reader.positions()) < sum(PARTITIONS.values()) + 1:
        if time.monotonic() > deadline:
            raise click.ClickException(f"not bridged:\n{reader.situation()}")
        time.sleep(0.1)


def play(
    seconds: float, seed: int, tally: Tally, logs: Path | None = None, round_s: float = ROUND_S,
    settled_within_s: float = SETTLED_WITHIN_S, habits: Habits = HABITS, aim: Aim | None = None,
) -> tuple[int, list[str]]:  # fmt: skip
    """Run a campaign until the time is over or something is violated; return the number of messages, and what is."""
    with bridged(tally, seed, logs, habits, aim) as made:
        end = time.monotonic() + seconds
        found: list[str] = []
        while not found and (left := end - time.monotonic()) > 1:
            found = made.round(min(round_s, left), settled_within_s)
            click.echo(
                f"{made.sent:,} messages, {made.handled:,} handled, {made.truncated:,} truncated, "
                f"{made.skipped:,} left out, {made.lost:,} lost by the broker, "
                f"{made.checker.repeats:,} repeats at least once, {sum(tally.kinds.values()):,} faults, "
                f"at rest after {made.settled_s:.0f} s, {len(found)} violations"
            )
        return made.sent, found
