"""The commit of a batch: staged rows become messages in the transaction that enters the batch into the ledger.

That transaction moves a small batch itself. It only decides a large one (`outbox.bulk`): chunks of it move afterwards,
so that nobody else's messages queue behind all of it.
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
from outbox.bulk import BulkLost, deciding, holding, is_unfinished, keeping, moving, table
from spark_jobs.node import AS_THE_ROLE, SESSION, Node
from spark_jobs.write.content import Content
from spark_jobs.write.finishing import PACE, Pace, described, finish
from spark_jobs.write.ledger import Batch, comparing, entering, finding_entry, owning
from spark_jobs.write.shape import Shape
from spark_jobs.write.staging import Staged, left_to_a_sweep, sweep
from spark_jobs.write.user_sql import Staging, UserSql, hiding, showing

log = logging.getLogger("mailroom.spark")


class StagingLost(MailroomError):
    """What a task had staged is not all there any more. Nothing was sent."""


class SendFailed(MailroomError):
    """The database refused the batch. Nothing of it was sent."""


@dataclass(frozen=True, slots=True)
class Sent:
    """How many messages of a batch were sent, and how many passed over, since they were sent before."""

    messages: int
    passed_over: int = 0


def commit(
    node: Node, batch: Batch, shape: Shape, staged: Sequence[Staged], user_sql: UserSql | None = None,
    *, pace: Pace = PACE,
) -> Sent:  # fmt: skip
    """Send what these attempts have staged, in their order, unless the ledger has the batch; enter it into the ledger.

    A batch of more than a chunk of `pace` is decided in one transaction and moved in others, before this returns.
    After `StagingLost`, `BatchDiffers`, `StreamTaken` or `SendFailed` nothing was sent. After `CommitUnknown` it may
    have been: run the batch again. `BulkUnfinished`: it was decided, and not all of it was moved.
    """
    schema = node.schema
    tables = {one.token: one.content.messages for one in staged if one.token}
    content = sum((one.content for one in staged), Content()).under(_heading(shape, user_sql))
    if not tables:
        # Nothing to enter; but a batch that had rows must not come again with none.
        with node.connect("commit", autocommit=True) as connection:
            run(connection, owning(schema, batch))
            run(connection, comparing(schema, batch, content))
            unfinished = run(connection, is_unfinished(schema, batch.name))
        if unfinished:
            finish(node, batch.name, pace)
        return Sent(0)
    is_large = content.messages > pace.rows or sum(one.size for one in staged) > pace.max_bytes
    sending = _Sending(node.schema, batch, shape, tables, user_sql, is_large)

    def work(connection: psycopg.Connection) -> bool:
        entered = run(connection, entering(schema, batch, content))
        if entered:
            if run(connection, is_unfinished(schema, batch.name)):
                raise _Behind
            sending.send(connection)
        return entered

    def connect() -> psycopg.Connection:
        return node.connect("commit", session=AS_THE_ROLE if user_sql else SESSION)

    try:
        if sending.is_large:
            with node.connect("commit", autocommit=True) as connection:
                if run(connection, finding_entry(schema, batch)) is None:
                    sending.keep(connection)
        while True:
            try:
                entered = atomically(connect, work, schema=schema)
                break
            except _Behind:
                finish(node, batch.name, pace)
    except psycopg.Error as error:
        raise SendFailed(
            f"The batch {batch} was not sent: {described(error)}. Nothing of it is in the outbox."
        ) from None
    if sending.is_large or not entered:
        # Before it is said to be done. What the ledger has may be what a driver has left, or is at work on.
        finish(node, batch.name, pace)
    with left_to_a_sweep():
        sweep(node)
    if entered:
        return Sent(content.messages)
    log.warning("the batch %s was sent before: %s messages are passed over", batch, content.messages)
    return Sent(0, passed_over=content.messages)


class _Behind(Exception):
    """An earlier batch of the same name was decided and is not wholly in the outbox."""


def _heading(shape: Shape, user_sql: UserSql | None) -> str:
    """What distinguishes batches of the same rows: their columns, constants and user's SQL."""
    columns = [name for name, _ in shape.staged()[1:]]
    return json.dumps([columns, shape.constants, user_sql.text if user_sql else ""])


@dataclass(frozen=True, slots=True)
class _Sending:
    """How a new batch is sent: its messages are moved, or it is decided, and `finish` moves them."""

    schema: str
    batch: Batch
    shape: Shape
    tables: Mapping[UUID, int]
    user_sql: UserSql | None
    is_large: bool

    def keep(self, connection: psycopg.Connection) -> None:
        """Have what was staged outlive a crash of the server."""
        with self._losing():
            for token in self.tables:
                with connection.transaction():
                    run(connection, keeping(self.schema, table(token)))

    def send(self, connection: psycopg.Connection) -> None:
        """Run the user's SQL, and send the batch or decide that it is sent."""
        with self._losing():
            view = run(connection, showing(self.schema, self.shape, list(self.tables))) if self.user_sql else ""
        if self.user_sql:
            self.user_sql.transact(connection, Staging(view, sum(self.tables.values()), self.batch.number))
        with self._losing():
            run(connection, self._deciding() if self.is_large else self._moving())
        if self.user_sql:
            run(connection, hiding(self.schema, list(self.tables)))

    def _deciding(self) -> Operation[None]:
        batch = self.batch
        yield from deciding(
            self.schema, batch.name, batch.number, self.tables, dict(self.shape.constants), batch.source
        )

    def _moving(self) -> Operation[None]:
        for token, messages in self.tables.items():
            columns = yield from holding(self.schema, table(token))
            constants = dict(self.shape.constants)
            moved = yield from moving(self.schema, table(token), columns, constants, self.batch.source)
            if moved.messages != messages:
                raise BulkLost("rows of a table are gone")

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except (BulkLost, psycopg.errors.UndefinedTable):
            raise StagingLost(
                f"What was staged for the batch {self.batch} is not all there: the server crashed, it was abandoned "
                "for a day, or SQL of yours or a trigger took messages away. Nothing was sent: run it again."
            ) from None
