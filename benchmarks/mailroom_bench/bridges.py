"""Bridges: a full outbox to Kafka, at least once and exactly once, and from Kafka into an inbox.

Beside them, in the same run, a bare producer and a bare consumer of the same client. They write and read the same
records, made beforehand, with the same options, and do nothing else; the transactions are as large as the bridge's. So
a ratio to them is what the database, the records and the order of the two cost. What goes out is stamped by the same
daemon meanwhile. The processor time is that of the daemon's process, with the client's threads, and not that of the
servers; so "out" has a part of the delivery in it. Time begins with the commit that wakes the daemon, which has sent
a message already; and when the first messages have come in.

By default the broker is librdkafka's mock cluster, which writes nothing to disk; MAILROOM_BENCH_KAFKA names a real one.
It keeps 5 MB of a partition, so no run has more than `MOST` messages.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import nan
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from mailroom import subscribe
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Carried, Form, Record, Sender, record_of
from mailroom.bridges.settings import InSettings, OutSettings

from .kafka import PARTITIONS, WITHIN_S, fresh_topics, kafka, missing
from .linked import FAR, received
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline
from .processor import spent_us
from .workload import INBOX, VALUE, key

if TYPE_CHECKING:
    from confluent_kafka import Producer

MOST = 20_000
PER_TRANSACTION = 2_000
_ACTOR, _BRIDGE = "bench", "kafka"


def _records(topic: str, messages: int) -> list[Record]:
    """Return records as a bridge of another node writes them."""
    now = datetime.now(UTC)
    form, sender = Form(topic), Sender(uuid4(), "bench", 1)
    return [
        record_of(
            Carried(
                nth + 1, nth + 1, now, UUID(int=nth + 1), FAR, key(nth), "M", "U", None, VALUE, None, None, None, None,
                None, now,
            ),
            form,
            sender,
        )
        for nth in range(messages)
    ]  # fmt: skip


def _put(producer: "Producer", records: Sequence[Record]) -> None:
    for record in records:
        while True:
            try:
                producer.produce(record.topic, record.value, record.key, headers=list(record.headers))
                break
            except BufferError:
                producer.poll(WITHIN_S)


def _bare_producer(address: str, records: Sequence[Record], *, in_transactions: bool = False) -> float:
    from confluent_kafka import Producer

    options = {"bootstrap.servers": address, "linger.ms": 1, "enable.idempotence": True, "acks": "all", "log_level": 0}
    own = {"transactional.id": records[0].topic} if in_transactions else {}
    producer = Producer(options | own | {"partitioner": "murmur2_random"})
    producer.list_topics(records[0].topic, timeout=WITHIN_S)  # so that it is connected
    if not in_transactions:
        began = time.monotonic()
        _put(producer, records)
        producer.flush()
        return len(records) / (time.monotonic() - began)
    producer.init_transactions(WITHIN_S)
    began = time.monotonic()
    for first in range(0, len(records), PER_TRANSACTION):
        producer.begin_transaction()
        _put(producer, records[first : first + PER_TRANSACTION])
        producer.commit_transaction(WITHIN_S)
    return len(records) / (time.monotonic() - began)


def _bare_consumer(address: str, topic: str, messages: int) -> float:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": address, "group.id": topic, "log_level": 0})
    consumer.assign([TopicPartition(topic, part, 0) for part in range(PARTITIONS)])
    try:
        done = len(consumer.consume(1, WITHIN_S))
        began, first = time.monotonic(), done
        while done < messages:
            for message in consumer.consume(PER_TRANSACTION, 0.02):
                message.value(), message.key(), message.headers()
                done += 1
        return (done - first) / (time.monotonic() - began)
    finally:
        consumer.close()


def _until(pipeline: Pipeline, done: Callable[[], int], messages: int) -> tuple[float, float]:
    """Return the rate and the processor time per message, in microseconds, of what is not done yet; NaN for nothing."""
    # What is done is asked last: else all that is left might be done, and paid for, before the other readings.
    began, before, left = time.monotonic(), pipeline.used_s(), messages - done()
    ended = pipeline.wait(lambda: done() >= messages)
    return left / (ended - began) if left else nan, spent_us(before, pipeline.used_s(), left)


def _acked(node: Node) -> int:
    with node.connect(autocommit=True) as connection:
        row = connection.execute(f"SELECT acked FROM {node.schema}.link".encode()).fetchone()
    return int(row[0]) if row else 0


def _out(setup: Setup, address: str, topic: str, messages: int, *, exactly_once: bool) -> tuple[float, float]:
    settings = OutSettings("kafka", address, Form(topic), exactly_once, topic if exactly_once else None)
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        with node.connect() as connection:
            Bridges(schema=node.schema).out(connection, _BRIDGE, settings, topics=[FAR], actor=_ACTOR)
        pipeline.dispatch()
        ring = f"INSERT INTO {node.outbox} (topic, value) VALUES ('{FAR}', '\\xf6')"
        node.execute(ring)
        pipeline.wait(lambda: _acked(node) == 1)  # it is connected
        node.send(messages, topic=FAR)
        node.execute(ring)
        return _until(pipeline, lambda: _acked(node), messages + 2)


def _in(setup: Setup, address: str, topic: str, messages: int) -> tuple[float, float]:
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        pipeline.dispatch()
        with node.connect() as connection:
            settings = InSettings("kafka", address, (topic,))
            Bridges(schema=node.schema).into(connection, _BRIDGE, settings, actor=_ACTOR)
            subscribe(connection, INBOX, FAR, schema=node.schema, origin=_BRIDGE)
        pipeline.wait(lambda: received(node) > 0)
        return _until(pipeline, lambda: received(node), messages)


def _run(setup: Setup) -> Values:
    messages = min(setup.messages, MOST)
    with kafka() as address, fresh_topics(address, 4) as (log, in_transactions, out, once):
        records = _records(log, messages)
        producer = _bare_producer(address, records)
        transactions = _bare_producer(address, _records(in_transactions, messages), in_transactions=True)
        out_rate, out_us = _out(setup, address, out, messages, exactly_once=False)
        once_rate, once_us = _out(setup, address, once, messages, exactly_once=True)
        consumer = _bare_consumer(address, log, messages)
        in_rate, in_us = _in(setup, address, log, messages)
    return {
        "bare producer": producer, "out": out_rate, "bare transactions": transactions, "out, exactly once": once_rate,
        "bare consumer": consumer, "in": in_rate, "processor, out": out_us, "processor, exactly once": once_us,
        "processor, in": in_us,
    }  # fmt: skip


MEASUREMENT = Measurement(
    "bridges",
    "a full outbox to Kafka, and from Kafka into an inbox",
    (
        Line("bare producer"),
        Line("out", baseline="bare producer", bar=Bar(at_least=14_500)),
        Line("bare transactions"),
        Line("out, exactly once", baseline="bare transactions", bar=Bar(at_least=6_950)),
        Line("bare consumer"),
        Line("in", baseline="bare consumer"),
        Line("processor, out", unit="us/message", bar=Bar(at_most=100)),
        Line("processor, exactly once", unit="us/message"),
        Line("processor, in", unit="us/message", bar=Bar(at_most=80)),
    ),
    _run,
    missing,
)
