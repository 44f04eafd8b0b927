"""The commit of a batch: staged rows become messages in the transaction that enters the batch into the ledger.

That transaction moves a small batch itself. It only decides a large one (`outbox.bulk`): chunks of it move afterwards,
so that no other messages queue behind all of it.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

import psycopg

from mailroom import atomically
from mailroom.errors import MailroomError
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from mailroom.sql.sight import seeing
from outbox.bulk import BulkLost, deciding, holding, is_unfinished, keeping, moving_rows
from spark_jobs.arrow.content import BatchContent
from spark_jobs.node import AS_THE_ROLE, JOB_SESSION, Node
from spark_jobs.write.finishing import PACE, ChunkPace, described, finish
from spark_jobs.write.ledger import SparkBatch, comparing, entering, finding_entry, owning
from spark_jobs.write.shape import Shape
from spark_jobs.write.staging import Staged, left_to_a_sweep, sweep
from spark_jobs.write.user_sql import Staging, UserSql, hiding, showing

log = logging.getLogger("mailroom.spark")


class StagingLost(MailroomError):
    """What a task had staged is not all there any more. Nothing was sent."""

    code = "MR-spark-staging-lost"


class SendFailed(MailroomError):
    """The database refused the batch. Nothing of it was sent."""

    code = "MR-spark-send-failed"


@dataclass(frozen=True, slots=True)
class SentBatch:
    """How many messages of a batch were sent, and how many passed over, since they were sent before."""

    messages: int
    passed_over: int = 0


def commit(
    node: Node, batch: SparkBatch, shape: Shape, staged: Sequence[Staged], user_sql: UserSql | None = None,
    *, pace: ChunkPace = PACE,
) -> SentBatch:  # fmt: skip
    """Send what these attempts have staged, in their order, unless the ledger has the batch; enter it into the ledger.

    A batch of more than a chunk of `pace` is decided in one transaction and moved in others, before this returns.
    After `StagingLost`, `BatchDiffers`, `StreamTaken` or `SendFailed` nothing was sent. After `CommitUnknown` it may
    have been: run the batch again. `BulkUnfinished`: it was decided, and not all of it was moved.
    """
    tables = {one.token: one.content.messages for one in staged if one.token}
    content = sum((one.content for one in staged), BatchContent()).under(_heading(shape, user_sql))
    is_large = content.messages > pace.rows or sum(one.size for one in staged) > pace.max_bytes
    sending = _Sending(node, batch, shape, content, tables, user_sql, pace, is_large)
    if not tables:
        sending.enter_none()
        return SentBatch(0)
    entered = sending.enter()
    if is_large or not entered:
        # Before it is reported as done. What the ledger has may be what a driver has left, or is at work on.
        finish(node, batch.name, pace)
    with left_to_a_sweep():
        sweep(node)
    if entered:
        return SentBatch(content.messages)
    log.warning("the batch %s was sent before: %s messages are passed over", batch, content.messages)
    return SentBatch(0, passed_over=content.messages)


def _heading(shape: Shape, user_sql: UserSql | None) -> str:
    """What distinguishes batches of the same rows: their columns, constants and user's SQL."""
    columns = [name for name, _ in shape.staged()[1:]]
    return json.dumps([columns, shape.constants, user_sql.text if user_sql else ""])


class _Behind(Exception):
    """An earlier batch of the same name was decided and is not wholly in the outbox."""


@dataclass(frozen=True, slots=True)
class _Sending:
    """How a batch is sent: its messages are moved, or it is decided, and `finish` moves them."""

    node: Node
    batch: SparkBatch
    shape: Shape
    content: BatchContent
    tables: Mapping[UUID, int]
    user_sql: UserSql | None
    pace: ChunkPace
    is_large: bool

    def enter_none(self) -> None:
        """Check a batch without rows, of which there is nothing to enter: a batch that had rows must not lack them."""
        with self.node.connect("commit", autocommit=True) as connection:
            run(connection, owning(self.node.schema, self.batch))
            run(connection, comparing(self.node.schema, self.batch, self.content))
            unfinished = run(connection, is_unfinished(self.node.schema, self.batch.name))
        if unfinished:
            finish(self.node, self.batch.name, self.pace)

    def enter(self) -> bool:
        """Enter the batch into the ledger and send it, in one transaction; return false if it was sent before."""
        try:
            if self.is_large:
                self._keep()
            while True:
                try:
                    return atomically(self._connect, self._work, schema=self.node.schema)
                except _Behind:
                    finish(self.node, self.batch.name, self.pace)
        except psycopg.Error as error:
            raise SendFailed(
                f"The batch {self.batch} was not sent: {described(error)}. Nothing of it is in the outbox."
            ) from None

    def _connect(self) -> psycopg.Connection:
        return self.node.connect("commit", session=AS_THE_ROLE if self.user_sql else JOB_SESSION)

    def _keep(self) -> None:
        """Make what was staged outlive a crash of the server, unless the batch was sent before."""
        with self.node.connect("commit", autocommit=True) as connection:
            if run(connection, finding_entry(self.node.schema, self.batch)) is not None:
                return
            with self._losing():
                for token in self.tables:
                    with connection.transaction():
                        run(connection, keeping(self.node.schema, self.node.table(token)))

    def _work(self, connection: psycopg.Connection) -> bool:
        if self.user_sql:  # in its session the server hides rows and refuses nothing
            run(connection, seeing(self.node.schema, "spark_batch", "spark_bulk", "spark_staging"))
        if not run(connection, entering(self.node.schema, self.batch, self.content)):
            return False
        if run(connection, is_unfinished(self.node.schema, self.batch.name)):
            raise _Behind
        tables = [self.node.table(token) for token in self.tables]
        with self._losing():
            view = run(connection, showing(self.shape, tables)) if self.user_sql else ""
        if self.user_sql:
            self.user_sql.transact(connection, Staging(view, sum(self.tables.values()), self.batch.number))
        with self._losing():
            run(connection, self._deciding() if self.is_large else self._moving())
        if self.user_sql:
            run(connection, hiding(view))
        return True

    def _deciding(self) -> Operation[None]:
        node, batch, constants = self.node, self.batch, dict(self.shape.constants)
        where = (node.schema, node.staging or node.schema)
        yield from deciding(*where, batch.name, batch.number, self.tables, constants, batch.source)

    def _moving(self) -> Operation[None]:
        node, constants = self.node, dict(self.shape.constants)
        for token, messages in self.tables.items():
            columns = yield from holding(node.table(token))
            moved = yield from moving_rows(node.schema, node.table(token), columns, constants, self.batch.source)
            if moved.messages != messages:
                raise BulkLost("rows of a table are gone")

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except (BulkLost, psycopg.errors.UndefinedTable):
            raise StagingLost(
                f"What was staged for the batch {self.batch} is not all there: the server crashed, it was abandoned "
                "for a day, or your own SQL or a trigger took messages away. Nothing was sent: run it again."
            ) from None
