"""What Kafka's client reports of the records that it is given: errors, and the offsets of what is acknowledged."""

from collections.abc import Callable
from typing import TypeAlias

from confluent_kafka import KafkaError, Message

from mailroom.bridges.publisher import Numbered

# By error, None if there is none: the record that was reported last.
# D-bridges-17: Offsets tell a bridge out that its broker has lost records.
Told: TypeAlias = dict[KafkaError | None, Message]


class Reports:
    """Of records of one batch. Each has a method of a dict called: a call of Python would cost as much as sending it.

    The first record of each partition has a dict of its own, and the others share one. The last report of these is that
    of the last record, since they are acknowledged in order.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[str, int], tuple[Told, Told]] = {}

    def of_the_next(self, topic: str, part: int) -> Callable[[KafkaError | None, Message], None]:
        """Return what is to be called with the report of the next record to this partition."""
        if (told := self._told.get((topic, part))) is not None:
            return told[1].__setitem__
        first, _ = self._told[topic, part] = {}, {}
        return first.__setitem__

    def places(self) -> set[tuple[str, int]]:
        """Return the partitions of which something was to be reported."""
        return set(self._told)

    def failed(self) -> list[KafkaError]:
        """Return the errors."""
        return [error for told in self._told.values() for each in told for error in each if error is not None]

    def numbered(self) -> list[Numbered]:
        """Return the offsets, once all records are acknowledged. The client does not know that of each repeat."""
        found = []
        for (topic, part), told in self._told.items():
            known = [offset for each in told if None in each if (offset := each[None].offset() or 0) >= 0]
            if known:
                found.append(Numbered(topic, part, known[0], known[-1]))
        return found
