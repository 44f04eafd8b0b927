"""The audit's routes: who gets a topic, of which kinds, and since when."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from spark_jobs.proof.routes import routes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAYS = "inbox string, topic string, kind string, source string, messages bigint, at timestamp"
MADE = datetime(2026, 1, 1, tzinfo=UTC)


def test_topic_counts_from_its_first_message_or_from_the_first_that_came_by_its_pattern_alone(
    spark: "SparkSession",
) -> None:
    ways = [
        ("shipping", "order", "MECR", None, None, MADE),
        ("shipping", "order.#", "ME", "order.%", None, MADE),
        ("audit", "order.#", "ME", "order.%", None, MADE),
        ("audit", "*.paid", "ME", "%.paid.", 2, MADE),
    ]
    topics = ["order", "order.sent", "order.paid", "order.item.paid"]
    first = [("shipping", "order", 5), ("audit", "order", 7), ("audit", "order.paid", 3)]
    found = routes(
        spark.createDataFrame(ways, WAYS),
        spark.createDataFrame([(topic,) for topic in topics], "topic string"),
        spark.createDataFrame(first, "inbox string, topic string, first bigint"),
    ).collect()
    # shipping got nothing by its pattern alone, and audit number 3 by one of two.
    assert {(row.inbox, row.topic): row["first"] for row in found} == {
        ("shipping", "order"): 5, ("shipping", "order.sent"): None, ("shipping", "order.paid"): None,
        ("shipping", "order.item.paid"): None,
        ("audit", "order"): 7, ("audit", "order.sent"): 7, ("audit", "order.paid"): 3, ("audit", "order.item.paid"): 7,
    }  # fmt: skip
    kinds = {(row.inbox, row.topic): set(row.kinds) for row in found}
    assert kinds.pop(("shipping", "order")) == set("MECR")
    assert set(map(frozenset, kinds.values())) == {frozenset("ME")}
