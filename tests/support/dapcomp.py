"""The worked run of dapcomp's README: three processes broadcast one message each, and what their clocks are then.

https://github.com/dmgcodevil/dapcomp: each message has arrived everywhere before the next one is sent. A history is the
clocks at which a process sent or received the messages, in their order.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

PROCESSES = ("p1", "p2", "p3")
CLOCKS = {"p1": 6, "p2": 6, "p3": 5}
HISTORIES = {"p1": [1, 4, 6], "p2": [2, 3, 6], "p3": [2, 4, 5]}


class Broadcast(NamedTuple):
    """`sender` sends `message`, and then each of `receivers` receives it."""

    sender: str
    message: str
    receivers: tuple[str, ...]


def broadcasts() -> Iterator[Broadcast]:
    """The run, step by step."""
    for nth, sender in enumerate(PROCESSES, start=1):
        yield Broadcast(sender, f"m{nth}", tuple(process for process in PROCESSES if process != sender))


def histories(send: Callable[[str, str], int], receive: Callable[[str, str, str, int], int]) -> dict[str, list[int]]:
    """Run it and return the histories.

    `send(sender, message)` returns the clock of the send, and `receive(receiver, sender, message, sent_clock)` that of
    the receipt. With real nodes the first sends and delivers, the second carries over the link and reaps.
    """
    found: dict[str, list[int]] = {process: [] for process in PROCESSES}
    for sender, message, receivers in broadcasts():
        sent_clock = send(sender, message)
        found[sender].append(sent_clock)
        for receiver in receivers:
            found[receiver].append(receive(receiver, sender, message, sent_clock))
    return found
