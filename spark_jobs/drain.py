"""Drain: reap an inbox into Parquet files, exactly once; `python -m spark_jobs.drain`."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import click
import psycopg
import pyarrow as pa

from inbox.order import finding_in_parts
from mailroom.cli.acting import counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, say
from mailroom.cli.parameters import WholeNumber
from mailroom.errors import ConfigurationError, MailroomError
from mailroom.schema import checking
from mailroom.session.commit import atomically
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from mailroom.values.names import inbox_name
from mailroom.values.numbers import count, whole
from spark_jobs.archive.drainer import Drainer
from spark_jobs.archive.files import SPARK_COLUMNS
from spark_jobs.archive.folder import full_name, spark_name
from spark_jobs.command import dsn_variable, job, main, node_of, session
from spark_jobs.node import Node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_SHARDS = 1_000
MAX_MESSAGES = 1_000_000  # of one segment: each claim passes over what the segment has deleted before
SEGMENT_MESSAGES = 100_000


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain took: how many messages, in how many segments."""

    messages: int
    segments: int


def drain(node: Node, inbox: str, directory: str, *, shard: int = 0, max_messages: int = SEGMENT_MESSAGES) -> Drained:
    """Reap an inbox into Parquet files until nothing is left to take, each message exactly once; needs no Spark.

    `directory` is a path, or a URI of file, s3, gs, abfs or hdfs. Each segment takes up to `max_messages` (about 1 GiB
    of values if that is less) into one file, as a worker would: in clock order within a key, without keys that wait,
    are parked, or are worked on by others. If it is killed or cut off, the next drain of the inbox, by any shard,
    finishes what was committed; nothing else is ever visible. Two drains of one shard wait for each other. Several
    shards share the inbox: a key's messages may then be in files of several shards, in order by `clock`.

    Handles lost connections, and COMMITs whose answer was lost, as `mailroom.atomically` does. Raises
    `ConfigurationError`, `InvalidMessage`, `UnknownInbox`, `SchemaError`, `CommitUnknown` (the next drain knows),
    `MailroomError` where a committed file is missing, `OSError`, and errors of the driver.
    """
    inbox, directory = inbox_name(inbox), full_name(directory)
    shard = whole(shard, "shard", 0, MAX_SHARDS - 1, ConfigurationError)
    max_messages = count(max_messages, "max_messages")
    messages = segments = 0
    with closing(_Sessions(node, f"drain {inbox} {shard}")) as sessions:
        with sessions.connect() as connection:
            run(connection, _checking(node.schema, inbox))
            connection.rollback()
        drainer = Drainer(node.schema, inbox, directory, shard, max_messages)
        atomically(sessions.connect, drainer.finish_others, schema=node.schema)
        atomically(sessions.connect, drainer.finish, schema=node.schema)
        is_all = False
        while not is_all:
            taken = atomically(sessions.connect, drainer.segment, schema=node.schema)
            atomically(sessions.connect, drainer.finish, schema=node.schema)
            messages, segments, is_all = messages + taken.messages, segments + bool(taken.messages), taken.is_all
    return Drained(messages, segments)


def _checking(schema: str, inbox: str) -> Operation[None]:
    yield from checking(schema)
    yield from finding_in_parts(schema, inbox)


class _Sessions:
    """One session for all transactions, and another one when it was lost."""

    def __init__(self, node: Node, role: str) -> None:
        self._node = node
        self._role = role
        self._connection: psycopg.Connection | None = None

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection]:
        if self._connection is None:
            self._connection = self._node.connect(self._role)
        try:
            yield self._connection
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


TOTALS = Sql(
    """
SELECT coalesce(sum(messages), 0::numeric)::bigint, coalesce(sum(segment), 0::numeric)::bigint FROM {schema}.spark_drain
WHERE inbox = %(inbox)s::text AND shard < %(shards)s::integer
""",
    columns=("bigint", "bigint"),
)


def totalling(schema: str, inbox: str, shards: int) -> Operation[Drained]:
    """Return what the first `shards` shards have drained in all; raises as `drain` does."""
    yield from _checking(schema, inbox)
    [(messages, segments)] = yield TOTALS.at(schema=schema)(inbox=inbox, shards=shards)
    return Drained(messages, segments)


def drain_on(
    spark: "SparkSession",
    node: Node,
    inbox: str,
    directory: str,
    shards: int,
    *,
    max_messages: int = SEGMENT_MESSAGES,
) -> Drained:
    """`drain` by as many tasks of Spark as `shards`, into a directory that all executors share.

    A task that is tried again, or runs twice, does no harm: only one at a time locks the shard, and each segment is a
    transaction of its own. Returns what these shards took since the call began. Raises as `drain` does; Spark retries a
    task with any other error, and raises it in the end.
    """
    inbox, directory = inbox_name(inbox), full_name(directory)
    shards = whole(shards, "shards", 1, MAX_SHARDS, ConfigurationError)
    node = node.pinned()
    before = _totals(node, inbox, shards)
    task = partial(_drain_shards, node=node, inbox=inbox, directory=directory, max_messages=max_messages)
    refused = spark.range(0, shards, 1, shards).mapInArrow(task, "shard bigint, error string, code string").collect()
    if refused:
        raise MailroomError(f"Shard {refused[0].shard}: {refused[0].error}", code=refused[0].code)
    after = _totals(node, inbox, shards)
    return Drained(after.messages - before.messages, after.segments - before.segments)


def _totals(node: Node, inbox: str, shards: int) -> Drained:
    with node.connect(f"drain {inbox}") as connection:
        return run(connection, totalling(node.schema, inbox, shards))


def _drain_shards(
    batches: Iterator[pa.RecordBatch], node: Node, inbox: str, directory: str, max_messages: int
) -> Iterator[pa.RecordBatch]:
    """Drain the shards of a task; return those that must not be retried, with the reason."""
    for batch in batches:
        for shard in batch.column("id").to_pylist():
            try:
                drain(node, inbox, directory, shard=shard, max_messages=max_messages)
            except MailroomError as error:
                yield pa.RecordBatch.from_pydict({"shard": [shard], "error": [str(error)], "code": [error.code]})


def drained(spark: "SparkSession", directory: str) -> "DataFrame":
    """Read what drains have put into a directory, one row per message; empty if nothing was drained yet.

    `value` is CBOR: `spark_jobs.from_cbor` reads it. The directory must exist.
    """
    return spark.read.schema(SPARK_COLUMNS).parquet(spark_name(full_name(directory)))


@job("drain")
@click.argument("inbox")
@click.argument("directory")
@click.option(
    "--shards",
    type=WholeNumber(1, MAX_SHARDS),
    default=1,
    show_default=True,
    help="Drain side by side, each shard in a task of Spark; then --dsn must not hold a password.",
)
@click.option(
    "--max-messages",
    type=WholeNumber(1, MAX_MESSAGES),
    default=SEGMENT_MESSAGES,
    show_default=True,
    help="Messages of one segment: one transaction, one file.",
)
@dsn_variable
@pass_call
def command(call: Call, inbox: str, directory: str, shards: int, max_messages: int, dsn_variable: str | None) -> None:
    """Reap INBOX into Parquet files in DIRECTORY until it is empty, each message exactly once.

    DIRECTORY is a path, or a URI of file, s3, gs, abfs or hdfs. The next call finishes what was interrupted. With one
    shard this needs no Spark.

    \b
    Examples:
      python -m spark_jobs.drain shipping /data/shipping
      spark-submit spark_jobs/drain.py shipping hdfs:///shipping --shards 4 --dsn service=orders
    """
    node = node_of(call, dsn_variable, travels=shards > 1)
    if shards == 1:
        found = drain(node, inbox, directory, max_messages=max_messages)
    else:
        with session(f"drain {inbox}") as spark:
            found = drain_on(spark, node, inbox, directory, shards, max_messages=max_messages)
    if call.json:
        document({"inbox": inbox, "directory": directory, "messages": found.messages, "segments": found.segments})
    else:
        say(f"Drained {counted(found.messages, 'message')} in {counted(found.segments, 'segment')} into {directory}.")


if __name__ == "__main__":
    main(command)
