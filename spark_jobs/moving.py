"""Moving: what tasks have staged becomes messages, once, in one transaction with the batch's row in the ledger."""

from collections.abc import Callable, Sequence
from uuid import UUID

import psycopg

from mailroom import atomically
from mailroom.errors import MailroomError
from mailroom.operation import Operation, Sql
from mailroom.sqlstate import sqlstate
from mailroom.transaction import run
from spark_jobs.columns import Shape
from spark_jobs.ledger import Batch, comparing, entering
from spark_jobs.node import Node
from spark_jobs.staging import Staged, sweep_afterwards, table


class StagingLost(MailroomError):
    """What a task had staged is not all there any more. Nothing was sent."""


class SendFailed(MailroomError):
    """The database refused the batch. Nothing of it was sent."""


def commit(node: Node, batch: Batch, shape: Shape, staged: Sequence[Staged]) -> None:
    """Send what these attempts have staged, in their order, and enter the batch into the ledger; none if it has it.

    Raises `StagingLost`, `BatchDiffers`, `StreamTaken` or `SendFailed`, after which nothing was sent; `CommitUnknown`
    if nobody can tell, after which the batch is simply run again.
    """
    if staged:
        once(node, batch, lambda connection: _move_all(connection, node.schema, batch, shape, staged))
    else:
        # Nothing to enter; but a name that was used for rows must not stand for none.
        with node.connect("commit", autocommit=True) as connection:
            run(connection, comparing(node.schema, batch, 0))


def once(
    node: Node,
    batch: Batch,
    work: Callable[[psycopg.Connection], None],
    connect: Callable[[], psycopg.Connection] | None = None,
) -> None:
    """Commit `work(connection)`, which enters the batch, exactly once; then sweep the staging tables.

    `connect` opens its sessions if the node's own are not right for it. Raises `SendFailed`, which repeats the notes of
    psycopg's error.
    """
    try:
        atomically(connect or (lambda: node.connect("commit")), work, schema=node.schema)
    except psycopg.Error as error:
        # Not the error's own text: it may repeat a row.
        known = (error.diag.constraint_name, *getattr(error, "__notes__", ()))
        where = "".join(f", {part}" for part in known if part)
        raise SendFailed(
            f"The batch {batch} was not sent: {type(error).__name__} ({sqlstate(error)}{where}). Nothing "
            "of it is in the outbox."
        ) from None
    sweep_afterwards(node)


def _move_all(
    connection: psycopg.Connection, schema: str, batch: Batch, shape: Shape, staged: Sequence[Staged]
) -> None:
    if not run(connection, entering(schema, batch, sum(one.messages for one in staged))):
        return
    run(connection, _reading_in_order())
    for one in staged:
        try:
            moved = move(connection, schema, table(one.token), batch, shape)
        except psycopg.errors.UndefinedTable:
            raise lost(batch) from None
        if moved != one.messages:
            raise lost(batch)


def lost(batch: Batch) -> StagingLost:
    """Return the error of a batch whose rows are not all there."""
    return StagingLost(
        f"What was staged for the batch {batch} is gone: the server crashed, or it was abandoned for a day. "
        "Nothing was sent: run it again."
    )


FIND = Sql("SELECT pg_catalog.to_regclass('{schema}.{table}'::text) IS NOT NULL", columns=("boolean",))


def finding(schema: str, token: UUID) -> Operation[bool]:
    """Tell whether the staging table is there."""
    [(found,)] = yield FIND.at(schema=schema, table=table(token))()
    return bool(found)


# The messages of a task keep its order: its table was filled by one COPY and never changed, so that a scan which begins
# at its beginning meets the rows as they came. A scan that joins another one would not.
IN_ORDER = Sql(
    "SELECT set_config('synchronize_seqscans', 'off', true), set_config('max_parallel_workers_per_gather', '0', true)",
    columns=("text", "text"),
)
MOVE = Sql(
    "INSERT INTO {schema}.outbox ({names}, source) SELECT {expressions}, %(source)s::text FROM {schema}.{table} {which}"
)
# What a null in a column, or the column's absence, stands for where the outbox's own default is not it.
EXPRESSIONS = {
    "key": "coalesce(key, message_id::text)",
    "kind": "coalesce(kind, 'M')::\"char\"",
    "message_type": "coalesce(message_type, 'U')::\"char\"",
    "event_type": 'event_type::"char"',
}


def _reading_in_order() -> Operation[None]:
    yield IN_ORDER.at()()


def move(connection: psycopg.Connection, schema: str, table: str, batch: Batch, shape: Shape, which: str = "") -> int:
    """Copy the rows of a staging table into the outbox, those of the clause `which`; returns how many."""
    constants = dict(shape.constants)
    names = list(dict.fromkeys([*(name for name, _ in shape.staged()), "key", *constants]))
    expressions = {name: EXPRESSIONS.get(name, name) for name in names}
    expressions["key"] = EXPRESSIONS["key"] if "key" in shape.names else "message_id::text"
    expressions |= {name: f"%({name})s::text" + ("" if name == "topic" else '::"char"') for name in constants}
    statement = MOVE.at(
        schema=schema, table=table, names=", ".join(names), which=which,
        expressions=", ".join(expressions[name] for name in names),
    )  # fmt: skip
    # Not by `run`, which does not tell how many rows there were; counting them by RETURNING would hold them all.
    return connection.execute(statement.sql, {**constants, "source": batch.source}).rowcount
