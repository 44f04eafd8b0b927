"""What a stream has given out under which batch number, and what was read of it: the view of `spark_stream`.

A sink that takes a repeated batch once goes by its number. So a number stands for the same messages for ever: the node
keeps the batches whose messages are not all deleted, and the last one. A checkpoint that was set back, or another
checkpoint that begins again at the first number, is found out by that. Each operation runs in a transaction of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from inbox.by_key.claim import PIN
from mailroom.errors import ConfigurationError
from mailroom.sql.operation import Operation, Sql
from spark_jobs.read.inbox_rows import BY_RANGE, DIGESTED, Planned, Range
from spark_jobs.read.numbers import way_on
from spark_jobs.read.offsets import BatchEnd

GIVEN = Sql(
    """
SELECT checkpoint, batch, upto, message_id, messages, digest FROM {schema}.my_spark_stream
WHERE inbox = %(inbox)s::text ORDER BY batch
""",
    columns={
        "checkpoint": "text",
        "batch": "bigint",
        "upto": "bigint",
        "message_id": "text",
        "messages": "bigint",
        "digest": "bigint",
    },
)


def finding_given(
    schema: str, inbox: str, checkpoint: str, number: int, continues: str | None
) -> Operation[BatchEnd | None]:
    """Return where the batch of that number ends if it was given out before, else None.

    Raises `ConfigurationError` if the checkpoint lags behind what it has given out, or another one reads the inbox and
    is not the one that this `continues`.
    """
    rows = GIVEN.named((yield GIVEN.at(schema=schema)(inbox=inbox)))
    last = None
    for each in rows:
        if each.checkpoint == checkpoint:
            if each.batch == number:
                return BatchEnd(int(each.upto), each.message_id, number, int(each.messages), int(each.digest))
            last = int(each.batch)
        elif each.checkpoint != continues:
            raise _read_by_another(inbox, each.checkpoint, rows[-1].batch, checkpoint)
    if last is not None and last > number:
        raise set_back(inbox, checkpoint, number, last)
    return None


LAST = Sql(
    "SELECT checkpoint, batch FROM {schema}.my_spark_stream WHERE inbox = %(inbox)s::text ORDER BY batch DESC LIMIT 1",
    columns=("text", "bigint"),
)


def finding_last(schema: str, inbox: str) -> Operation[tuple[str, int] | None]:
    """Return the checkpoint that reads the inbox, and the number of its last batch."""
    for checkpoint, batch in (yield LAST.at(schema=schema)(inbox=inbox)):
        return str(checkpoint), int(batch)
    return None


# -- what there is to read --------------------------------------------------------------------------------------------

MEASURE = Sql(
    """
SELECT width_bucket(clock, %(lowest)s::bigint[]), count(*), bit_xor({digested})
FROM {schema}.inbox_{inbox} WHERE {by_range} GROUP BY 1 ORDER BY 1
""",
    columns=("integer", "bigint", "bigint"),
    digested=DIGESTED,
    by_range=BY_RANGE,
)


@dataclass(frozen=True, slots=True)
class RangeContent:
    """How many messages, and their digest."""

    messages: int = 0
    digest: int = 0


def measuring(schema: str, inbox: str, ranges: Sequence[Range]) -> Operation[list[RangeContent]]:
    """Return what is in each of the ranges, which follow one another."""
    yield PIN.at()()
    found = [RangeContent()] * len(ranges)
    lowest = [one.above + 1 for one in ranges]
    measured = yield MEASURE.at(schema=schema, inbox=inbox)(lowest=lowest, above=ranges[0].above, upto=ranges[-1].upto)
    for nth, messages, digest in measured:
        found[nth - 1] = RangeContent(int(messages), int(digest))
    return found


# -- giving out and deleting ------------------------------------------------------------------------------------------

REPLACE = Sql(
    "UPDATE {schema}.my_spark_stream SET deleted = true "
    "WHERE inbox = %(inbox)s::text AND checkpoint <> %(checkpoint)s::text"
)
GIVE = Sql(
    """
INSERT INTO {schema}.my_spark_stream (inbox, checkpoint, batch, above, upto, message_id, messages, digest)
VALUES (%(inbox)s::text, %(checkpoint)s::text, %(batch)s::bigint, %(above)s::bigint, %(upto)s::bigint,
        %(message_id)s::text, %(messages)s::bigint, %(digest)s::bigint)
"""
)


def giving_out(
    schema: str, inbox: str, checkpoint: str, ranges: Sequence[Range], end: BatchEnd, continues: str | None
) -> Operation[list[Range]]:
    """Give a batch out under its number, and return its ranges with what has to be read of each.

    Raises `ConfigurationError` if the number stands for other messages, or they are not all there, and as
    `finding_given` does.
    """
    contents = yield from measuring(schema, inbox, ranges)
    yield from recording(schema, inbox, checkpoint, ranges[0].above, end, contents, continues)
    return [
        replace(one, planned=Planned(checkpoint, end.batch, content.messages, content.digest))
        for one, content in zip(ranges, contents, strict=True)
    ]


def total(contents: Iterable[RangeContent]) -> RangeContent:
    """Return what is in all of them together."""
    found = RangeContent()
    for one in contents:
        found = RangeContent(found.messages + one.messages, found.digest ^ one.digest)
    return found


def recording(
    schema: str, inbox: str, checkpoint: str, above: int, end: BatchEnd, contents: Iterable[RangeContent],
    continues: str | None,
) -> Operation[None]:  # fmt: skip
    """Record that a batch with this is given out under its number; raises as `giving_out` does."""
    end, found = replace(end, ahead=()), total(contents)
    known = yield from finding_given(schema, inbox, checkpoint, end.batch, continues)
    if known not in (None, end):
        raise set_back(inbox, checkpoint, end.batch, end.batch)
    if (found.messages, found.digest) != (end.messages, end.digest):
        raise ConfigurationError(
            f"Batch {end.batch} of the stream of inbox {inbox!r} had {end.messages} messages when it was planned, and "
            f"they are not all there any more: {found.messages} are in their place. Either another consumer took some, "
            "and the sink lacks them, or this stream has read and deleted the batch before, and its checkpoint is an "
            "older copy. Nothing was read or deleted now. Stop the other consumer if there is one. "
            f"{way_on(checkpoint)}",
            code="MR-spark-messages-gone",
        )
    if known is None:
        yield REPLACE.at(schema=schema)(inbox=inbox, checkpoint=checkpoint)
        yield GIVE.at(schema=schema)(
            inbox=inbox, checkpoint=checkpoint, batch=end.batch, above=above, upto=end.clock,
            message_id=end.message_id, messages=end.messages, digest=end.digest,
        )  # fmt: skip


READ = Sql(
    """
SELECT batch, above, upto, read @> {whole} FROM {schema}.my_spark_stream
WHERE inbox = %(inbox)s::text AND checkpoint = %(checkpoint)s::text AND batch <= %(number)s::bigint ORDER BY batch
""",
    columns=("bigint", "bigint", "bigint", "boolean"),
)


@dataclass(frozen=True, slots=True)
class Given:
    """A batch that was given out: its number and clocks, and whether tasks have read all of it."""

    batch: int
    above: int
    upto: int
    is_read: bool


def finding_read(
    schema: str, inbox: str, checkpoint: str, number: int, whole: str = "int8range(above, upto, '(]')"
) -> Operation[list[Given]]:
    """Return the batches up to that number that are not forgotten; `whole` is the range that all tasks report."""
    rows = yield READ.at(schema=schema, whole=whole)(inbox=inbox, checkpoint=checkpoint, number=number)
    return [Given(int(batch), int(above), int(upto), bool(is_read)) for batch, above, upto, is_read in rows]


# The last one says which numbers were given out.
# D-spark-2: Batch numbers of a stream are the source's own.
FORGET = Sql(
    """
UPDATE {schema}.my_spark_stream AS s SET deleted = true
WHERE inbox = %(inbox)s::text AND batch <= %(number)s::bigint
  AND batch < (SELECT max(batch) FROM {schema}.my_spark_stream WHERE inbox = %(inbox)s::text)
"""
)


def forgetting(schema: str, inbox: str, number: int) -> Operation[None]:
    """Forget batches up to that number, whose messages are deleted, but for the last."""
    yield FORGET.at(schema=schema)(inbox=inbox, number=number)


# -- refusals ---------------------------------------------------------------------------------------------------------


def set_back(inbox: str, checkpoint: str, number: int, last: int) -> ConfigurationError:
    """Return the error for a checkpoint that is older than what it has given out."""
    return ConfigurationError(
        f"The checkpoint was set back: it goes on with batch {number}, and has given out other messages of inbox "
        f"{inbox!r} up to batch {last}. A sink that has seen these numbers would pass over what they are now. "
        f"{way_on(checkpoint)}",
        code="MR-spark-checkpoint-set-back",
    )


def _read_by_another(inbox: str, owner: str, last: int, checkpoint: str) -> ConfigurationError:
    return ConfigurationError(
        f"Inbox {inbox!r} was read up to batch {last} under checkpoint {owner}, and this is checkpoint {checkpoint}, "
        f"whose numbers stand for other messages. {way_on(owner)}",
        code="MR-spark-checkpoint-other",
    )
