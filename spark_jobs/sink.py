"""`foreachBatch` over JDBC: what a stream's micro-batches hold is sent exactly once, and business rows with it.

    insert = "INSERT INTO orders SELECT number, total FROM {staging}"
    sink = OutboxSink("orders", topic="order.placed", commit_sql=insert)
    frame.writeStream.foreachBatch(sink).option("checkpointLocation", ...).start()

Spark's own JDBC writer fills a staging table of this call alone. Then one transaction of the driver does the rest: the
batch's row in the ledger, the business rows, the messages.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg

from mailroom import settings
from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.names import DEFAULT_SCHEMA
from mailroom.operation import Operation
from mailroom.transaction import run
from spark_jobs.jdbc import check_driver, jdbc_options
from spark_jobs.ledger import KNOWN, Batch, entering
from spark_jobs.moving import finding, lost, move, once
from spark_jobs.node import SESSION, Node
from spark_jobs.staging import Staged, drop, table
from spark_jobs.staging_jdbc import IN_ORDER, Layout, choosing, creating_for_jdbc, hiding, quoted, showing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("mailroom.spark")

# The statements of users mean what they mean to their role elsewhere; ours are written for any search_path.
AS_THE_ROLE = {name: value for name, value in SESSION.items() if name != "search_path"}
ENDS_TRANSACTION = re.compile(r"\s*(commit|rollback|end|abort|prepare\s+transaction)\b", re.I)
# logServerErrorDetail: else the driver puts a row that is refused into its error.
WRITING = {"batchsize": "10000", "reWriteBatchedInserts": "true", "logServerErrorDetail": "false"}


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


class OutboxSink:
    """Sends each micro-batch once, whole and in order; give it to `writeStream.foreachBatch`.

    `stream` names the stream in the ledger. Without it the query's id does, and a query with a new checkpoint sends
    everything again. `topic`, `kind`, `message_type` and `event_type` go for all rows; else they are columns.

    `commit_sql`, a statement or a list of them, runs in the transaction that sends the batch, with `{staging}` for its
    rows; or `transact(connection, staging)` does, which must not commit and may be run more than once. Then the
    DataFrame may have columns that no message has. Both run as the role of the connection string, with its own
    search_path, and not at all for a batch without rows.

    The database is named as in `format("outbox")`: `dsn` without a password, `dsn_variable`, or neither. Raises
    `ConfigurationError`. A call raises `InvalidMessage`, `SendFailed`, `StagingLost` or `BatchDiffers`, after which
    nothing of the batch was sent, or an error of Spark, of which the same is true; after `CommitUnknown` it may have
    been. Spark then fails the query; started again from its checkpoint it repeats the batch, and what was sent is not
    sent twice.
    """

    def __init__(
        self,
        stream: str | None = None,
        *,
        topic: str | None = None,
        kind: str | None = None,
        message_type: str | None = None,
        event_type: str | None = None,
        dsn: str | None = None,
        dsn_variable: str | None = None,
        schema: str = DEFAULT_SCHEMA,
        commit_sql: str | Sequence[str] = (),
        transact: Transact | None = None,
    ) -> None:
        if commit_sql and transact:
            raise ConfigurationError("Give commit_sql or transact: a transact can run SQL by itself.")
        statements = (commit_sql,) if isinstance(commit_sql, str) else tuple(commit_sql)
        for statement in statements:
            if ENDS_TRANSACTION.match(statement):
                raise ConfigurationError(
                    "A statement of commit_sql ends the transaction, which OutboxSink does: leave it out."
                )
        if stream is not None:
            Batch(stream)
        given = {"topic": topic, "kind": kind, "message_type": message_type, "event_type": event_type}
        options = {"dsn": dsn, "dsnVariable": dsn_variable, "schema": schema}
        self._stream = stream
        self._for_all_rows = {name: text for name, text in given.items() if text is not None}
        self._node = Node.of({name: text for name, text in options.items() if text is not None})
        self._statements = statements
        self._transact = transact

    def __call__(self, frame: "DataFrame", batch_id: int) -> None:
        """Send a micro-batch, unless the ledger has it; called by Spark, in the driver."""
        batch = self._batch(frame, batch_id)
        layout = Layout.of(frame.schema, self._for_all_rows, business=bool(self._statements or self._transact))
        if self._is_sent(frame, batch):
            return
        check_driver(frame.sparkSession)
        # Of this call alone: a task of an earlier one that still runs then writes into a table that is gone.
        with self._node.connect("stage") as connection:
            token = run(connection, creating_for_jdbc(self._node.schema, batch, layout))
        try:
            self._stage(frame, layout, token)
            once(self._node, batch, lambda connection: self._send(connection, batch, layout, token), self._connect)
        finally:
            self._drop(Staged(batch, token, 0))

    def _batch(self, frame: "DataFrame", number: int) -> Batch:
        query = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        name = self._stream or query
        if name is None:
            raise ConfigurationError(
                "No streaming query runs this: give it to writeStream.foreachBatch, or name a stream."
            )
        return Batch(name, number, query)

    def _is_sent(self, frame: "DataFrame", batch: Batch) -> bool:
        with self._node.connect("ledger", autocommit=True) as connection:
            rows = run(connection, _looking(self._node.schema, batch))
        if not rows:
            return False
        [(query, messages)] = rows
        # That of another query is counted and not staged: the tables of a batch that the ledger has are swept.
        return (batch.query is not None and query == batch.query) or messages == frame.count()

    def _stage(self, frame: "DataFrame", layout: Layout, token: UUID) -> None:
        # The password is an option, which Spark redacts wherever it shows options.
        options = jdbc_options(self._node.connection_string()) | WRITING
        staged = frame.mapInArrow(layout.rows, layout.spark_schema())
        staged.write.format("jdbc").options(**options, dbtable=self._qualified(table(token))).mode("append").save()

    def _send(self, connection: psycopg.Connection, batch: Batch, layout: Layout, token: UUID) -> None:
        schema = self._node.schema
        attempts = None
        if run(connection, finding(schema, token)):
            attempts = run(connection, choosing(schema, token))
        if attempts is None:
            raise lost(batch)
        messages = sum(attempts.values())
        if not messages or not run(connection, entering(schema, batch, messages)):
            return
        view = run(connection, showing(schema, token, layout, attempts))
        self._business(connection, Staging(self._qualified(view), messages, batch.number))
        if move(connection, schema, view, batch, layout.shape, IN_ORDER) != messages:
            raise lost(batch)
        run(connection, hiding(schema, token))

    def _business(self, connection: psycopg.Connection, staging: Staging) -> None:
        doing = "transact"
        try:
            if self._transact is not None:
                self._transact(connection, staging)
            for nth, statement in enumerate(self._statements, start=1):
                doing = f"statement {nth} of commit_sql"
                # binary: else a text could hold several statements, one of them COMMIT.
                connection.execute(statement.replace("{staging}", staging.rows).encode(), binary=True)
        except psycopg.Error as error:
            error.add_note(doing)
            raise

    def _connect(self) -> psycopg.Connection:
        return settings.connect(self._node.connection_string(), "spark commit", AS_THE_ROLE)

    def _qualified(self, name: str) -> str:
        return f"{quoted(self._node.schema)}.{quoted(name)}"

    def _drop(self, staged: Staged) -> None:
        # It must not hide how the batch ended; a later sweep drops what is left.
        try:
            drop(self._node, [staged])
        except (psycopg.Error, ConnectionFailed) as error:
            log.info("a staging table is left for a later sweep: %s", type(error).__name__)


def _looking(schema: str, batch: Batch) -> Operation[list[tuple[str | None, int]]]:
    rows = yield KNOWN.at(schema=schema)(name=batch.name, number=batch.number)
    return [(query, messages) for query, messages, _ in rows]
