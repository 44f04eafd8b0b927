"""The stream of `format("inbox")`: offsets are clocks, and what a committed batch has read is reaped.

Spark calls `commit(end)` when it has planned the batch after the one that ends there. So the messages of a batch stay
in the inbox until what was made of them is durable, and a batch that Spark repeats after a failure reads the very same
rows. It plans in a process beside the driver, where a reader lives as long as its query; the executors read.

A commit deletes all batches up to its own, since the commit before may not have come about: Spark makes none up. That
nothing is deleted unread rests on this:

- What a delivery, a requeue of dead letters or a scheduled message that is due puts into an inbox has a clock above all
  that were given out. So below the end of a batch that was planned nothing new turns up.
- A database restored to an earlier time gives out the clocks of the time it lacks once more. An offset therefore names
  the message that has its clock, and one that this session did not give out itself is compared (`comparing`).
- Replayed messages of parked keys come back with their clocks. No batch is planned while a key is parked, and when
  messages are parked that the stream has passed, the way on is another checkpoint.
- A session that is lost takes the lock along. The next one takes it again, and goes on if the first message of the
  batch under way is there, and its last: a reaper begins with the oldest.
- A number of Spark's that was used for a batch is used for no other one, also if the checkpoint was set back
  (`spark_jobs.read.numbers`).
- A batch that a sink passes over is not planned at all. Its messages stay, and so does all that comes after them.
- A task that reads other messages than were planned, or fewer, fails, and one that has read them all reports it: what
  was not reported is not deleted (`spark_jobs.read.given_out`).
- What somebody inserts by hand with a clock of his own choice after it was read is not seen. The stream is to have its
  inbox alone.
"""

# ruff: noqa: N802 - names of pyspark's

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial, wraps
from itertools import count, takewhile
from time import sleep
from typing import Any, Concatenate, ParamSpec, TypeAlias, cast
from uuid import uuid4

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.session.backoff import pause_s
from mailroom.session.commit import ATTEMPTS, LONGEST_PAUSE_S
from mailroom.sql.operation import Operation, T
from mailroom.sql.pooler import PooledConnection
from mailroom.sql.runner import run
from mailroom.sql.sqlstate import is_lost, sqlstate
from spark_jobs.node import Node
from spark_jobs.read.given_out import Given, finding_given, finding_last, forgetting, set_back
from spark_jobs.read.inbox_rows import ALL, Chosen, Range, batches
from spark_jobs.read.log_parts import LaneRange, lane_batches
from spark_jobs.read.log_stream import is_set_back
from spark_jobs.read.log_stream import set_back as rewound
from spark_jobs.read.numbers import finding_used, number_of_task, using
from spark_jobs.read.offsets import BatchEnd
from spark_jobs.read.streamed import Streamed, finding_streamed

try:
    from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # 4.1, which asks for the latest offset without a start and a limit
    SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

log = logging.getLogger("mailroom.spark")

P = ParamSpec("P")

Offset = dict[str, Any]
Method: TypeAlias = "Callable[Concatenate[InboxStreamReader, P], T]"


def _resumed(method: "Method[P, T]") -> "Method[P, T]":
    """Retry a method on another session when its own is lost; each may run twice."""

    @wraps(method)
    def resumed(self: "InboxStreamReader", /, *arguments: P.args, **named: P.kwargs) -> T:
        failures = 0
        while True:
            try:
                return method(self, *arguments, **named)
            except (psycopg.OperationalError, ConnectionFailed) as error:
                failures += 1
                # The user learns at once that the first connection fails.
                if failures == ATTEMPTS or not (self._identity and self._is_lost(error)):
                    raise
                log.info("stream %s: %s, reconnecting", self._inbox, type(error).__name__)
            self.stop()
            sleep(pause_s(failures, LONGEST_PAUSE_S))

    return resumed


def _is_read(one: tuple[Given, int]) -> bool:
    """Return whether a batch was read and has the number that is due, so that none before it was passed over."""
    return one[0].is_read and one[0].batch == one[1]


def _reaping(of: Streamed, above: int, upto: int) -> Operation[int | None]:
    return of.reaping(above, upto)


class InboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The sole consumer of an inbox: every message that is delivered is in exactly one batch, and then reaped.

    Raises `UnknownInbox`; `ConfigurationError` while another stream or a worker reads the inbox, or keys of it are
    parked, or when the checkpoint is of another inbox, or of a time that the database lacks. It reconnects after a
    lost connection, ten times at most; `ConfigurationError` if messages were taken meanwhile.
    """

    def __init__(
        self, node: Node, inbox: str, partitions: int | None, max_messages: int, *, keep_batches: int = 0,
        continues: str | None = None, chosen: Chosen = ALL,
    ) -> None:  # fmt: skip
        self._node = node
        self._inbox = inbox
        self._number = partitions
        self._max_messages = max_messages
        self._keep_batches = keep_batches
        self._continues = continues
        self._chosen = chosen
        self._checkpoint: str | None = None
        self._connection: psycopg.Connection | None = None
        self._identity = ""
        self._of: Streamed | None = None
        self._known: set[BatchEnd] = set()  # given out or compared by this session, and not below the last commit
        self._first: tuple[int, int | None] = (0, None)  # above which clock the last batch begins, and with which
        self._reached: BatchEnd | None = None  # where the next batch starts, for Spark 4.1, which does not say
        self._target: BatchEnd | None = None
        self._planned = 0  # the batch that this session has planned last
        self._idle = 0  # how many batches Spark has made since then without data of this inbox
        self._used: int | None = None  # the number of Spark's from which those count

    # -- in the driver ------------------------------------------------------------------------------------------------

    @_resumed
    def initialOffset(self) -> Offset:
        """Start before the first message that is not read: the checkpoint is new, and gets its id."""
        self._checkpoint = str(uuid4())
        return self._offset(self._ask(lambda of: of.starting()))

    def getDefaultReadLimit(self) -> "ReadLimit":
        """Take `maxMessages` in a batch."""
        return ReadMaxRows(self._max_messages)

    @_resumed
    def prepareForTriggerAvailableNow(self) -> None:
        """Stop at what there is now."""
        ends = self._ask(lambda of: of.finding_ends())
        self._target = ends.last if ends else BatchEnd()

    @_resumed
    def latestOffset(self, start: Offset | None = None, limit: "ReadLimit | None" = None) -> Offset:
        """Return the last message of the next batch, or where it starts if there is none."""
        # Spark 4.1 does not say where to start; unless an earlier call did, nothing can be counted from there.
        if start is None:
            self._ask(lambda of: of.demanding_start())
        reached = (self._reached or BatchEnd()) if start is None else self._place(start)
        limited = self._reached is not None if start is None else isinstance(limit, ReadMaxRows)
        number = self._max_messages if limited else None
        reached = reached if self._checkpoint else self._resumed_at(reached)
        given = self._run(finding_given, self._checkpoint, reached.batch + 1, self._continues)
        # Also where the end is known: keys that are parked, or a worker, end the stream.
        end = self._ask(lambda of: of.planning(reached, number, self._target))
        if given is not None:
            end = replace(given, ahead=reached.ahead_of(given.clock))
        if end != reached:
            self._first = reached.clock, self._ask(lambda of: of.finding_lowest(reached.clock))
        return self._offset(end)

    def _resumed_at(self, reached: BatchEnd) -> BatchEnd:
        # Spark 4.1 again: the checkpoint is one that this node knows, or none.
        last = self._run(finding_last)
        self._checkpoint, batch = last or (str(uuid4()), 0)
        return replace(reached, batch=batch)

    @_resumed
    def reportLatestOffset(self) -> Offset:
        """Return where the inbox ends, and how far the batch just planned is behind that, for Spark's progress.

        `lag_clocks` is at most how many messages are left: other inboxes' have clocks too. `lag_s` is how long ago the
        first of them was delivered.
        """
        reached = self._reached or BatchEnd()
        ends = self._ask(lambda of: of.finding_ends(reached.clock))
        end, waiting_s = (ends.last, ends.waiting_s) if ends else (reached, 0.0)
        lag = {"lag_clocks": end.clock - reached.clock, "lag_s": waiting_s}
        return {"inbox": self._identity, "clock": end.clock, "message_id": end.message_id, **lag}

    @_resumed
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Cut the clocks of a batch into ranges, or of a log the lanes."""
        reached, upto = self._place(start), self._place(end)
        lowest = self._ask(lambda of: of.finding_lowest(reached.clock))
        self._first, self._reached = (reached.clock, lowest), upto
        self._planned, self._idle, self._used = upto.batch, 0, None
        if upto == reached:
            return []
        if upto.batch != reached.batch + 1:
            raise set_back(self._inbox, str(self._checkpoint), reached.batch + 1, upto.batch)
        checkpoint = str(self._checkpoint)
        given = self._ask(lambda of: of.giving(checkpoint, reached, upto, lowest, self._number, self._continues))
        seen = self._node.pinned(self._session()).seen
        return [replace(cast(Range, one), seen=seen) for one in given]

    def commit(self, end: Offset) -> None:
        """Reap what was read up to `end`, but for the last `keep_batches`: what was made of it is durable.

        Nothing of a batch that tasks have not reported as read, and nothing after it.
        """
        # Spark commits a batch when it has planned the next one, and nothing of this inbox is in that.
        self._idle += self._reached is not None and end.get("batch") == self._reached.batch
        self._commit(end)

    @_resumed
    def _commit(self, end: Offset) -> None:
        upto = self._place(end)
        self._use(upto.batch)
        if self._first[0] < upto.clock:
            self._first = (0, None)
        wanted = upto.batch - self._keep_batches
        checkpoint = str(self._checkpoint)
        given = self._ask(lambda of: of.finding_read(checkpoint, wanted))
        lowest = self._ask(lambda of: of.finding_lowest(0))
        first = given[0].batch if given else wanted
        if given and lowest is not None and lowest <= given[0].above:
            first, given = first - 1, []  # which the sink has passed over: then there is no plan, and no row of it
        read = [one for one, _ in takewhile(_is_read, zip(given, count(first), strict=False))]
        for batch in read:
            reached: int | None = batch.above
            while reached is not None:
                reached = self._ask(partial(_reaping, above=reached, upto=batch.upto))
        if read:
            self._run(forgetting, read[-1].batch)
        if wanted > (read[-1].batch if read else 0):
            log.warning(
                "stream %s: of batch %s not every message was read, so it stays in the inbox, and so does what comes "
                "after it; does the sink read each batch to its end? Another checkpoint reads it again",
                self._inbox, first + len(read),
            )  # fmt: skip
        self._known = {place for place in self._known if place.clock >= upto.clock}

    def _use(self, batch: int) -> None:
        """Record the numbers that Spark has used since a batch for others, which it does not say."""
        if self._idle:
            if self._used is None:
                self._used = self._run(finding_used, self._checkpoint, batch, self._planned)
            if self._used is not None:
                self._run(using, self._checkpoint, batch, self._used + self._idle)

    def stop(self) -> None:
        """Release the inbox."""
        self._known = set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _is_lost(self, error: Exception) -> bool:
        # psycopg gives up some sessions without a word of the server's, and does not call them broken.
        return is_lost(error, self._connection) or not sqlstate(error)

    def _offset(self, place: BatchEnd) -> Offset:
        self._session()
        self._reached = place
        self._known.add(place)
        told = {name: value for name, value in asdict(place).items() if name != "ahead" or value}
        return {"inbox": self._identity, "checkpoint": self._checkpoint, **told}

    def _place(self, offset: Offset) -> BatchEnd:
        self._session()
        if offset["inbox"] != self._identity:
            if is_set_back(offset["inbox"], self._identity):
                raise rewound(self._inbox)
            raise ConfigurationError(
                f"The checkpoint is of {offset['inbox']}, and this is {self._identity}: their clocks do not compare. "
                "Name another checkpointLocation.",
                code="MR-spark-checkpoint-of-another",
            )
        if "checkpoint" not in offset:
            raise ConfigurationError(
                "The checkpoint is of a version that did not number its batches. Name another checkpointLocation; the "
                "stream then reads all that is in the inbox, also what it may have read before.",
                code="MR-spark-checkpoint-too-old",
            )
        self._checkpoint = offset["checkpoint"]
        given = {field.name: offset[field.name] for field in fields(BatchEnd) if field.name != "ahead"}
        place = BatchEnd(**given, ahead=tuple((lane, at) for lane, at in offset.get("ahead", ())))
        if place.clock and place not in self._known:
            self._ask(lambda of: of.comparing(place))
            self._known.add(place)
        return place

    def _run(self, operation: Callable[..., Operation[T]], *values: object) -> T:
        connection = self._session()
        with connection.transaction():
            return run(connection, operation(self._node.schema, self._inbox, *values))

    def _ask(self, question: "Callable[[Streamed], Operation[T]]") -> T:
        connection = self._session()
        with connection.transaction():
            return run(connection, question(cast("Streamed", self._of)))

    def _session(self) -> psycopg.Connection:
        if self._connection is None:
            connection = self._node.connect(f"stream {self._inbox}", autocommit=True)
            with contextlib.ExitStack() as unless_entered:
                unless_entered.callback(connection.close)
                self._of, self._identity = self._enter(connection)
                unless_entered.pop_all()
            self._connection = connection
        return self._connection

    def _enter(self, connection: psycopg.Connection) -> tuple[Streamed, str]:
        if isinstance(connection, PooledConnection):
            raise ConfigurationError(
                "A stream holds a lock for as long as it runs, which a pooler in transaction mode does not keep: give "
                "it a connection string that names the server itself.",
                code="MR-pooler-in-the-way",
            )
        try:
            with connection.transaction():
                of = run(connection, finding_streamed(self._node.schema, self._inbox))
                return of, run(connection, of.entering(*self._first))
        except psycopg.errors.LockNotAvailable:
            raise ConfigurationError(
                f"Another stream reads inbox {self._inbox!r}, and each would have a part of the messages. Stop it, or "
                "make an inbox of its own for each (mailroom inbox create).",
                code="MR-spark-inbox-shared",
            ) from None

    # -- in the executors ---------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one range."""
        read = lane_batches if isinstance(partition, LaneRange) else batches
        return read(self._node, self._inbox, cast(Any, partition), self._chosen, number_of_task())
