"""A bridge's own records in Kafka's logs: others may write anything there."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias, cast
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from dispatcher.bridges.kafka.client import POLL_S, STEP_S, headers_of
from dispatcher.bridges.kafka.left_open import Again
from mailroom.bridges.record import id_of

Place: TypeAlias = tuple[str, int]

BACK, FURTHER = 1_000, 10  # how many records of a partition are read back at first, and how many times as many then


class OwnRecords:
    """Reads what `consumer` may read, which tells ends of partitions. Own records have the headers `mine`.

    `check` raises if the bridge is given up meanwhile.
    """

    def __init__(
        self, consumer: Consumer, mine: Mapping[str, bytes], again: Again, check: Callable[[], None]
    ) -> None:  # fmt: skip
        self._consumer = consumer
        self._mine = mine.items()
        self._again = again
        self._check = check

    def read(self, reading: Sequence[TopicPartition]) -> Iterator[tuple[Place, int, UUID]]:
        """Read partitions from these offsets to the end of each; return the place, clock and id of each own record."""
        self._consumer.assign(list(reading))
        left = {(each.topic, each.partition) for each in reading}
        while left:
            self._check()
            for message in self._consumer.consume(1_000, POLL_S):
                error, place = message.error(), (str(message.topic()), int(message.partition() or 0))
                if error is None:
                    headers = dict(cast("list[tuple[str, bytes]]", headers_of(message) or []))
                    if self._mine <= headers.items():
                        with suppress(LookupError, ValueError, StopIteration):
                            yield place, int(headers["mailroom-clock"]), id_of(headers)
                elif error.code() == KafkaError._PARTITION_EOF:
                    # To one that others write to it comes to an end again and again.
                    left.discard(place)
                elif not error.retriable():
                    raise KafkaException(error)

    def last_clock(self, places: Collection[Place]) -> int:
        """Return the highest clock of own records there, 0 if there are none. They rise in each partition."""
        left, back, highest = set(places), BACK, 0
        while left:
            bounds = {place: self._bounds(place) for place in left}
            starts = {place: max(low, high - back) for place, (low, high) in bounds.items()}
            for place, clock, _ in self.read([TopicPartition(*place, start) for place, start in starts.items()]):
                highest = max(highest, clock)
                left.discard(place)
            left = {place for place in left if starts[place] > bounds[place][0]}
            back *= FURTHER
        return highest

    def _bounds(self, place: Place) -> tuple[int, int]:
        low, high = self._again(
            lambda: self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=STEP_S, cached=False)
        )
        return int(low), int(high)
