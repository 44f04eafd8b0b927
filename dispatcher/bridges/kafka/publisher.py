"""Publishes to Kafka, at least once or exactly once.

*At least once*: an idempotent producer that waits for all replicas and gives no record up. With a finite
`message.timeout.ms` it would leave a gap: records 1, 4 and 5 were in the log while a broker was away for 2.6 s, and
whoever then sends 2 and 3 overtakes within a key. As it is, what is missing after an end is a suffix of each partition.

*Exactly once*: each batch is a transaction of Kafka (KIP-98), which also commits the clock of its last message as an
offset of a group of the bridge's own. The next producer with the same transactional id fences this one, and what is up
to the clock that it finds is not published again. Clocks and not seqs: a node that was put back in time gives out seqs
again, and never clocks.
"""

import contextlib
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from dispatcher.bridges.kafka.client import POLL_S, STEP_S, KafkaClient, log
from dispatcher.bridges.kafka.left_open import LeftOpen, Place, ask_ends
from dispatcher.bridges.kafka.meaning import FENCED, OF_THE_RECORD, PASSING, PURGED, REFUSED, advice
from dispatcher.bridges.kafka.options import hiding
from dispatcher.bridges.kafka.own_records import OwnRecords
from dispatcher.bridges.kafka.partition import partitioner
from dispatcher.bridges.kafka.reports import Reports
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, Numbered, OutBridge, RecordRefused
from mailroom.bridges.record import Record
from mailroom.errors import ConfigurationError

told = logging.getLogger("mailroom.dispatcher")

# How long a topic may take to be created by the broker itself, and how long its absence is believed. Less than
# `tending.PATIENCE_S`, or the state would be unreachable meanwhile.
ABSENT_S = 2.0
MAX_BYTES = 1_000_000  # librdkafka's own default of message.max.bytes
# A client may wait for ever, for a coordinator that it no longer knows (librdkafka's issue 5511). So one that ends no
# transaction, or gets nothing acknowledged, is made anew; `call_thread` sees to one whose call never returns. The mark
# says what was committed; without a mark what was on its way may be there twice, as after a crash.
TRANSACTION_S = 30.0
SILENT_S = 300.0
STABLE_S = 6.0  # until a mark that is not stable is taken for one whose transaction has no end
ENDS_S = 10.0  # until it is no longer asked where logs end
# Where the offset of a bridge's own group stands.
MARK_PART = 0


def own_id(bridge: OutBridge) -> str:
    """Return the bridge's transactional id, which is its group's name, too. A link's number is never used again."""
    return f"mailroom.{bridge.node_id}.{bridge.link}"


class KafkaPublisher(KafkaClient):
    """A publisher to Kafka; see `mailroom.bridges.publisher`."""

    def __init__(self, bridge: OutBridge) -> None:
        super().__init__(bridge.name, own_id(bridge), bridge.settings.address, bridge.options)
        self._bridge = bridge
        self._exactly_once = bridge.settings.exactly_once
        self._max_bytes = int(str(self._options.get("message.max.bytes", MAX_BYTES)))
        self._producer: Producer | None = None
        self._group: Consumer | None = None
        self._mark = 0
        self._was_away = False
        self._topics: set[str] = set()
        self._there: dict[str, Collection[int]] = {}
        self._numbered: list[Numbered] = []
        self._absent: dict[str, tuple[float, str]] = {}
        self._begun: set[Place] = set()  # where this producer's transactions end nothing of an earlier one
        self._partition = partitioner(bridge.name, str(self._options.get("partitioner", "murmur2_random")))

    async def open(self) -> int:
        """Connect, fence a predecessor, and read the mark."""
        return await self._in_thread(self._open)

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Read this bridge's records of that time in all topics that it may have published to."""
        return await self._in_thread(lambda: self._published(after, since))

    async def parts(self, topics: Collection[str]) -> Mapping[str, int]:
        """Ask how many partitions these topics have."""
        return await self._in_thread(lambda: self._parts(topics))

    def numbered(self) -> Sequence[Numbered]:
        """Return the offsets of what was acknowledged."""
        told, self._numbered = self._numbered, []
        return told

    async def ends(self, places: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """Ask where these partitions end. A topic that is not there was deleted by somebody: of it nothing is told."""
        return await self._in_thread(lambda: self._ends(places))

    async def publish(self, records: Sequence[Record]) -> None:
        """Publish in one transaction, or idempotently."""
        await self._in_thread(lambda: self._publish(records))

    async def keep(self) -> None:
        """Commit the mark's offset again: a group's offsets expire a week after its last commit."""
        await self._in_thread(lambda: self._publish(()))

    # -- In the thread ------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        self._make()
        cluster = self._again(lambda: self._going().list_topics(timeout=STEP_S))
        self._there = {name: topic.partitions.keys() for name, topic in cluster.topics.items()}
        if not self._exactly_once:
            return 0
        with self._using(self._mark_right):
            self._find_mark_topic()
            self._again(lambda: self._going().init_transactions(STEP_S))
            found = self._read_mark()
        self._was_away = False
        self._mark = max(self._mark, found)
        return found

    def _make(self) -> None:
        own = (
            {"transactional.id": own_id(self._bridge)}
            if self._exactly_once
            else {"message.timeout.ms": "0", "enable.gapless.guarantee": "true"}
        )
        options = {"linger.ms": "1"} | self._options | own | {"enable.idempotence": "true", "acks": "all"}
        try:
            self._producer = Producer(options, logger=log)
            if self._exactly_once and self._group is None:
                group = {"group.id": own_id(self._bridge), "enable.auto.commit": "false"}
                self._group = Consumer(self._of_a_consumer() | group, logger=log)
        except KafkaException as error:
            text = hiding(self._options, error.args[0].str())
            raise ConfigurationError(f"Bridge {self._bridge.name}: {text}", code="MR-bridge-options") from None

    def _of_a_consumer(self) -> dict[str, object]:
        """Return the options without those of a producer, which a consumer does not know."""
        return {name: value for name, value in self._options.items() if not name.startswith("message.")}

    def _note(self, error: KafkaError) -> None:
        super()._note(error)
        self._was_away = True

    def _look_at_mark(self) -> None:
        """Look, if the broker was away, whether it still has what it has acknowledged: it may have been put back.

        It would go on with a transaction of this producer, or say that one is committed of which it knows nothing.
        """
        self._serve_callbacks()
        if not (self._exactly_once and self._was_away):
            return
        self._drop()
        if 0 < (found := self._open()) < self._mark:  # one that is gone has its own rule
            raise BrokerTrouble(f"its mark is {found:,} and was {self._mark:,} before it was away")

    def _serve_callbacks(self) -> None:
        if self._producer is not None:
            self._producer.poll(0)
        # Nothing is assigned, so it is an error: that of the group's coordinator is told nowhere else.
        told = None if self._group is None else self._group.poll(0)
        if told is not None and (error := told.error()) is not None:
            self._note(error)

    def _going(self) -> Producer:
        self._check_open()
        if self._producer is None:
            raise BrokerTrouble("given up")
        return self._producer

    def _read_mark(self) -> int:
        for _ in range(2):  # the broker may have been away
            try:
                return self._again(lambda: self._committed(self._consumer()), STABLE_S)
            except KafkaException as error:
                if error.args[0].code() not in PASSING:
                    raise
            # Without what a transaction has written that has not ended.
            options = {"group.id": own_id(self._bridge), "isolation.level": "read_uncommitted"}
            consumer = Consumer(self._of_a_consumer() | options, logger=log)
            try:
                found = self._again(lambda consumer=consumer: self._committed(consumer))  # type: ignore[misc]  # bound at once
            finally:
                consumer.close()
        return self._mended(found)

    def _committed(self, consumer: Consumer) -> int:
        [found] = consumer.committed([self._mark_at(0)], timeout=STEP_S)
        if found.error is not None:
            raise KafkaException(found.error)
        return max(0, found.offset)

    # D-bridges-30: A mark whose transaction Kafka has not ended is found in the log, and committed anew.
    def _mended(self, mark: int) -> int:
        """Commit the mark again; it was last known as this. A transaction that wrote one has no end at Kafka.

        By now none of this producer is under way, and nobody can say what became of it. The log can: if it was
        committed, its records are there, and the last of them has its mark.
        """
        with self._reading() as (_, own, places):
            mark = max(mark, own.last_clock(places))
        told.warning(
            "bridges: Kafka has not ended a transaction of %s that wrote its mark. By the log the mark is %d, which is "
            "committed anew.", self._name, mark,
        )  # fmt: skip
        self._going().begin_transaction()
        self._commit(mark)
        return mark

    @property
    def _mark_right(self) -> str:
        return f"Read on topic {self._bridge.settings.mark_topic}"

    def _find_mark_topic(self) -> None:
        try:
            self._find(self._bridge.settings.mark_topic or "", self._mark_right)
        except RecordRefused as refused:
            raise BrokerRefused(f"the mark has no place: {refused}", code="MR-bridge-broker-refused") from None

    def _consumer(self) -> Consumer:
        if self._group is None:
            raise BrokerTrouble("given up")
        return self._group

    def _mark_at(self, clock: int) -> TopicPartition:
        return TopicPartition(self._bridge.settings.mark_topic or "", MARK_PART, clock)

    def _parts(self, topics: Collection[str]) -> dict[str, int]:
        if self._producer is None:
            self._open()
        found = {topic: self._find(topic, _right_to_publish([topic])) for topic in sorted(topics)}
        self._topics |= found.keys()
        return found

    def _publish(self, records: Sequence[Record]) -> None:
        self._look_at_mark()
        if self._producer is None:
            self._open()
            # The end of the transaction before was unknown, and by the mark it is known.
            records = [record for record in records if record.clock > self._mark]
        self._check(records)
        try:
            numbered = self._in_transaction(records) if self._exactly_once else self._produce(records).numbered()
        except (RecordRefused, BrokerTrouble, KafkaException):
            # It has failed as a whole, or has a gap from here on.
            self._drop()
            raise
        self._numbered += numbered
        if records:
            self._mark = records[-1].clock
        self._look_at_mark()
        self._error = None

    def _ends(self, places: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
        admin = AdminClient(cast("dict[str, Any]", self._of_a_consumer()), logger=log)
        there = {place for place in places if place[1] in self._there.get(place[0], ())}
        found: dict[Place, int] = {}
        # One without a leader holds up nothing before something is published to it: then its offset tells.
        with contextlib.suppress(KafkaException):
            self._again(lambda: ask_ends(admin, there, found), ENDS_S)
        return found

    def _published(self, after: int, since: datetime) -> list[tuple[int, UUID]]:
        since_ms = int(since.timestamp() * 1000)
        with self._reading() as (consumer, own, places):
            wanted = [TopicPartition(*place, since_ms) for place in places]
            found = self._again(lambda: consumer.offsets_for_times(wanted, timeout=STEP_S)) if wanted else []
            if errors := [each.error for each in found if each.error is not None]:
                raise KafkaException(errors[0])  # of one partition, whose offset means nothing then
            reading = [each for each in found if each.offset >= 0]  # the others have nothing of that time
            return [(clock, id) for _, clock, id in own.read(reading) if clock > after]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[tuple[Consumer, OwnRecords, list[Place]]]:
        """Give a consumer of committed records, and all partitions to which this bridge may have published."""
        options = {"group.id": own_id(self._bridge), "enable.auto.commit": "false", "enable.partition.eof": "true"}
        consumer = Consumer(self._of_a_consumer() | options, logger=log)
        try:
            with self._using(f"Read on topic {self._bridge.settings.form.topic}"):
                cluster = self._again(lambda: consumer.list_topics(timeout=STEP_S))
                # Not topics of the cluster's own, such as __consumer_offsets, which this client may not be allowed to
                # read.
                name = re.compile(
                    re.escape(self._bridge.settings.form.topic).replace(re.escape("{topic}"), "[A-Za-z].*")
                )
                yield (
                    consumer,
                    OwnRecords(consumer, self._mine, self._again, self._check_open),
                    [
                        (topic, part)
                        for topic, told in cluster.topics.items()
                        if name.fullmatch(topic)
                        for part in told.partitions
                    ],
                )
        finally:
            consumer.close()

    @property
    def _mine(self) -> dict[str, bytes]:
        return {"mailroom-origin": str(self._bridge.node_id).encode(), "mailroom-link": str(self._bridge.link).encode()}

    def _check(self, records: Sequence[Record]) -> None:
        for record in records:
            size = len(record.key or b"") + len(record.value or b"")
            size += sum(len(name) + len(value) for name, value in record.headers)
            if size > self._max_bytes:
                raise RecordRefused(
                    f"the record of message {record.id} has {size:,} bytes, and message.max.bytes is "
                    f"{self._max_bytes:,}. Raise it for this bridge and for its topic.",
                    code="MR-bridge-record-refused",
                )
        for topic in sorted({record.topic for record in records} - self._topics):
            self._find(topic, _right_to_publish([topic]))
            self._topics.add(topic)

    def _find(self, topic: str, right: str) -> int:
        """Look whether the topic is there, and may be known; return how many partitions it has.

        A broker that creates topics by itself does so now.
        """
        self._right = right
        since, why = self._absent.get(topic, (0.0, ""))
        if time.monotonic() - since < ABSENT_S:
            raise RecordRefused(why, code="MR-bridge-record-refused")
        until = time.monotonic() + ABSENT_S
        while True:
            found = self._again(lambda: self._going().list_topics(topic, timeout=STEP_S)).topics[topic]
            if found.error is None:
                return len(found.partitions)
            if found.error.code() in OF_THE_RECORD and time.monotonic() >= until:
                what_to_do = advice(found.error.str(), right, self._own_name) or " Create it, or allow it."
                why = f"topic {topic} cannot be published to ({self._text(found.error)}).{what_to_do}"
                self._absent[topic] = (time.monotonic(), why)
                raise RecordRefused(why, code="MR-bridge-record-refused")
            self._error = found.error
            self._closed.wait(POLL_S)

    def _in_transaction(self, records: Sequence[Record]) -> list[Numbered]:
        ended: set[Place] = set()
        while True:
            self._going().begin_transaction()
            reports = self._produce(records)
            with self._using(f"Read on topic {', '.join(sorted({record.topic for record in records}))}"):
                if not (given_up := self._would_commit(reports, ended)):
                    break
                # D-bridges-29: What Kafka has not ended is aborted with the first transaction, which is repeated.
                self._again(lambda: self._going().abort_transaction(STEP_S), TRANSACTION_S)
            ended |= given_up
        self._begun |= reports.places()
        self._commit(records[-1].clock if records else self._mark)
        return reports.numbered()

    def _commit(self, clock: int) -> None:
        mark = [self._mark_at(clock)]
        group = self._consumer().consumer_group_metadata()
        with self._using(self._mark_right):
            self._again(lambda: self._going().send_offsets_to_transaction(mark, group, STEP_S), TRANSACTION_S)
            self._again(lambda: self._going().commit_transaction(STEP_S), TRANSACTION_S)

    def _would_commit(self, reports: Reports, ended: Collection[Place]) -> set[Place]:
        """Return where a commit would commit what was given up before. Where that `ended`, it was aborted just now."""
        starts = {(each.topic, each.part): each.first for each in reports.numbered()}
        if unknown := reports.places() - starts.keys() - self._begun:
            topic, part = min(unknown)
            raise BrokerTrouble(f"it does not say where its transaction begins in partition {part} of {topic}")
        starts = {place: start for place, start in starts.items() if place not in self._begun}
        if not starts:
            return set()
        look = LeftOpen(self._name, self._own_name, self._of_a_consumer(), self._mine, self._again, self._pause)
        left = look.before(starts)
        return {
            place for place, at in left.items()
            if look.is_given_up(place, at, starts[place], self._mark, has_ended=place in ended)
        }  # fmt: skip

    def _produce(self, records: Sequence[Record]) -> Reports:
        """Give the records to the client, and wait until each is acknowledged, or one has failed."""
        with self._using(_right_to_publish({record.topic for record in records}), for_records=True):
            return self._give(records)

    def _give(self, records: Sequence[Record]) -> Reports:
        producer = self._going()
        reports = Reports()
        for record in records:
            self._check_open()  # who has lost the database meanwhile hands over nothing more
            part = self._partition(record)
            report = reports.of_the_next(record.topic, part)
            while True:
                try:
                    producer.produce(
                        record.topic, record.value, record.key, part, on_delivery=report,
                        timestamp=int(record.at.timestamp() * 1000), headers=list(record.headers),
                    )  # fmt: skip
                    break
                except BufferError:
                    self._going().poll(POLL_S)
                except KafkaException as error:
                    if error.args[0].code() == KafkaError._FATAL:
                        self._going().poll(0)  # raises what was fatal
                    raise
        left, since = len(producer), time.monotonic()
        while left and not (failed := reports.failed()):  # what is neither acknowledged nor given up
            self._going().poll(POLL_S)
            if len(producer) < left:
                left, since = len(producer), time.monotonic()
                self.answered_at = since
            elif time.monotonic() - since > SILENT_S:
                raise BrokerTrouble(self.trouble or "it acknowledges nothing")
            if self._error is not None and (self._error.fatal() or self._error.code() in REFUSED | FENCED):
                raise KafkaException(self._error)
        if failed := reports.failed():
            cause = next((error for error in failed if error.code() in OF_THE_RECORD), failed[0])
            if self._exactly_once and cause.code() in PURGED:
                # The transaction has failed before them, say when it asked for a topic, and says why if it is to end.
                self._again(lambda: self._going().commit_transaction(STEP_S), TRANSACTION_S)
            raise KafkaException(cause)
        return reports

    def _drop(self) -> None:
        """Give the producer up, with what it has not sent."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(KafkaException):  # that of a fatal error, again: it is told, or is of no interest
                producer.purge(blocking=False)
                producer.poll(0)
        self._topics.clear()
        self._begun.clear()
        if self._closed.is_set() and self._group is not None:
            group, self._group = self._group, None
            group.close()

    def _leave(self) -> None:
        # Sent later, what it still has would come behind what its successor sends, and within a key overtake.
        if (producer := self._producer) is not None:
            producer.purge(blocking=False)


def _right_to_publish(topics: Collection[str]) -> str:
    [topic, *others] = sorted(topics) or [""]
    return f"Write and Describe on topic {topic}" if not others else "Write and Describe on all topics of the bridge"
