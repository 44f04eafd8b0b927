"""The Kafka between the nodes, two servers with a network before each, and an independent reader of its log."""

import shutil
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import cast
from uuid import UUID

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from tests.faults.bridges.checks import PARTITIONS, Place
from tests.faults.bridges.networks import Networks
from tests.faults.bridges.segments import Partition
from tests.support.kafka import Kafka

SERVERS = 2
READ_WITHIN_S = 60.0
GATHER_S = 0.1
FENCE_WITHIN_S = 15.0
DELETE_TIMES, DELETED_WITHIN_S = 2, 10.0
# What Kafka 4.3.1 says of its group coordinator after it was killed often; from then on that does nothing any more, and
# no transaction ends, until somebody starts the broker anew.
BROKEN = b"is out of sync with the underlying log"
CLIENT = {"reconnect.backoff.max.ms": 300, "log_level": 0}


class CampaignBroker:
    """A Kafka of two servers, to which nodes get by `network` only; the campaign takes the straight way.

    Each partition is at one of the two, so that one of them can be away and the other one not.
    """

    def __init__(self, home: Path, seed: int) -> None:
        self.down = threading.Lock()  # held by who takes a server down, until it is up again
        self.network = Networks()
        self.servers: list[Kafka] = []
        self._home = home
        self._logs_read: dict[Path, int] = {}
        for nth in range(SERVERS):
            beside = self.servers[0] if self.servers else None
            front = self.network.before(seed + nth)
            self.servers.append(Kafka(home / f"kafka-{nth}", front=front, beside=beside))
        self.address = ",".join(each.fronted for each in self.servers)
        bootstrap = ",".join(each.bootstrap for each in self.servers)
        self.client: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap, **CLIENT}

    @property
    def kafka(self) -> Kafka:
        """The first one, which is the controller."""
        return self.servers[0]

    def start(self) -> None:
        """Start it, with its topics."""
        for server in self.servers:
            server.start()
        for topic, partitions in PARTITIONS.items():
            self.kafka.create(topic, partitions)

    def close(self) -> None:
        """End it for good."""
        for server in reversed(self.servers):
            server.close()
        self.network.close()

    def restart(self) -> None:
        """Kill all of it, and start it again."""
        for server in self.servers:
            server.kill()
        for server in self.servers:
            server.start()

    def copy(self) -> None:
        """Copy what it keeps, as a cold backup does; it is down and up again."""
        for server in reversed(self.servers):
            server.stop()
        for server in self.servers:
            shutil.rmtree(_copy(server), ignore_errors=True)
            subprocess.run(["cp", "-a", str(_data(server)), str(_copy(server))], check=True)
        for server in self.servers:
            server.start()

    def put_back(self) -> None:
        """Put what it keeps back to the copy. It is not running."""
        for server in self.servers:
            shutil.rmtree(_data(server))
            subprocess.run(["cp", "-a", str(_copy(server)), str(_data(server))], check=True)

    def at(self, place: Place) -> tuple[Kafka, Path]:
        """Return which server has a partition, and the folder of its log."""
        [found] = [
            (server, folder) for server in self.servers if (folder := _data(server) / f"{place[0]}-{place[1]}").exists()
        ]  # fmt: skip
        return found

    def made_anew(self, topic: str) -> dict[Place, Partition]:
        """Delete a topic, and make another one of its name; return what was in it."""
        old = {folder for server in self.servers for folder in _data(server).glob("*-delete")}
        [gone] = self.kafka.admin.delete_topics([topic], request_timeout=READ_WITHIN_S).values()
        gone.result()
        deadline = time.monotonic() + READ_WITHIN_S
        while True:
            try:
                self.kafka.create(topic, PARTITIONS[topic])
                break
            except KafkaException:  # while it is not gone everywhere
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        found: dict[Place, Partition] = {}
        while len(found) < PARTITIONS[topic]:
            for server in self.servers:
                for folder in set(_data(server).glob(f"{topic}-*-delete")) - old:
                    found[topic, int(folder.name.removeprefix(f"{topic}-").partition(".")[0])] = Partition(folder)
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing is left of the old {topic}: {sorted(found)}")
        return found

    def fence(self, own_id: str, topic: str) -> None:
        """Take a bridge's transactional id away from it, and write with it in a transaction that is given up."""
        # What it leaves open when a fault meets it as well holds up readers for so long only.
        options = {"transactional.id": own_id, "transaction.timeout.ms": 5_000}
        producer = Producer({**self.client, **options})
        producer.init_transactions(FENCE_WITHIN_S)
        producer.begin_transaction()
        producer.produce(topic, b"never committed")
        producer.flush(FENCE_WITHIN_S)
        producer.abort_transaction(FENCE_WITHIN_S)

    def has_group(self, group: str) -> bool:
        """Tell whether it has offsets."""
        [told] = (
            AdminClient(dict(self.client)).list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
        )
        return any(each.offset >= 0 for each in told.result(READ_WITHIN_S).topic_partitions)

    def delete_group(self, group: str) -> bool:
        """Delete a group with its offsets, as their expiry does; return whether it was there."""
        for _ in range(DELETE_TIMES):
            admin = AdminClient(dict(self.client))  # no answer is on its way to it
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
            self.restart()
        return False

    def mend(self) -> bool:
        """Start it anew if it says that it is broken; return whether it did since the last call."""
        said = b"".join(self._said(server.log) for server in self.servers)
        if BROKEN not in said:
            return False
        with self.down:
            self.restart()
        return True

    def _said(self, path: Path) -> bytes:
        with path.open("rb") as log:
            log.seek(self._logs_read.get(path, 0))
            said = log.read()
        self._logs_read[path] = self._logs_read.get(path, 0) + len(said)
        return said

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
            **broker.client, "group.id": "auditor", "enable.auto.commit": False,
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

    def forget(self, place: Place, since: int) -> None:
        """Forget what was there from an offset on: it is gone, and something else may stand there."""
        self.places[place] = {at: id for at, id in self.places[place].items() if at < since}
        self._next[place] = min(self._next[place], since)
        self._counted[place] = min(self._counted[place], since)

    def ends(self) -> dict[Place, int]:
        """Return the offset after the last record of each partition, as far as it was read."""
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


def _data(server: Kafka) -> Path:
    return server.log.with_name("data")


def _copy(server: Kafka) -> Path:
    return server.log.with_name("copy")
