"""Rounds of faults on a ring under load, each followed by a rest at which everything has to hold."""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import psutil

from tests.faults.actors import Actor
from tests.faults.links.checks import RING, Checker, Ledger
from tests.faults.links.load import Signals, load
from tests.faults.links.node import RingNode
from tests.faults.links.strikes import Aim, Striker, Tally
from tests.faults.links.struck import DAEMONS, LOST, StruckNode
from tests.faults.nursery import Nursery
from tests.faults.report import unasked
from tests.faults.stage import home_of_campaign
from tests.faults.task import USUAL, Habits, Task

NAMES = ("east", "north", "west")
WAITING = 6_000  # rows not handled, at which writers rest
ROUND_S = 90.0
LINKED_WITHIN_S = 60.0
SETTLED_WITHIN_S = 180.0
SENT_AGAIN = 100  # messages of a node that was put back
PAUSE_S = 0.4  # between two faults at a node, at most


class Ring:
    """The nodes, their load, and what is done to them."""

    def __init__(
        self, nodes: Sequence[RingNode], tally: Tally, endings: Counter[str], seed: int, aim: Aim | None = None
    ) -> None:
        self.messages = 0
        self.handled = 0
        self.settled_s = 0.0  # how long the last round took to come to an end
        self._nodes = nodes
        self._tally = tally
        self._endings = endings
        self._dice = random.Random(seed)
        self._signals = Signals()
        self._senders = [sender for node in nodes for sender in load(node, self._signals, seed)]
        self._strikers = {node.name: Striker(node, tally, seed, aim) for node in nodes}
        self._checker = Checker({node.name: nodes[nth - 1].name for nth, node in enumerate(nodes)})
        self._errors: list[BaseException] = []

    @contextlib.contextmanager
    def under_load(self) -> Iterator[None]:
        """Have the load work in this block."""
        works = [sender.run for sender in self._senders]
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
        self._signals.rests.clear()
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._guarded, args=(self._strike, node, end)) for node in self._nodes]
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
        if seen:
            return seen
        ledgers = {node.name: node.take_ledger() for node in self._nodes}
        self._count(ledgers.values())
        found = [*self._checker.check(ledgers), *(line for node in self._nodes for line in node.trouble())]
        return found or self._put_back(ledgers)

    def _put_back(self, ledgers: Mapping[str, Ledger]) -> list[str]:
        """Put one node back to before its readers were allowed; the next round shows what came of it."""
        node = self._dice.choice(self._nodes)
        readers = self._dice.sample(list(node.others), len(node.others))
        node.put_back(readers, guests=self._dice.choice((0, 1, 3)))
        deadline = time.monotonic() + LINKED_WITHIN_S
        while not _read_again(node, readers):
            if time.monotonic() > deadline:
                return [f"{node.name} was put back and is not read again", *(each.situation() for each in self._nodes)]
            time.sleep(0.2)
        # Of what has come to others only: the node's own inboxes were not put back.
        ring = [each for each in ledgers[node.name].sent if each.topic == RING]
        node.send_again(self._dice.sample(ring, min(len(ring), SENT_AGAIN)))
        self._tally.did("source put back to before its links")
        return []

    def _count(self, ledgers: Any) -> None:
        self.messages += sum(len(ledger.sent) for ledger in ledgers)
        self.handled += sum(len(ledger.handled) for ledger in ledgers)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._errors.append(error)

    def _strike(self, node: RingNode, end: float) -> None:
        dice = random.Random(f"{self._dice.random()} {node.name}")
        while time.monotonic() < end and not self._errors and not self._signals.over.is_set():
            self._strikers[node.name].strike()
            time.sleep(dice.uniform(0, PAUSE_S))

    def _watch(self) -> None:
        """Let writers rest while more waits than is good."""
        while not self._signals.over.wait(0.5):
            with contextlib.suppress(*LOST):
                crowded = max(node.waiting()[0] for node in self._nodes) > WAITING
                (self._signals.crowded.set if crowded else self._signals.crowded.clear)()

    def _settle(self, within_s: float) -> list[str]:
        """Wait until nothing is left to handle; return what is known if that does not happen."""
        self._signals.rests.set()
        for sender in self._senders:
            with sender.turn:  # nothing is being sent by who has not seen it
                pass
        deadline = time.monotonic() + within_s
        before: list[tuple[int, int]] = []
        quiet = 0
        while quiet < 3:
            time.sleep(0.25)
            now = [node.waiting() for node in self._nodes]
            quiet = quiet + 1 if now == before and not any(rows for rows, _ in now) else 0
            before = now
            if self._errors or time.monotonic() > deadline:
                return [f"stuck: {[rows for rows, _ in now]} rows wait", *(each.situation() for each in self._nodes)]
        return []


def _read_again(node: RingNode, readers: Sequence[RingNode]) -> bool:
    with contextlib.suppress(*LOST):
        return node.is_read_again(readers)
    return False


@contextlib.contextmanager
def ring(
    names: Sequence[str], tally: Tally, seed: int, habits: Habits, aim: Aim | None = None, logs: Path | None = None
) -> Iterator[Ring]:
    """Make nodes that read each other, with their daemons and under load."""
    endings: Counter[str] = Counter()
    with home_of_campaign() as home, ExitStack() as stack:
        stack.callback(keep_logs, home, logs)
        nodes = [RingNode(home, name, seed) for name in names]
        for node in nodes:
            stack.callback(close, node)
            node.start()
        for nth, node in enumerate(nodes):
            node.link(nodes[nth - 1], [each for each in nodes if each is not node])
        for nth in range(DAEMONS):
            # Daemons number n take the networks number n, wherever they go.
            nursery = Nursery(home, {f"MAILROOM_DSN_{node.name.upper()}": node.dsn(nth) for node in nodes})
            stack.callback(nursery.close)
            for node in nodes:
                task = Task(
                    "linked", f"{node.name}-{nth}", node.dsn(nth), node.host.dsn, str(home), seed, "", False, 0.0,
                    habits,
                )  # fmt: skip
                node.daemons.append(Actor(task, nursery, endings))
        _await_links(nodes)
        made = Ring(nodes, tally, endings, seed, aim)
        with made.under_load():
            yield made


def _await_links(nodes: Sequence[RingNode]) -> None:
    deadline = time.monotonic() + LINKED_WITHIN_S
    while not all(node.is_linked(len(nodes) - 1) for node in nodes):
        if time.monotonic() > deadline:
            raise click.ClickException("\n".join(["not linked:", *(node.situation() for node in nodes)]))
        time.sleep(0.1)


def close(node: StruckNode) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        node.close()


def keep_logs(home: Path, logs: Path | None) -> None:
    if logs is not None:
        logs.mkdir(exist_ok=True)
        for log in home.glob("*.log"):
            (logs / log.name).write_bytes(log.read_bytes())


def play(
    names: Sequence[str],
    seconds: float,
    seed: int,
    tally: Tally,
    logs: Path | None = None,
    habits: Habits = USUAL,
    aim: Aim | None = None,
    round_s: float = ROUND_S,
    settled_within_s: float = SETTLED_WITHIN_S,
) -> tuple[int, list[str]]:
    """Run a campaign until the time is over or something is violated; return the number of messages, and what is."""
    with ring(names, tally, seed, habits, aim, logs) as made:
        end = time.monotonic() + seconds
        found: list[str] = []
        while not found and (left := end - time.monotonic()) > 1:
            found = made.round(min(round_s, left), settled_within_s)
            click.echo(
                f"{len(names)} nodes: {made.messages:,} messages, {made.handled:,} handled, "
                f"{sum(tally.kinds.values()):,} faults, at rest after {made.settled_s:.0f} s, {len(found)} violations"
            )
        return made.messages, found
