"""The load: what is sent at one node, and handled at the other."""

from typing import Any

import psycopg

from tests.faults.bridges.checks import PARTITIONS
from tests.faults.bridges.nodes import InNode, OutNode
from tests.faults.links.load import HANDLED, ROLLED_BACK, Sender, Signals

BATCH = 200  # messages of a transaction, at most
PAUSE_S = 0.4  # between two transactions of a writer, on average


class Writer(Sender):
    """Sends new messages, several in a transaction."""

    def step(self, session: psycopg.Connection[Any]) -> float:
        if self._signals.rests.is_set() or self._signals.crowded.is_set():
            return 0.1
        with session.transaction(force_rollback=self._dice.random() < ROLLED_BACK):
            self._send(session, [(0, None)] * self._dice.randint(1, BATCH))
        return self._dice.uniform(0, 2 * PAUSE_S)


class Reaper(Sender):
    """Handles what an inbox has."""

    def __init__(self, node: InNode, inbox: str, signals: Signals, seed: int) -> None:
        super().__init__(node, f"on-{inbox}", inbox, signals, seed)
        self._inboxes = node.inboxes

    def step(self, session: psycopg.Connection[Any]) -> float:
        with session.transaction(force_rollback=self._dice.random() < ROLLED_BACK):
            messages = self._inboxes[self._topic].reap_any(session, 200, 4)
            if messages:
                rows = [(self._topic, m.id, m.origin, m.key, m.clock, m.sent_clock) for m in messages]
                session.execute(HANDLED, [list(column) for column in zip(*rows, strict=True)])
        return 0.0 if messages else 0.03


def load(out: OutNode, into: InNode, signals: Signals, seed: int) -> list[Sender]:
    """Return those who work at the nodes."""
    writers = [Writer(out, f"new-{topic}", topic, signals, seed) for topic in PARTITIONS]
    return [*writers, *(Reaper(into, topic, signals, seed) for topic in PARTITIONS)]
