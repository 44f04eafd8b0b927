"""The Kafka between the nodes, the network before it, and an independent reader of its log."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import cast
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.faults.bridges.checks import PARTITIONS, Place
from tests.faults.network import Network
from tests.support.kafka import Kafka

READ_WITHIN_S = 60.0
GATHER_S = 0.1
FENCE_WITHIN_S = 15.0
DELETE_TIMES, DELETED_WITHIN_S = 2, 10.0
# What Kafka 4.3.1 says of its group coordinator after it was killed often; from then on that does nothing any more, and
# no transaction ends, until somebody starts the broker anew.
BROKEN = b"is out of sync with the underlying log"
CLIENT = {"reconnect.backoff.max.ms": 300, "log_level": 0}


class CampaignBroker:
    """A Kafka that nodes reach by `network` only; the campaign takes the straight way."""

    def __init__(self, home: Path, seed: int) -> None:
        self.down = threading.Lock()  # held by who takes it down, until it is up again
        self._networks: list[Network] = []
        self._log_read = 0

        def front(port: int) -> int:
            self._networks.append(Network("127.0.0.1", port, seed))
            return self._networks[0].port

        self.kafka = Kafka(home / "kafka", front=front)

    @property
    def network(self) -> Network:
        """What lies between the nodes and it."""
        return self._networks[0]

    def start(self) -> None:
        """Start it, with its topics."""
        self.kafka.start()
        for topic, partitions in PARTITIONS.items():
            self.kafka.create(topic, partitions)

    def close(self) -> None:
        """End it for good."""
        self.kafka.close()
        for network in self._networks:
            network.close()

    def fence(self, own_id: str, topic: str) -> None:
        """Take a bridge's transactional id away from it, and write with it in a transaction that is given up."""
        # What it leaves open when a fault meets it as well holds up readers for so long only.
        options = {"transactional.id": own_id, "transaction.timeout.ms": 5_000}
        producer = Producer({**self.kafka.client, **CLIENT, **options})
        producer.init_transactions(FENCE_WITHIN_S)
        producer.begin_transaction()
        producer.produce(topic, b"never committed")
        producer.flush(FENCE_WITHIN_S)
        producer.abort_transaction(FENCE_WITHIN_S)

    def delete_group(self, group: str) -> bool:
        """Delete a group with its offsets, as their expiry does; return whether it was there."""
        for _ in range(DELETE_TIMES):
            admin = AdminClient({**self.kafka.client, **CLIENT})  # no answer is on its way to it
            [deleted] = admin.delete_consumer_groups([group], request_timeout=DELETED_WITHIN_S).values()
            try:
                deleted.result()
            except KafkaException as error:
                if error.args[0].code() in (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.NON_EMPTY_GROUP):
                    return False
            else:
                return True
        # Without an answer it might be done at any time, and there would be nothing to rely on.
        with self.down:
            self.kafka.kill()
            self.kafka.start()
        return False

    def mend(self) -> bool:
        """Start it anew if it says that it is broken; return whether it did since the last call."""
        with self.kafka.log.open("rb") as log:
            log.seek(self._log_read)
            said = log.read()
        self._log_read += len(said)
        if BROKEN not in said:
            return False
        with self.down:
            self.kafka.kill()
            self.kafka.start()
        return True

    def truncate(self, place: Place, offset: int) -> None:
        """Delete what a partition has before an offset, as its retention does."""
        [done] = self.kafka.admin.delete_records([TopicPartition(*place, offset)]).values()
        done.result(READ_WITHIN_S)


class Auditor:
    """Reads the log as anybody may: committed records only, each partition from its beginning."""

    def __init__(self, broker: CampaignBroker) -> None:
        self.places: dict[Place, dict[int, UUID]] = {
            (topic, part): {} for topic, parts in PARTITIONS.items() for part in range(parts)
        }
        self._next = dict.fromkeys(self.places, 0)
        self._client = {
            **broker.kafka.client, **CLIENT, "group.id": "auditor", "enable.auto.commit": False,
            "isolation.level": "read_committed", "enable.partition.eof": True, "auto.offset.reset": "earliest",
        }  # fmt: skip
        self._counted: dict[Place, int] = dict.fromkeys(self.places, 0)  # up to where `take` has counted

    def read(self) -> None:
        """Read on, up to the end of each partition."""
        consumer = Consumer(self._client)
        try:
            consumer.assign([TopicPartition(*place, offset) for place, offset in self._next.items()])
            left = set(self.places)
            deadline = time.monotonic() + READ_WITHIN_S
            while left:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the log's ends were not reached: {left}")
                # It waits for as many as it is asked for.
                for message in consumer.consume(1_000, GATHER_S):
                    place, offset = (str(message.topic()), int(message.partition() or 0)), int(message.offset() or 0)
                    if (error := message.error()) is None:
                        self.places[place][offset] = _id(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        self._next[place] = offset
                        left.discard(place)
        finally:
            consumer.close()

    def ends(self) -> dict[Place, int]:
        """Return the offset behind the last record of each partition, as far as it was read."""
        return {place: max(ids, default=-1) + 1 for place, ids in self.places.items()}

    def take(self) -> dict[str, Counter[UUID]]:
        """Return how often each message is in each topic, of what was read since the last time."""
        found: dict[str, Counter[UUID]] = {topic: Counter() for topic in PARTITIONS}
        for place, ids in self.places.items():
            found[place[0]].update(id for offset, id in ids.items() if offset >= self._counted[place])
            self._counted[place] = max(ids, default=-1) + 1
        return found


def _id(message: Message) -> UUID:
    headers = cast("list[tuple[str, bytes]]", message.headers())
    return UUID(dict(headers)["ce_id"].decode())
