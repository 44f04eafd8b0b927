"""Moving: what tasks have staged becomes messages, once, in one transaction with the batch's row in the ledger."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import psycopg

from mailroom import atomically, settings
from mailroom.errors import MailroomError
from mailroom.operation import Operation, Sql
from mailroom.sqlstate import sqlstate
from mailroom.transaction import run
from spark_jobs.columns import Shape
from spark_jobs.content import Content
from spark_jobs.ledger import Batch, comparing, entering, owning
from spark_jobs.node import SESSION, Node
from spark_jobs.staging import Staged, sweep_afterwards, table
from spark_jobs.user_sql import Staging, UserSql, hiding, showing

log = logging.getLogger("mailroom.spark")

# The statements of users mean what they mean to their role elsewhere; ours are written for any search_path.
AS_THE_ROLE = {name: value for name, value in SESSION.items() if name != "search_path"}


class StagingLost(MailroomError):
    """What a task had staged is not all there any more. Nothing was sent."""


class SendFailed(MailroomError):
    """The database refused the batch. Nothing of it was sent."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a batch: how many messages were sent, and how many passed over, since they were sent before."""

    messages: int
    passed_over: int = 0


def commit(node: Node, batch: Batch, shape: Shape, staged: Sequence[Staged], user_sql: UserSql | None = None) -> Sent:
    """Send what these attempts have staged, in their order, and enter the batch into the ledger; nothing if it has it.

    Raises `StagingLost`, `BatchDiffers`, `StreamTaken` or `SendFailed`, which repeats the notes of psycopg's error;
    after these nothing was sent. `CommitUnknown` if nobody can tell, after which the batch is simply run again.
    """
    schema = node.schema
    tables = {one.token: one.content.messages for one in staged if one.token}
    content = sum((one.content for one in staged), Content()).under(_heading(shape, user_sql))
    if not tables:
        # Nothing to enter; but a batch that had rows must not come again with none.
        with node.connect("commit", autocommit=True) as connection:
            run(connection, owning(schema, batch))
            run(connection, comparing(schema, batch, content))
        return Sent(0)

    def work(connection: psycopg.Connection) -> bool:
        entered = run(connection, entering(schema, batch, content))
        if entered:
            _send(connection, schema, batch, shape, tables, user_sql)
        return entered

    def connect() -> psycopg.Connection:
        session = AS_THE_ROLE if user_sql else SESSION
        return settings.connect(node.connection_string(), "spark commit", session)

    try:
        entered = atomically(connect, work, schema=schema)
    except psycopg.Error as error:
        # Not the error's own text: it may repeat a row.
        known = (error.diag.constraint_name, *getattr(error, "__notes__", ()))
        where = "".join(f", {part}" for part in known if part)
        raise SendFailed(
            f"The batch {batch} was not sent: {type(error).__name__} ({sqlstate(error)}{where}). Nothing "
            "of it is in the outbox."
        ) from None
    sweep_afterwards(node)
    if entered:
        return Sent(content.messages)
    log.warning("the batch %s was sent before: %s messages are passed over", batch, content.messages)
    return Sent(0, passed_over=content.messages)


def _heading(shape: Shape, user_sql: UserSql | None) -> str:
    """What makes another batch of the same rows: their columns, what goes for all of them, and what else is done."""
    columns = [name for name, _ in shape.staged()[1:]]
    return json.dumps([columns, shape.constants, user_sql.text if user_sql else ""])


def _send(
    connection: psycopg.Connection, schema: str, batch: Batch, shape: Shape, tables: Mapping[UUID, int],
    user_sql: UserSql | None,
) -> None:  # fmt: skip
    if user_sql:
        try:
            view = run(connection, showing(schema, shape, list(tables)))
        except psycopg.errors.UndefinedTable:
            raise _lost(batch) from None
        user_sql.transact(connection, Staging(view, sum(tables.values()), batch.number))
    run(connection, _reading_in_order())
    for token, messages in tables.items():
        try:
            moved = move(connection, schema, table(token), batch, shape)
        except psycopg.errors.UndefinedTable:
            raise _lost(batch) from None
        if moved != messages:
            raise _lost(batch)
    if user_sql:
        run(connection, hiding(schema, list(tables)))


def _lost(batch: Batch) -> StagingLost:
    return StagingLost(
        f"What was staged for the batch {batch} is not all there: the server crashed, it was abandoned for a day, or "
        "SQL of yours or a trigger took messages away. Nothing was sent: run it again."
    )


# The messages of a task keep its order: its table was filled by one COPY and never changed, so that a scan which begins
# at its beginning meets the rows as they came. A scan that joins another one would not.
IN_ORDER = Sql(
    "SELECT set_config('synchronize_seqscans', 'off', true), set_config('max_parallel_workers_per_gather', '0', true)",
    columns=("text", "text"),
)
MOVE = Sql("INSERT INTO {schema}.outbox ({names}, source) SELECT {expressions}, %(source)s::text FROM {schema}.{table}")
# What a null in a column, or the column's absence, stands for where the outbox's own default is not it.
EXPRESSIONS = {
    "key": "coalesce(key, message_id::text)",
    "kind": "coalesce(kind, 'M')::\"char\"",
    "message_type": "coalesce(message_type, 'U')::\"char\"",
    "event_type": 'event_type::"char"',
}


def _reading_in_order() -> Operation[None]:
    yield IN_ORDER.at()()


def move(connection: psycopg.Connection, schema: str, table: str, batch: Batch, shape: Shape) -> int:
    """Copy the rows of a staging table into the outbox; returns how many."""
    constants = dict(shape.constants)
    names = list(dict.fromkeys([*shape.messages(), "key", *constants]))
    expressions = {name: EXPRESSIONS.get(name, name) for name in names}
    expressions["key"] = EXPRESSIONS["key"] if "key" in shape.names else "message_id::text"
    expressions |= {name: f"%({name})s::text" + ("" if name == "topic" else '::"char"') for name in constants}
    statement = MOVE.at(
        schema=schema, table=table, names=", ".join(names), expressions=", ".join(expressions[name] for name in names)
    )
    # Not by `run`, which does not tell how many rows there were; counting them by RETURNING would hold them all.
    return connection.execute(statement.sql, {**constants, "source": batch.source}).rowcount
