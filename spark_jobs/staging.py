"""Staging: what tasks write. A table of its own for each attempt, which nobody but the driver makes messages of.

A task may run twice, at once or one after the other, and may die after its commit. So what it writes stands in a table
that only its attempt knows, and counts once the driver, whom Spark tells which attempts succeeded, has moved it
(`spark_jobs.moving`). A table whose batch the ledger has is of no use any more, nor is one that was abandoned.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any
from uuid import UUID

import psycopg
from pyspark.sql.datasource import WriterCommitMessage

from mailroom.commit import NEW
from mailroom.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sqlstate import RETRIED, sqlstate
from mailroom.transaction import run
from spark_jobs import copying
from spark_jobs.columns import Shape
from spark_jobs.ledger import Batch
from spark_jobs.node import Node

log = logging.getLogger("mailroom.spark")

ABANDONED_AFTER_H = 24.0
DROPPED_AT_ONCE = 100  # each takes a few of the server's locks until the transaction ends


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """What one task attempt has staged: the token that names its table, how many messages, and for which batch."""

    batch: Batch
    token: UUID
    messages: int


def table(token: UUID) -> str:
    """Return the name of the staging table."""
    return f"staging_{token.hex}"


TOKEN = Sql(f"SELECT {NEW.strip()}", columns=("uuid",))
# Filled once, read once and dropped: not logged, and nothing for autovacuum. A crash of the server empties it, which
# who moves it finds out by the number of its rows.
CREATE = Sql("CREATE UNLOGGED TABLE {schema}.{table} ({columns}) WITH (autovacuum_enabled = off)")
# The table was made in the same transaction, so its rows need not be marked as committed one by one when they are read.
COPY = Sql("COPY {schema}.{table} ({names}) FROM STDIN (FORMAT binary, FREEZE)")
NOTE = Sql(
    "INSERT INTO {schema}.spark_staging (token, name, batch) "
    "VALUES (%(token)s::uuid, %(name)s::text, %(number)s::bigint)"
)


def stage(node: Node, batch: Batch, shape: Shape, rows: Iterable[Any]) -> Staged | None:
    """Put the rows of Arrow record batches into a new staging table and commit it; None if there are no rows.

    Raises `InvalidMessage` for a row over a limit. After an error there is no table.
    """
    filled = (some for some in rows if some.num_rows)
    first = next(filled, None)
    if first is None:
        return None
    kinds = [kind for _, kind in shape.staged()]
    with node.connect("task") as connection, connection.transaction():
        token = run(connection, creating(node.schema, batch, shape.staged()))
        copy = COPY.at(schema=node.schema, table=table(token), names=", ".join(name for name, _ in shape.staged()))
        messages = 0
        with connection.cursor() as cursor, cursor.copy(copy.sql) as stream:
            stream.write(copying.HEADER)
            for some in chain([first], filled):
                stream.write(copying.rows(shape.prepared(some), kinds))
                messages += some.num_rows
            stream.write(copying.TRAILER)
    return Staged(batch, token, messages)


def creating(schema: str, batch: Batch, columns: Iterable[tuple[str, str]]) -> Operation[UUID]:
    """Make a staging table with these columns, names and types, and note whose it is; returns its token."""
    yield IN_TRANSACTION
    [(token,)] = yield TOKEN.at()()
    definitions = ", ".join(f"{name} {kind}" for name, kind in columns)
    yield CREATE.at(schema=schema, table=table(token), columns=definitions)()
    yield NOTE.at(schema=schema)(token=token, name=batch.name, number=batch.number)
    return UUID(str(token))


# -- Sweeping ---------------------------------------------------------------------------------------------------------

# Those of other roles are left to them: only the owner may drop a table. Who moves a table has it locked, and one that
# is still being filled is not visible.
ORPHANS = Sql(
    """
SELECT token FROM {schema}.spark_staging AS s
WHERE (EXISTS (SELECT FROM {schema}.spark_batch AS b WHERE b.name = s.name AND b.batch = s.batch)
       OR at < clock_timestamp() - %(hours)s::float8 * interval '1 hour')
  AND pg_has_role((SELECT relowner FROM pg_catalog.pg_class WHERE oid = to_regclass(
          '{schema}.staging_' || replace(token::text, '-', ''))::oid), 'USAGE') IS NOT FALSE
ORDER BY token LIMIT %(rows)s::bigint FOR UPDATE SKIP LOCKED
""",
    columns=("uuid",),
)
HOLD = Sql(
    "SELECT token FROM {schema}.spark_staging WHERE token = ANY (%(tokens)s::uuid[]) ORDER BY token FOR UPDATE",
    columns=("uuid",),
)
# CASCADE: a work that commits by itself leaves a view of the table behind.
DROP = Sql("DROP TABLE IF EXISTS {schema}.{table} CASCADE")
FORGET = Sql("DELETE FROM {schema}.spark_staging WHERE token = ANY (%(tokens)s::uuid[])")
PATIENCE = Sql("SELECT set_config('lock_timeout', '1s', true)", columns=("text",))


def sweep(node: Node, abandoned_after_h: float = ABANDONED_AFTER_H) -> int:
    """Drop staging tables whose batch the ledger has, and those older than so many hours; returns how many.

    A batch that is still to be committed keeps its tables for that long; longer ones fail loudly and are run again.
    """
    swept = 0
    with node.connect("sweep", autocommit=True) as connection:
        while True:
            with connection.transaction():
                dropped = run(connection, sweeping(node.schema, abandoned_after_h))
            swept += dropped
            if dropped < DROPPED_AT_ONCE:
                return swept


def sweeping(schema: str, hours: float) -> Operation[int]:
    """Drop orphans, some at a time; returns how many."""
    orphans = yield ORPHANS.at(schema=schema)(hours=hours, rows=DROPPED_AT_ONCE)
    return (yield from _dropping(schema, [token for (token,) in orphans]))


def drop(node: Node, staged: Iterable[Staged]) -> None:
    """Drop the staging tables of these attempts, as far as they are there."""
    tokens = [one.token for one in staged]
    if tokens:
        with node.connect("abort") as connection:
            run(connection, _aborting(node.schema, tokens))


def _aborting(schema: str, tokens: list[UUID]) -> Operation[int]:
    held = yield HOLD.at(schema=schema)(tokens=tokens)
    return (yield from _dropping(schema, [token for (token,) in held]))


def _dropping(schema: str, tokens: list[UUID]) -> Operation[int]:
    yield PATIENCE.at()()
    for token in tokens:
        yield DROP.at(schema=schema, table=table(token))()
    yield FORGET.at(schema=schema)(tokens=tokens)
    return len(tokens)


def sweep_afterwards(node: Node) -> None:
    """`sweep` after something that has succeeded: what cannot be dropped now is left to a later one."""
    try:
        sweep(node)
    except psycopg.Error as error:
        if sqlstate(error) not in RETRIED:
            raise
        log.info("staging tables are left for a later sweep: %s", type(error).__name__)
