"""The truth: the CSV read again, and compared with what came out, row for row and in order."""

from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from examples.pipeline.flights import VALUE
from spark_jobs.audit import audit
from spark_jobs.drain import drained
from spark_jobs.node import Node
from spark_jobs.read.cbor_decoded import from_cbor


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a right run has, and what the files say of it."""

    name: str
    ok: bool
    detail: str


def verify(spark: SparkSession, node: Node, rows: DataFrame, directory: Path) -> list[Check]:
    """Compare the files with the rows of the CSV, and audit them with the node's tables."""
    files = drained(spark, str(directory)).cache()
    arrived = files.select("key", "clock", from_cbor("value", VALUE).alias("flight")).cache()
    return [
        _same(rows, arrived.select("flight.*")),
        _ordered(arrived),
        _placed(rows, arrived),
        *_audited(spark, node, directory),
    ]


def _same(rows: DataFrame, flights: DataFrame) -> Check:
    """Every column of every flight, as often as it is in the CSV."""
    missing, strange = rows.exceptAll(flights).count(), flights.exceptAll(rows).count()
    detail = f"{flights.count():,} rows; {missing} of the CSV are missing, {strange} are not in it"
    return Check("row for row as in the CSV", missing == strange == 0, detail)


def _ordered(arrived: DataFrame) -> Check:
    """Along each aircraft, by clock, flights come as in the CSV: Lamport's order is the order sent."""
    by_clock = Window.partitionBy("key").orderBy("clock")
    steps = arrived.select((f.col("flight.number") - f.lag("flight.number").over(by_clock)).alias("step")).where(
        "step IS NOT NULL"
    )
    wrong = steps.where("step <= 0").count()
    return Check("each aircraft in the order sent", wrong == 0, f"{steps.count():,} steps, {wrong} go back")


def _placed(rows: DataFrame, arrived: DataFrame) -> Check:
    """Where each aircraft is after its last flight, and how many it had: by the messages' clocks, and by the CSV."""
    by_messages = _fleet(arrived.select("clock", "flight.tailnum", "flight.dest"), "tailnum", "clock")
    by_csv = _fleet(rows, "tailnum", "number")
    wrong = by_messages.exceptAll(by_csv).count() + by_csv.exceptAll(by_messages).count()
    return Check("aircraft counted and placed", wrong == 0, f"{by_csv.count():,} aircraft, {wrong} differ")


def _fleet(flights: DataFrame, aircraft: str, order: str) -> DataFrame:
    return flights.where(f.col(aircraft).isNotNull()).groupBy(aircraft).agg(f.count("*"), f.max_by("dest", order))


def _audited(spark: SparkSession, node: Node, directory: Path) -> list[Check]:
    report = audit(spark, node, [str(directory)])
    return [
        Check(f"audit: {one.name}", one.holds, f"{one.checked:,} checked, {one.wrong} wrong") for one in report.checks
    ]
