"""One shard's drainer: the transactions by which it turns messages of an inbox into files.

A segment is one transaction and one file. The file is written under a hidden name and made durable while the
transaction is open, and gets the name that readers see only after the COMMIT: so no reader ever sees a message that is
still in the inbox. What is to be done after the COMMIT is written in the transaction (`spark_drain`), and done in a
short one of its own by the next holder of the row's lock: a drainer may die in between.
"""

import logging
from dataclasses import dataclass
from uuid import UUID

import psycopg

from inbox.by_key.claim import MAX_BYTES, Course, Share, reaping_rows
from mailroom.errors import MailroomError
from mailroom.order.clock import DURABLE
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import run
from spark_jobs.archive.files import SegmentFile, Series, attempt_in, attempt_of
from spark_jobs.archive.folder import Folder, folder, shown
from spark_jobs.arrow.message_rows import RawCursor

log = logging.getLogger("mailroom.spark")

# D-spark-15: A drain's file is hidden until the COMMIT.
SEGMENT_BYTES = 2**30  # of values
CLAIM = 10_000  # messages; fewer if they hold `MAX_BYTES`
# Keys of a claim. As few as fill it, since the transaction holds them and leaves the others to other shards; but never
# more than a claim finds without a walk from key to key.
FEWEST_KEYS = 250
MOST_KEYS = 4_000


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where a shard stands: a row of `spark_drain`."""

    shard: int
    segment: int
    file: str | None
    directory: str
    finished: bool
    node: UUID


BEGIN = Sql(
    """
INSERT INTO {schema}.spark_drain (inbox, shard, directory)
VALUES (%(inbox)s::text, %(shard)s::integer, %(directory)s::text)
ON CONFLICT DO NOTHING
"""
)
# The holder of the row is the shard's one drainer: all transactions that held it before have ended, and what the row
# does not name was not committed. So it is read in a statement after the one that may have waited.
SHARD_LOCK = """
SELECT d.shard, d.segment, d.file, d.directory, d.finished, n.id
FROM {schema}.spark_drain AS d, {schema}.node AS n WHERE d.inbox = %(inbox)s::text AND {shards}
"""
POSITION = ("integer", "bigint", "text", "text", "boolean", "uuid")
LOCK_SHARD = Sql(SHARD_LOCK, columns=POSITION, shards="d.shard = %(shard)s::integer FOR UPDATE OF d")
# A locked row has a live drainer, which finishes its own shard.
LOCK_OTHERS = Sql(
    SHARD_LOCK, columns=POSITION, shards="d.shard <> %(shard)s::integer AND NOT d.finished FOR UPDATE OF d SKIP LOCKED"
)


def locking(schema: str, inbox: str, shard: int, directory: str) -> Operation[ShardPosition]:
    """Become the shard's one drainer until the transaction ends, once no other is; return where the shard stands."""
    yield IN_TRANSACTION
    # The file becomes visible after this COMMIT, and must not outlive it in a crash of the server.
    yield DURABLE.at()()
    yield BEGIN.at(schema=schema)(inbox=inbox, shard=shard, directory=directory)
    [row] = yield LOCK_SHARD.at(schema=schema)(inbox=inbox, shard=shard)
    return ShardPosition(*row)


def locking_others(schema: str, inbox: str, shard: int) -> Operation[list[ShardPosition]]:
    """Lock the inbox's other shards that are unfinished and are not being drained; return where they stand."""
    yield IN_TRANSACTION
    yield DURABLE.at()()
    rows = yield LOCK_OTHERS.at(schema=schema)(inbox=inbox, shard=shard)
    return [ShardPosition(*row) for row in rows]


ADVANCE = Sql(
    """
UPDATE {schema}.spark_drain
SET segment = %(segment)s::bigint, file = %(file)s::text, directory = %(directory)s::text, finished = false,
    messages = messages + %(messages)s::bigint, at = clock_timestamp()
WHERE inbox = %(inbox)s::text AND shard = %(shard)s::integer
"""
)
FINISHED = Sql(
    "UPDATE {schema}.spark_drain SET finished = true WHERE inbox = %(inbox)s::text AND shard = %(shard)s::integer"
)


def advancing(
    schema: str, inbox: str, shard: int, *, segment: int, file: str, directory: str, messages: int
) -> Operation[None]:
    """Record a segment, in its own transaction."""
    yield ADVANCE.at(schema=schema)(
        inbox=inbox, shard=shard, segment=segment, file=file, directory=directory, messages=messages
    )


def finishing(schema: str, inbox: str, shard: int) -> Operation[None]:
    """Record that the last segment's file has its final name."""
    yield FINISHED.at(schema=schema)(inbox=inbox, shard=shard)


@dataclass(frozen=True, slots=True)
class TakenSegment:
    """What one segment took; `is_all`: nothing else could be had."""

    messages: int
    is_all: bool


class Drainer:
    """One drainer of an inbox; its methods are transactions: both that finish, then `segment` and `finish` in turn."""

    def __init__(self, schema: str, inbox: str, directory: str, shard: int, max_messages: int) -> None:
        self._schema = schema
        self._inbox = inbox
        self._shard = shard
        self._directory = directory
        self._folder = folder(directory)
        self._folder.make()
        self._max_messages = max_messages
        self._keys = FEWEST_KEYS
        self._course = Course()
        self._swept = False
        self._written: str | None = None  # the file of the attempt before, if that came as far as its COMMIT

    def segment(self, connection: psycopg.Connection) -> TakenSegment:
        """Take a segment; nothing if another drainer of the shard has taken one that is to be finished first."""
        position = run(connection, self._locking())
        if not position.finished:
            return TakenSegment(0, is_all=False)
        series, segment = self._series(position), position.segment + 1
        if self._folder.has(series.final(segment)):
            raise self._other_history(series.final(segment))
        self._sweep(series, position)
        with SegmentFile(self._folder, series, segment) as file:
            is_all = self._fill(file, connection)
            file.seal()
            if file.messages:
                self._written = file.name
                advance = advancing(
                    self._schema, self._inbox, self._shard,
                    segment=segment, file=file.name, directory=self._directory, messages=file.messages,
                )  # fmt: skip
                run(connection, advance)
                self._demand_file(file.name)
        return TakenSegment(file.messages, is_all)

    def finish(self, connection: psycopg.Connection) -> None:
        """Give the file of the shard's last segment the name that readers see."""
        self._finish(connection, run(connection, self._locking()))

    def finish_others(self, connection: psycopg.Connection) -> None:
        """Do the same for the inbox's other shards, which perhaps are never drained again.

        Only warns of those it cannot finish, such as one that drained into a directory of another machine.
        """
        for position in run(connection, locking_others(self._schema, self._inbox, self._shard)):
            try:
                self._finish(connection, position)
            except (MailroomError, OSError) as error:
                log.warning("drain %s: shard %s stays unfinished: %s", self._inbox, position.shard, error)

    def _locking(self) -> Operation[ShardPosition]:
        return locking(self._schema, self._inbox, self._shard, self._directory)

    def _series(self, position: ShardPosition) -> Series:
        return Series(position.node, self._inbox, position.shard)

    def _finish(self, connection: psycopg.Connection, position: ShardPosition) -> None:
        if not position.finished:
            there = self._folder if position.directory == self._directory else folder(position.directory)
            _show(there, position, self._series(position).final(position.segment))
            run(connection, finishing(self._schema, self._inbox, position.shard))

    def _sweep(self, series: Series, position: ShardPosition) -> None:
        """Delete what was never committed."""
        if self._written is not None:
            self._folder.delete(self._written)  # renamed by now, unless it was not committed
            self._written = None
        if self._swept:
            return
        names = [name for name in self._folder.starting_with(f".{series.prefix}") if name != position.file]
        ours = series.attempts(position.segment + 1)
        for name in names:
            if name[: len(ours)] > ours:
                raise self._other_history(name)
        for name in names:
            self._folder.delete(name)
        self._swept = True

    def _fill(self, file: SegmentFile, connection: psycopg.Connection) -> bool:
        """Claim until the segment is full or the inbox is empty; tell whether nothing else could be had."""
        is_all = False
        while not is_all and file.messages < self._max_messages and file.value_bytes < SEGMENT_BYTES:
            total = min(CLAIM, self._max_messages - file.messages)
            wanted = Share(self._keys, total, total)
            taken, left, _, self._course = run(
                connection, reaping_rows(self._schema, self._inbox, wanted, self._course), RawCursor
            )
            is_all = not left
            size = file.add(taken)
            # A claim that its bytes cut short is larger: a value has at most half of them. More keys would not fill it.
            if len(taken) < total // 2 and size < MAX_BYTES // 2:
                self._keys = min(4 * self._keys, MOST_KEYS)
        return is_all

    def _other_history(self, name: str) -> MailroomError:
        return MailroomError(
            f"{name} is in {shown(self._directory)} already, and its segment has yet to be drained: the database was "
            "restored to a time before it, or is a copy of the one that drained it, or its table spark_drain was "
            "emptied. Drain into another directory; messages of that time may then be in both.",
            code="MR-drain-other-history",
        )

    def _demand_file(self, hidden: str) -> None:
        # The last moment: once it is committed, the messages are nowhere else.
        if not self._folder.has(hidden):
            raise MailroomError(
                f"{hidden} was deleted from {shown(self._directory)} while it was written; its messages stay in the "
                "inbox. Let nothing clean the directory of hidden files, see that no other database drains into it, "
                "and drain again.",
                code="MR-drain-file-deleted",
            )


def _show(there: Folder, position: ShardPosition, final: str) -> None:
    """Give a committed file its final name, unless it has it already."""
    hidden, directory = str(position.file), shown(position.directory)
    if there.has(final):
        if attempt_in(there, final) != attempt_of(hidden):
            raise MailroomError(
                f"{directory} has a file {final} that is not the one which this database has committed as {hidden}: "
                "another database drains into the directory, such as the one that this is a copy of. Move the file "
                "out of the way, then drain again.",
                code="MR-drain-directory-shared",
            )
        # It was renamed, or copied by a store; and who renamed it may have died before that was durable.
        there.delete(hidden)
        return
    try:
        there.rename(hidden, final)
    except FileNotFoundError:
        raise MailroomError(
            f"A file with messages that have left the inbox is missing: {directory} has neither {hidden} "
            f"nor {final}. If this machine does not see the directory of the drain before, drain on one that "
            "does. If the file is lost, restore it from a backup; to go on without it, set finished = true in its "
            "row of spark_drain.",
            code="MR-drain-file-missing",
        ) from None
