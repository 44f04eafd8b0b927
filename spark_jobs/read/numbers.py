"""Under which numbers of Spark's the batches of a stream are read: a sink that goes by numbers goes by those.

The source counts its own batches, and Spark counts all of a query: also those without data of this inbox, which a
query with a watermark makes, or one that reads other sources too. So after a checkpoint was set back, a batch may come
again under another number, or a new one under a number that the sink has done. Only tasks are told Spark's number. They
record it before they read, and refuse a number that is not the one of the batch. A batch without data of this inbox has
none of our tasks, but the commit of the one before comes while nothing new is planned. If the query dies before that
call, Spark does not make it again: then the count is one too low until a task brings the next number. To count one more
at each start instead would refuse numbers that were not used, and so end streams that are well.
"""

from pyspark import TaskContext

from mailroom.errors import ConfigurationError
from mailroom.sql.operation import Operation, Sql

BATCH = "streaming.sql.batchId"  # what Spark tells each task of a micro-batch


def number_of_task() -> int | None:
    """Return the number that Spark gives the micro-batch of this task; None outside of one."""
    context = TaskContext.get()
    number = context.getLocalProperty(BATCH) if context else None
    return int(number) if number is not None else None


# A number is used once it was above all that batches before have used.
NUMBER = Sql(
    """
SELECT s.number, (SELECT max(b.used) FROM {schema}.my_spark_stream AS b
                  WHERE b.inbox = s.inbox AND b.checkpoint = s.checkpoint AND b.batch < s.batch)
FROM {schema}.my_spark_stream AS s
WHERE s.inbox = %(inbox)s::text AND s.checkpoint = %(checkpoint)s::text AND s.batch = %(batch)s::bigint
""",
    columns=("bigint", "bigint"),
)
# Other tasks of the batch bring the same number.
TAKE = Sql(
    """
UPDATE {schema}.my_spark_stream SET number = %(number)s::bigint, used = greatest(used, %(number)s::bigint)
WHERE inbox = %(inbox)s::text AND checkpoint = %(checkpoint)s::text AND batch = %(batch)s::bigint AND number IS NULL
"""
)


def taking_number(schema: str, inbox: str, checkpoint: str, batch: int, number: int) -> Operation[None]:
    """Record that Spark reads a batch under this number.

    Raises `ConfigurationError` if the batch has another one, or Spark has used the number for a batch before.
    """
    names = {"inbox": inbox, "checkpoint": checkpoint, "batch": batch}
    for known, used in (yield NUMBER.at(schema=schema)(**names)):
        if known is None and (used is None or used < number):
            yield TAKE.at(schema=schema)(**names, number=number)
        elif known != number:
            before = f"was batch {known}" if known is not None else f"comes after batch {used}"
            raise ConfigurationError(
                f"The checkpoint was set back: what is Spark's batch {number} now {before} of the query before. A "
                f"sink that has seen these numbers would pass over what they are now. {way_on(checkpoint)}",
                code="MR-spark-checkpoint-set-back",
            )


USED = Sql(
    """
SELECT CASE WHEN batch = %(planned)s::bigint THEN number ELSE used END FROM {schema}.my_spark_stream
WHERE inbox = %(inbox)s::text AND checkpoint = %(checkpoint)s::text AND batch = %(batch)s::bigint
""",
    columns=("bigint",),
)
USE = Sql(
    """
UPDATE {schema}.my_spark_stream SET used = greatest(used, %(used)s::bigint)
WHERE inbox = %(inbox)s::text AND checkpoint = %(checkpoint)s::text AND batch = %(batch)s::bigint
"""
)


def finding_used(schema: str, inbox: str, checkpoint: str, batch: int, planned: int) -> Operation[int | None]:
    """Return Spark's number of a batch if it was `planned` last, else the last one used; None if that is unknown."""
    rows = yield USED.at(schema=schema)(inbox=inbox, checkpoint=checkpoint, batch=batch, planned=planned)
    return None if rows in ([], [(None,)]) else int(rows[0][0])


def using(schema: str, inbox: str, checkpoint: str, batch: int, used: int) -> Operation[None]:
    """Record up to which number Spark has made batches without data of this inbox, after that batch."""
    yield USE.at(schema=schema)(inbox=inbox, checkpoint=checkpoint, batch=batch, used=used)


def way_on(owner: str) -> str:
    """Say how a stream goes on that has to end."""
    return (
        "Put the newest checkpoint back if there is one. Else name another checkpointLocation, give the sink another "
        "path or stream name, since it passes over the batch numbers that it has seen, and say so: "
        f'.option("continuesCheckpoint", "{owner}"). The stream then reads all that is in the inbox.'
    )
