"""Every broker passes the suite that a broker of a user's own is tried by; and the suite notices what is wrong."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import aio_pika
import nats as nats_client
import pytest

from mailroom.bridges import (
    Arrived,
    BrokerPosition,
    BrokerWasAway,
    Form,
    InSettings,
    OutSettings,
    PositionGone,
    Record,
)
from mailroom.testing import BrokerCase, NotConforming, conform
from tests.bridges.plugged import EXAMPLE, plugged
from tests.bridges.receiver import Receiver, receiving
from tests.support.kafka import Kafka
from tests.support.nats import Nats
from tests.support.processes import Broker
from tests.support.rabbitmq import RabbitMQ

_numbers = count(1)


class KilledCase(BrokerCase):
    """A broker that is a process of the test's."""

    can_be_killed = True

    def __init__(self, server: Broker) -> None:
        self.server = server

    async def kill(self) -> None:
        self.server.kill()

    async def start(self) -> None:
        self.server.start()


class KafkaCase(KilledCase):
    broker = "kafka"
    server: Kafka

    async def out(self) -> OutSettings:
        topic = f"suite{next(_numbers)}"
        self.server.create(topic, 1)
        return OutSettings("kafka", self.server.bootstrap, Form(topic))

    def into(self, out: OutSettings) -> InSettings:
        return InSettings("kafka", out.address, (out.form.topic,))


class NatsCase(KilledCase):
    broker = "nats"
    server: Nats

    async def out(self) -> OutSettings:
        stream = f"suite{next(_numbers)}"
        client = await nats_client.connect(self.server.url)
        await client.jetstream().add_stream(name=stream, subjects=[f"{stream}.>"])
        await client.close()
        return OutSettings("nats", self.server.url, Form(f"{stream}.{{topic}}"))

    def into(self, out: OutSettings) -> InSettings:
        return InSettings("nats", out.address, (out.form.topic.partition(".")[0],))


class RabbitCase(KilledCase):
    broker = "rabbitmq"
    server: RabbitMQ

    async def out(self) -> OutSettings:
        queue = f"suite{next(_numbers)}"
        async with await aio_pika.connect(self.server.url) as connection:
            await (await connection.channel()).declare_queue(queue, durable=True)
        return OutSettings("rabbitmq", f"127.0.0.1:{self.server.port}", Form(queue))

    def into(self, out: OutSettings) -> InSettings:
        return InSettings("rabbitmq", out.address, (out.form.topic,))


class WebhookCase(BrokerCase):
    broker = "webhook"
    options = {"unsigned": "yes", "private": "yes"}  # noqa: RUF012 - as users write it

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def out(self) -> OutSettings:
        self._receiver.posted.clear()
        return OutSettings("webhook", self._receiver.url)

    async def records(self, out: OutSettings, until: Collection[UUID]) -> Sequence[Arrived]:
        found = []
        for nth, posted in enumerate(self._receiver.posted):
            named = {
                name.replace("ce-", "ce_"): text if name == "mailroom-headers" else unquote(text)
                for name, text in posted.headers.items()
                if name.startswith(("ce-", "mailroom-", "content-type"))
            }
            raw = [(name, text.encode()) for name, text in named.items()]
            found.append(Arrived("hooks", 0, nth, named["ce_partitionkey"].encode(), posted.body, raw, None))
        return found


@pytest.mark.nightly  # what the suite asks, the tests of Kafka ask one by one
async def test_kafka_conforms(kafka: Kafka) -> None:
    await conform(KafkaCase(kafka))


async def test_nats_conforms(nats: Nats) -> None:
    await conform(NatsCase(nats))


@pytest.mark.slow
async def test_rabbitmq_conforms(rabbitmq: RabbitMQ) -> None:
    await conform(RabbitCase(rabbitmq))


async def test_webhooks_conform() -> None:
    async with receiving() as receiver:
        await conform(WebhookCase(receiver))


# -- The broker of files ----------------------------------------------------------------------------------------------


class FilesCase(BrokerCase):
    broker = "files"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def out(self) -> OutSettings:
        return OutSettings("files", str(self._folder / str(next(_numbers))))

    def into(self, out: OutSettings) -> InSettings:
        return InSettings("files", out.address, ("suite.topic",))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilesCase]:
    with plugged(tmp_path, monkeypatch):
        yield FilesCase(tmp_path / "folders")


async def test_broker_of_files_in_the_examples_conforms_and_is_short(files: FilesCase) -> None:
    await conform(files)
    assert len(EXAMPLE.read_text().splitlines()) <= 150


def broken(client: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield what a client would be if it broke a promise, and what the suite is to say of it."""
    publish, opened, read = client.FilePublisher.publish, client.FilePublisher.open, client.FileSource.read

    async def loses(self: Any, records: Sequence[Record]) -> None:
        await publish(self, records[len(records) > 3 :])  # not the last of a key, which the suite waits for

    async def reverses(self: Any, records: Sequence[Record]) -> None:
        await publish(self, records[::-1])

    async def strips(self: Any, records: Sequence[Record]) -> None:
        await publish(self, [replace(each, key=b"k") for each in records])

    async def outlives(self: Any, records: Sequence[Record]) -> None:
        if self._lock is not None:
            await publish(self, records)

    async def forgets(self: Any) -> Any:
        return 0 * await opened(self)

    async def boasts(self: Any) -> Any:
        return 1_000 + await opened(self)

    async def hides(self: Any, wait_s: float) -> Any:
        try:
            return await read(self, wait_s)
        except PositionGone:
            raise BrokerWasAway from None

    async def begins_anew(self: Any, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        self._at = {topic: BrokerPosition(topic, 0, 0) for topic in self._topics}
        return [] if known else [*self._at.values()]

    yield "FilePublisher.publish", loses, "are lost, and 0 are there"
    yield "FilePublisher.publish", reverses, "the order is not that of the bridge"
    yield "FilePublisher.publish", strips, "another key, value or headers"
    yield "FilePublisher.publish", outlives, "publish returns though its publisher is closed"
    yield "FilePublisher.open", forgets, "it is not exactly once"
    yield "FilePublisher.open", boasts, "open says that the broker has clock"
    yield "FileSource.read", hides, "not told as PositionGone"
    yield "FileSource.begin", begins_anew, "it goes on elsewhere"


@pytest.mark.slow
async def test_suite_notices_each_promise_that_is_broken(files: FilesCase, monkeypatch: pytest.MonkeyPatch) -> None:
    unnoticed = []
    for place, instead, text in broken(import_module("files_broker")):
        with monkeypatch.context() as patched:
            patched.setattr(f"files_broker.{place}", instead)
            try:
                await conform(files)
            except NotConforming as told:
                if text in str(told):
                    continue
                text += f" (but {told})"
            unnoticed.append(f"{instead.__name__}: {text}")
    assert unnoticed == []
