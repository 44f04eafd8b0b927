"""The brokers that tests of bridges run: each keeps what it took, also when killed, and none outlives its test."""

import os
import subprocess
import sys
import time
from pathlib import Path

import aio_pika
import nats as nats_client
import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

from tests.support.kafka import Kafka
from tests.support.kafka_mock import ROOT, MockKafka
from tests.support.nats import Nats
from tests.support.rabbitmq import RabbitMQ
from tests.support.waiting import WITHIN_S, eventually

Settings = dict[str, str | int | float | bool]

PRODUCE = 0
QUIET: Settings = {"log_level": 0}  # a broker that is gone is what these tests want


def published(settings: Settings, topic: str, value: bytes, **more: str | int) -> KafkaError | None:
    """Publish a record and return why it was refused."""
    answers: list[KafkaError | None] = []
    producer = Producer({**settings, **QUIET, **more})
    producer.produce(topic, value, on_delivery=lambda error, _record: answers.append(error))
    producer.flush(WITHIN_S)
    [error] = answers
    return error


def read(settings: Settings, topic: str, number: int) -> list[bytes | None]:
    """Return the values of the first records of a topic with one partition."""
    consumer = Consumer({**settings, **QUIET, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    records: list[Message] = []
    while len(records) < number:
        found = consumer.consume(number - len(records), WITHIN_S)
        assert found, f"{len(records)} records within {WITHIN_S} s"
        records += found
    consumer.close()
    return [record.value() for record in records]


def test_mock_cluster_gives_back_what_it_took(mock_kafka: MockKafka) -> None:
    mock_kafka.create("orders", 1)
    settings: Settings = {"bootstrap.servers": mock_kafka.bootstrap}
    assert published(settings, "orders", b"first") is None
    assert read(settings, "orders", 1) == [b"first"]


def test_mock_cluster_fails_as_told(mock_kafka: MockKafka) -> None:
    mock_kafka.create("failing", 1)
    settings: Settings = {"bootstrap.servers": mock_kafka.bootstrap}
    mock_kafka.errors(PRODUCE, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    refused = [published(settings, "failing", b"refused") for _ in range(3)]
    assert [error and error.code() for error in refused] == [
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        None,
    ]


def test_mock_broker_goes_and_comes_back_with_what_it_had(mock_kafka: MockKafka) -> None:
    mock_kafka.create("kept", 1)
    settings: Settings = {"bootstrap.servers": mock_kafka.bootstrap}
    assert published(settings, "kept", b"before") is None
    mock_kafka.down()
    error = published(settings, "kept", b"lost", **{"message.timeout.ms": 200})
    assert error is not None
    assert error.code() == KafkaError._MSG_TIMED_OUT
    mock_kafka.up()
    assert published(settings, "kept", b"after") is None
    assert read(settings, "kept", 2) == [b"before", b"after"]


@pytest.mark.slow
def test_mock_broker_answers_late(mock_kafka: MockKafka) -> None:
    mock_kafka.create("late", 1)
    mock_kafka.rtt(1, 200)
    begun = time.monotonic()
    assert published({"bootstrap.servers": mock_kafka.bootstrap}, "late", b"x") is None
    assert time.monotonic() - begun > 0.2
    mock_kafka.rtt(1, 0)


def test_mock_cluster_refuses_what_it_cannot_do(mock_kafka: MockKafka) -> None:
    with pytest.raises(AssertionError, match="Broker not available"):
        mock_kafka.down(9)


# Programs that start a server in the folder they are given, name its process, and wait for their own end.
HOLDERS = {
    "mock": "from tests.support.kafka_mock import MockKafka; server = MockKafka(); pid = server.pid",
    "paused": """
from tests.support.processes import ServerProcess
from tests.support.waiting import eventually
server = ServerProcess(["/bin/sh", "-c", "sleep 600 & echo started; wait"], log=folder / "log")
eventually((folder / "log").read_text)
server.pause()
pid = server.pid
""",
    "rabbitmq": """
from tests.support.rabbitmq import RabbitMQ
server = RabbitMQ(folder)
server.start()
pid = server.process.pid
""",
}
HELD = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
{}
print(pid, flush=True)
sys.stdin.read()
"""


def ends_with_its_holder(server: str, folder: Path) -> set[str]:
    """Start a server in a process that is then killed, wait until all its processes are gone, and name them."""
    with subprocess.Popen(
        [sys.executable, "-c", HELD.format(HOLDERS[server]), folder],
        cwd=ROOT,
        env={**os.environ, "HOLDER": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        started = [process for process in psutil.process_iter() if _is_held_in(folder, process)]
        assert {pid, holder.pid} <= {process.pid for process in started}
        names = {process.name() for process in started}
        holder.kill()
    eventually(lambda: not any(map(_runs, started)))
    return names


def _is_held_in(folder: Path, process: psutil.Process) -> bool:
    try:
        return process.environ().get("HOLDER") == str(folder)
    except psutil.Error:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("server", ["mock", "paused"])
def test_server_ends_with_the_process_that_started_it(server: str, tmp_path: Path) -> None:
    ends_with_its_holder(server, tmp_path)


@pytest.mark.nightly  # of the tests' own brokers, which the tests of bridges use
@pytest.mark.slow  # so that it runs where `make brokers` has been
def test_rabbitmq_ends_with_its_name_service(rabbitmq: RabbitMQ, shared_home: Path) -> None:
    assert {"epmd", "beam.smp"} <= ends_with_its_holder("rabbitmq", shared_home / "held")


def test_broker_that_cannot_start_says_why(nats: Nats, shared_home: Path) -> None:
    (shared_home / "broken").mkdir()
    (shared_home / "broken" / "streams").touch()  # where its folder should be
    broker = Nats(shared_home / "broken")
    with pytest.raises(AssertionError, match="storage directory is not a directory"):
        broker.start()


@pytest.mark.nightly  # of the tests' own brokers, which the tests of bridges use
@pytest.mark.slow  # so that it runs where `make kafka` has been
def test_kafka_gives_back_what_it_took_also_after_its_death(kafka: Kafka) -> None:
    kafka.create("kept", 1, retention_ms=-1)
    assert published(kafka.client, "kept", b"first", acks="all") is None
    kafka.kill()
    with pytest.raises(KafkaException):
        kafka.admin.list_topics(timeout=0.1)
    kafka.start()
    assert published(kafka.client, "kept", b"second", acks="all") is None
    assert read(kafka.client, "kept", 2) == [b"first", b"second"]


@pytest.mark.slow  # as above
def test_kafka_that_is_paused_answers_later(kafka: Kafka) -> None:
    kafka.create("paused", 1)
    kafka.pause()
    error = published(kafka.client, "paused", b"lost", **{"message.timeout.ms": 200})
    kafka.resume()
    assert error is not None
    assert error.code() == KafkaError._MSG_TIMED_OUT
    assert published(kafka.client, "paused", b"later") is None


@pytest.mark.nightly  # of the tests' own brokers, which the tests of bridges use
@pytest.mark.slow  # as above
def test_kafka_with_a_password_takes_only_who_has_it(kafka_home: Path) -> None:
    with Kafka(kafka_home / "guarded", password="geheim") as broker:
        broker.create("guarded", 1)
        assert published(broker.client, "guarded", b"x") is None
        for wrong in ({"sasl.password": "wrong"}, {"security.protocol": "PLAINTEXT"}):
            error = published({**broker.client, **wrong}, "guarded", b"x", **{"message.timeout.ms": 500})
            assert error is not None
        broker.stop()


@pytest.mark.nightly  # of the tests' own brokers, which the tests of bridges use
@pytest.mark.slow  # so that it runs where `make brokers` has been
async def test_rabbitmq_gives_back_what_it_took_also_after_its_death(rabbitmq: RabbitMQ) -> None:
    async with await aio_pika.connect(rabbitmq.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("kept", durable=True, arguments={"x-queue-type": "quorum"})
        await channel.default_exchange.publish(aio_pika.Message(b"first"), "kept", timeout=WITHIN_S)
    eventually(lambda: rabbitmq.keeps("kept"))
    rabbitmq.kill()
    with pytest.raises(ConnectionError):
        await aio_pika.connect(rabbitmq.url)
    rabbitmq.start()
    async with await aio_pika.connect(rabbitmq.url) as connection:
        queue = await (await connection.channel()).get_queue("kept")
        message = await queue.get(timeout=WITHIN_S)
        assert message is not None
        assert message.body == b"first"
        await message.ack()


async def test_nats_gives_back_what_it_took_also_after_its_death(nats: Nats) -> None:
    client = await nats_client.connect(nats.url)
    stream = client.jetstream()
    await stream.add_stream(name="kept", subjects=["kept.>"])
    answer = await stream.publish("kept.orders", b"first", timeout=WITHIN_S)
    assert answer.seq == 1
    await client.close()
    nats.kill()
    nats.start()
    client = await nats_client.connect(nats.url)
    message = await client.jetstream().get_msg("kept", 1)
    assert message.data == b"first"
    await client.close()
