"""Reads from Kafka: each partition from where the database says, and never from where Kafka would.

All partitions are assigned by hand, not through a group: one dispatcher leads, so there is nothing to share out, and no
rebalance that would hand a partition to somebody else in the middle of a batch. The group's offsets at Kafka are
committed for others, who watch the lag there. A position that is gone is an error and never reset; so is one of a topic
that was made anew under the same name, however far its records reach by now.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from dispatcher.bridges.kafka.client import STEP_S, KafkaClient, headers_of, log
from dispatcher.bridges.kafka.held_up import HeldUp
from dispatcher.bridges.kafka.meaning import advice
from dispatcher.bridges.kafka.options import hiding
from dispatcher.bridges.kafka.topic_ids import TopicIds
from mailroom.bridges.arrival import Arrived
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble
from mailroom.bridges.source import BrokerPosition, BrokerWasAway, InBridge, PartsChanged, PositionGone
from mailroom.errors import ConfigurationError

ROWS = 2_000  # at once,
MAX_BYTES = 4 * 1024 * 1024  # and that much
GATHER_S = 0.005
LOOK_S = 10.0  # between two looks for new partitions
GONE = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION,
        KafkaError._NO_OFFSET,
    }
)  # fmt: skip


def own_group(bridge: InBridge) -> str:
    """Return the name of the bridge's group. An origin's number is never used again."""
    return f"mailroom.{bridge.node_id}.in.{bridge.origin}"


class KafkaSource(KafkaClient):
    """A source of records at Kafka; see `mailroom.bridges.source`."""

    def __init__(self, bridge: InBridge) -> None:
        super().__init__(bridge.name, own_group(bridge), bridge.settings.address, bridge.options)
        self._bridge = bridge
        self._consumer: Consumer | None = None
        self._topic_ids: TopicIds | None = None
        self._logs: dict[str, str] = {}
        self._positions: dict[tuple[str, int], BrokerPosition] = {}
        self._left: list[Arrived | BrokerPosition] = []
        self._ends_seen: dict[tuple[str, int], int] = {}
        self._held_up = HeldUp(bridge.name)
        self._looked_at = 0.0
        self._was_away = False

    async def open(self) -> str:
        """Connect; the cluster has an id."""
        return await self._in_thread(self._open)

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        """Assign the known partitions, and find the others."""
        return await self._in_thread(lambda: self._begin(known))

    async def read(self, wait_s: float) -> Sequence[Arrived | BrokerPosition]:
        """Read what has come, in the order of each partition."""
        return await self._in_thread(lambda: self._read(wait_s))

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        """Commit the group's offsets, which nothing of ours reads."""
        await self._in_thread(lambda: self._taken(positions))

    # -- In the thread ------------------------------------------------------------------------------------------------

    def _open(self) -> str:
        own = {
            "group.id": own_group(self._bridge), "enable.auto.commit": "false", "auto.offset.reset": "error",
            "isolation.level": "read_committed", "queued.max.messages.kbytes": "16384", "enable.partition.eof": "true",
        }  # fmt: skip
        try:
            self._consumer = Consumer(self._options | own, logger=log)
        except KafkaException as error:
            text = hiding(self._options, error.args[0].str())
            raise ConfigurationError(f"Bridge {self._name}: {text}", code="MR-bridge-options") from None
        cluster = self._again(lambda: self._going().list_topics(timeout=STEP_S))
        if cluster.controller_id in cluster.brokers:  # it answers for the others
            self._topic_ids = TopicIds(self._options, self._bridge.settings.topics)
        return str(cluster.cluster_id)

    def _serve_callbacks(self) -> None:
        told = None if self._consumer is None else self._consumer.poll(0)
        if told is not None:
            # D-bridges-13: Each poll of a consumer is looked at.
            self._keep(told)  # what is assigned comes here, too

    def _going(self) -> Consumer:
        self._check_open()
        if self._consumer is None:
            raise BrokerTrouble("given up")
        return self._consumer

    def _parts(self) -> list[tuple[str, int]]:
        found = []
        for topic in self._bridge.settings.topics:
            told = self._again(lambda topic=topic: self._going().list_topics(topic, timeout=STEP_S)).topics[topic]  # type: ignore[misc]  # bound at once
            if told.error is not None or not told.partitions:
                why = "it has no partitions" if told.error is None else self._text(told.error)
                what_to_do = advice(why, f"Read and Describe on topic {topic}", self._own_name)
                raise BrokerRefused(
                    f"topic {topic} cannot be read ({why}).{what_to_do or ' Create it, or allow it.'}",
                    code="MR-bridge-no-topic",
                )
            found += [(topic, part) for part in sorted(told.partitions)]
        return found

    def _begin(self, known: Sequence[BrokerPosition]) -> list[BrokerPosition]:
        self._looked_at = time.monotonic()
        self._positions = {(each.topic, each.part): each for each in known}
        # What comes meanwhile from where it was would come twice.
        self._going().unassign()
        self._left.clear()
        self._was_away = False
        self._ends_seen.clear()
        parts = self._parts()
        self._compare_ids()
        # Nothing of a topic that the bridge no longer has.
        wanted = [self._positions[part] for part in parts if part in self._positions]
        # D-bridges-14: Partitions are assigned by hand, and not by a group.
        self._going().assign([_assigned(each) for each in wanted])
        begun = {topic for topic, _ in self._positions}
        found = []
        for topic, part in parts:
            if (topic, part) not in self._positions:
                low, high = self._ends(topic, part)
                # A partition that was added later is read from its beginning, a topic from where the bridge says.
                start = low if topic in begun or self._bridge.settings.start == "earliest" else high
                found.append(BrokerPosition(topic, part, start, log=self._logs.get(topic)))
        return found

    def _compare(self, told: Mapping[str, str]) -> None:
        """Compare the topics with those in which the positions are."""
        self._logs |= told
        for (topic, part), position in self._positions.items():
            if position.log is not None and told.get(topic, position.log) != position.log:
                low, _ = self._ends(topic, part)
                why = f"the topic was made anew since it was read up to {position.next}: other records are there"
                raise PositionGone(position, low, why)

    def _ends(self, topic: str, part: int) -> tuple[int, int]:
        place = TopicPartition(topic, part)
        low, high = self._again(lambda: self._going().get_watermark_offsets(place, timeout=STEP_S, cached=False))
        return int(low), int(high)

    def _read(self, wait_s: float) -> list[Arrived | BrokerPosition]:
        if not self._left:
            if time.monotonic() - self._looked_at >= (STEP_S if self._error is not None else LOOK_S):
                self._look()
            # The client waits for as many as it is asked for. So one is awaited, and what came with it is taken.
            first = self._going().consume(1, min(wait_s, STEP_S))
            for message in first + (self._going().consume(ROWS - 1, GATHER_S) if first else []):
                self._keep(message)
        if self._left:
            self._confirm()
        size = taken = 0
        for taken, record in enumerate(self._left, 1):  # noqa: B007 - how many are within the limit
            size += len(record.value or b"") if isinstance(record, Arrived) else 0
            if size > MAX_BYTES:
                break
        records, self._left = self._left[:taken], self._left[taken:]
        if records:
            self._error = None
        return records

    def _confirm(self) -> None:
        """Look whether what was read since the last look is of the log that was read before, which may end any time."""
        if self._was_away:
            raise BrokerWasAway
        self._compare_ids()

    def _compare_ids(self) -> None:
        """Look whether the topics are the same. A cluster that does not tell that in time is believed without."""
        if self._topic_ids is not None:
            self._topic_ids.ask()
            self._compare(self._topic_ids.told(STEP_S))

    def _note(self, error: KafkaError) -> None:
        super()._note(error)
        self._was_away = True

    def _keep(self, message: Message) -> None:
        """Keep a record for `read`; or raise what is told in its place."""
        if (error := message.error()) is None:
            self._left.append(_arrived(message, self._logs.get(str(message.topic()))))
        elif error.code() == KafkaError._PARTITION_EOF:
            self._ends_seen[str(message.topic()), int(message.partition() or 0)] = int(message.offset() or 0)
        elif error.code() in GONE and message.topic() is not None:
            # What came before it of other partitions comes again.
            raise self._gone(str(message.topic()), int(message.partition() or 0))
        elif error.fatal() or not error.retriable():
            raise self._meaning(error, f"Read on topic {message.topic() or ', '.join(self._bridge.settings.topics)}")

    def _look(self) -> None:
        """Look for new partitions, and whether the broker answers."""
        self._looked_at = time.monotonic()
        try:
            parts = self._parts()
        except BrokerTrouble:
            return
        if any(part not in self._positions for part in parts):
            raise PartsChanged
        self._compare_ids()
        # What lies between the last record and the end are ends of transactions, and what was aborted. Kafka deletes
        # them as it does records, and who came back then would miss them.
        waiting = {}
        for part, end in self._ends_seen.items():
            if (was := self._positions[part]).next < end:
                self._left.append(BrokerPosition(*part, end, was.leader_epoch, was.log))
            elif (log_end := self._log_end(*part)) > was.next == end:
                waiting[part] = end, log_end
        self._held_up.look(waiting)

    def _log_end(self, topic: str, part: int) -> int:
        """Return where a partition's log ended at the last fetch, also behind what is committed. Nobody is asked."""
        _, high = self._going().get_watermark_offsets(TopicPartition(topic, part), cached=True)
        return int(high)

    def _gone(self, topic: str, part: int) -> PositionGone:
        self._compare_ids()  # another one has no offset of it
        position = self._positions[topic, part]
        low, high = self._ends(topic, part)
        if position.next < low:
            missing = f"records {position.next} to {low - 1} ({low - position.next:,}) are deleted there"
            return PositionGone(position, low, missing)
        if position.next > high:
            missing = f"the log ends at {high}, and was read up to {position.next}: it was cut back, or made anew"
            return PositionGone(position, high, missing)
        return PositionGone(position, position.next, "the log was cut back and written anew behind what was read")

    def _taken(self, positions: Sequence[BrokerPosition]) -> None:
        for each in positions:
            self._positions[each.topic, each.part] = each
        self._going().commit(
            offsets=[TopicPartition(each.topic, each.part, each.next) for each in positions], asynchronous=True
        )

    def _drop(self) -> None:
        self._topic_ids = None
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()


def _assigned(position: BrokerPosition) -> TopicPartition:
    if position.leader_epoch is None:
        return TopicPartition(position.topic, position.part, position.next)
    return TopicPartition(position.topic, position.part, position.next, leader_epoch=position.leader_epoch)


def _arrived(message: Message, topic_id: str | None) -> Arrived:
    kind, at_ms = message.timestamp()
    at = None if kind == TIMESTAMP_NOT_AVAILABLE else _moment(at_ms)
    given = headers_of(message)
    epoch = message.leader_epoch()
    return Arrived(
        str(message.topic()), int(message.partition() or 0), int(message.offset() or 0), _bytes(message.key()),
        _bytes(message.value()), given or [], at,
        None if epoch is None or epoch < 0 else epoch,
        log=topic_id,
        fault=None if given is not None else "the name of one of its headers is not UTF-8",
    )  # fmt: skip


def _moment(at_ms: int) -> datetime | None:
    """Return a time that whoever wrote the record has given: any number."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _bytes(text: bytes | str | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text
