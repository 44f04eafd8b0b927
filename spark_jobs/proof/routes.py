"""Who gets which topics, as DataFrames: the rule of `mailroom.registry.routing`, for topics that stand in files
only."""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from mailroom.registry.routing import FITS


def routed(ways: DataFrame, topics: DataFrame) -> DataFrame:
    """Return a row for each of these topics and each way to an inbox that it goes.

    Its columns are inbox, topic, `kinds` (those that come this way), `fits` (None for a topic) and `made` (the
    making of the inbox). `ways` are those of `spark_jobs.proof.tables`.
    """
    way = ("inbox", f.col("kind").alias("kinds"), f.col("source").alias("fits"), f.col("at").alias("made"))
    exact = ways.filter("source IS NULL").select("topic", *way)
    patterns = ways.filter("source IS NOT NULL").select(*way, f.col("messages").alias("words"))
    words = f.size(f.split("topic", "[.]")).alias("words")
    compared = topics.select("topic", f.concat("topic", f.lit(".")).alias("ended"), words)
    by_pattern = compared.alias("t").join(f.broadcast(patterns.alias("p")), f.expr(FITS))
    return exact.unionByName(by_pattern.select("topic", "inbox", "kinds", "fits", "made"))


def routes(ways: DataFrame, topics: DataFrame, first: DataFrame) -> DataFrame:
    """Return a row for each of these topics and each inbox that gets it: the `kinds`, `first`, and `made`.

    `first` has the first clock of each inbox and topic, and so has the result: an inbox gets the topic from there on.
    If it got nothing of the topic, a pattern counts from the first message that can have come by this pattern alone.
    """
    each = routed(ways, topics).join(first, ["inbox", "topic"], "left")
    is_alone = f.col("fits").isNotNull() & (f.count("*").over(Window.partitionBy("inbox", "topic")) == 1)
    alone = f.min(f.when(f.col("is_alone"), f.col("first"))).over(Window.partitionBy("inbox", "fits"))
    found = each.withColumn("is_alone", is_alone).withColumn("alone", alone)
    return found.groupBy("inbox", "topic").agg(
        f.array_join(f.collect_set("kinds"), "").alias("kinds"),
        f.coalesce(f.min("first"), f.min("alone")).alias("first"),
        f.min("made").alias("made"),
    )
