"""Brokers that the tests of bridges share. A test that breaks one mends it; names of topics are the test's own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatcher.bridges import tending
from tests.support.kafka import kafka_jars
from tests.support.kafka_mock import MockKafka
from tests.support.kafka_secure import SecureKafka
from tests.support.nats import Nats, nats_program
from tests.support.rabbitmq import RabbitMQ, rabbitmq_program
from tests.support.waiting import WITHIN_S


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bridges try again soon. Only what fails is trouble: a machine that is busy makes brokers slow."""
    for name, seconds in (
        ("LONGEST_PAUSE_S", 0.1),
        ("LONGEST_STOP_S", 0.3),
        ("LEASE_S", 0.1),
        ("PATIENCE_S", WITHIN_S),
    ):
        monkeypatch.setattr(tending, name, seconds)


@pytest.fixture
def impatient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bridges note trouble at once, for a test that waits for it. Any delay is trouble then, until it goes on."""
    monkeypatch.setattr(tending, "PATIENCE_S", 0.05)


@pytest.fixture(scope="module")
def mock_kafka() -> Iterator[MockKafka]:
    """librdkafka's mock cluster of one broker."""
    with MockKafka() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kafka_home(shared_home: Path) -> Path:
    """A directory for Apache Kafkas; without one the test is skipped."""
    if kafka_jars() is None:
        pytest.skip("Apache Kafka or Java is not installed: Java 17 and make kafka")
    return shared_home


@pytest.fixture(scope="session")
def kafka(kafka_home: Path) -> Iterator[SecureKafka]:
    """A real Apache Kafka."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with SecureKafka(kafka_home / "kafka") as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbitmq(shared_home: Path) -> Iterator[RabbitMQ]:
    """A RabbitMQ node."""
    if rabbitmq_program() is None:
        pytest.skip("RabbitMQ is not installed: apt-get install rabbitmq-server, or make brokers")
    with RabbitMQ(shared_home / "rabbitmq") as broker:
        yield broker


@pytest.fixture(scope="session")
def nats(shared_home: Path) -> Iterator[Nats]:
    """A NATS server with JetStream."""
    if nats_program() is None:
        pytest.skip("NATS is not installed: apt-get install nats-server, or make brokers")
    with Nats(shared_home / "nats") as broker:
        yield broker
