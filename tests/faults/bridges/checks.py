"""What must hold of the ledgers and of the log at the broker after each round. Nothing here reads either."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias
from uuid import UUID

from tests.faults.links.checks import Handled, Sent, once

# Topics, here and at the broker, and inboxes. Records of the last one are written by no bridge, so they have no clock,
# and nothing but the position keeps the one that takes them in from taking them in twice.
LEAST, EXACTLY, FOREIGN = "least", "exactly", "foreign"
PARTITIONS = {LEAST: 6, EXACTLY: 3, FOREIGN: 2}
BRIDGED = (LEAST, EXACTLY)  # those that a bridge publishes to
# The same for other brokers: a stream and a work queue of NATS, and a queue of RabbitMQ.
STREAM, QUEUE, RABBIT = "stream", "queue", "rabbit"
TAKEN_IN = (*PARTITIONS, STREAM, RABBIT)  # by the other node; from the work queue a customer takes straight
TOPICS = (*TAKEN_IN, QUEUE)
LOGGED = (*PARTITIONS, STREAM)
ONCE_IN_LOG = (EXACTLY, FOREIGN, STREAM)

Place: TypeAlias = tuple[str, int]  # a topic at the broker and a partition of it


class Checker:
    """Checks round after round."""

    def __init__(self) -> None:
        self.repeats = 0  # in the log of what is published at least once, so far
        self._logged: dict[str, set[UUID]] = {topic: set() for topic in LOGGED}
        self._nth: dict[tuple[str, str], int] = {}  # of the last message of an inbox and a key
        self._clock: dict[tuple[str, str], int] = {}  # and its sent_clock

    def check(
        self,
        sent: Sequence[Sent],
        handled: Sequence[Handled],
        log: Mapping[str, Counter[UUID]],
        gone: Collection[UUID] = (),
        undone: Collection[UUID] = (),
        barred: Collection[UUID] = (),
    ) -> list[str]:
        """Return what this round violates.

        `log` says how often each message is in a topic at the broker, those of this round. What is `gone` was deleted
        or lost there before it was taken in, or left out by an operator, who set the position behind it. What is
        `undone` had been sent by a node that was put back since. What is `barred` may not be taken in any more.
        """
        return list(self._violations(sent, handled, log, gone, undone, barred))

    def _violations(
        self,
        sent: Sequence[Sent],
        handled: Sequence[Handled],
        log: Mapping[str, Counter[UUID]],
        gone: Collection[UUID],
        undone: Collection[UUID],
        barred: Collection[UUID],
    ) -> Iterator[str]:
        for topic in TOPICS:
            wanted = {each.id for each in sent if each.topic == topic}
            came = [each for each in handled if each.inbox == topic]
            yield from once(topic, wanted, came, {*gone, *undone})
            if topic not in LOGGED:
                continue
            if unpublished := wanted - log[topic].keys() - set(gone):
                yield f"{topic}: {len(unpublished)} are not in the log, as {min(unpublished)}"
            # A daemon that goes on late may repeat there what an earlier round has sent.
            if foreign := log[topic].keys() - wanted - set(undone) - self._logged[topic]:
                yield f"{topic}: {len(foreign)} in the log that nobody sent in this round, as {min(foreign)}"
        if taken := {each.id for each in handled} & set(barred):
            yield f"{len(taken)} taken in that an operator had left out, as {min(taken)}"
        self.repeats += sum(log[LEAST].values()) - len(log[LEAST].keys() - self._logged[LEAST])
        for topic in ONCE_IN_LOG:
            if twice := [id for id, times in log[topic].items() if times > 1 or id in self._logged[topic]]:
                yield f"{topic}: {len(twice)} in the log more than once, as {min(twice)}"
        for topic, ids in log.items():
            self._logged[topic] |= ids.keys()
        yield from self._keys(handled, {each.id: each.nth for each in sent})

    def _keys(self, handled: Sequence[Handled], nth: Mapping[UUID, int]) -> Iterator[str]:
        """Along each key, what was sent is handled in its order."""
        for each in handled:
            place = (each.inbox, each.key)
            if each.id not in nth:  # undone: where it stands is not known any more
                continue
            if nth[each.id] <= self._nth.get(place, 0):
                yield f"inversion in key {each.key} of {each.inbox}, at {each}"
            if each.sent_clock <= self._clock.get(place, 0):
                yield f"key {each.key} of {each.inbox} against the clock of its node, at {each}"
            self._nth[place] = max(nth[each.id], self._nth.get(place, 0))
            self._clock[place] = max(each.sent_clock, self._clock.get(place, 0))
