"""The audit: each rule is seen to be broken, and nothing that a running node does is taken for it.

CI breaks each rule over rows that are made, and audits some runs of a node. The other runs, of the same rules, are for
nights: each sends, delivers, drains and audits by Spark.
"""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from click.testing import CliRunner, Result

from inbox import Inbox, Skip
from mailroom.errors import ConfigurationError, MailroomError, SchemaError
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.runner import run
from spark_jobs import audit as audit_job
from spark_jobs.archive.files import SPARK_COLUMNS, Series
from spark_jobs.audit import AuditReport, audit
from spark_jobs.drain import drain
from spark_jobs.node import Node as SparkNode
from spark_jobs.proof import tables as audit_tables
from spark_jobs.proof.checks import CHECKS, CHECKS_OF_SENT, Evidence, Found, check
from spark_jobs.proof.routes import routed
from spark_jobs.proof.tables import TABLES_DDL
from spark_jobs.write.sink import OutboxSink
from tests.spark.frames import frame
from tests.support.node import Node, failing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

BATCH = "mailroom spark job -1"

# -- Each check --------------------------------------------------------------------------------------------------------


class Case:
    """Two segments of six messages of three keys, six more under way, all of one batch; number 9 replies to number 3.

    Inbox, batch, ids and day are a case's own, so that one run of the checks serves all cases.
    """

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.source = f"mailroom spark job {nth}"
        self.files = {number: self.file(number, 1 if number <= 6 else 2) for number in range(1, 13)}
        self.files[9] |= {"kind": "R", "headers": {"correlation": self.id(3).upper()}}
        self.files[10] |= {"headers": {"causation": self.id(4)}}
        self.files[11] |= {"headers": {"correlation": self.id(12)}}  # no reply, so the header says nothing
        places = ("inbox", "inbox", "parked", "dead_letter", "outbox", "scheduled")
        self.under_way = {number: self.row(place, number) for number, place in enumerate(places, start=13)}
        self.batch: dict[str, Any] = {
            "place": "batch", "source": self.source, "messages": 18,
            "hash": f"{sum(int(self.hash(number), 16) for number in range(1, 19)) % 2**64:016x}",
        }  # fmt: skip
        self.shard: dict[str, Any] = {
            "place": "shard",
            "inbox": f"inbox_{nth}",
            "shard": 0,
            "segment": 2,
            "messages": 12,
        }
        self.sent = {number: {"place": "sent", "message_id": self.id(number)} for number in range(1, 19)}
        self.more: list[dict[str, Any]] = []

    def id(self, number: int) -> str:
        return str(UUID(int=self.nth << 64 | number))

    def at(self, second: float) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=self.nth, seconds=second)

    def hash(self, number: int) -> str:
        return sha256(b"topic_%d\0key-%d\0%d" % (self.nth, number % 3, number)).hexdigest()[:16]

    def file(self, number: int, segment: int) -> dict[str, Any]:
        return {
            "topic": f"topic_{self.nth}", "value": b"%d" % number,
            "inbox": f"inbox_{self.nth}", "key": f"key-{number % 3}", "clock": number, "sent_clock": number,
            "origin": "here", "message_id": self.id(number), "kind": "M", "source": self.source, "segment": segment,
            "shard": 0, "sent_at": self.at(number), "delivered_at": self.at(number + 0.5),
        }  # fmt: skip

    def row(self, place: str, number: int) -> dict[str, Any]:
        known = {"inbox": f"inbox_{self.nth}", "clock": number} if place in ("inbox", "parked") else {}
        return {
            "place": place,
            "key": f"key-{number % 3}",
            "message_id": self.id(number),
            "source": self.source,
            "topic": f"topic_{self.nth}",
            "kind": "M",
            "hash": self.hash(number),
            "at": self.at(number + 0.5),
        } | known

    def copy_all(self, *left_out: int, by_pattern: bool = False) -> None:
        """Have another inbox that subscribes to the topic got everything that this one has, in a shard of its own."""
        files = {100 + number: row for number, row in self.files.items() if number not in left_out}
        self.files |= {number: row | {"inbox": f"billing_{self.nth}"} for number, row in files.items()}
        self.more += [self.row(place, number) | {"inbox": f"billing_{self.nth}"}
                      for place, number in (("inbox", 13), ("parked", 14), ("dead_letter", 15))]  # fmt: skip
        self.more.append(self.shard | {"inbox": f"billing_{self.nth}", "messages": len(files)})
        self.subscribe(by_pattern=by_pattern)

    def subscribe(self, second: float = 0, kinds: str = "MECR", *, by_pattern: bool = False) -> None:
        """Have the other inbox, made at that second, subscribe to the topic, or to all that begin with it."""
        way = {"place": "way", "inbox": f"billing_{self.nth}", "topic": f"topic_{self.nth}", "kind": kinds}
        if by_pattern:
            way |= {"topic": f"topic_{self.nth}.#", "kind": "ME", "source": rf"topic\_{self.nth}.%"}
        self.more.append(way | {"at": self.at(second)})

    def add_by_hand(self, number: int, topic: str) -> None:
        """Have this inbox alone got a message of a topic that begins with the others'."""
        sent = {"source": "psql", "topic": f"topic_{self.nth}.{topic}", "message_id": self.id(100 + number)}
        self.files[100 + number] = self.file(number, 1) | sent | {"key": topic}
        self.shard["messages"] += 1

    def tables(self) -> list[dict[str, Any]]:
        return [self.batch, self.shard, *self.under_way.values(), *self.sent.values(), *self.more]


def case_of(row: "Row") -> int:
    """The case of whose things a row of a check is."""
    if "message_id" in row:
        return UUID(row.message_id).int >> 64
    return int((row.inbox if "inbox" in row else row.source).replace(" ", "_").rsplit("_", 1)[1])


def made(spark: "SparkSession", rows: list[dict[str, Any]], columns: str) -> "DataFrame":
    names = [column.split()[0] for column in columns.replace("map<string, string>", "map").split(", ")]
    return spark.createDataFrame([tuple(row.get(name) for name in names) for row in rows], columns).coalesce(1)


def a_file_is_lost(case: Case) -> None:
    case.shard["messages"] = 13


def all_files_of_a_shard_are_lost(case: Case) -> None:
    case.more.append(case.shard | {"shard": 1, "messages": 6})


def a_batch_lacks_one(case: Case) -> None:
    case.batch["messages"] = 19


def a_batch_has_one_more(case: Case) -> None:
    case.batch["messages"] = 17


def nothing_of_a_batch_is_there(case: Case) -> None:
    case.more.append(case.batch | {"source": f"mailroom spark other {case.nth}"})


def one_is_delivered_twice(case: Case) -> None:
    case.files[100] = case.file(5, 2) | {"clock": 100, "sent_clock": 100}
    case.shard["messages"] = 13


def one_is_drained_and_in_the_inbox(case: Case) -> None:
    case.more.append(case.row("inbox", 5))


def one_is_drained_and_parked(case: Case) -> None:
    case.more.append(case.row("parked", 5))


def two_have_one_clock(case: Case) -> None:
    case.files[12]["clock"] = 11


def one_is_overtaken_by_a_later_segment(case: Case) -> None:
    case.files[4]["segment"], case.files[7]["segment"] = 2, 1


def two_of_an_origin_are_swapped(case: Case) -> None:
    case.files[4]["sent_clock"], case.files[7]["sent_clock"] = 7, 4


def a_reply_stands_before_its_request(case: Case) -> None:
    case.files[9]["headers"] = {"correlation": case.id(11).upper()}


def an_effect_stands_before_its_cause(case: Case) -> None:
    case.files[10]["headers"] = {"causation": case.id(11)}


def a_cause_is_late(case: Case) -> None:
    """Number 4, of which number 10 is an effect."""
    case.files[4] |= {"clock": 100, "sent_clock": 100, "segment": 2, "delivered_at": case.at(20)}


def requeue(case: Case, second: float, inbox: str | None) -> None:
    case.more.append({"place": "requeue", "inbox": inbox, "messages": 1, "at": case.at(second)})


def a_cause_is_late_and_another_inbox_was_requeued(case: Case) -> None:
    a_cause_is_late(case)
    requeue(case, 20.5, f"billing_{case.nth}")


def a_cause_is_late_and_its_inbox_was_requeued_before(case: Case) -> None:
    a_cause_is_late(case)
    requeue(case, 19.5, f"inbox_{case.nth}")


def a_cause_is_late_and_its_inbox_was_requeued_much_later(case: Case) -> None:
    a_cause_is_late(case)
    requeue(case, 4_000, f"inbox_{case.nth}")


def a_cause_is_late_and_others_were_requeued_before_its_effect(case: Case) -> None:
    a_cause_is_late(case)
    requeue(case, 9.5, None)


def a_cause_is_late_and_others_were_requeued_after_it(case: Case) -> None:
    a_cause_is_late(case)
    requeue(case, 20.5, None)


def a_cause_was_there_before_and_has_a_late_clock(case: Case) -> None:
    a_cause_is_late(case)
    case.files[4]["delivered_at"] = case.at(4.5)
    requeue(case, 15, None)
    requeue(case, 15, f"inbox_{case.nth}")


def one_of_the_senders_is_lost(case: Case) -> None:
    case.sent[99] = case.sent[1] | {"message_id": case.id(99)}


def one_was_never_sent(case: Case) -> None:
    del case.sent[5]


def two_values_are_swapped(case: Case) -> None:
    case.files[1]["value"], case.files[2]["value"] = case.files[2]["value"], case.files[1]["value"]


def a_value_under_way_is_another(case: Case) -> None:
    case.under_way[17]["hash"] = case.hash(1)


def two_copies_differ(case: Case) -> None:
    copy = case.file(20, 2) | {"source": "psql"}
    case.files |= {20: copy, 21: copy | {"inbox": f"billing_{case.nth}", "value": b"another"}}
    case.shard["messages"] = 13
    case.more.append(case.shard | {"inbox": f"billing_{case.nth}", "messages": 1})


def a_copy_is_lost(case: Case) -> None:
    case.copy_all(7)


def a_whole_inbox_is_gone(case: Case) -> None:
    case.more.append(case.shard | {"inbox": f"billing_{case.nth}", "messages": 0, "segment": 0})
    case.subscribe()


def more_copies_are_lost_than_were_discarded(case: Case) -> None:
    case.copy_all(7, 8)
    case.more.append({"place": "discard", "inbox": f"billing_{case.nth}", "messages": 1})


def a_copy_by_a_pattern_is_lost(case: Case) -> None:
    case.copy_all(7, by_pattern=True)


def an_inbox_by_a_pattern_is_gone(case: Case) -> None:
    case.more.append(case.shard | {"inbox": f"billing_{case.nth}", "messages": 0, "segment": 0})
    case.subscribe(by_pattern=True)


def a_topic_of_a_pattern_is_lost(case: Case) -> None:
    """Of the one topic it got nothing, and another one shows that it had subscribed by then."""
    case.copy_all(*range(1, 7), by_pattern=True)
    case.add_by_hand(50, "new")


BROKEN: dict[Callable[[Case], None], str] = {
    a_file_is_lost: "files complete",
    all_files_of_a_shard_are_lost: "files complete",
    a_batch_lacks_one: "batches complete",
    a_batch_has_one_more: "batches complete",
    nothing_of_a_batch_is_there: "batches complete",
    one_is_delivered_twice: "delivered once",
    one_is_drained_and_in_the_inbox: "drained is gone",
    one_is_drained_and_parked: "drained is gone",
    two_have_one_clock: "clocks differ",
    one_is_overtaken_by_a_later_segment: "segments in order",
    two_of_an_origin_are_swapped: "origins in order",
    a_reply_stands_before_its_request: "effects follow causes",
    an_effect_stands_before_its_cause: "effects follow causes",
    a_cause_is_late: "effects follow causes",
    a_cause_is_late_and_another_inbox_was_requeued: "effects follow causes",
    a_cause_is_late_and_its_inbox_was_requeued_before: "effects follow causes",
    a_cause_is_late_and_its_inbox_was_requeued_much_later: "effects follow causes",
    a_cause_is_late_and_others_were_requeued_before_its_effect: "effects follow causes",
    a_cause_is_late_and_others_were_requeued_after_it: "effects follow causes",
    a_cause_was_there_before_and_has_a_late_clock: "effects follow causes",
    one_of_the_senders_is_lost: "sent is there",
    one_was_never_sent: "there is sent",
    two_values_are_swapped: "values as sent",
    a_value_under_way_is_another: "values as sent",
    two_copies_differ: "copies agree",
    a_copy_is_lost: "copies complete",
    a_whole_inbox_is_gone: "copies complete",
    a_copy_by_a_pattern_is_lost: "copies complete",
    an_inbox_by_a_pattern_is_gone: "copies complete",
    a_topic_of_a_pattern_is_lost: "copies complete",
    more_copies_are_lost_than_were_discarded: "copies complete",
}


def as_it_is(case: Case) -> None:
    pass


def messages_were_drained_after_the_look(case: Case) -> None:
    case.files[13] = case.file(13, 3)
    case.files[14] = case.file(14, 1) | {"shard": 1}  # a shard that was not there yet


def a_batch_was_sent_and_drained_after_the_look(case: Case) -> None:
    case.files[20] = case.file(20, 3) | {"source": "mailroom spark later 0"}


def others_send_too(case: Case) -> None:
    case.files[20] = case.file(20, 2) | {"source": "psql"}
    case.shard["messages"] = 13


def two_inboxes_get_one(case: Case) -> None:
    case.files[20] = case.file(3, 1) | {"inbox": f"billing_{case.nth}"}
    case.more.append(case.shard | {"inbox": f"billing_{case.nth}", "messages": 1})


def shards_drain_beside_each_other(case: Case) -> None:
    case.files[7] |= {"shard": 1, "segment": 1}
    case.files[4]["segment"] = 2
    case.shard["messages"] = 11
    case.more.append(case.shard | {"shard": 1, "messages": 1})


def another_node_counts_otherwise(case: Case) -> None:
    case.files[7] |= {"origin": "there", "sent_clock": 1}


def a_skipped_cause_was_requeued(case: Case) -> None:
    a_cause_is_late(case)
    requeue(case, 20.5, f"inbox_{case.nth}")


def an_undelivered_cause_was_requeued(case: Case) -> None:
    a_cause_is_late(case)
    requeue(case, 15, None)


def a_cause_was_requeued_and_drained_after_the_look(case: Case) -> None:
    case.files[100] = case.file(13, 3) | {"clock": 100, "sent_clock": 100}
    case.files[12]["headers"] = {"causation": case.id(13)}


def all_copies_are_there(case: Case) -> None:
    case.copy_all()


def a_copy_was_discarded(case: Case) -> None:
    case.copy_all(7)
    case.more.append({"place": "discard", "inbox": f"billing_{case.nth}", "messages": 1})


def a_message_was_replayed_from_the_archive(case: Case) -> None:
    """Into one of two inboxes, which gets it alone."""
    case.copy_all()
    case.files[200] = case.file(20, 2) | {"source": "mailroom archive replay"}
    case.shard["messages"] += 1


def an_inbox_subscribed_later(case: Case) -> None:
    case.copy_all(*range(1, 7))


def an_inbox_was_made_later(case: Case) -> None:
    case.more.append(case.shard | {"inbox": f"billing_{case.nth}", "messages": 0, "segment": 0})
    case.subscribe(1_000)


def an_inbox_that_no_drain_reaps_has_none(case: Case) -> None:
    case.subscribe()


def events_do_not_go_by_the_topic_s_name(case: Case) -> None:
    case.more.append(case.shard | {"inbox": f"billing_{case.nth}", "messages": 0, "segment": 0})
    for row in (*case.files.values(), *case.under_way.values()):
        row["kind"] = "E"
    case.subscribe(0, "MCR")


def commands_do_not_go_by_patterns(case: Case) -> None:
    case.more.append(case.shard | {"inbox": f"billing_{case.nth}", "messages": 0, "segment": 0})
    for number, row in (*case.files.items(), *case.under_way.items()):
        row["kind"] = "R" if number == 9 else "C"
    case.subscribe(by_pattern=True)


def a_pattern_was_subscribed_to_later(case: Case) -> None:
    """Also of a topic of which nothing has been sent since."""
    case.copy_all(*range(1, 7), by_pattern=True)
    case.add_by_hand(0, "old")


def a_pattern_was_subscribed_to_beside_a_topic(case: Case) -> None:
    """What came by the exact subscription does not say since when there is the pattern."""
    case.copy_all()
    case.subscribe(1_000, by_pattern=True)
    case.add_by_hand(50, "old")


def a_copy_was_drained_after_the_look(case: Case) -> None:
    case.copy_all()
    case.files[200] = case.file(20, 3) | {"source": "psql"}


SOUND = [
    all_copies_are_there, a_copy_was_discarded, a_message_was_replayed_from_the_archive,
    an_inbox_subscribed_later, an_inbox_was_made_later,
    commands_do_not_go_by_patterns, a_pattern_was_subscribed_to_later, a_pattern_was_subscribed_to_beside_a_topic,
    an_inbox_that_no_drain_reaps_has_none, events_do_not_go_by_the_topic_s_name, a_copy_was_drained_after_the_look,
    a_skipped_cause_was_requeued, an_undelivered_cause_was_requeued, a_cause_was_requeued_and_drained_after_the_look,
    as_it_is, messages_were_drained_after_the_look, a_batch_was_sent_and_drained_after_the_look, others_send_too,
    two_inboxes_get_one, shards_drain_beside_each_other, another_node_counts_otherwise,
]  # fmt: skip
CASES: list[Callable[[Case], None]] = [*BROKEN, *SOUND]


def evidence_of(spark: "SparkSession", cases: list[Case], **options: bool) -> Evidence:
    files = [row for case in cases for row in case.files.values()]
    tables = [row for case in cases for row in case.tables()]
    return Evidence(made(spark, files, SPARK_COLUMNS), made(spark, tables, TABLES_DDL), **options)


def wrong_in(spark: "SparkSession", changes: list[Callable[[Case], None]]) -> dict[str, list[str]]:
    """By a case's name, the checks that do not hold in it."""
    cases = [Case(nth) for nth in range(len(changes))]
    for case, change in zip(cases, changes, strict=True):
        change(case)
    evidence = evidence_of(spark, cases)
    found: dict[str, list[str]] = {change.__name__: [] for change in changes}
    for name, each in (CHECKS | CHECKS_OF_SENT).items():
        for nth in {case_of(row) for row in each.rows(evidence).filter("wrong").collect()}:
            found[changes[nth].__name__].append(name)
    return found


def test_broken_rules_fail_their_checks_alone_and_what_is_right_holds(spark: "SparkSession") -> None:
    found = wrong_in(spark, CASES)
    expected = {broken.__name__: [name] for broken, name in BROKEN.items()} | {sound.__name__: [] for sound in SOUND}
    assert {name: checks for name, checks in found.items() if checks != expected[name]} == {}


def test_dropped_ones_may_be_allowed(spark: "SparkSession") -> None:
    cases = [Case(0), Case(1)]
    a_batch_lacks_one(cases[0])
    a_batch_has_one_more(cases[1])
    found = check("batches complete", evidence_of(spark, cases, may_drop=True))
    assert (found.holds, found.checked, found.wrong) == (False, 2, 1)
    assert found.examples == [{"source": cases[1].source, "sent": 17, "found": 18}]


def test_examples_are_few_and_hold_no_value(spark: "SparkSession") -> None:
    case = Case(0)
    case.files = {
        number: case.file(number, 1) | {"sent_clock": 1, "value": b"secret", "value_json": '"secret"'}
        for number in range(1, 31)
    }
    found = check("origins in order", evidence_of(spark, [case]))
    assert (found.holds, found.checked, found.wrong, len(found.examples)) == (False, 30, 27, 10)
    assert found.examples[0] == {
        "inbox": "inbox_0", "key": "key-0", "origin": "here", "clock": 6, "message_id": case.id(6), "sent_clock": 1,
        "before": 1,
    }  # fmt: skip


# -- A node ------------------------------------------------------------------------------------------------------------


class Run:
    """A node whose inbox "numbers" is drained into a directory, and the sender's own table public.sent."""

    def __init__(self, spark: "SparkSession", node: Node, spark_dsn: str, directory: Path) -> None:
        self.spark = spark
        self.node = node
        self.job = SparkNode(dsn=spark_dsn)
        self.directory = directory
        node.inbox("numbers")
        node.connection.execute("CREATE TABLE public.sent (message_id uuid PRIMARY KEY, key text)")

    def send(self, count: int, name: str = "job", **options: str) -> None:
        """Send a batch, which the sender notes."""
        options = {"topic": "numbers", "idempotencyKey": name, "dsn": str(self.job.dsn), **options}
        frame(self.spark, count, 2).write.format("outbox").options(**options).mode("append").save()
        record = "INSERT INTO public.sent SELECT message_id, key FROM mailroom.outbox WHERE source = %s"
        self.node.connection.execute(record, [f"mailroom spark {name} -1"])

    def drain(self, **options: int) -> None:
        drain(self.job, "numbers", str(self.directory), **options)

    def drained(self) -> int:
        return self.spark.read.parquet(str(self.directory)).count()

    def audit(self, **options: Any) -> AuditReport:
        return audit(self.spark, self.job, [str(self.directory)], sent="public.sent", **options)

    def wrong(self, *names: str) -> list[Found]:
        """Gather the evidence anew, and return what does not hold of some checks."""
        evidence = audit_job.gather(self.spark, self.job, [str(self.directory)], sent="public.sent")
        return [found for found in (check(name, evidence) for name in names) if not found.holds]


@pytest.fixture
def node_run(spark: "SparkSession", dsn: str, spark_dsn: str, tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "drained").mkdir()
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Run(spark, Node(dsn, connection), spark_dsn, tmp_path / "drained")


def test_run_that_is_sound_holds_wherever_its_messages_are(node_run: Run) -> None:
    node_run.send(40)
    node_run.node.deliver_all()
    node_run.drain(max_messages=15)
    node_run.send(6, "unrouted", topic="nobody", kind="C")
    node_run.send(6, "waiting")
    node_run.node.send("numbers", {"by": "another"}, deliver_at=datetime(2100, 1, 1, tzinfo=UTC))
    node_run.node.deliver_all()
    columns = (
        "inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, value, sent_at"
    )
    node_run.node.connection.execute(
        "WITH last AS (SELECT max(clock) AS clock FROM mailroom.inbox_numbers), gone AS ("
        "DELETE FROM mailroom.inbox_numbers AS i USING last WHERE i.clock = last.clock RETURNING i.*) "
        f"INSERT INTO mailroom.parked ({columns}, source) SELECT {columns}, source FROM gone"
    )
    node_run.send(3, "sent")
    report = node_run.audit()
    assert [(found.name, found.wrong) for found in report.checks if not found.holds] == []
    assert report.under_way == {"outbox": 3, "scheduled": 1, "inbox": 5, "parked": 1, "dead_letter": 6, "transit": 0}
    checked = {found.name: found.checked for found in report.checks}
    assert checked == {
        "files complete": 1, "batches complete": 4, "delivered once": 40, "drained is gone": 6, "clocks differ": 40,
        "segments in order": checked["segments in order"], "origins in order": 40, "effects follow causes": 0,
        "sent is there": 55, "there is sent": 55, "values as sent": 4, "copies agree": 56, "copies complete": 1,
    }  # fmt: skip
    assert "the topics, keys and values of 4 batches of Spark's ledger are those that were sent" in report.proven
    assert "1 messages of others than Spark's batches are there: that their values are those that were sent" in (
        report.not_proven
    )
    assert report.files["messages"] == 40
    assert report.files["topics"] == [{"inbox": "numbers", "topic": "numbers", "messages": 40}]
    [moments] = node_run.node.rows("SELECT min(clock), max(clock) FROM (SELECT clock FROM mailroom.inbox_numbers) AS i")
    assert report.files["clocks"][1] < moments[0]
    first, last = report.files["delivered_at"]
    assert node_run.node.value("SELECT %s <= %s AND %s < now()", first, last, last)


@pytest.mark.nightly
def test_message_that_went_to_another_node_only_is_not_lost(node_run: Run) -> None:
    connection = node_run.node.connection
    connection.execute("INSERT INTO mailroom.link (name) VALUES ('lyon')")
    connection.execute("INSERT INTO mailroom.link_topic (topic, link) SELECT topic, number FROM mailroom.link, "
                       "(VALUES ('numbers'), ('elsewhere')) AS t (topic)")  # fmt: skip
    node_run.send(10)
    node_run.send(20, "far", topic="elsewhere")
    node_run.node.deliver_all()
    node_run.drain()
    checks = ("batches complete", "copies agree", "values as sent")
    assert node_run.wrong(*checks, "sent is there", "there is sent") == []
    assert node_run.audit().under_way["transit"] == 30
    connection.execute("DELETE FROM mailroom.transit WHERE seq <= 14")
    assert node_run.wrong(*checks) == []
    connection.execute("DELETE FROM mailroom.transit WHERE seq BETWEEN 16 AND 30")
    assert [found.name for found in node_run.wrong(*checks)] == ["batches complete"]


@pytest.mark.nightly  # as a_file_is_lost, a_batch_lacks_one and one_of_the_senders_is_lost
def test_lost_message_and_lost_file_are_found(node_run: Run) -> None:
    node_run.send(20)
    node_run.node.deliver_all()
    [(lost,)] = node_run.node.rows(
        "DELETE FROM mailroom.inbox_numbers WHERE clock = (SELECT min(clock) FROM mailroom.inbox_numbers) "
        "RETURNING message_id::text"
    )
    node_run.drain(max_messages=10)
    names = ("files complete", "batches complete", "sent is there")
    assert node_run.wrong(*names) == [
        Found("batches complete", False, 1, 1, [{"source": BATCH, "sent": 20, "found": 19}]),
        Found("sent is there", False, 20, 1, [{"message_id": lost, "key": "key-0"}]),
    ]
    next(iter(node_run.directory.glob("*.parquet"))).unlink()
    assert [found.name for found in node_run.wrong(*names)] == list(names)


def test_values_that_were_changed_are_found(node_run: Run) -> None:
    node, names = node_run.node, ("values as sent", "copies agree")
    node.inbox("others", "numbers")
    node_run.send(20)
    node.deliver_all()
    swap = """WITH two AS (SELECT key, value FROM mailroom.inbox_%s WHERE key IN ('key-1', 'key-2') AND clock < 11)
              UPDATE mailroom.inbox_%s AS i SET value = two.value FROM two WHERE clock < 11 AND two.key <> i.key
              AND i.key IN ('key-1', 'key-2')"""
    node.connection.execute((swap % ("numbers", "numbers")).encode())
    node_run.drain()
    assert [(found.name, found.wrong) for found in node_run.wrong(*names)] == [(names[0], 1), (names[1], 2)]
    node.connection.execute((swap % ("others", "others")).encode())
    assert [(found.name, found.wrong) for found in node_run.wrong(*names)] == [(names[0], 1)]


@pytest.mark.nightly
def test_values_of_every_shape_are_those_that_were_sent(node_run: Run) -> None:
    """Whatever of a message is a column, an option, or made up: the audit hashes it as the tasks did."""
    rows = node_run.spark.range(0, 30, 1, 3)
    options = {"dsn": str(node_run.job.dsn), "topic": "numbers"}
    own = "concat('00000000-0000-4000-8000-0000000000', lpad(string(id), 2, '0'))"
    late = "timestamp'2100-01-01 00:00:00Z' AS deliver_at"
    shapes: dict[str, list[str]] = {
        "plain": ["id AS value"],
        "topics": ["'numbers' AS topic", "id AS value"],
        "some keys": ["if(id % 2 = 0, string(id), NULL) AS key", "struct(id, 'ä' AS text) AS value"],
        "own ids": [f"{own} AS message_id", f"{own} AS key", "id AS value"],
        "all": ["id AS key", "map('user', 'ada') AS headers", "id AS value", "2L AS after_clock", late],
    }
    for name, columns in shapes.items():
        mine = options if name != "topics" else {"dsn": options["dsn"]}
        rows.selectExpr(*columns).write.format("outbox").options(idempotencyKey=name, **mine).mode("append").save()
    sink = OutboxSink("sink", topic="numbers", dsn=options["dsn"], commit_sql="SELECT count(number) FROM {staging}")
    sink(rows.selectExpr("id AS number", "string(id) AS key", "id AS value"), 0)
    for _ in range(2):
        evidence = audit_job.gather(node_run.spark, node_run.job, [str(node_run.directory)])
        found = check("values as sent", evidence)
        assert (found.checked, found.wrong, found.examples) == (6, 0, [])
        node_run.node.deliver_all()
        node_run.drain()
    assert node_run.drained() == 150


def test_inbox_that_was_emptied_is_found(node_run: Run) -> None:
    """Of its messages there are copies in another inbox, so none of them is lost altogether."""
    node = node_run.node
    node.inbox("others", "numbers")
    node.send("numbers", {"by": "another"})
    node_run.send(5)
    node.deliver_all()
    drain(node_run.job, "others", str(node_run.directory), max_messages=1)
    node_run.send(5, "more")
    node.deliver_all()
    node.connection.execute("DELETE FROM mailroom.inbox_others")
    node_run.drain()
    assert node_run.wrong("files complete", "batches complete", "sent is there") == []
    assert node_run.wrong("copies complete") == [
        Found("copies complete", False, 2, 1, [
            {"inbox": "others", "topic": "numbers", "due": 11, "found": 6, "discarded": 0}
        ])
    ]  # fmt: skip


@pytest.mark.nightly  # as a_copy_by_a_pattern_is_lost, and test_ways_are_those_of_deliveries
def test_message_that_a_pattern_should_have_brought_is_missed(node_run: Run) -> None:
    node = node_run.node

    def drain_both() -> None:
        node.deliver_all()
        for inbox in ("numbers", "others"):
            drain(node_run.job, inbox, str(node_run.directory))

    node.inbox("others", "numbers.#")
    node_run.send(5)
    for kind in "MECR":
        node.send("numbers", 1, kind=kind)
    drain_both()
    assert node_run.wrong("copies complete") == []
    for _ in range(2):
        node.send("numbers", 2)
    node.deliver_all()
    node.connection.execute("DELETE FROM mailroom.inbox_others WHERE clock < (SELECT max(clock) FROM mailroom.inbox)")
    drain_both()
    [found] = node_run.wrong("copies complete")
    assert found.examples == [{"inbox": "others", "topic": "numbers", "due": 9, "found": 8, "discarded": 0}]


def test_ways_are_those_of_deliveries(node_run: Run) -> None:
    patterns = ["#", "a.*", "a.#", "*", "*.b", "*.*", "a_b.*", "a_b.#", "a.b", "a"]
    topics = ["a", "a.b", "a.b.c", "a_b", "a_b.c", "axb", "axb.c", "b", "a.", "a..b", "by_0", "by_8"]
    for nth, pattern in enumerate(patterns):
        node_run.node.inbox(f"by_{nth}", pattern)
    for topic in topics:
        for kind in "ME":
            node_run.node.send(topic, kind=kind)
    node_run.node.deliver_all()
    delivered = set(node_run.node.delivered("inbox, topic, kind"))
    ways = audit_tables.read(node_run.spark, node_run.job, None).filter("place = 'way'")
    found = routed(ways, node_run.spark.createDataFrame([(topic,) for topic in topics], "topic string"))
    assert delivered == {
        (row.inbox, row.topic, kind) for row in found.collect() if row.topic in topics for kind in row.kinds
        if kind in "ME"
    }  # fmt: skip


@pytest.mark.nightly
def test_what_no_ledger_tells_is_said_not_to_be_proven(node_run: Run) -> None:
    """A row of a plain sender's that somebody removed: with his own note it is found, without it nobody can know."""
    node = node_run.node
    node.inbox("reaped", "orders")
    ids = [node.send("numbers", number) for number in range(3)]
    node.deliver_all()
    node.connection.execute("DELETE FROM mailroom.inbox_numbers WHERE message_id = %s", [ids[1]])
    node_run.drain()
    report = audit(node_run.spark, node_run.job, [str(node_run.directory)])
    assert report.holds
    said = (
        "2 messages of others than Spark's batches are there: whether that is all they sent, and with these values; "
        "give --sent what they recorded"
    )
    assert report.not_proven[-2:] == [said, "what these inboxes got, which no drain reaps: reaped"]
    node.connection.execute("INSERT INTO public.sent SELECT unnest(%s::uuid[])", [ids])
    assert [found.name for found in node_run.wrong("sent is there")] == ["sent is there"]


@pytest.mark.nightly
def test_messages_that_move_meanwhile_are_not_lost(node_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    node_run.send(20, "first")
    node_run.node.deliver_all()
    node_run.send(20, "second")
    read, await_files = audit_tables.read, audit_tables.await_files

    def move_and_read(*arguments: Any) -> "DataFrame":
        node_run.drain()
        node_run.node.deliver_all()
        return read(*arguments)

    def move_and_await_files(*arguments: Any) -> str:
        node_run.drain()
        node_run.send(20, "third")
        node_run.node.deliver_all()
        node_run.drain()
        return await_files(*arguments)

    monkeypatch.setattr(audit_job, "read", move_and_read)
    monkeypatch.setattr(audit_job, "await_files", move_and_await_files)
    assert node_run.wrong("files complete", "batches complete", "drained is gone", *CHECKS_OF_SENT) == []
    monkeypatch.undo()
    assert node_run.drained() == 60


@pytest.mark.nightly
def test_files_of_other_nodes_are_ignored(node_run: Run) -> None:
    """Theirs may lie in the same directory, of an inbox of the same name."""
    node_run.send(10)
    node_run.node.deliver_all()
    node_run.drain()
    [file] = node_run.directory.iterdir()
    inbox, _, shard, segment = file.name.split("-")
    (node_run.directory / f"{inbox}-00000000-{shard}-{segment}").write_bytes(file.read_bytes())
    assert node_run.drained() == 20
    report = node_run.audit()
    assert (report.holds, report.files["messages"]) == (True, 10)


@pytest.mark.nightly
def test_cause_that_was_requeued_after_its_effect_is_no_disorder(node_run: Run) -> None:
    node = node_run.node
    cause = node.send("numbers", 1, key="a")
    node.deliver_all()
    [message] = Inbox("numbers").peek(node.connection)
    with node.connection.transaction():
        run(node.connection, failing("numbers", message, Skip("not now")))
    unrouted = node.send("nobody", 1, kind="C")
    node.deliver_all()
    for number, id in enumerate((cause, unrouted)):
        node.send("numbers", number, key="b", headers={"causation": str(id)})
    node.deliver_all()
    node.inbox("others", "nobody")
    with node.connection.transaction():
        assert DeadLetters().requeue(node.connection, None, actor="test") == 2
    node.deliver_all()
    node_run.drain()
    drain(node_run.job, "others", str(node_run.directory))
    assert node_run.wrong("effects follow causes") == []
    node.connection.execute("DELETE FROM mailroom.audit")
    [found] = node_run.wrong("effects follow causes")
    assert (found.checked, found.wrong) == (2, 2)


def test_tables_are_read_once(node_run: Run) -> None:
    node_run.send(5)
    tables = audit_tables.read(node_run.spark, node_run.job, None)
    node_run.node.connection.execute("DELETE FROM mailroom.outbox")
    assert tables.filter("place = 'outbox'").count() == 5


def hidden(node_run: Run) -> tuple[Path, Path]:
    """Put the node back to where a drain has committed and its file is not to be seen; return its two names."""
    node_id = node_run.node.value("SELECT id FROM mailroom.node")
    final = node_run.directory / Series(node_id, "numbers", 0).final(1)
    file = final.rename(final.with_name(Series(node_id, "numbers", 0).hidden(1)))
    node_run.node.connection.execute("UPDATE mailroom.spark_drain SET finished = false, file = %s", [file.name])
    return file, final


def test_file_that_is_about_to_be_shown_is_awaited(node_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    node_run.send(5)
    node_run.node.deliver_all()
    node_run.drain()
    file, final = hidden(node_run)
    monkeypatch.setattr(audit_tables, "sleep", lambda _: file.rename(final))
    assert node_run.wrong("files complete") == []


@pytest.mark.nightly
def test_file_that_stays_hidden_is_told_and_healed_by_a_drain(node_run: Run) -> None:
    node_run.send(5)
    node_run.node.deliver_all()
    node_run.drain()
    hidden(node_run)
    with pytest.raises(
        MailroomError, match=r"000000000001\.parquet is committed and not to be seen .* Drain this inbox"
    ):
        audit_tables.await_files(node_run.job, [str(node_run.directory)], within_s=0)
    audit_tables.await_files(node_run.job, ["/another"], within_s=0)
    node_run.send(1, "more")
    node_run.node.deliver_all()
    node_run.drain()
    assert node_run.wrong("files complete", "batches complete") == []


def test_sent_may_be_a_select(node_run: Run) -> None:
    node_run.send(5)
    select = "SELECT message_id::text FROM public.sent WHERE key LIKE 'key-%' -- all\n"
    tables = audit_tables.read(node_run.spark, node_run.job, select)
    assert tables.filter("place = 'sent' AND message_id IS NOT NULL AND key IS NULL").count() == 5
    with pytest.raises(ConfigurationError, match="no column message_id"):
        audit_tables.read(node_run.spark, node_run.job, "SELECT key FROM public.sent")
    with pytest.raises(psycopg.errors.UndefinedTable):
        audit_tables.read(node_run.spark, node_run.job, "public.orders")


def test_what_is_missing_is_told(spark: "SparkSession", spark_dsn: str, connect: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"One of these directories is missing: .*/nowhere"):
        audit(spark, SparkNode(dsn=spark_dsn), [str(tmp_path / "nowhere")])
    with pytest.raises(SchemaError):
        audit(spark, SparkNode("another", spark_dsn), [str(tmp_path)])
    report = audit(spark, SparkNode(dsn=spark_dsn), [str(tmp_path), f"{tmp_path}/"])
    assert report.holds
    assert report.files == {"messages": 0, "clocks": [None, None], "delivered_at": [None, None], "topics": []}


# -- The command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(node_run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Call the command, in the session of all tests."""
    monkeypatch.setattr(node_run.spark, "stop", lambda: None)

    def call(*arguments: str) -> Result:
        options = ["--drained", str(node_run.directory), "--dsn", str(node_run.job.dsn), *arguments]
        return CliRunner().invoke(audit_job.command, options)

    return call


def test_command_prints_a_result_and_writes_a_report(
    node_run: Run, command: Callable[..., Result], tmp_path: Path
) -> None:
    node_run.send(12)
    node_run.node.deliver_all()
    node_run.drain()
    result = command("--report", str(tmp_path / "audit.json"), "--sent", "public.sent")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Proven: the files of 1 shards hold as many messages as their drains took."
    assert lines[[line.split(":")[0] for line in lines].index("Not proven")].startswith("Not proven: headers, kinds")
    assert lines[-1] == "Everything holds; 12 messages in files, 0 rows under way or dead letters."
    assert ["delivered", "once", "yes", "12", "0"] in [line.split() for line in lines]
    report = json.loads((tmp_path / "audit.json").read_text())
    assert (report["holds"], report["drained"]) == (True, [str(node_run.directory)])

    node_run.node.connection.execute("UPDATE mailroom.spark_batch SET messages = 13")
    result = command()
    assert result.exit_code == 1
    *_, example, verdict = result.stdout.splitlines()
    assert example == f"batches complete: source {BATCH}, sent 13, found 12"
    assert verdict == "WRONG: batches complete; 12 messages in files, 0 rows under way or dead letters."

    result = command("--may-drop", "--json")
    assert result.exit_code == 0
    assert [one["name"] for one in json.loads(result.stdout)["checks"]] == list(CHECKS)


def test_command_refuses_wrong_usage(command: Callable[..., Result], tmp_path: Path) -> None:
    assert CliRunner().invoke(audit_job.command, []).exit_code == 2
    result = command("--report", str(tmp_path / "nowhere" / "audit.json"))
    assert result.exit_code == 2
    assert "There is no directory for the report" in result.output
    assert isinstance(command("--dsn-variable", "DSN").exception, ConfigurationError)
