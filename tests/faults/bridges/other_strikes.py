"""What is done to the other brokers: NATS and RabbitMQ, and the stream of NATS, which is put back and made anew."""

import contextlib
import random
import threading
import time
from collections.abc import Callable

from tests.faults.bridges.checks import STREAM
from tests.faults.bridges.losses import Losses
from tests.faults.bridges.mutants import Aim
from tests.faults.bridges.networks import lose_answers
from tests.faults.bridges.others import LOST, NatsBroker, RabbitBroker
from tests.faults.links.strikes import Tally
from tests.faults.links.struck import LOST as NODE_LOST
from tests.faults.network import QUIET, Trouble

AWAY_S = (0.3, 3.0)
DOWN_S = (0.0, 1.0)
QUIET_S = 0.3  # in which what was sent before gets there
MEANWHILE_S = 3.0
PLACE = (STREAM, 0)


class OtherStriker:
    """Strikes a broker and its network, one fault after the other."""

    kills = 8

    def __init__(self, broker: NatsBroker | RabbitBroker, tally: Tally, seed: int) -> None:
        self._broker = broker
        self._tally = tally
        self._dice = random.Random(f"{seed} {broker.name}")
        self._kinds: dict[Callable[[], None], int] = {
            self._kill: self.kills, self._pause: 8, self._cut: 14, self._black_hole: 8, self._lose_answers: 20,
        }  # fmt: skip

    def strike(self) -> None:
        """Make one fault, drawn from the seed."""
        [kind] = self._dice.choices(list(self._kinds), list(self._kinds.values()))
        with contextlib.suppress(*NODE_LOST, *LOST):
            kind()

    def _did(self, what: str) -> None:
        self._tally.did(f"{self._broker.name} {what}")

    def _kill(self) -> None:
        with self._broker.down:
            self._broker.server.kill()
            time.sleep(self._dice.uniform(*DOWN_S))
            self._broker.server.start()
        self._did("killed")

    def _pause(self) -> None:
        with self._broker.down:
            self._broker.server.pause()
            time.sleep(self._dice.uniform(*AWAY_S))
            self._broker.server.resume()
        self._did("paused")

    def _cut(self) -> None:
        self._broker.network.cut()
        self._did("connections cut")

    def _black_hole(self) -> None:
        self._broker.network.be(Trouble("black hole"))
        time.sleep(self._dice.uniform(*AWAY_S))
        self._broker.network.be(QUIET)
        if self._dice.random() < 0.5:
            self._broker.network.cut()
        self._did("cut off")

    def _lose_answers(self) -> None:
        if lose_answers(self._broker.network, self._dice):
            self._did("answers lost")


class RabbitStriker(OtherStriker):
    """RabbitMQ, which takes long to start."""

    kills = 2


class NatsStriker(OtherStriker):
    """NATS, whose stream loses what it had, too. `turn` is held by who strikes the reader."""

    def __init__(
        self, broker: NatsBroker, losses: Losses, turn: threading.Lock, tally: Tally, seed: int, aim: Aim | None = None
    ) -> None:
        super().__init__(broker, tally, seed)
        self._nats = broker
        self._losses = losses
        self._turn = turn
        self._kinds |= {self._put_back: 4, self._make_anew: 4}
        if aim is not None:
            self._kinds = {self._lose_answers: 1}

    def _put_back(self) -> None:
        with self._turn, self._losses.turn:
            if self._losses.keeps.is_set():
                return
            with self._broker.down:
                end = self._nats.copy()
            time.sleep(self._dice.uniform(0, MEANWHILE_S))
            with self._losses.standing() as stood:
                known = self._lose(self._nats.put_back, end + 1) if stood else None
            if known is not None:
                self._did("stream put back")
                if known > end + 1:
                    self._losses.operator.resumes_into("put back", {PLACE: end + 1})

    def _make_anew(self) -> None:
        with self._turn, self._losses.turn:
            if self._losses.keeps.is_set():
                return
            if self._lose(self._nats.made_anew, 1) is not None:
                self._did("stream made anew")
                self._losses.operator.resumes_into("made anew", {PLACE: 1})

    def _lose(self, work: Callable[[], None], since: int) -> int | None:
        """Have the stream lose what it had, while nobody gets through; return where it was read to, None if not known.

        The reader may have something in hand, which it takes in yet.
        """
        self._broker.network.be(Trouble("black hole"))
        try:
            time.sleep(QUIET_S)
            known = self._losses.operator.of_into.known().get(PLACE)
            if known is None:
                return None
            with self._broker.down:
                self._nats.end()
                work()
            self._losses.lacking.add(STREAM)
            gone = self._nats.forget(since)
            self._losses.had |= set(gone.values())
            self._losses.lost |= {id for at, id in gone.items() if at >= known}
        finally:
            self._broker.network.cut()
            self._broker.network.be(QUIET)
            self._broker.network.cut()
        return known
