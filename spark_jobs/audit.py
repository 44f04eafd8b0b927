"""The audit: what drained files and the node's tables prove about loss, duplicates, changes and order."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from mailroom.cli.acting import counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, json_text, say, table
from mailroom.errors import ConfigurationError
from spark_jobs.archive.files import SPARK_COLUMNS
from spark_jobs.archive.folder import full_name, shown, spark_name
from spark_jobs.command import dsn_variable, job, main, node_of, session
from spark_jobs.node import Node
from spark_jobs.proof.checks import CHECKS, CHECKS_OF_SENT, UNDER_WAY, Evidence, Found, check
from spark_jobs.proof.tables import await_files, read

MAX_TOPICS = 1_000  # in the report


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    `proven` and `not_proven` say in words what is proven, and what is not even if all `holds`. `files` describes the
    messages in the files: how many, the first and last clock and time of delivery, and how many of each inbox and topic
    (the 1,000 largest). `under_way` is how many are in each table of the node.
    """

    holds: bool
    proven: list[str]
    not_proven: list[str]
    at: datetime
    schema: str
    drained: list[str]
    checks: list[Found]
    files: dict[str, Any]
    under_way: dict[str, int]


def audit(
    spark: SparkSession, node: Node, drained: Sequence[str], *, sent: str | None = None, may_drop: bool = False
) -> AuditReport:
    """Audit a node by the directories of its drains, while it runs or not.

    `sent` is a table of the same database, with its schema, or a SELECT: the ids (message_id) of all that was sent in
    the batches of the ledger, and the key if wanted. With `may_drop`, a batch may have fewer messages left than were
    sent. Raises `ConfigurationError` for a directory that is missing, `MailroomError` if a file stays hidden
    (`await_files`), `SchemaError`, and errors of the driver and of Spark.
    """
    at = datetime.now(UTC)
    directories = sorted({full_name(directory) for directory in drained})
    evidence = gather(spark, node, directories, sent=sent, may_drop=may_drop)
    checks = [check(name, evidence) for name in (*CHECKS, *(CHECKS_OF_SENT if sent is not None else ()))]
    places = {row.place: row["count"] for row in evidence.tables.groupBy("place").count().collect()}
    under_way = {place: places.get(place, 0) for place in UNDER_WAY}
    files = _described(evidence.files)
    holds = all(found.holds for found in checks)
    proven = [found.proves for found in checks if found.holds and found.checked]
    unproven = _unproven(evidence, sent=sent is not None)
    return AuditReport(holds, proven, unproven, at, node.schema, directories, checks, files, under_way)


NEVER_PROVEN = (
    "headers, kinds and times: they are not compared with what was sent",
    "which of the messages of one batch, topic and key has which value: the ledger has a sum of hashes",
)


def _unproven(evidence: Evidence, *, sent: bool) -> list[str]:

    found = list(NEVER_PROVEN)
    batches = evidence.at("batch").select("source")
    others = evidence.everywhere("message_id", "source").join(batches, "source", "left_anti")
    messages = others.agg(f.count_distinct("message_id")).collect()[0][0]
    what = f"{messages:,} messages of others than Spark's batches are there"
    if sent:
        found.append(f"{what}: that their values are those that were sent")
    else:
        found.append(f"{what}: whether that is all they sent, and with these values; give --sent what they recorded")
    drained = evidence.at("shard").select("inbox")
    inboxes = evidence.at("way").select("inbox").distinct().join(drained, "inbox", "left_anti")
    names = [row.inbox for row in inboxes.orderBy("inbox").limit(MAX_TOPICS).collect()]
    if names:
        found.append(f"what these inboxes got, which no drain reaps: {', '.join(names)}")
    return found


def gather(
    spark: SparkSession, node: Node, directories: Sequence[str], *, sent: str | None = None, may_drop: bool = False
) -> Evidence:
    """Read the tables, and list the files; raises as `audit` does."""
    tables = read(spark, node, sent)
    # Only now: see `SNAPSHOT` of `spark_jobs.proof.tables`.
    names = await_files(node, directories)
    return Evidence(_files(spark, directories, names), tables, may_drop)


def _files(spark: SparkSession, directories: Sequence[str], names: str) -> DataFrame:
    try:
        # One listing for all checks: Spark keeps it with the DataFrame.
        return spark.read.schema(SPARK_COLUMNS).option("pathGlobFilter", names).parquet(*map(spark_name, directories))
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        raise ConfigurationError(
            f"One of these directories is missing: {', '.join(map(shown, directories))}.",
            code="MR-invalid-directory",
        ) from None


def _described(files: DataFrame) -> dict[str, Any]:

    delivered = f.unix_micros("delivered_at")
    extremes = (f.min("clock"), f.max("clock"), f.min(delivered), f.max(delivered))
    messages, *clocks, first, last = files.agg(f.count("*"), *extremes).collect()[0]
    topics = files.groupBy("inbox", "topic").agg(f.count("*").alias("messages"))
    return {
        "messages": messages,
        "clocks": clocks,
        "delivered_at": [_moment(first), _moment(last)],
        "topics": [
            row.asDict() for row in topics.orderBy(f.desc("messages"), "inbox", "topic").limit(MAX_TOPICS).collect()
        ],
    }


def _moment(microseconds: int | None) -> datetime | None:
    # Not as Spark's own timestamp, which comes without a zone, in this machine's.
    return None if microseconds is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


@job("audit")
@click.option(
    "--drained", metavar="DIR", multiple=True, required=True, help="Where drains put their files; may be repeated."
)
@click.option("--sent", metavar="TABLE|SELECT", help="What was sent, as the sender knows it: message_id, and key.")
@click.option(
    "--may-drop",
    is_flag=True,
    help="Batches may have fewer messages than they sent: some expire, or are events that no inbox gets.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write what was found into this file, as JSON.",
)
@dsn_variable
@pass_call
def command(
    call: Call,
    drained: tuple[str, ...],
    sent: str | None,
    may_drop: bool,
    report: Path | None,
    dsn_variable: str | None,
) -> None:
    """Compare drained files with the node's tables: nothing lost, nothing twice, nothing changed, all in order.

    The first lines say what is proven, and what is not. Give the directories of all drains of the node. It may run
    meanwhile. A DSN in --dsn holds no password.

    \b
    Examples:
      python -m spark_jobs.audit --drained /data/shipping --drained /data/billing
      python -m spark_jobs.audit --drained /data/shipping --sent public.orders --report audit.json
      spark-submit --py-files mailroom.zip spark_jobs/audit.py --drained hdfs:///shipping --dsn service=orders

    Exit codes: 0 all holds, 1 something does not, or the audit failed; 2 wrong usage.
    """
    if report is not None and not report.absolute().parent.is_dir():
        raise click.UsageError(f"There is no directory for the report {report}.")
    node = node_of(call, dsn_variable)
    with session("audit") as spark:
        found = audit(spark, node, drained, sent=sent, may_drop=may_drop)
    if report is not None:
        report.write_text(json_text(found) + "\n")
    if call.json:
        document(found)
    else:
        _print(found)
    if not found.holds:
        click.get_current_context().exit(1)


def _print(report: AuditReport) -> None:
    rows = ((found.name, found.holds, found.checked, found.wrong) for found in report.checks)
    for what, sentences in (("Proven", report.proven), ("Not proven", report.not_proven)):
        for sentence in sentences:
            say(f"{what}: {sentence}.")
    table(("check", "holds", "checked", "wrong"), rows, numbers=("checked", "wrong"))
    for found in report.checks:
        for example in found.examples:
            say(f"{found.name}: {', '.join(f'{name} {value}' for name, value in example.items() if value is not None)}")
    messages = counted(report.files["messages"], "message")
    waiting = counted(sum(report.under_way.values()), "row")
    wrong = [found.name for found in report.checks if not found.holds]
    result = f"WRONG: {', '.join(wrong)}" if wrong else "Everything holds"
    say(f"{result}; {messages} in files, {waiting} under way or dead letters.")


if __name__ == "__main__":
    main(command)
