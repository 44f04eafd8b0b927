"""What lies between the nodes and a broker of several servers."""

import random
import time
from collections.abc import Callable

from tests.faults.network import ANSWERS_LOST, QUIET, Network, Trouble

ANSWERS_S = (0.2, 1.5)


class Networks:
    """One network before each server, with the same trouble in all of them."""

    def __init__(self) -> None:
        self._networks: list[Network] = []
        self.trouble = QUIET

    def before(self, seed: int) -> Callable[[int], int]:
        """Return what makes one before a port, and returns its own."""

        def front(port: int) -> int:
            self._networks.append(Network("127.0.0.1", port, seed))
            return self._networks[-1].port

        return front

    def be(self, trouble: Trouble) -> None:
        """Have this trouble from now on, in the place of any other."""
        self.trouble = trouble
        for each in self._networks:
            each.be(trouble)

    def cut(self) -> None:
        """Reset every connection there is."""
        for each in self._networks:
            each.cut()

    def done(self, kind: str) -> int:
        """Return how often this has really happened."""
        return sum(each.done[kind] for each in self._networks)

    def close(self) -> None:
        """End them."""
        for each in self._networks:
            each.close()


def lose_answers(network: Networks, dice: random.Random) -> bool:
    """Let all answers get lost for a while, and with them the connections; return whether there were any."""
    before = network.done(ANSWERS_LOST)
    network.be(Trouble(ANSWERS_LOST))
    time.sleep(dice.uniform(*ANSWERS_S))
    network.cut()
    network.be(QUIET)
    network.cut()  # what came in between has heard a part
    return network.done(ANSWERS_LOST) > before
