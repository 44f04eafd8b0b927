"""What an inbox is to its stream: its messages, which a commit deletes, or a reader of a log, which keeps them."""

from typing import Protocol

from pyspark.sql.datasource import InputPartition

from mailroom.order.traits import reading_traits
from mailroom.schema import finding
from mailroom.sql.operation import Operation
from spark_jobs.read.given_out import Given, finding_read, giving_out, measuring
from spark_jobs.read.inbox_rows import Range, cutting
from spark_jobs.read.log_stream import finding_log_streamed
from spark_jobs.read.offsets import BatchEnd, Ends, comparing, entering, finding_ends, finding_lowest, planning, reaping


class Streamed(Protocol):
    """What a stream asks of its inbox. Each operation runs in a transaction of its own."""

    def entering(self, above: int, first: int | None) -> Operation[str]:
        """Lock the inbox for this session, and name the history of its clocks.

        Raises `ConfigurationError` unless `first` (None: any) is the clock of the first message above `above`.
        """

    def starting(self) -> Operation[BatchEnd]:
        """Return where a new checkpoint starts."""

    def demanding_start(self) -> Operation[None]:
        """Raise `ConfigurationError` if Spark has to say where a batch starts, which 4.1 does not."""

    def comparing(self, place: BatchEnd) -> Operation[None]:
        """Raise `ConfigurationError` if a checkpoint is of a time that this database lacks."""

    def finding_ends(self, above: int = 0) -> Operation[Ends | None]:
        """Return what there is above a clock; None if there is nothing."""

    def finding_lowest(self, above: int) -> Operation[int | None]:
        """Return the clock of the first message above a clock that no commit has reached; None if it does not matter.

        Above 0 it is asked for the batch under way, of which others may take messages.
        """

    def planning(self, reached: BatchEnd, number: int | None, target: BatchEnd | None) -> Operation[BatchEnd]:
        """Return where the next batch ends, of at most so many messages and not after `target`; `reached` if nowhere.

        Raises `ConfigurationError` where a message may be missed, or another consumer takes some.
        """

    def giving(
        self, checkpoint: str, reached: BatchEnd, end: BatchEnd, lowest: int | None, number: int | None,
        continues: str | None,
    ) -> Operation[list[InputPartition]]:  # fmt: skip
        """Give a batch out under its number, in at most so many parts; raises as `giving_out` does."""

    def finding_read(self, checkpoint: str, number: int) -> Operation[list[Given]]:
        """Return the batches up to that number that are not forgotten."""

    def reaping(self, above: int, upto: int) -> Operation[int | None]:
        """End the first messages of a batch that was read; returns the last one's clock, None if there is none left."""


class KeyStreamed:
    """An inbox by key: what was read is deleted."""

    def __init__(self, schema: str, inbox: str) -> None:
        self._names = schema, inbox

    def entering(self, above: int, first: int | None) -> Operation[str]:
        """See `Streamed`."""
        return entering(*self._names, above, first)

    def starting(self) -> Operation[BatchEnd]:
        """Before the first message."""
        yield from ()
        return BatchEnd()

    def demanding_start(self) -> Operation[None]:
        """See `Streamed`."""
        yield from ()

    def comparing(self, place: BatchEnd) -> Operation[None]:
        """See `Streamed`."""
        return comparing(*self._names, place)

    def finding_ends(self, above: int = 0) -> Operation[Ends | None]:
        """See `Streamed`."""
        return finding_ends(*self._names, above)

    def finding_lowest(self, above: int) -> Operation[int | None]:
        """See `Streamed`."""
        return finding_lowest(*self._names, above)

    def planning(self, reached: BatchEnd, number: int | None, target: BatchEnd | None) -> Operation[BatchEnd]:
        """See `Streamed`."""
        end = (yield from planning(*self._names, reached.clock, number)) or reached
        if target is not None and target.clock < end.clock:
            end = max(reached, target, key=lambda place: place.clock)
        if end.clock <= reached.clock:
            return reached
        [content] = yield from measuring(*self._names, [Range(reached.clock, end.clock)])
        return BatchEnd(end.clock, end.message_id, reached.batch + 1, content.messages, content.digest)

    def giving(
        self, checkpoint: str, reached: BatchEnd, end: BatchEnd, lowest: int | None, number: int | None,
        continues: str | None,
    ) -> Operation[list[InputPartition]]:  # fmt: skip
        """See `Streamed`."""
        above = reached.clock if lowest is None else min(lowest, end.clock) - 1
        ranges = yield from cutting(*self._names, above, end.clock, number)
        return [*(yield from giving_out(*self._names, checkpoint, ranges, end, continues))]

    def finding_read(self, checkpoint: str, number: int) -> Operation[list[Given]]:
        """See `Streamed`."""
        return finding_read(*self._names, checkpoint, number)

    def reaping(self, above: int, upto: int) -> Operation[int | None]:
        """See `Streamed`."""
        return reaping(*self._names, above, upto)


def finding_streamed(schema: str, inbox: str) -> Operation[Streamed]:
    """Return the inbox as its stream sees it. Raises `UnknownInbox`."""
    yield from finding(schema, inbox)
    if (yield from reading_traits(schema, inbox)).reads_log:
        return (yield from finding_log_streamed(schema, inbox))
    return KeyStreamed(schema, inbox)
