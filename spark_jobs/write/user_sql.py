"""The user's part of the transaction that sends a batch: SQL or a function, which finds the batch in a view."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import psycopg

from mailroom.errors import ConfigurationError
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from outbox.bulk import NTH
from spark_jobs.write.columns import PARTITION
from spark_jobs.write.shape import Shape

ENDS_TRANSACTION = re.compile(r"\s*(commit|rollback|end|abort|prepare\s+transaction)\b", re.I)


@dataclass(frozen=True, slots=True)
class Staging:
    """A batch in the transaction that sends it: `rows` is the quoted name of a view of its rows, to be put into SQL.

    The view has all columns of the DataFrame and message_id, as the outbox will have them (`value` is CBOR), and ends
    with the transaction. `ORDER BY mailroom_partition, mailroom_nth` is the order of the DataFrame.
    """

    rows: str
    messages: int
    batch_id: int


Transact = Callable[[psycopg.Connection, Staging], object]


@dataclass(frozen=True, slots=True)
class UserSql:
    """What is done beside the messages, and its text, by which the ledger knows it."""

    transact: Transact
    text: str

    @classmethod
    def of(cls, commit_sql: str | Sequence[str], transact: Transact | None) -> "UserSql | None":
        """Return what a sink was given, None if nothing. Raises `ConfigurationError`."""
        statements = (commit_sql,) if isinstance(commit_sql, str) else tuple(commit_sql)
        if statements and transact:
            raise ConfigurationError(
                "Give commit_sql or transact: a transact can run SQL by itself.", code="MR-arguments-conflict"
            )
        for statement in statements:
            if not statement.strip():
                raise ConfigurationError(
                    "A statement of commit_sql is empty: leave it out, or write one.", code="MR-spark-option"
                )
            if ENDS_TRANSACTION.match(statement):
                raise ConfigurationError(
                    "A statement of commit_sql ends the transaction, which Mailroom does: leave it out.",
                    code="MR-transaction-ended",
                )
        if statements:
            return cls(partial(_execute, statements), "; ".join(statements))
        return cls(partial(_call, transact), "") if transact else None


def _execute(statements: Sequence[str], connection: psycopg.Connection, staging: Staging) -> None:
    for nth, statement in enumerate(statements, start=1):
        try:
            # binary: otherwise a text could hold several statements, one of them COMMIT.
            connection.execute(statement.replace("{staging}", staging.rows).encode(), binary=True)
        except psycopg.Error as error:
            error.add_note(f"statement {nth} of commit_sql")
            raise


def _call(transact: Transact, connection: psycopg.Connection, staging: Staging) -> None:
    try:
        transact(connection, staging)
    except psycopg.Error as error:
        error.add_note("transact")
        raise


# A view, not a subquery: the user's SQL may give it any alias, or none.
SHOW = Sql("CREATE VIEW {view} AS {rows}")
READ_PART = Sql(
    "SELECT {columns}, {part} AS {partition}, {nth} FROM {table}",
    partition=PARTITION,
    nth=NTH,
)
HIDE = Sql("DROP VIEW {view}")


def showing(shape: Shape, tables: Sequence[str]) -> Operation[str]:
    """Make a view of the rows of these tables, in their order, with the types of the DataFrame; returns its name."""
    yield IN_TRANSACTION
    business = (f"{column.quoted}::{column.shown} AS {column.quoted}" for column in shape.business)
    columns = ", ".join([*shape.messages(), *business])
    rows = " UNION ALL ".join(
        READ_PART.at(table=table, columns=columns, part=str(nth)).sql for nth, table in enumerate(tables)
    )
    view = f"{tables[0]}_rows"
    yield SHOW.at(view=view, rows=rows)()
    return view


def hiding(view: str) -> Operation[None]:
    """Drop the view. If the user's part ended the transaction, the view would stay until the tables are swept."""
    yield HIDE.at(view=view)()
