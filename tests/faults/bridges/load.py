"""The load: what is sent at one node, what others write at the broker, and what is handled at the other node."""

import json
from typing import Any
from uuid import uuid4

import psycopg
from confluent_kafka import Producer

from tests.faults.bridges.broker import CampaignBroker
from tests.faults.bridges.checks import EXACTLY, FOREIGN, LEAST, QUEUE, RABBIT, STREAM, TAKEN_IN
from tests.faults.bridges.nodes import InNode, OutNode
from tests.faults.links.checks import Sent
from tests.faults.links.load import HANDLED, KEYS, ROLLED_BACK, Sender, Signals

BATCH = {LEAST: 300, EXACTLY: 300, STREAM: 150, RABBIT: 30, QUEUE: 60}  # messages of a transaction, at most
PAUSE_S = 0.4  # between two transactions of a writer, on average
KEYLESS = 0.3  # of the messages have no key
FOREIGN_BATCH = 40  # records, at most


class Writer(Sender):
    """Sends new messages, several in a transaction."""

    keyless = KEYLESS

    def step(self, session: psycopg.Connection[Any]) -> float:
        if self._signals.rests.is_set() or self._signals.crowded.is_set():
            return 0.1
        with session.transaction(force_rollback=self._dice.random() < ROLLED_BACK):
            self._send(session, [(0, None)] * self._dice.randint(1, BATCH[self._topic]))
        return self._dice.uniform(0, 2 * PAUSE_S)


class ForeignWriter(Sender):
    """Writes records that no bridge has made, straight to the broker. Its client gives none of them up."""

    def __init__(self, node: InNode, broker: CampaignBroker, signals: Signals, seed: int) -> None:
        super().__init__(node, FOREIGN, FOREIGN, signals, seed)
        self._client = {**broker.client, "enable.idempotence": True, "acks": "all", "message.timeout.ms": 0}
        self.renew()
        self._sent: list[Sent] = []

    def run(self) -> None:
        """Work until it is over."""
        pause_s = 0.0
        while not self._signals.over.wait(pause_s):
            with self.turn:
                pause_s = self._step()
        self._producer.purge()

    def renew(self) -> None:
        """Begin anew at a broker that has lost what it had of this one. Nothing may be on its way."""
        self._producer = Producer(self._client)

    def _step(self) -> float:
        if self._signals.rests.is_set() or self._signals.crowded.is_set():
            return 0.1
        for _ in range(self._dice.randint(1, FOREIGN_BATCH)):
            id = uuid4()
            key = None if self._dice.random() < KEYLESS else f"{self._name}-{self._dice.randrange(KEYS)}"
            self._nth += 1
            self._sent.append(Sent(id, FOREIGN, key or str(id), self._nth))
            value = json.dumps({"nth": self._nth})
            self._producer.produce(FOREIGN, value, key, headers={"ce_id": str(id)})
        while self._producer.flush(0.2) and not self._signals.over.is_set():
            pass
        return self._dice.uniform(0, 2 * PAUSE_S)

    def take_sent(self) -> list[Sent]:
        """Return what was written since the last time, and forget it. Only at rest."""
        sent, self._sent = self._sent, []
        return sent


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


class Load:
    """Those who work at the nodes and at the broker. `at_nodes` have sessions."""

    def __init__(self, out: OutNode, into: InNode, broker: CampaignBroker, signals: Signals, seed: int) -> None:
        self.foreign = ForeignWriter(into, broker, signals, seed)
        writers = [Writer(out, f"new-{topic}", topic, signals, seed) for topic in (LEAST, EXACTLY, STREAM, RABBIT)]
        reapers = [Reaper(into, topic, signals, seed) for topic in TAKEN_IN]
        self.at_nodes: list[Sender] = [*writers, Writer(into, f"new-{QUEUE}", QUEUE, signals, seed), *reapers]

    @property
    def senders(self) -> list[Sender]:
        """All of them."""
        return [*self.at_nodes, self.foreign]
