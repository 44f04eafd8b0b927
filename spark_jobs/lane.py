"""A lane: one drainer of an inbox, and the transactions by which it turns messages into files.

An epoch is one transaction and one file. The file is written under a hidden name and made durable while the
transaction is open, and gets the name that readers see only after the COMMIT: so no reader ever sees a message that is
still in the inbox. What was to be done after the COMMIT is written in the transaction (`spark_drain`), and done by the
next one that locks the row, whoever that is: a drainer that dies in between leaves nothing to guess.
"""

from dataclasses import dataclass
from uuid import UUID

import psycopg

from inbox.claim import Share, reaping_rows
from mailroom.errors import MailroomError
from mailroom.operation import IN_TRANSACTION, Operation, Row, Sql
from mailroom.stamping import DURABLE
from mailroom.transaction import run
from spark_jobs.archive import EpochFile, Series, run_raw
from spark_jobs.folder import Folder, folder

EPOCH_BYTES = 2**30
GROUP = 10_000  # rows of a row group, and of a claim if as few keys hold as many
# Keys of a claim. As few as fill it, since the transaction holds them and leaves the others to other lanes; but never
# more than a claim finds without a walk from key to key.
FEWEST_KEYS = 250
MOST_KEYS = 4_000


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
