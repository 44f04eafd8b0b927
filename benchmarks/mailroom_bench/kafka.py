"""A Kafka to measure with: one that the environment names, or else librdkafka's mock cluster, which keeps no disk."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection

from mailroom.errors import ConnectionFailed

from . import processor
from .clients import PROCESSES

ADDRESS = "MAILROOM_BENCH_KAFKA"
PARTITIONS = 4
WITHIN_S = 30.0


def missing() -> str | None:
    """Say what this machine lacks."""
    return processor.missing() if find_spec("confluent_kafka") else "Run: pip install 'pg-mailroom[kafka]'"


@contextmanager
def kafka() -> Iterator[str]:
    """Yield the address of a Kafka, HOST:PORT."""
    if address := os.environ.get(ADDRESS):
        yield address
        return
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_mock, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(WITHIN_S):
            raise ConnectionFailed("librdkafka's mock cluster did not begin", code="MR-bench-failed")
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _mock(to: "Connection[str, str]") -> None:
    from confluent_kafka import Producer

    client = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    [broker] = client.list_topics(timeout=WITHIN_S).brokers.values()
    to.send(f"{broker.host}:{broker.port}")
    to.poll(None)  # until it is ended


@contextmanager
def fresh_topics(address: str, count: int) -> Iterator[list[str]]:
    """Yield the names of new topics, and delete them afterwards."""
    from confluent_kafka import KafkaException, Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    names = [f"bench.{secrets.token_hex(6)}" for _ in range(count)]
    if not os.environ.get(ADDRESS):
        # The mock cluster makes a topic when a producer asks for it, and cannot delete it.
        producer = Producer({"bootstrap.servers": address, "log_level": 0})
        for name in names:
            producer.list_topics(name, timeout=WITHIN_S)
        yield names
        return
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    try:
        for made in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names]).values():
            made.result(WITHIN_S)
    except KafkaException as error:
        text = f"{address} made no topics to measure with: {error.args[0].str()}"
        raise ConnectionFailed(text, code="MR-bench-failed") from None
    try:
        yield names
    finally:
        for done in admin.delete_topics(names).values():
            done.result(WITHIN_S)
