"""Drain: reap an inbox into Parquet files, exactly once.

An epoch is one transaction and one file. The file is written under a hidden name and made durable while the
transaction is open, and gets the name that readers see only after the COMMIT: so no reader ever sees a message that is
still in the inbox. What was to be done after the COMMIT is written in the transaction (`spark_drain`), and done by the
next one that locks the row, whoever that is: a drainer that dies in between leaves nothing to guess.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn
from uuid import UUID

import click
import psycopg

from inbox.claim import Share, reaping_rows
from inbox.look import finding
from mailroom.cli.acting import counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.failures import Interrupted, tell
from mailroom.cli.options import share
from mailroom.cli.output import document, say
from mailroom.cli.parameters import LIMIT
from mailroom.commit import atomically
from mailroom.errors import ConfigurationError, MailroomError
from mailroom.limits import count
from mailroom.names import inbox_name
from mailroom.operation import IN_TRANSACTION, Operation, Row, Sql
from mailroom.schema import checking
from mailroom.stamping import DURABLE
from mailroom.transaction import run
from spark_jobs.archive import SPARK_COLUMNS, EpochFile, Series, run_raw
from spark_jobs.folder import Folder, folder, full_name
from spark_jobs.node import Node

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

MAX_LANES = 1_000
EPOCH_MESSAGES = 100_000
EPOCH_BYTES = 2**30
GROUP = 10_000  # rows of a row group, and of a claim if as few keys hold as many
# Keys of a claim. As few as fill it, since the transaction holds them and leaves the others to other lanes; but never
# more than a claim finds without a walk from key to key.
FEWEST_KEYS = 250
MOST_KEYS = 4_000


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain took: how many messages, in how many epochs."""

    messages: int
    epochs: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a lane stands: a row of `spark_drain`."""

    epoch: int
    file: str | None
    directory: str
    finished: bool
    node: UUID


BEGIN = Sql(
    """
INSERT INTO {schema}.spark_drain (inbox, lane, directory)
VALUES (%(inbox)s::text, %(lane)s::integer, %(directory)s::text)
ON CONFLICT DO NOTHING
"""
)
# In a statement after the one that may have waited for another's first epoch. Who holds the row is the lane's one
# drainer: the transactions of all that held it before have ended, and what it does not name was not committed.
LOCK = Sql(
    """
SELECT d.epoch, d.file, d.directory, d.finished, n.id
FROM {schema}.spark_drain AS d, {schema}.node AS n
WHERE d.inbox = %(inbox)s::text AND d.lane = %(lane)s::integer
FOR UPDATE OF d
""",
    columns=("bigint", "text", "text", "boolean", "uuid"),
)


def locking(schema: str, inbox: str, lane: int, directory: str) -> Operation[Position]:
    """Become the lane's one drainer until the transaction ends, waiting for whoever is; tell where the lane stands."""
    yield IN_TRANSACTION
    # The file becomes visible after this COMMIT, and must not outlive it in a crash of the server.
    yield DURABLE.at()()
    yield BEGIN.at(schema=schema)(inbox=inbox, lane=lane, directory=directory)
    [row] = yield LOCK.at(schema=schema)(inbox=inbox, lane=lane)
    return Position(*row)


FINISHED = Sql(
    "UPDATE {schema}.spark_drain SET finished = true WHERE inbox = %(inbox)s::text AND lane = %(lane)s::integer"
)
ADVANCE = Sql(
    """
UPDATE {schema}.spark_drain
SET epoch = %(epoch)s::bigint, file = %(file)s::text, directory = %(directory)s::text, finished = false,
    messages = messages + %(messages)s::bigint, at = clock_timestamp()
WHERE inbox = %(inbox)s::text AND lane = %(lane)s::integer
"""
)


def finishing(schema: str, inbox: str, lane: int) -> Operation[None]:
    """Record that the last epoch's file has its final name."""
    yield FINISHED.at(schema=schema)(inbox=inbox, lane=lane)


def advancing(
    schema: str, inbox: str, lane: int, *, epoch: int, file: str, directory: str, messages: int
) -> Operation[None]:
    """Record an epoch, in its own transaction."""
    yield ADVANCE.at(schema=schema)(
        inbox=inbox, lane=lane, epoch=epoch, file=file, directory=directory, messages=messages
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """What one epoch took; `is_all`: nothing else could be had."""

    messages: int
    is_all: bool


class Lane:
    """One drainer of an inbox; `atomically` runs its two transactions."""

    def __init__(self, schema: str, inbox: str, directory: str, lane: int, max_messages: int) -> None:
        self._schema = schema
        self._inbox = inbox
        self._lane = lane
        self._directory = directory
        self._folder = folder(directory)
        self._folder.make()
        self._max_messages = max_messages
        self._keys = FEWEST_KEYS
        self._cursor = ""
        self._swept = False
        self._written: str | None = None  # the file of the attempt before, if that came as far as its COMMIT

    def epoch(self, connection: psycopg.Connection) -> Taken:
        """Finish the epoch before, and take another."""
        position = self.finish(connection)
        series, epoch = Series(position.node, self._inbox, self._lane), position.epoch + 1
        self._demand_new(series.final(epoch))
        with EpochFile(self._folder, series, epoch) as file:
            is_all = self._fill(file, connection)
            file.seal()
            if file.messages:
                self._written = file.name
                advance = advancing(
                    self._schema, self._inbox, self._lane,
                    epoch=epoch, file=file.name, directory=self._directory, messages=file.messages,
                )  # fmt: skip
                run(connection, advance)
        return Taken(file.messages, is_all)

    def finish(self, connection: psycopg.Connection) -> Position:
        """Lock the lane, give the file of its last epoch the final name, and delete what was never committed."""
        position = run(connection, locking(self._schema, self._inbox, self._lane, self._directory))
        series = Series(position.node, self._inbox, self._lane)
        if not position.finished and position.file is not None:
            there = self._folder if position.directory == self._directory else folder(position.directory)
            _show(there, position, series.final(position.epoch))
            run(connection, finishing(self._schema, self._inbox, self._lane))
        if not self._swept:
            for name in list(self._folder.starting_with(f"_{series.prefix}")):
                self._folder.delete(name)
            self._swept = True
        if self._written is not None:
            self._folder.delete(self._written)  # renamed by now, unless it was not committed
            self._written = None
        return position

    def _fill(self, file: EpochFile, connection: psycopg.Connection) -> bool:
        rows: list[Row] = []
        is_all = False
        while not is_all and file.messages + len(rows) < self._max_messages and file.written_bytes < EPOCH_BYTES:
            total = min(GROUP, self._max_messages - file.messages - len(rows))
            wanted = Share(self._keys, total, total)
            taken, (*_, left, self._cursor, _, _) = run_raw(
                connection, reaping_rows(self._schema, self._inbox, wanted, self._cursor)
            )
            is_all = not (taken and left)
            if len(taken) < total // 2:
                self._keys = min(4 * self._keys, MOST_KEYS)
            rows += taken
            if len(rows) >= GROUP:
                file.add(rows)
                rows = []
        if rows:
            file.add(rows)
        return is_all

    def _demand_new(self, final: str) -> None:
        if self._folder.has(final):
            raise MailroomError(
                f"{final} is in {self._directory} already, and its epoch has yet to be drained: the database was "
                "restored to a time before it, or its table spark_drain was emptied. Drain into another directory; "
                "messages of that time may then be in both."
            )


def _show(there: Folder, position: Position, final: str) -> None:
    """Give a committed file its final name, unless it has it already."""
    hidden = str(position.file)
    try:
        there.rename(hidden, final)
    except FileNotFoundError:
        if not there.has(final):
            raise MailroomError(
                f"A file with messages that have left the inbox is missing: {position.directory} has neither {hidden} "
                f"nor {final}. If this machine does not see the directory of the drain before, drain on one that "
                "does. If the file is lost, restore it from a backup; to go on without it, set finished = true in its "
                "row of spark_drain."
            ) from None


def drain(node: Node, inbox: str, directory: str, *, lane: int = 0, max_messages: int = EPOCH_MESSAGES) -> Drained:
    """Reap an inbox into Parquet files until nothing can be had, each message exactly once; needs no Spark.

    `directory` is a path, or a URI of file, s3, gs, abfs or hdfs. Each epoch takes up to `max_messages` (about 1 GiB
    of values if that is less) into one file, as a worker would: in clock order within a key, without keys that wait,
    are parked, or are worked on by others. Killed or cut off anywhere, the next drain of the same lane finishes what
    was committed; nothing else is ever visible. Of two drains of one lane one waits for the other. Several lanes share
    the inbox: a key's messages may then be in files of several lanes, in order by `clock`.

    Lost connections, and COMMITs whose answer was lost, are dealt with as by `mailroom.atomically`. Raises
    `ConfigurationError`, `InvalidMessage`, `UnknownInbox`, `SchemaError`, `CommitUnknown` (the next drain knows),
    `MailroomError` where a committed file is missing, `OSError`, and errors of the driver.
    """
    inbox, directory = inbox_name(inbox), full_name(directory)
    if not 0 <= lane < MAX_LANES:
        raise ConfigurationError(f"A lane is a number from 0 to {MAX_LANES - 1}, not {lane}.")
    max_messages = count(max_messages, "max_messages")
    messages = epochs = 0
    with _sessions(node, f"drain {inbox} {lane}") as sessions:
        with sessions.connect() as connection:
            run(connection, _looking(node.schema, inbox))
            connection.rollback()
        work = Lane(node.schema, inbox, directory, lane, max_messages)
        is_all = False
        while not is_all:
            taken = atomically(sessions.connect, work.epoch, schema=node.schema)
            messages, epochs, is_all = messages + taken.messages, epochs + bool(taken.messages), taken.is_all
        if epochs:
            atomically(sessions.connect, work.finish, schema=node.schema)
    return Drained(messages, epochs)


def _looking(schema: str, inbox: str) -> Operation[None]:
    yield from checking(schema)
    yield from finding(schema, inbox)


class _Sessions:
    """One session for all transactions, and another when it was lost."""

    def __init__(self, node: Node, role: str) -> None:
        self._node = node
        self._role = role
        self.connection: psycopg.Connection | None = None

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection]:
        if self.connection is None:
            self.connection = self._node.connect(self._role)
        try:
            yield self.connection
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@contextmanager
def _sessions(node: Node, role: str) -> Iterator[_Sessions]:
    sessions = _Sessions(node, role)
    try:
        yield sessions
    finally:
        sessions.close()


TOTALS = Sql(
    """
SELECT coalesce(sum(messages), 0::numeric)::bigint, coalesce(sum(epoch), 0::numeric)::bigint FROM {schema}.spark_drain
WHERE inbox = %(inbox)s::text AND lane < %(lanes)s::integer
""",
    columns=("bigint", "bigint"),
)


def totalling(schema: str, inbox: str, lanes: int) -> Operation[Drained]:
    """Return what the first `lanes` lanes have drained in all."""
    [(messages, epochs)] = yield TOTALS.at(schema=schema)(inbox=inbox, lanes=lanes)
    return Drained(messages, epochs)


def drain_on(
    spark: "SparkSession",
    node: Node,
    inbox: str,
    directory: str,
    lanes: int,
    *,
    max_messages: int = EPOCH_MESSAGES,
) -> Drained:
    """`drain` by as many tasks of Spark as `lanes`, into a directory that all executors share.

    A task that is tried again, or runs twice, does no harm: the lane is locked by one at a time, and each epoch is a
    transaction of its own. Returns what these lanes took since the call began. Raises as `drain` does; what
    else goes wrong in a task is Spark's to try again and to raise.
    """
    inbox, directory = inbox_name(inbox), full_name(directory)
    if not 1 <= lanes <= MAX_LANES:
        raise ConfigurationError(f"lanes is a number from 1 to {MAX_LANES:,}, not {lanes}.")
    before = _totals(node, inbox, lanes)
    task = partial(_drain_lanes, node=node, inbox=inbox, directory=directory, max_messages=max_messages)
    refused = spark.range(0, lanes, 1, lanes).mapInArrow(task, "lane bigint, error string").collect()
    if refused:
        raise MailroomError(f"Lane {refused[0].lane}: {refused[0].error}")
    after = _totals(node, inbox, lanes)
    return Drained(after.messages - before.messages, after.epochs - before.epochs)


def _totals(node: Node, inbox: str, lanes: int) -> Drained:
    with node.connect(f"drain {inbox}") as connection:
        run(connection, _looking(node.schema, inbox))
        return run(connection, totalling(node.schema, inbox, lanes))


def _drain_lanes(
    batches: "Iterator[pa.RecordBatch]", node: Node, inbox: str, directory: str, max_messages: int
) -> "Iterator[pa.RecordBatch]":
    """Drain the lanes of a task; gives those that must not be tried again, with the reason."""
    import pyarrow as pa

    for batch in batches:
        for lane in batch.column("id").to_pylist():
            try:
                drain(node, inbox, directory, lane=lane, max_messages=max_messages)
            except MailroomError as error:
                yield pa.RecordBatch.from_pydict({"lane": [lane], "error": [str(error)]})


def drained(spark: "SparkSession", directory: str) -> "DataFrame":
    """Read what drains have put into a directory, a row per message; empty where nothing was drained yet.

    `value` is CBOR: `from_cbor` of `spark_jobs.cbor_decoded` reads it. The directory must be there.
    """
    return spark.read.schema(SPARK_COLUMNS).parquet(full_name(directory))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("inbox")
@click.argument("directory")
@click.option("--dsn-variable", metavar="NAME", help="An environment variable that holds the connection string.")
@click.option(
    "--lanes",
    type=click.IntRange(1, MAX_LANES),
    default=1,
    show_default=True,
    help="Drain side by side, each lane in a task of Spark; then --dsn must not hold a password.",
)
@click.option(
    "--max-messages",
    type=LIMIT,
    default=EPOCH_MESSAGES,
    show_default=True,
    help="Messages of one epoch: one transaction, one file.",
)
@pass_call
def command(call: Call, inbox: str, directory: str, dsn_variable: str | None, lanes: int, max_messages: int) -> None:
    """Reap INBOX into Parquet files in DIRECTORY until it is empty, each message exactly once.

    DIRECTORY is a path, or a URI of file, s3, gs, abfs or hdfs. What was interrupted is finished by the next call.
    With one lane this needs no Spark.

    \b
    Examples:
      python -m spark_jobs.drain shipping /data/shipping
      spark-submit spark_jobs/drain.py shipping hdfs:///shipping --lanes 4 --dsn-variable ORDERS
    """
    with _terminated_like_interrupted():
        found = _drain(call, inbox, directory, dsn_variable, lanes, max_messages)
    if call.json:
        document({"inbox": inbox, "directory": directory, "messages": found.messages, "epochs": found.epochs})
    else:
        say(f"Drained {counted(found.messages, 'message')} in {counted(found.epochs, 'epoch')} into {directory}.")


def _drain(call: Call, inbox: str, directory: str, variable: str | None, lanes: int, max_messages: int) -> Drained:
    if variable is not None and call.names_database:
        raise ConfigurationError("--dsn-variable and --dsn name two databases: give one of them.")
    if lanes == 1:
        node = Node.of({"schema": call.schema, "dsnVariable": variable}) if variable else Node(call.schema, call.dsn())
        return drain(node, inbox, directory, max_messages=max_messages)
    from pyspark.errors import PySparkException

    from spark_jobs.session import spark_session

    options = {"schema": call.schema, "dsn": call.dsn() if call.names_database else None, "dsnVariable": variable}
    node = Node.of({name: value for name, value in options.items() if value is not None})
    spark = spark_session(f"drain {inbox}")
    try:
        return drain_on(spark, node, inbox, directory, lanes, max_messages=max_messages)
    except PySparkException as error:
        raise MailroomError(f"Spark failed: {error}") from error
    finally:
        spark.stop()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None  # click would print a line of its own on the way out
    finally:
        signal.signal(signal.SIGTERM, before)


share(command)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = command.main(prog_name="python -m spark_jobs.drain", standalone_mode=False)
    except Exception as error:
        code = tell(error)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
