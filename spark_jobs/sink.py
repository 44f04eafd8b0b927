"""`foreachBatch` over JDBC: what a stream's micro-batches hold is sent exactly once, and business rows with it.

    insert = "INSERT INTO orders SELECT number, total FROM {staging}"
    sink = OutboxSink("orders", topic="order.placed", commit_sql=insert)
    frame.writeStream.foreachBatch(sink).option("checkpointLocation", ...).start()

Spark's own JDBC writer fills a staging table of this call alone. Then one transaction of the driver does the rest: the
batch's row in the ledger, the business rows, the messages.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg

from mailroom import settings
from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.names import DEFAULT_SCHEMA
from mailroom.transaction import run
from spark_jobs.jdbc import check_driver, jdbc_options
from spark_jobs.ledger import Batch, comparing, entering, owning, sending
from spark_jobs.moving import SendFailed, finding, lost, move, once
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
WRITING = {"reWriteBatchedInserts": "true", "logServerErrorDetail": "false"}
MOST_ROWS_AT_ONCE = 10_000


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
    everything again. The name belongs to the query that sent its last batch. Another one, such as a new checkpoint
    makes, names that query's id as `continues_query` to go on with the stream.

    `topic`, `kind`, `message_type` and `event_type` go for all rows; else they are columns.

    `commit_sql`, a statement or a list of them, runs in the transaction that sends the batch, with `{staging}` for its
    rows; or `transact(connection, staging)` does, which must not commit and may be run more than once. Then the
    DataFrame may have columns that no message has. Both run as the role of the connection string, with its own
    search_path, and not at all for a batch without rows.

    `batchsize` is how many rows each task hands to JDBC at once, and has on its executor's heap until then: 1 to
    10,000, fewer for large values.

    The ledger knows a batch by the stream's name and its number. So no other sink has that name, in this query or
    another one, and each is called once for a batch, or again if the call failed. Any other second call in a query
    raises `ConfigurationError`, and the call of another query `StreamTaken`.

    The database is named as in `format("outbox")`: `dsn` without a password, `dsn_variable`, or neither. Raises
    `ConfigurationError`. A call raises `InvalidMessage`, `SendFailed`, `StagingLost`, `BatchDiffers` or `StreamTaken`,
    after which nothing of the batch was sent, or an error of Spark, of which the same is true; after `CommitUnknown` it
    may have been. Spark then fails the query; started again from its checkpoint it repeats the batch, and what was sent
    is not sent twice.
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
        batchsize: int = 1_000,
        continues_query: str | None = None,
    ) -> None:
        if commit_sql and transact:
            raise ConfigurationError("Give commit_sql or transact: a transact can run SQL by itself.")
        statements = (commit_sql,) if isinstance(commit_sql, str) else tuple(commit_sql)
        for statement in statements:
            if ENDS_TRANSACTION.match(statement):
                raise ConfigurationError(
                    "A statement of commit_sql ends the transaction, which OutboxSink does: leave it out."
                )
        if not 1 <= batchsize <= MOST_ROWS_AT_ONCE:
            raise ConfigurationError(f"batchsize is {batchsize}: give 1 to {MOST_ROWS_AT_ONCE} rows.")
        if stream is not None:
            Batch(stream)
        elif continues_query is not None:
            raise ConfigurationError("Name the stream too: continues_query says whose stream of that name goes on.")
        given = {"topic": topic, "kind": kind, "message_type": message_type, "event_type": event_type}
        options = {"dsn": dsn, "dsnVariable": dsn_variable, "schema": schema}
        self._stream = stream
        self._continues = continues_query
        self._for_all_rows = {name: text for name, text in given.items() if text is not None}
        self._node = Node.of({name: text for name, text in options.items() if text is not None})
        self._statements = statements
        self._transact = transact
        self._batchsize = batchsize

    def __call__(self, frame: "DataFrame", batch_id: int) -> None:
        """Send a micro-batch, unless the ledger has it; called by Spark, in the driver."""
        batch = self._batch(frame, batch_id)
        layout = Layout.of(frame.schema, self._for_all_rows, business=bool(self._statements or self._transact))
        with _only_call(self._node, batch, _run_id(frame, batch)):
            with self._node.connect("ledger", autocommit=True) as connection:
                sent = self._is_sent(connection, frame, batch)
            if not sent:
                self._stage_and_send(frame, batch, layout)

    def _stage_and_send(self, frame: "DataFrame", batch: Batch, layout: Layout) -> None:
        check_driver(frame.sparkSession)
        # Of this call alone: a task of an earlier one that still runs then writes into a table that is gone.
        with self._node.connect("stage") as connection:
            token = run(connection, creating_for_jdbc(self._node.schema, batch, layout))
        try:
            self._stage(frame, layout, token)
            once(
                self._node, batch, lambda connection: self._send(connection, frame, batch, layout, token), self._connect
            )
        finally:
            self._drop(Staged(batch, token, 0))

    def _batch(self, frame: "DataFrame", number: int) -> Batch:
        query = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        name = self._stream or query
        if name is None:
            raise ConfigurationError(
                "No streaming query runs this: give it to writeStream.foreachBatch, or name a stream."
            )
        return Batch(name, number, query, self._continues)

    def _is_sent(self, connection: psycopg.Connection, frame: "DataFrame", batch: Batch) -> bool:
        run(connection, owning(self._node.schema, batch))
        senders = run(connection, sending(self._node.schema, batch))
        if not senders:
            return False
        if batch.query is not None and senders == [batch.query]:
            return True
        # That of another query is counted and not staged: the tables of a batch that the ledger has are swept.
        return run(connection, comparing(self._node.schema, batch, frame.count()))

    def _stage(self, frame: "DataFrame", layout: Layout, token: UUID) -> None:
        # The password is an option, which Spark redacts wherever it shows options.
        options = jdbc_options(self._node.connection_string()) | WRITING | {"batchsize": str(self._batchsize)}
        staged = frame.mapInArrow(layout.rows, layout.spark_schema())
        staged.write.format("jdbc").options(**options, dbtable=self._qualified(table(token))).mode("append").save()

    def _send(
        self, connection: psycopg.Connection, frame: "DataFrame", batch: Batch, layout: Layout, token: UUID
    ) -> None:
        schema = self._node.schema
        attempts = run(connection, choosing(schema, token)) if run(connection, finding(schema, token)) else None
        if attempts is None:
            # Another driver that has sent the batch meanwhile sweeps the table, which JDBC's writer may make again.
            if not self._is_sent(connection, frame, batch):
                raise lost(batch)
            return
        messages = sum(attempts.values())
        if not messages or not run(connection, entering(schema, batch, messages)):
            return
        view = run(connection, showing(schema, token, layout, attempts))
        self._business(connection, Staging(self._qualified(view), messages, batch.number))
        moved = move(connection, schema, view, batch, layout.shape, IN_ORDER)
        if moved != messages:
            raise SendFailed(
                f"Of the {messages} messages of the batch {batch} only {moved} went into the outbox: a trigger there, "
                "or your SQL for the batch, takes some away. Nothing was sent: mend it, and run it again."
            )
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


# -- One call for a batch ---------------------------------------------------------------------------------------------

# By node and stream name, the last call: which run of a query, and its batch. A run never goes back to an earlier one.
_last_calls: dict[tuple[Node, str], tuple[str | None, int]] = {}
_last_calls_lock = threading.Lock()


@contextmanager
def _only_call(node: Node, batch: Batch, run_id: str | None) -> Iterator[None]:
    """Refuse a second call of a run for the batch, unless the first failed: the ledger would have it pass for sent."""
    key, call = (node, batch.name), (run_id, batch.number)
    with _last_calls_lock:
        if run_id is not None and _last_calls.get(key) == call:
            raise ConfigurationError(
                f"The batch {batch} comes twice: another OutboxSink of this query has that name, or this one was "
                "called before. Give each its own stream name, and call each once for a batch."
            )
        _last_calls[key] = call
    try:
        yield
    except BaseException:
        with _last_calls_lock:
            _last_calls.pop(key, None)
        raise


def _run_id(frame: "DataFrame", batch: Batch) -> str | None:
    """Return what tells a run of the query from the next one, which may repeat the last batch; None if nothing does."""
    group = frame.sparkSession.sparkContext.getLocalProperty("spark.jobGroup.id")
    try:
        # A job group of the user's own, set in its place, may be the same in the next run.
        return group if batch.query is not None and group is not None and UUID(group) else None
    except ValueError:
        return None
