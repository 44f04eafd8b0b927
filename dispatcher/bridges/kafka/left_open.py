"""What an earlier transaction of this producer has left open, where Kafka has not ended it.

For each producer a partition knows where its open records begin, over all epochs, and the next end of one of its
transactions ends them all. Kafka should have ended them by then. Where it has not, a commit would commit what was given
up as well, and readers of committed records get it twice. So it is looked at before the first commit to a partition.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # it is made for callers

from dispatcher.bridges.kafka.client import POLL_S, STEP_S, headers_of
from dispatcher.bridges.kafka.client import log as client_log
from mailroom.bridges.publisher import BrokerTrouble

log = logging.getLogger("mailroom.dispatcher")

T = TypeVar("T")
Place: TypeAlias = tuple[str, int]

SETTLES_S = 2.0  # how long transactions of others, which are open most of the time, are waited for
SILENT_S = 30.0


class Again(Protocol):
    """Calls the client until the broker has answered."""

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what the call returns."""
        ...


def ask_ends(
    admin: AdminClient, places: Collection[Place], found: dict[Place, int],
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> None:  # fmt: skip
    """Ask where these partitions end for readers with this isolation, unless it is found already."""
    end = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # the library says no type
    wanted = {TopicPartition(*place): end for place in places if place not in found}
    failed: BaseException | None = None
    told = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=STEP_S) if wanted else {}
    for place, answer in told.items():
        if (error := answer.exception()) is not None:  # often the same one for all
            failed = error
        elif (offset := answer.result().offset) < 0:  # the client says so while it knows no leader
            failed = KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, retriable=True))
        else:
            found[place.topic, place.partition] = offset
    if failed is not None:
        raise failed


class LeftOpen:
    """Looks for the bridge `name` with its `group` and these options. Its records have the headers `mine`.

    `pause` waits for a moment, and raises if the bridge is given up meanwhile.
    """

    def __init__(
        self, name: str, group: str, options: Mapping[str, object], mine: Mapping[str, bytes], again: Again,
        pause: Callable[[], None],
    ) -> None:  # fmt: skip
        self._name = name
        self._group = group
        self._options = cast("dict[str, Any]", dict(options))
        self._mine = mine.items()
        self._again = again
        self._pause = pause

    def before(self, starts: Mapping[Place, int]) -> dict[Place, int]:
        """Return where something is open before these offsets, at which the transaction in hand begins: from where on.

        Kafka has all of it on each replica, so it is seen: what lies behind it is acknowledged.
        """
        admin = AdminClient(self._options, logger=client_log)
        until = time.monotonic() + SETTLES_S
        while True:
            found: dict[Place, int] = {}
            self._again(lambda found=found: ask_ends(admin, starts, found, IsolationLevel.READ_COMMITTED))  # type: ignore[misc]  # bound at once
            left = {place: at for place, at in found.items() if at < starts[place]}
            if not left or time.monotonic() > until:
                return left
            self._pause()

    def is_given_up(self, place: Place, first: int, end: int, mark: int, *, has_ended: bool) -> bool:
        """Tell whether records of this bridge between these offsets were given up, and a commit would commit them.

        The earliest transaction that is open in this partition, of any producer, begins at `first`. If the record there
        is of this bridge, and the mark says that it is committed, then Kafka has lost the end of that commit: another
        commit is what it needs, and an abort would take the records away. If the record is of another producer, records
        of this bridge that come later may be open too, unless an abort `has_ended` them.
        """
        topic, part = place
        own = list(self._own(place, first, end))
        at_first = next((clock for offset, clock in own if offset == first), None)
        if at_first is not None and at_first <= mark:
            log.warning(
                "bridges: Kafka has not ended a committed transaction of %s in partition %d of %s, from offset %d on. "
                "The next commit there ends it.", self._name, part, topic, first,
            )  # fmt: skip
            return False
        if at_first is not None and has_ended:
            raise BrokerTrouble(f"an aborted transaction stays open in partition {part} of {topic} at offset {first}")
        given_up = sum(clock > mark for _, clock in own)
        if has_ended or not given_up:
            return False
        log.warning(
            "bridges: Kafka has not ended a transaction that %s had given up in partition %d of %s: %d records from "
            "offset %d on. They are aborted.", self._name, part, topic, given_up, first,
        )  # fmt: skip
        return True

    def _own(self, place: Place, first: int, end: int) -> Iterator[tuple[int, float]]:
        """Read the offsets and clocks of this bridge's records, also of those that are not committed."""
        own = {
            "group.id": self._group, "enable.auto.commit": "false", "isolation.level": "read_uncommitted",
            "enable.partition.eof": "true",
        }  # fmt: skip
        consumer = Consumer(self._options | own, logger=client_log)
        try:
            consumer.assign([TopicPartition(*place, first)])
            since = time.monotonic()
            while time.monotonic() < since + SILENT_S:
                self._pause()
                for message in consumer.consume(1_000, POLL_S):
                    since = time.monotonic()
                    if (error := message.error()) is not None and error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    if error is not None or (offset := int(message.offset() or 0)) >= end:
                        return
                    headers = dict(headers_of(message) or [])
                    if self._mine <= headers.items():
                        yield offset, _clock(headers)
            raise BrokerTrouble(f"what is open at offset {first} of {place[0]}/{place[1]} cannot be read")
        finally:
            consumer.close()


def _clock(headers: Mapping[str, bytes | None]) -> float:
    """Return a clock that anybody may have written: what is none is above each mark."""
    try:
        return int(headers["mailroom-clock"] or b"")
    except (KeyError, ValueError):
        return inf
