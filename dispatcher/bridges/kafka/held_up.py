"""Which partitions stand still because a transaction is open there: Kafka does not tell a reader of what is committed.

Such a reader gets nothing behind the first record of a transaction that is open. It is at the end of what it may read,
and the partition grows. For a short time that is so with each transaction.
"""

import logging
from collections.abc import Mapping
from typing import TypeAlias

log = logging.getLogger("mailroom.dispatcher")

# One after the other, a minute. Not a time: a reader that was paused itself has looked only once, and reads on then.
LOOKS = 6

Part: TypeAlias = tuple[str, int]


class HeldUp:
    """Tells in the log, once each, which partitions of the bridge `name` are held up, and which go on again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: dict[Part, tuple[int, int]] = {}

    def look(self, waiting: Mapping[Part, tuple[int, int]]) -> None:
        """Be told at each look which partitions wait: at which offset, and where their log ends."""
        before, self._seen = self._seen, {}
        for (topic, part), (offset, end) in waiting.items():
            was, looks = before.pop((topic, part), (offset, 0))
            if was != offset:
                self._tell_of_end((topic, part), looks)
                looks = 0
            self._seen[topic, part] = offset, looks + 1
            if looks + 1 == LOOKS:
                log.warning(
                    "bridges: %s waits in partition %d of %s at offset %d, and the log ends at %d: somebody has left a "
                    "transaction open there. Kafka ends it at its time-out (transaction.timeout.ms of its producer). "
                    "To see whose it is: kafka-transactions.sh describe-producers --topic %s --partition %d",
                    self._name, part, topic, offset, end, topic, part,
                )  # fmt: skip
        for place, (_, looks) in before.items():
            self._tell_of_end(place, looks)

    def _tell_of_end(self, place: Part, looks: int) -> None:
        if looks >= LOOKS:
            log.info("bridges: %s goes on in partition %d of %s", self._name, place[1], place[0])
