"""What the audit reads of a node: where its messages are, what was sent, drained and requeued, all as of one moment."""

from collections.abc import Iterator, Sequence
from functools import partial
from time import monotonic, sleep

import psycopg
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from mailroom.errors import ConfigurationError, MailroomError
from mailroom.registry.routing import GETS, WAYS
from mailroom.schema import checking
from mailroom.sql.operation import Operation, Row, Sql
from mailroom.sql.runner import PlainCursor, run
from spark_jobs.archive.files import Series, files_of
from spark_jobs.archive.folder import folder, shown
from spark_jobs.arrow.content import HASH, SENT_BYTES
from spark_jobs.arrow.message_rows import LONG, MOMENT, TEXT, ddl
from spark_jobs.node import Node

FETCHED = 20_000  # rows that a task holds at a time
VISIBLE_S = 60.0  # a drainer that is alive shows its file milliseconds after the COMMIT
POLL_INTERVAL_S = 0.1

ARROW = pa.schema({
    "place": TEXT, "inbox": TEXT, "key": TEXT, "clock": LONG, "message_id": TEXT, "source": TEXT, "messages": LONG,
    "shard": pa.int32(), "segment": LONG, "at": MOMENT, "topic": TEXT, "kind": TEXT, "hash": TEXT,
})  # fmt: skip
TABLES_DDL = ddl(ARROW)
NO_MESSAGE = "NULL::text, NULL::bigint, NULL::text"
NO_TIME = "NULL::timestamptz"
NO_CONTENT = "NULL::text, NULL::text, NULL::text"
NO_COUNT = "NULL::bigint, NULL::integer, NULL::bigint"
NOT_DELIVERED = (
    f"NULL::text, key, NULL::bigint, message_id::text, source, {NO_COUNT}, {NO_TIME}, topic, kind::text, {HASH}"
)
DELIVERED = f"inbox, key, clock, message_id::text, source, {NO_COUNT}, %s, topic, kind::text, {HASH}"

# One statement, so one snapshot, and the files are listed only after it. Messages move in circles (outbox, scheduled
# and back; inbox, parked and back; dead_letter and back), so no order of reading table after table would see all of
# them; a snapshot has each in exactly one place, or it was reaped before, and then its file is listed. Seen in both, in
# the inbox and in a file of a later segment, it was merely drained meanwhile. A batch and its messages are committed
# together, and so are a sender's rows and its messages: a snapshot has both or neither.
#
# What links carry is in `transit` too, until a while after its reader has it; then only their number is left (trimmed).
#
# A way to an inbox (`mailroom.registry.routing`) has as `kind` the kinds that come by it. That of a pattern has in the
# place of a source what its topics are LIKE, and in that of a count how many words they have.
# D-spark-14: The audit reads one snapshot.
SNAPSHOT = Sql(
    """
SELECT 'outbox', {not_delivered} FROM {schema}.outbox
UNION ALL
SELECT 'scheduled', {not_delivered} FROM {schema}.scheduled
UNION ALL
SELECT 'inbox', {delivered} FROM {schema}.inbox
UNION ALL
SELECT 'parked', {delivered} FROM {schema}.parked
UNION ALL
SELECT 'dead_letter', {dead_lettered} FROM {schema}.dead_letter
UNION ALL
SELECT 'transit', {not_delivered} FROM {schema}.transit WHERE kind <> 'H'
UNION ALL
SELECT 'trimmed', NULL::text, {no_message}, NULL::text, min(seq) - 1::bigint, NULL::integer, NULL::bigint, {no_time},
       {no_content}
FROM {schema}.transit GROUP BY link
UNION ALL
SELECT 'batch', NULL::text, {no_message}, pg_catalog.format('mailroom spark %s %s', name, batch),
       b.messages - coalesce(u.messages - u.moved, 0::bigint), NULL::integer, NULL::bigint, {no_time},
       NULL::text, NULL::text,
       CASE WHEN u.name IS NULL THEN pg_catalog.encode(pg_catalog.substr(digest, 1, {sent_bytes}), 'hex') END
FROM {schema}.spark_batch AS b LEFT JOIN {schema}.spark_bulk AS u USING (name, batch)
UNION ALL
SELECT 'shard', inbox, {no_message}, NULL::text, messages, shard, segment, {no_time}, {no_content}
FROM {schema}.spark_drain
UNION ALL
SELECT 'way', inbox, {no_message}, fits, words, NULL::integer, NULL::bigint, r.created_at, topic,
       (SELECT pg_catalog.string_agg(kind, ''::text)
        FROM pg_catalog.unnest(ARRAY['M', 'E', 'C', 'R']) AS k (kind) WHERE {gets}), NULL::text
FROM ({ways}) AS w (topic, inbox, subscribed, named, fits, words)
JOIN {schema}.inbox_registry AS r ON r.name = w.inbox
UNION ALL
SELECT CASE WHEN action = 'requeue dead letters' THEN 'requeue' ELSE 'discard' END, inbox, {no_message}, NULL::text,
       messages, NULL::integer, NULL::bigint, at, {no_content}
FROM {schema}.audit WHERE action IN ('requeue dead letters', 'discard', 'discard dead letters')
""",
    not_delivered=NOT_DELIVERED,
    delivered=DELIVERED % "delivered_at",
    dead_lettered=DELIVERED % NO_TIME,
    ways=WAYS,
    gets=GETS,
    no_message=NO_MESSAGE,
    no_time=NO_TIME,
    sent_bytes=SENT_BYTES,
    no_content=NO_CONTENT,
)
SENT = (
    "UNION ALL SELECT 'sent', NULL::text, {key}, NULL::bigint, message_id::uuid::text, NULL::text, {none} FROM {rows}"
)
NONE_OF_SENT = f"{NO_COUNT}, {NO_TIME}, {NO_CONTENT}"


def snapshot(connection: psycopg.Connection, node: Node, sent: str | None) -> str:
    """Return the statement that reads the node, and what was sent by `sent`: a table, or a SELECT, with message_id.

    Raises `SchemaError`, `ConfigurationError` if `sent` has no column message_id, and errors of the driver.
    """
    run(connection, checking(node.schema))
    statement = SNAPSHOT.at(schema=node.schema).sql
    if sent is None:
        return statement
    # On lines of their own, since a SELECT may end in a comment.
    rows = f"(\n{sent if len(sent.split()) > 1 else f'TABLE {sent}'}\n) AS sent"
    with PlainCursor(connection) as cursor:
        cursor.execute(f"SELECT * FROM {rows} LIMIT 0".encode())
        columns = {column.name for column in cursor.description or ()}
    if "message_id" not in columns:
        raise ConfigurationError(
            "What --sent names has no column message_id. Give a SELECT that names it so.",
            code="MR-audit-column-missing",
        )
    key = "key::text" if "key" in columns else "NULL::text"
    return f"{statement}\n{SENT.format(key=key, none=NONE_OF_SENT, rows=rows)}"


def read(spark: SparkSession, node: Node, sent: str | None) -> DataFrame:
    """Read the node once, in a task of Spark: no row passes through the driver's process.

    What was read stays with the executors. Losing one of them fails the audit: tables that were read again would be of
    another moment. Raises as `snapshot` does.
    """
    with node.connect("audit") as connection:
        connection.read_only = True
        statement = snapshot(connection, node, sent)
        node = node.pinned(connection)
    rows = spark.range(0, 1, 1, 1).mapInArrow(partial(_rows, node=node, statement=statement), TABLES_DDL)
    return rows.repartition("message_id").localCheckpoint(eager=True)


def _rows(batches: Iterator[pa.RecordBatch], node: Node, statement: str) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        with node.connect("audit") as connection:
            connection.read_only = True
            with connection.cursor("audit") as cursor:
                cursor.execute(statement.encode(), binary=True)
                while rows := cursor.fetchmany(FETCHED):
                    columns = zip(zip(*rows, strict=True), ARROW.types, strict=True)
                    yield pa.RecordBatch.from_arrays([pa.array(cells, kind) for cells, kind in columns], schema=ARROW)


UNFINISHED = Sql(
    """
SELECT n.id, d.inbox, d.shard, d.segment, d.directory FROM {schema}.node AS n LEFT JOIN {schema}.spark_drain AS d
ON NOT d.finished AND d.directory = ANY (%(directories)s::text[])
""",
    columns=("uuid", "text", "integer", "bigint", "text"),
)


def _finding_unfinished(schema: str, directories: Sequence[str]) -> Operation[list[Row]]:
    return list((yield UNFINISHED.at(schema=schema)(directories=list(directories))))


def await_files(node: Node, directories: Sequence[str], *, within_s: float = VISIBLE_S) -> str:
    """Wait until every segment committed so far can be seen; return the pattern of the names of this node's files.

    A file gets the name that readers see just after its COMMIT, and its messages are nowhere in between. Raises
    `MailroomError` if a file stays hidden: its drainer was killed at that very point.
    """
    with node.connect("audit") as connection:
        rows = run(connection, _finding_unfinished(node.schema, directories))
    end = monotonic() + within_s
    for id, inbox, shard, segment, directory in rows:
        while inbox is not None and not folder(directory).has(name := Series(id, inbox, shard).final(segment)):
            if monotonic() >= end:
                raise MailroomError(
                    f"{name} is committed and not to be seen in {shown(directory)}: its drain was interrupted. Drain "
                    "this inbox once more, which finishes it, and audit again.",
                    code="MR-drain-unfinished",
                )
            sleep(POLL_INTERVAL_S)
    return files_of(rows[0][0])
