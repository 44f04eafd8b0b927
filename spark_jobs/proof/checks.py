"""The checks of the audit, as DataFrames: a row for each thing that is checked, and whether it is wrong.

Each groups by ids, keys or clocks, so that Spark spreads it over the cluster, and compares hashes of values. The
columns beside `wrong` say where to look.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from inbox.archive import SOURCE as REPLAY
from spark_jobs.arrow.content import HASH_IN_SPARK
from spark_jobs.proof.routes import routes

SOURCE = "mailroom spark "
UNDER_WAY = ("outbox", "scheduled", "inbox", "parked", "dead_letter", "transit")
EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is checked: the messages in `files`, and the tables as of one moment before those files were listed.

    `tables` has the columns of `spark_jobs.proof.tables`. `may_drop`: messages that left no trace were dropped by their
    sender's wish.
    """

    files: DataFrame
    tables: DataFrame
    may_drop: bool = False

    def at(self, *places: str) -> DataFrame:
        """Return what the tables have in these places."""
        return self.tables.filter(f.col("place").isin(*places))

    def everywhere(self, *columns: str) -> DataFrame:
        """Return these columns of the messages in files and under way."""
        return _union(self.files.select(*columns), self.at(*UNDER_WAY).select(*columns))

    def hashed(self) -> DataFrame:
        """Return each message's hashes: one, if it says the same wherever it is."""
        hashed = Evidence(self.files.withColumn("hash", f.expr(HASH_IN_SPARK)), self.tables)
        return hashed.everywhere("message_id", "source", "hash").distinct()

    def drained_before(self) -> DataFrame:
        """Return the messages of files that were committed when the tables were read."""
        shards = self.at("shard").select("inbox", "shard", f.col("segment").alias("last"))
        return self.files.join(f.broadcast(shards), ["inbox", "shard"]).filter("segment <= last")


Rows = Callable[[Evidence], DataFrame]


@dataclass(frozen=True, slots=True)
class Check:
    """A rule: what it proves of that many things if it holds, and its DataFrame, a row for each of them."""

    proves: str
    rows: Rows


CHECKS: dict[str, Check] = {}
CHECKS_OF_SENT: dict[str, Check] = {}


def _checks(name: str, proves: str, checks: dict[str, Check] = CHECKS) -> Callable[[Rows], Rows]:
    def registered(rows: Rows) -> Rows:
        checks[name] = Check(proves, rows)
        return rows

    return registered


@_checks("files complete", "the files of {:,} shards hold as many messages as their drains took")
def _files_complete(evidence: Evidence) -> DataFrame:
    shards = evidence.at("shard").select("inbox", "shard", f.col("messages").alias("drained"))
    found = evidence.drained_before().groupBy("inbox", "shard").agg(f.count("*").alias("found"))
    return _counted(shards.join(found, ["inbox", "shard"], "left"), f.col("drained") != f.col("found"))


@_checks("batches complete", "each of {:,} batches of Spark's ledger is there with as many messages as it sent")
def _batches_complete(evidence: Evidence) -> DataFrame:
    """Each batch has left as many messages as it sent, but for those that other nodes have and that are trimmed here.

    Which these are is no longer known, so of each batch as many may be missing as were trimmed.
    """
    batches = evidence.at("batch").select("source", f.col("messages").alias("sent"))
    # By the prefix first, not by a join with the ledger: few sources have most of the messages.
    seen = evidence.everywhere("source", "message_id").filter(f.col("source").startswith(SOURCE))
    found = seen.groupBy("source").agg(f.count_distinct("message_id").alias("found"))
    if evidence.may_drop:
        return _counted(batches.join(found, "source", "left"), f.col("found") > f.col("sent"))
    trimmed = evidence.at("trimmed").agg(f.coalesce(f.sum("messages"), f.lit(0)).alias("trimmed"))
    counted = batches.join(found, "source", "left").crossJoin(f.broadcast(trimmed))
    lacking = f.col("sent") - f.coalesce("found", f.lit(0))
    return _counted(counted, (lacking < 0) | (lacking > f.col("trimmed"))).drop("trimmed")


@_checks("values as sent", "the topics, keys and values of {:,} batches of Spark's ledger are those that were sent")
def _values_as_sent(evidence: Evidence) -> DataFrame:
    """What is there of a whole batch of the ledger has the topics, keys and values that were sent, by their hashes."""
    digests = evidence.at("batch").select("source", f.col("messages").alias("sent"), f.col("hash").alias("digest"))
    halves = [f.conv(f.substring("hash", start, 8), 16, 10).cast("bigint") for start in (1, 9)]
    found = evidence.hashed().filter(f.col("source").startswith(SOURCE)).groupBy("source").agg(
        f.count_distinct("message_id").alias("found"), *(f.sum(half).alias(f"sum_{n}") for n, half in enumerate(halves))
    )  # fmt: skip
    # Without carry out of 64 bits. Another check finds messages that are missing or there twice.
    total = f.expr("lpad(lower(concat(lpad(hex((sum_0 + shiftright(sum_1, 32)) & 4294967295L), 8, '0'), "
                   "lpad(hex(sum_1 & 4294967295L), 8, '0'))), 16, '0')")  # fmt: skip
    whole = digests.filter("digest IS NOT NULL").join(found, "source").filter("sent = found")
    return whole.select("source", "sent", (total != f.col("digest")).alias("wrong"))


@_checks("copies agree", "{:,} messages say the same wherever they are: topic, key and value")
def _copies_agree(evidence: Evidence) -> DataFrame:
    found = evidence.hashed().groupBy("message_id").agg(f.count("*").alias("contents"))
    return found.withColumn("wrong", f.col("contents") > 1)


@_checks("copies complete", "{:,} times a topic and a drained inbox: it got what any other inbox got of that topic")
def _copies_complete(evidence: Evidence) -> DataFrame:
    """A drained inbox has, or had, what other inboxes got of the topics that it subscribes to.

    A topic counts from the first of its messages that the inbox got, and if there is none, by a pattern from the first
    message that came by that alone, or else from the making of the inbox. As many may be missing as somebody discarded
    there. What was replayed from the archive is of one inbox alone.
    """
    columns = ("inbox", "topic", "kind", "message_id", "clock", "source")
    of_files = (*columns, f.col("delivered_at").alias("at"))
    held = evidence.at("inbox", "parked").select(*columns, "at")
    skipped = evidence.at("dead_letter").filter("inbox IS NOT NULL").select(*columns, "at")
    got = _union(evidence.files.select(*of_files), held, skipped)
    # Not of all files: an inbox has yet to be drained of what another one was after the tables were read.
    sent = _union(evidence.drained_before().select(*of_files), held).filter(~f.col("source").eqNullSafe(REPLAY))
    seen = sent.groupBy("topic", "kind", "message_id")
    first = got.groupBy("inbox", "topic").agg(f.min("clock").alias("first"))
    ways = evidence.at("way").join(evidence.at("shard").select("inbox").distinct(), "inbox")
    topics = _union(seen.agg(f.count("*")).select("topic"), first.select("topic")).distinct()
    due = (
        seen.agg(f.min("clock").alias("clock"), f.min("at").alias("at"))
        .join(f.broadcast(routes(ways, topics, first)), "topic")
        .filter("coalesce(clock >= first, at >= made) AND instr(kinds, kind) > 0")
        .join(got.select("inbox", "message_id", f.lit(1).alias("got")).distinct(), ["inbox", "message_id"], "left")
    )  # fmt: skip
    found = due.groupBy("inbox", "topic").agg(f.count("*").alias("due"), f.count("got").alias("found"))
    discarded = evidence.at("discard").groupBy("inbox").agg(f.sum("messages").alias("discarded"))
    found = found.join(discarded, "inbox", "left").fillna(0, "discarded")
    return found.withColumn("wrong", f.col("due") - f.col("found") > f.col("discarded"))


@_checks("sent is there", "each of {:,} messages that the sender recorded is there", CHECKS_OF_SENT)
def _sent_is_there(evidence: Evidence) -> DataFrame:
    found = _by_id(evidence).filter("is_sent")
    return found.select("message_id", "key", (~f.col("is_there")).alias("wrong"))


@_checks("there is sent", "each of {:,} messages of Spark's batches is one that the sender recorded", CHECKS_OF_SENT)
def _there_is_sent(evidence: Evidence) -> DataFrame:
    found = _by_id(evidence).filter("is_of_batch")
    return found.select("message_id", "key", (~f.col("is_sent")).alias("wrong"))


@_checks("delivered once", "each of {:,} messages is in its inbox's files once")
def _delivered_once(evidence: Evidence) -> DataFrame:
    found = evidence.files.groupBy("inbox", "message_id").agg(
        f.min("key").alias("key"), f.min("clock").alias("clock"), f.count("*").alias("times")
    )
    return found.withColumn("wrong", f.col("times") > 1)


@_checks("drained is gone", "none of {:,} messages that wait in an inbox was drained before")
def _drained_is_gone(evidence: Evidence) -> DataFrame:
    held = evidence.at("inbox", "parked").select("inbox", "key", "clock", "message_id")
    # Not of all files: what was drained after the tables were read is rightly in both.
    drained = evidence.drained_before().select("inbox", "message_id").join(held, ["inbox", "message_id"], "left_semi")
    found = held.join(drained.distinct().withColumn("drained", f.lit(True)), ["inbox", "message_id"], "left")
    return found.withColumn("wrong", f.col("drained").isNotNull()).drop("drained")


@_checks("clocks differ", "{:,} clocks were each given to one message of an inbox")
def _clocks_differ(evidence: Evidence) -> DataFrame:
    found = evidence.files.groupBy("inbox", "clock").agg(
        f.count_distinct("message_id").alias("messages"), f.min("message_id").alias("message_id"),
        f.max("message_id").alias("other"),
    )  # fmt: skip
    return found.withColumn("wrong", f.col("messages") > 1)


@_checks(
    "segments in order", "no message overtook another of its key into an earlier segment of its shard ({:,} checked)"
)
def _segments_in_order(evidence: Evidence) -> DataFrame:
    segments = evidence.files.groupBy("inbox", "shard", "key", "segment").agg(
        f.min("clock").alias("clock"), f.max("clock").alias("last")
    )
    before = Window.partitionBy("inbox", "shard", "key").orderBy("segment").rowsBetween(Window.unboundedPreceding, -1)
    found = segments.withColumn("before", f.max("last").over(before)).drop("last")
    return found.withColumn("wrong", f.coalesce(f.col("clock") <= f.col("before"), f.lit(False)))


@_checks("origins in order", "{:,} messages stand after what their node had sent to the key before them")
def _origins_in_order(evidence: Evidence) -> DataFrame:
    order = Window.partitionBy("inbox", "key", "origin").orderBy("clock")
    found = evidence.files.select(
        "inbox", "key", "origin", "clock", "message_id", "sent_clock", f.lag("sent_clock").over(order).alias("before")
    )
    return found.withColumn("wrong", f.coalesce(f.col("sent_clock") <= f.col("before"), f.lit(False)))


# A dead letter that an inbox skipped is put back into it, and then written down, in one transaction: at most so long.
# D-spark-13: Deliveries are not counted per inbox.
PUTTING_BACK = "INTERVAL 1 HOUR"


@_checks("effects follow causes", "{:,} effects stand after their causes")
def _effects_follow_causes(evidence: Evidence) -> DataFrame:
    """A reply stands after its request, and whatever names its cause (header `causation`) after that.

    Not where the cause is a dead letter that was requeued after the effect was sent: it has a new clock since then. The
    time of its delivery and the audit trail show that. A cause that was merely delivered late, while nobody requeued
    anything, is out of order.
    """
    files = evidence.files
    named = _union(
        files.filter("kind = 'R'").withColumn("cause", f.col("headers")["correlation"]),
        files.withColumn("cause", f.col("headers")["causation"]),
    )
    effects = named.filter("cause IS NOT NULL").select(
        "message_id", "key", "clock", "sent_at", f.lower("cause").alias("cause")
    )
    # A message that several inboxes got has one clock in all of them, until one of them skips it. Not of all files:
    # what was requeued after the tables were read may be in one already.
    first = f.min_by(f.struct("clock", "delivered_at", "inbox"), "clock")
    causes = evidence.drained_before().groupBy(f.col("message_id").alias("cause")).agg(first.alias("copy"))
    requeues = evidence.at("requeue").agg(f.collect_list(f.struct("inbox", "at")).alias("requeues"))
    found = effects.distinct().join(causes, "cause").crossJoin(f.broadcast(requeues))
    came_back = f.exists("requeues", lambda requeue: _came_back(requeue, f.col("copy"), f.col("sent_at")))
    wrong = (f.col("clock") <= f.col("copy.clock")) & ~f.coalesce(came_back, f.lit(False))
    return found.select(
        "cause", "message_id", "key", "clock", f.col("copy.clock").alias("cause_clock"), wrong.alias("wrong")
    )


def _came_back(requeue: Column, copy: Column, sent_at: Column) -> Column:
    """Whether a requeue may have made this copy of a cause, and came after the effect was sent."""
    at, delivered_at = requeue["at"], copy["delivered_at"]
    skipped = (requeue["inbox"] == copy["inbox"]) & delivered_at.between(at - f.expr(PUTTING_BACK), at)
    undelivered = requeue["inbox"].isNull() & (delivered_at >= at)
    return (at >= sent_at) & (delivered_at >= sent_at) & (skipped | undelivered)


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found: how many things it checked, how many of them are wrong, and a few of those."""

    name: str
    holds: bool
    checked: int
    wrong: int
    examples: list[dict[str, Any]]

    @property
    def proves(self) -> str:
        """What follows, in words."""
        return (CHECKS | CHECKS_OF_SENT)[self.name].proves.format(self.checked)


def check(name: str, evidence: Evidence) -> Found:
    """Run a check."""
    rows = (CHECKS | CHECKS_OF_SENT)[name].rows(evidence)
    checked, wrong = rows.agg(f.count("*"), f.count_if("wrong")).collect()[0]
    examples: list[dict[str, Any]] = []
    if wrong:
        columns = [column for column in rows.columns if column != "wrong"]
        first = rows.filter("wrong").select(*columns).orderBy(*columns).limit(EXAMPLES)
        examples = [row.asDict() for row in first.collect()]
    return Found(name, not wrong, checked, wrong, examples)


def _counted(rows: DataFrame, differs: Column) -> DataFrame:
    return rows.fillna(0, "found").withColumn("wrong", differs)


def _union(*frames: DataFrame) -> DataFrame:
    return reduce(DataFrame.unionByName, frames)


def _by_id(evidence: Evidence) -> DataFrame:
    """Return a row for each message id: whether the sender recorded it, where it was seen, and of what batch."""
    there, sent = evidence.everywhere("message_id", "key", "source"), evidence.at("sent")
    seen = _union(
        there.withColumn("is_sent", f.lit(False)),
        sent.select("message_id", "key", "source", f.lit(True).alias("is_sent")),
    )
    batches = evidence.at("batch").select("source", f.lit(True).alias("is_of_batch"))
    return (
        seen.join(batches, "source", "left")
        .groupBy("message_id")
        .agg(
            f.min("key").alias("key"),
            f.bool_or("is_sent").alias("is_sent"),
            f.bool_or(~f.col("is_sent")).alias("is_there"),
            f.coalesce(f.bool_or("is_of_batch"), f.lit(False)).alias("is_of_batch"),
        )
    )
