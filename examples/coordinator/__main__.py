"""`python -m examples.coordinator [DSN]`: a cluster of three nodes on one host, which post in turn."""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

import psycopg

import mailroom
from examples.coordinator import states
from examples.coordinator.coordinator import Coordinator
from examples.coordinator.node import Node, Status
from examples.coordinator.states import Connection
from inbox import Worker
from mailroom.cli.failures import tell
from mailroom.cli.output import say
from mailroom.puzzledb import MessageObject, encode
from mailroom.values.codec import decode

MESSAGES = 10
NODES = 3
WITHIN_S = 60.0


class Heard:
    """An observer for the nodes of this process: it keeps what each has heard, by clock, and tells when that is all.

    By clock, since an observer is called again if the transaction that it was called in rolls back.
    """

    def __init__(self, nodes: list[Node], wanted: int) -> None:
        self.run = uuid4().hex  # what an earlier run has left is not counted
        self.all = threading.Event()
        self._numbers: dict[UUID, dict[int, int]] = {node.id: {} for node in nodes}
        self._wanted = wanted

    def by(self, node: Node, message: MessageObject, _: Connection) -> None:
        """Keep a message that this node has received."""
        match decode(message.object):
            case [self.run, int(number)]:
                self._numbers[node.id][message.clock] = number
        if sum(map(len, self._numbers.values())) >= self._wanted:
            self.all.set()

    def numbers(self, node: Node) -> list[int]:
        """Return what a node has heard, in the order of the clocks if that is the order in which it heard it."""
        heard = self._numbers[node.id]
        return list(heard.values()) if list(heard) == sorted(heard) else []


@contextlib.contextmanager
def _running(workers: list[Worker]) -> Iterator[None]:
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()


def main(dsn: str) -> bool:
    """Post messages by all nodes in turn, and return whether each node has heard what the others posted, in order."""
    nodes = [Node(id=uuid5(NAMESPACE_URL, f"coordinator/{nth}")) for nth in range(NODES)]
    coordinators = [Coordinator(node) for node in nodes]
    heard = Heard(nodes, MESSAGES * (NODES - 1))
    with psycopg.connect(dsn) as connection:
        states.create(connection)
        for each in coordinators:
            each.join(connection)
            each.add_observer(partial(heard.by, each.node))
    with _running([each.worker(dsn) for each in coordinators]), psycopg.connect(dsn) as connection:
        for each in coordinators:
            each.set_status(connection, Status.UP)
        for number, each in enumerate(islice(cycle(coordinators), MESSAGES)):
            each.post(connection, "U", "C", encode([heard.run, number]))
            connection.commit()
        heard.all.wait(WITHIN_S)
    with psycopg.connect(dsn) as connection:
        for node, status, clock, _ in coordinators[0].cluster_state(connection):
            if node in nodes:
                say(f"{node.id} on {node.host} is {status}, at clock {clock}, and heard {heard.numbers(node)}")
        for each in coordinators:
            each.leave(connection)
    return all(
        heard.numbers(node) == [number for number in range(MESSAGES) if number % NODES != nth]
        for nth, node in enumerate(nodes)
    )


def _run(arguments: Sequence[str]) -> int:
    try:
        is_right = main(mailroom.dsn(arguments[0] if arguments else None))
    except Exception as error:
        return tell(error)
    say("Each node heard what the others posted, in order." if is_right else "WRONG: see above.")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
