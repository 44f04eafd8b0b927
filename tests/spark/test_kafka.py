"""Records of Kafka into the outbox by Spark's own source: the page's program, on a real Kafka, exactly once."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mailroom.bridges.arrival import Arrived, Intake, incoming
from tests.spark.frames import values
from tests.spark.test_docs import Page, block
from tests.support.databases import Connect
from tests.support.kafka import Kafka, spark_kafka_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS, KEYS = 2, 5


def put(kafka: Kafka, first: int, count: int) -> None:
    """Write records of the topic "orders"; numbers of one key are in one partition."""
    from confluent_kafka import Producer

    producer = Producer(dict(kafka.client))
    for nth in range(first, first + count):
        value = json.dumps({"number": nth, "state": "paid"})
        producer.produce("orders", value, f"order-{nth % KEYS}", partition=nth % KEYS % PARTITIONS)
    assert producer.flush(60) == 0


def test_records_become_messages_once_over_restarts_and_replays_with_the_ids_of_a_bridge(
    spark: "SparkSession", spark_dsn: str, kafka: Kafka, connect: Connect, tmp_path: Path
) -> None:
    if not spark_kafka_jars():
        pytest.skip("Spark's source for Kafka is not there: make kafka")
    kafka.create("orders", PARTITIONS)
    cluster = kafka.admin.list_topics(timeout=60).cluster_id
    page = Page(
        "spark-recipes.md", spark, tmp_path,
        {"broker:9092": kafka.bootstrap, "MkU3OEVBNTcwNTJENDM2Qk": str(cluster), 'format("delta")': ""},
    )  # fmt: skip
    page.names["dsn"] = spark_dsn

    def run() -> None:
        page.run(block(page, 'format("kafka")'))
        page.run(block(page, "FAILFAST"))

    put(kafka, 0, 20)
    run()
    # As if Spark had died before it noted that the batch is done: it does it again, with the same records.
    (tmp_path / "checkpoints" / "kafka" / "commits" / "0").unlink()
    put(kafka, 20, 20)
    run()
    numbers = [value["number"] for value in values(connect)]
    assert sorted(numbers) == list(range(40))
    for key in range(KEYS):
        assert [each for each in numbers if each % KEYS == key] == list(range(key, 40, KEYS))
    with connect() as connection:
        ids = {found for (found,) in connection.execute("SELECT message_id FROM mailroom.outbox")}
    ends = [sum(nth % KEYS % PARTITIONS == part for nth in range(40)) for part in range(PARTITIONS)]
    assert ids == {
        incoming(Arrived("orders", part, offset, b"k", b"1", [], None), Intake(), str(cluster)).message_id
        for part in range(PARTITIONS) for offset in range(ends[part])
    }  # fmt: skip
