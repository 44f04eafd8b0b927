"""The pages about bridges are true: the class of a broker of one's own works, and the first steps with Kafka do."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractIncomingMessage
from click.testing import CliRunner
from confluent_kafka import Consumer, Producer

from mailroom.cli.root import root
from tests.bridges.plugged import plugged
from tests.project.test_docs import Block, blocks
from tests.support.kafka_mock import ROOT, MockKafka
from tests.support.pages import page_named
from tests.support.rabbitmq import RabbitMQ
from tests.support.waiting import WITHIN_S, eventually


@pytest.fixture
def desk(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name the database, and have modules of an empty directory be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAILROOM_DSN", dsn)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return dsn


def run(*words: str) -> str:
    result = CliRunner().invoke(root, words)
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.output}"
    return result.stdout


@contextmanager
def dispatcher() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-m", "mailroom", "dispatcher", "run"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield
        finally:
            process.terminate()
            _, log = process.communicate(timeout=WITHIN_S)
            sys.stdout.write(log)  # shown only if the test fails
    assert process.returncode == 0


def found(page: str, language: str, *texts: str) -> list[Block]:
    """Return the block of a page that holds each text."""
    matching = [[block for block in blocks(page_named(page)) if block.language == language and text in block.text]
                for text in texts]  # fmt: skip
    assert [len(each) for each in matching] == [1] * len(texts)
    return [block for [block] in matching]


def received(dsn: str, inbox: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        query = "SELECT message_id::text, topic, key FROM mailroom.inbox WHERE inbox = %s ORDER BY clock"
        return connection.execute(query, [inbox]).fetchall()


@pytest.mark.slow
def test_broker_of_ones_own_that_the_page_shows_publishes_and_is_read(
    desk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [console] = found("own-broker.md", "console", "bridge in replay")
    with plugged(tmp_path, monkeypatch):
        for words in console.commands():
            run(*(word.replace("/data/tape", f"{tmp_path}/tape") for word in words[1:]))
        with dispatcher():
            ids = [run("outbox", "send", "order.paid", "--key", key, "--value", "42").strip() for key in "aba"]
            eventually(lambda: len(received(desk, "auditor")) == len(ids))
    assert received(desk, "auditor") == [(ids[nth], "order.paid", key) for nth, key in enumerate("aba")]
    lines = [json.loads(line) for line in (tmp_path / "tape" / "order.paid").read_text().splitlines()]
    assert [pairs[:2] for _, *pairs in lines] == [[["key", key], ["value", "42"]] for key in "aba"]


@pytest.mark.slow
def test_first_steps_with_kafka_lead_to_a_record_and_to_a_message(desk: str) -> None:
    out, sent, into, seen = found(
        "kafka.md", "console", "bridge out orders", "mailroom outbox send", "bridge in stock", "inbox peek reorder"
    )
    with MockKafka(1, "shop.orders:3", "stock.levels:3") as kafka:

        def follow(block: Block) -> None:
            for words in block.commands():
                if words[0] == "mailroom" and words[1:] != ["dispatcher", "run"]:
                    run(*(word.replace("localhost:9092", kafka.bootstrap) for word in words[1:]))

        follow(out)
        with dispatcher():
            follow(sent)
            consumer = Consumer(
                {"bootstrap.servers": kafka.bootstrap, "group.id": "page", "auto.offset.reset": "earliest"}
            )
            consumer.subscribe(["shop.orders"])
            [record] = consumer.consume(1, WITHIN_S)
            consumer.close()
            assert (record.key(), record.value()) == (b"order-42", b'{"order":42}')
            assert ("ce_type", b"order.paid") in (record.headers() or [])

            follow(into)
            [[_, given, *_]] = [words for words in into.commands() if words[0] == "echo"]
            key, value = given.split(":", 1)
            producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
            producer.produce("stock.levels", value.encode(), key.encode())
            producer.flush(WITHIN_S)
            eventually(lambda: received(desk, "reorder"))
            follow(seen)
            assert [row[1:] for row in received(desk, "reorder")] == [("stock.levels", "teapot")]


def administer(rabbitmq: RabbitMQ, words: Sequence[str]) -> None:
    """Do what `rabbitmqadmin` does by these words; it needs a plugin, and is not in every package."""
    what = dict(word.split("=", 1) for word in words[3:])

    async def declare() -> None:
        async with await aio_pika.connect(rabbitmq.url) as connection:
            channel = await connection.channel()
            match words[1:3]:
                case ["declare", "queue"]:
                    arguments = {"x-queue-type": what["queue_type"]} | json.loads(what.get("arguments", "{}"))
                    await channel.declare_queue(what["name"], durable=True, arguments=arguments)
                case ["declare", "exchange"]:
                    await channel.declare_exchange(what["name"], what["type"], durable=True)
                case ["declare", "binding"]:
                    queue = await channel.get_queue(what["destination"])
                    await queue.bind(what["source"], what["routing_key"])
                case other:
                    raise AssertionError(other)

    asyncio.run(declare())


async def in_queue(rabbitmq: RabbitMQ, name: str) -> AbstractIncomingMessage | None:
    """Take a message from a queue, if there is one."""
    async with await aio_pika.connect(rabbitmq.url) as connection:
        queue = await (await connection.channel()).get_queue(name)
        return await queue.get(no_ack=True, fail=False)


@pytest.mark.slow
def test_first_steps_with_rabbitmq_lead_to_a_record_and_to_a_message(desk: str, rabbitmq: RabbitMQ) -> None:
    to_queue, to_exchange, into = found(
        "rabbitmq.md", "console", "--topic shop.orders", "--exchange shop", "bridge in stock"
    )

    def follow(block: Block) -> None:
        for words in block.commands():
            if words[0] == "rabbitmqadmin":
                administer(rabbitmq, words)
            elif words[0] == "mailroom" and words[1:] != ["dispatcher", "run"]:
                run(*(word.replace("localhost:5672", f"127.0.0.1:{rabbitmq.port}") for word in words[1:]))

    run("migrate")
    run("inbox", "create", "reorder")
    for block in (to_queue, to_exchange):
        follow(block)
        with dispatcher():
            sent = run("outbox", "send", "order.paid", "--key", "42", "--value", '{"order":42}').strip()
            record = eventually(lambda: asyncio.run(in_queue(rabbitmq, "shop.orders")))
        assert record is not None
        assert (record.message_id, record.body) == (sent, b'{"order":42}')
        assert record.headers["mailroom-key"] == "42"
    follow(into)
    asyncio.run(put(rabbitmq, "stock.levels", b'{"left": 3}'))
    with dispatcher():
        eventually(lambda: received(desk, "reorder"))
    assert [topic for _, topic, _ in received(desk, "reorder")] == ["stock.levels"]


async def put(rabbitmq: RabbitMQ, queue: str, body: bytes) -> None:
    """Put a message into a queue."""
    async with await aio_pika.connect(rabbitmq.url) as connection:
        exchange = (await connection.channel()).default_exchange
        await exchange.publish(aio_pika.Message(body), queue)
