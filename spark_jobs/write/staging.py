"""Staging: each attempt of a task writes into a table of its own, of which only the driver makes messages.

A task may run twice, at once or one after the other, and may die after its commit. So its rows count only once the
driver has moved them (`spark_jobs.write.commit`): Spark reports to it which attempts succeeded. A table whose batch the
ledger has is of no use any more, nor is one that was abandoned.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from mailroom.errors import MailroomError
from mailroom.session.commit import NEW
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import end_of_copy, run
from outbox.bulk import CHUNK_BYTES, CHUNK_ROWS, NTH, table_in
from spark_jobs.arrow import binary_copy
from spark_jobs.arrow.content import BatchContent
from spark_jobs.node import Node
from spark_jobs.write.ledger import SparkBatch
from spark_jobs.write.shape import Shape

log = logging.getLogger("mailroom.spark")

ABANDONED_AFTER_H = 24.0


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """What one task attempt has staged: its batch, the token of its table (None without rows), and the content.

    `size` is about how many bytes that were.
    """

    batch: SparkBatch
    token: UUID | None
    content: BatchContent
    size: int = 0


# Filled once, read once and dropped: not logged, and nothing for autovacuum. A crash of the server empties it, so the
# move counts its rows. A table of more than a chunk has to outlive a crash once its batch is decided: logging it from
# the start is cheaper than rewriting it.
CREATE = Sql("CREATE {unlogged} TABLE {table} ({columns}) WITH (autovacuum_enabled = off)")
# The table was made in the same transaction, so its rows need not be marked as committed one by one when they are read.
COPY = Sql("COPY {table} ({names}) FROM STDIN (FORMAT binary, FREEZE)")
REGISTER = Sql(
    "INSERT INTO {schema}.spark_staging (token, name, batch, schema) "
    "VALUES ({new}, %(name)s::text, %(number)s::bigint, %(staging)s::text) RETURNING token",
    columns=("uuid",),
    new=NEW.strip(),
)


# D-spark-3: A task only fills a table of its own.
# D-spark-4: A table per task attempt stays.
def stage(node: Node, batch: SparkBatch, shape: Shape, rows: Iterable[Any]) -> Staged:
    """Put the rows of Arrow record batches into a new staging table and commit it; no rows make no table.

    Raises `InvalidMessage` for a row over a limit. After an error there is no table.
    """
    filled = (some for some in rows if some.num_rows)
    first = _up_to_a_chunk(filled)
    content = BatchContent()
    if not first:
        return Staged(batch, None, content)
    is_large = _is_more_than_a_chunk(first)
    size = 0
    columns = [(NTH, "bigint"), *shape.staged()]
    names, kinds = zip(*columns, strict=True)
    with node.connect("task") as connection, connection.transaction():
        token = run(connection, creating(node.schema, batch, columns, is_large=is_large, staging=node.staging))
        copy = COPY.at(table=node.table(token), names=", ".join(names))
        with end_of_copy(connection), connection.cursor() as cursor, cursor.copy(copy.sql) as stream:
            stream.write(binary_copy.HEADER)
            for some in chain(first, filled):
                arrays = shape.prepared(some)
                numbers = pa.array(np.arange(some.num_rows) + content.messages + 1)
                content += shape.content(arrays)
                size += some.nbytes
                stream.write(binary_copy.rows(len(kinds), binary_copy.fields([numbers, *arrays], kinds)))
            stream.write(binary_copy.TRAILER)
    return Staged(batch, token, content, size)


def _up_to_a_chunk(filled: Iterator[Any]) -> list[Any]:
    """Take record batches until they are more than a chunk, or all."""
    taken: list[Any] = []
    while not _is_more_than_a_chunk(taken) and (some := next(filled, None)) is not None:
        taken.append(some)
    return taken


def _is_more_than_a_chunk(some: Sequence[Any]) -> bool:
    return bool(sum(each.num_rows for each in some) > CHUNK_ROWS or sum(each.nbytes for each in some) > CHUNK_BYTES)


def creating(
    schema: str,
    batch: SparkBatch,
    columns: Iterable[tuple[str, str]],
    *,
    is_large: bool = False,
    staging: str | None = None,
) -> Operation[UUID]:
    """Make a staging table with these columns, names and types, and record its batch; returns its token.

    It stands in the schema `staging`, None being the node's.
    """
    yield IN_TRANSACTION
    [(token,)] = yield REGISTER.at(schema=schema)(name=batch.name, number=batch.number, staging=staging)
    definitions = ", ".join(f"{name} {kind}" for name, kind in columns)
    unlogged = "" if is_large else "UNLOGGED"
    token = UUID(str(token))
    yield CREATE.at(table=table_in(staging or schema, token), columns=definitions, unlogged=unlogged)()
    return token


# -- Sweeping ---------------------------------------------------------------------------------------------------------

# Tables of other roles are left to them: only the owner may drop a table, and where its schema is closed to this role
# it could not even be looked up by name. One that COPY still fills is not visible yet, nor is its row here.
ORPHANS = Sql(
    """
SELECT token FROM {schema}.spark_staging AS s
LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = coalesce(s.schema, %(schema)s::text)
LEFT JOIN pg_catalog.pg_class AS c
       ON c.relnamespace = n.oid AND c.relname = 'staging_' || replace(token::text, '-', '')
WHERE part IS NULL
  AND (at < clock_timestamp() - %(hours)s::float8 * interval '1 hour'
       OR EXISTS (SELECT FROM {schema}.spark_batch AS b WHERE b.name = s.name AND b.batch = s.batch))
  AND pg_has_role(c.relowner, 'USAGE') IS NOT FALSE AND has_schema_privilege(n.oid, 'USAGE') IS NOT FALSE
ORDER BY token
""",
    columns=("uuid",),
)
# A table that is being read or moved stays for the next sweep, as does one whose drop a crash undoes.
PATIENCE = Sql(
    "SELECT set_config('lock_timeout', '20ms', true), set_config('synchronous_commit', 'off', true)",
    columns=("text", "text"),
)
# A part of a batch that was decided is still to be moved, whatever failed since. A trigger deletes what is marked: a
# right to DELETE would be one to lock the table.
FORGET = Sql(
    "UPDATE {schema}.spark_staging SET deleted = true WHERE token = %(token)s::uuid AND part IS NULL RETURNING schema",
    columns=("text",),
)
# CASCADE: a `transact` that commits by itself leaves a view of the table behind.
DROP = Sql("DROP TABLE IF EXISTS {table} CASCADE")


OF_BATCH = Sql(
    "SELECT token FROM {schema}.spark_staging WHERE name = %(name)s::text AND batch = %(number)s::bigint",
    columns=("uuid",),
)


def sweep(node: Node, abandoned_after_h: float = ABANDONED_AFTER_H) -> int:
    """Drop staging tables whose batch the ledger has, and those older than that many hours; returns how many.

    Tables that are locked are left. A batch that takes longer than that to commit fails, and has to be run
    again.
    """
    with node.connect("sweep", autocommit=True) as connection:
        return _drop_all(connection, node.schema, run(connection, finding_orphans(node.schema, abandoned_after_h)))


def finding_orphans(schema: str, hours: float) -> Operation[list[UUID]]:
    """Return the tokens of staging tables that no batch will need any more and that the role may drop."""
    return [token for (token,) in (yield ORPHANS.at(schema=schema)(schema=schema, hours=hours))]


def drop(node: Node, staged: Iterable[Staged]) -> None:
    """Drop the staging tables of these attempts, as far as they are there and are not locked."""
    tokens = [one.token for one in staged if one.token]
    if tokens:
        with node.connect("abort", autocommit=True) as connection:
            _drop_all(connection, node.schema, tokens)


def abandon(node: Node, batch: SparkBatch) -> None:
    """Drop a batch's staging tables that are not locked; another driver at work on it then has to start again."""
    with node.connect("abort", autocommit=True) as connection:
        _drop_all(connection, node.schema, run(connection, _finding(node.schema, batch)))


def _finding(schema: str, batch: SparkBatch) -> Operation[list[UUID]]:
    return [token for (token,) in (yield OF_BATCH.at(schema=schema)(name=batch.name, number=batch.number))]


def _drop_all(connection: psycopg.Connection, schema: str, tokens: Iterable[UUID]) -> int:
    dropped = 0
    for token in tokens:
        # Each by itself, so that one that is locked keeps none of the others.
        with suppress(psycopg.errors.LockNotAvailable), connection.transaction():
            run(connection, _dropping(schema, token))
            dropped += 1
    return dropped


def _dropping(schema: str, token: UUID) -> Operation[None]:
    yield PATIENCE.at()()
    for (elsewhere,) in (yield FORGET.at(schema=schema)(token=token)):
        yield DROP.at(table=table_in(elsewhere or schema, token))()


@contextmanager
def left_to_a_sweep() -> Iterator[None]:
    """Log an error of dropping tables instead of raising it: it must not hide how a batch has ended."""
    try:
        yield
    except (psycopg.Error, MailroomError) as error:
        log.info("staging tables are left for a later sweep: %s", type(error).__name__)
