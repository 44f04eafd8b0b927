"""The load: what is sent at each node, what is handled, and what is sent on."""

import contextlib
import random
import threading
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg

from outbox import Outbox, Outgoing
from tests.faults.links.checks import ORDER, PLAIN, RING, TOTAL
from tests.faults.links.node import RingNode
from tests.faults.links.struck import LOST, StruckNode

KEYS = 50
BATCH = 60  # messages of a transaction, at most
PAUSE_S = {RING: 0.25, ORDER: 0.5}  # between two transactions of a writer
HOPS = 3  # how far a message is sent on, at most
SENT_ON = {PLAIN: 0.2, TOTAL: 0.1}
ROLLED_BACK = 0.05  # of the transactions
# Nothing waits for the disk: a crash loses all that no daemon has made durable, and with a message its ledger.
ASYNCHRONOUS = "-c synchronous_commit=off"
TOPICS = {PLAIN: RING, TOTAL: ORDER}
SENT = "INSERT INTO ring.sent (id, topic, key, nth, cause) SELECT * FROM unnest(%s::uuid[], %s::text[], %s::text[], "
SENT += "%s::bigint[], %s::uuid[])"
HANDLED = "INSERT INTO ring.handled (inbox, id, origin, key, clock, sent_clock) SELECT * FROM unnest(%s::text[], "
HANDLED += "%s::uuid[], %s::uuid[], %s::text[], %s::bigint[], %s::bigint[])"


class Signals:
    """What all threads of the load look at."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.rests = threading.Event()  # nothing new is sent
        self.crowded = threading.Event()  # more waits than is good


class Sender:
    """Sends to one topic from one thread. It alone uses its keys, so their messages have an order.

    A share of them, `keyless`, has none.
    """

    keyless = 0.0

    def __init__(self, node: StruckNode, name: str, topic: str, signals: Signals, seed: int) -> None:
        self._node = node
        self.turn = threading.Lock()  # held while something may be sent
        self._name = f"{name}-{node.name}"
        self._topic = topic
        self._signals = signals
        self._dice = random.Random(f"{seed} {self._name}")
        self._nth = 0
        self._pause_s = 0.0

    def run(self) -> None:
        """Work until it is over, over one session after the other."""
        while not self._signals.over.is_set():
            with contextlib.suppress(*LOST), self._node.host.session(options=ASYNCHRONOUS) as session:
                while not self._signals.over.wait(self._pause_s):
                    with self.turn:
                        self._pause_s = self.step(session)
            self._signals.over.wait(0.1)

    def step(self, session: psycopg.Connection[Any]) -> float:
        """Do one transaction; return how long to pause."""
        raise NotImplementedError

    def _send(self, session: psycopg.Connection[Any], hops: Sequence[tuple[int, UUID | None]]) -> None:
        outgoing, rows = [], []
        for left, cause in hops:
            id, key = uuid4(), f"{self._name}-{self._dice.randrange(KEYS)}"
            self._nth += 1
            has_key = self._dice.random() >= self.keyless
            outgoing.append(Outgoing(self._topic, left, key=key if has_key else None, id=id))
            rows.append((id, self._topic, key if has_key else str(id), self._nth, cause))
        if outgoing:
            session.execute(SENT, [list(column) for column in zip(*rows, strict=True)])
            Outbox().send_many(session, outgoing)


class Writer(Sender):
    """Sends new messages, several in a transaction."""

    def step(self, session: psycopg.Connection[Any]) -> float:
        if self._signals.rests.is_set() or self._signals.crowded.is_set():
            return 0.1
        with session.transaction(force_rollback=self._dice.random() < ROLLED_BACK):
            self._send(session, [(HOPS, None)] * self._dice.randint(1, BATCH))
        return self._dice.uniform(0, 2 * PAUSE_S[self._topic])


class Reaper(Sender):
    """Handles what an inbox has, and sends a part of it on."""

    def __init__(self, node: RingNode, inbox: str, signals: Signals, seed: int) -> None:
        super().__init__(node, f"on-{inbox}", TOPICS[inbox], signals, seed)
        self._inbox, self._inboxes = inbox, node.inboxes

    def step(self, session: psycopg.Connection[Any]) -> float:
        with session.transaction(force_rollback=self._dice.random() < ROLLED_BACK):
            messages = self._inboxes[self._inbox].reap_any(session, 50, 4)
            if messages:
                rows = [(self._inbox, m.id, m.origin, m.key, m.clock, m.sent_clock) for m in messages]
                session.execute(HANDLED, [list(column) for column in zip(*rows, strict=True)])
            onwards = [m for m in messages if m.value > 1 and self._dice.random() < SENT_ON[self._inbox]]
            self._send(session, [(m.value - 1, m.id) for m in onwards])
        return 0.0 if messages else 0.03


def load(node: RingNode, signals: Signals, seed: int) -> list[Sender]:
    """Return those who work at a node."""
    writers = [Writer(node, f"new-{topic}", topic, signals, seed) for topic in (RING, ORDER)]
    return [*writers, *(Reaper(node, inbox, signals, seed) for inbox in (PLAIN, TOTAL))]
