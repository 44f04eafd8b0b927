"""The ledger of batches: a batch that comes again sends nothing, and one that only seems the same is an error."""

from dataclasses import dataclass

from mailroom.errors import InvalidMessage, MailroomError
from mailroom.sql import locks
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import shown
from spark_jobs.arrow.content import BatchContent

JOB = -1  # in the place of a micro-batch's number
MAX_NAME_BYTES = 100


class BatchDiffers(MailroomError):
    """The ledger has a batch of that name and number with other content. Nothing was sent."""


class StreamTaken(MailroomError):
    """The stream's name belongs to another query. Nothing was sent."""

    code = "MR-spark-stream-taken"


@dataclass(frozen=True, slots=True)
class SparkBatch:
    """A batch; it is the same one when it comes again with the same name and number.

    `query` is a streaming query's id, and `continues` that of the query whose stream it continues. A batch that is not
    `compared` is passed over by its name and number, whatever it holds now.
    """

    name: str
    number: int = JOB
    query: str | None = None
    continues: str | None = None
    compared: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.name.encode()) <= MAX_NAME_BYTES or "\0" in self.name:
            raise InvalidMessage(
                f"{shown(self.name)} cannot name a batch in the ledger: use 1 to {MAX_NAME_BYTES} bytes of text.",
                code="MR-spark-option",
            )

    @property
    def source(self) -> str:
        """The `source` of its messages."""
        return f"mailroom spark {self.name} {self.number}"

    def __str__(self) -> str:
        return f"{shown(self.name)}" if self.number == JOB else f"{self.number} of {shown(self.name)}"


# Waits for a transaction that is entering the same batch, and then finds it or takes its place.
ENTER = Sql(
    """
INSERT INTO {schema}.spark_batch (name, batch, query, messages, digest)
VALUES (%(name)s::text, %(number)s::bigint, %(query)s::text, %(messages)s::bigint, %(digest)s::bytea)
ON CONFLICT DO NOTHING RETURNING true
""",
    columns=("boolean",),
)
KNOWN = Sql(
    "SELECT messages, digest, at::timestamptz(0)::text FROM {schema}.spark_batch "
    "WHERE name = %(name)s::text AND batch = %(number)s::bigint",
    columns=("bigint", "bytea", "text"),
)
LEDGER_LOCK = Sql(
    "SELECT pg_advisory_xact_lock({lock}, hashtext(concat('{node} ', %(name)s::text))) IS NULL", columns=("boolean",)
)
OWNER = Sql(
    "SELECT query FROM {schema}.spark_batch WHERE name = %(name)s::text AND batch >= 0 ORDER BY batch DESC LIMIT 1",
    columns=("text",),
)
LAST = Sql("SELECT max(batch) FROM {schema}.spark_batch WHERE name = %(name)s::text", columns=("bigint",))


def entering(schema: str, batch: SparkBatch, content: BatchContent) -> Operation[bool]:
    """Enter a batch, in the transaction that sends it; return false if it was sent before.

    A query that restarts from its checkpoint should bring the very same batch, and so should a job that is run again.
    Raises `BatchDiffers` if the rows that would be passed over are not those that were sent, or the stream lacks a
    batch between those it has: rows would be left out silently. Raises `StreamTaken` as `owning` does.
    """
    yield IN_TRANSACTION
    if batch.number != JOB:
        # Of two queries that begin at once, the second sees the first's batch, whatever its number.
        yield LEDGER_LOCK.at(lock=str(locks.LEDGER), node=schema)(name=batch.name)
    yield from owning(schema, batch)
    entered = yield ENTER.at(schema=schema)(
        name=batch.name, number=batch.number, query=batch.query, messages=content.messages, digest=content.digest
    )
    if entered:
        [(last,)] = yield LAST.at(schema=schema)(name=batch.name)
        if batch.number != JOB and last > batch.number:
            raise BatchDiffers(
                f"The stream {shown(batch.name)} has gone past batch {batch.number}: the ledger has batch {last}. "
                "Nothing was sent. A new checkpoint has to cut its batches as the old one did; to send all of it as "
                "new, give the stream a new name.",
                code="MR-spark-batch-gone-past",
            )
        return True
    yield from comparing(schema, batch, content)
    return False


def owning(schema: str, batch: SparkBatch) -> Operation[None]:
    """Raise `StreamTaken` if the stream's last batch is of another query that this one does not continue.

    Each query numbers its batches from 0, so each would pass over the other's batches and leave its own rows out.
    """
    if batch.number == JOB:
        return
    for (owner,) in (yield OWNER.at(schema=schema)(name=batch.name)):
        if owner not in (None, batch.query, batch.continues):
            raise StreamTaken(
                f"The stream {shown(batch.name)} belongs to the query {owner}, and this is "
                f"{'no thread of a query' if batch.query is None else f'the query {batch.query}'}. "
                "Nothing was sent. Start a query from its own checkpoint, and give another query a stream name of its "
                f"own. If this one goes on with that stream on a new checkpoint, say so: continuesQuery={owner} "
                "(OutboxSink: continues_query)."
            )


def comparing(schema: str, batch: SparkBatch, content: BatchContent) -> Operation[None]:
    """Raise `BatchDiffers` if the ledger has the batch with other content."""
    for before, digest, at in (yield KNOWN.at(schema=schema)(name=batch.name, number=batch.number)):
        # Without a digest, only the numbers are compared.
        same = before == content.messages and digest in (None, content.digest)
        if batch.compared and not same:
            now = str(content.messages) if before != content.messages else "as many, but others"
            raise BatchDiffers(
                f"The batch {batch} was sent at {at} with {before} messages, and now it has {now}. Nothing was sent. "
                "If these are other data, give them another idempotency key or stream name. If they are the same, and "
                "only come out otherwise (by a random value, the time of day, or a change of the job), say so: "
                "onKnownBatch=pass (OutboxSink: on_known_batch).",
                code="MR-spark-batch-differs",
            )


def finding_entry(schema: str, batch: SparkBatch) -> Operation[tuple[int, str] | None]:
    """Return how many messages the batch had and when it was sent; None if the ledger does not have it."""
    for messages, _, at in (yield KNOWN.at(schema=schema)(name=batch.name, number=batch.number)):
        return int(messages), str(at)
    return None
