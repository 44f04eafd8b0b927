"""The stream of `format("inbox")`: offsets are clocks, and what a committed batch has read is reaped.

Spark calls `commit(end)` when it has planned the batch after the one that ends there. So the messages of a batch stay
in the inbox until what was made of them is durable, and a batch that Spark repeats after a failure reads the very same
rows. It plans in a process beside the driver, where a reader lives as long as its query; the executors read.

A commit deletes from the start of the inbox, since the commit before may not have come about: Spark makes none up. That
nothing is deleted unread rests on this:

- What a delivery, a requeue of dead letters or a scheduled message that is due puts into an inbox has a clock above all
  that were given out. So below the end of a batch that was planned nothing new turns up.
- A database restored to an earlier time gives out the clocks of the time it lacks once more. An offset therefore names
  the message that has its clock, and one that this session did not give out itself is compared (`comparing`).
- Replayed messages of parked keys come back with their clocks. No batch is planned while a key is parked, and when
  messages are parked that the stream has passed, the way on is another checkpoint.
- A session that is lost takes the lock along. The next one takes it again, and goes on if the first message of the
  batch under way is there, and its last: whoever reaps begins with the oldest.
- What somebody inserts by hand with a clock of his own choice, or another consumer parks and somebody replays between
  the plan of one batch and that of the next, is not seen. The stream is to have its inbox alone.
"""

# ruff: noqa: N802 - names of pyspark's

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from time import sleep
from typing import Any, Concatenate, ParamSpec, TypeAlias, cast

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from inbox.claim import PIN
from inbox.peek import finding
from inbox.worker.wakeup import PARTITION_KEY
from mailroom import clock, locks
from mailroom.commit import ATTEMPTS, LONGEST_PAUSE_S
from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.schema import BY_CLOCK
from mailroom.session.backoff import pause_s
from mailroom.session.pooler import PooledConnection
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.runner import run
from mailroom.sql.sqlstate import is_lost, sqlstate
from spark_jobs.node import Node
from spark_jobs.read.inbox_rows import Range, batches, cutting

try:
    from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # 4.1, which asks for the latest offset without a start and a limit
    SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

log = logging.getLogger("mailroom.spark")

P = ParamSpec("P")

REAPED_ROWS = 10_000  # in one transaction
PATIENCE_MS = 30_000  # for the lock: so long may the server take to notice that the session of before is gone

Offset = dict[str, Any]


# Held as long as the driver's session: two streams would each have a part of the messages.
LOCK = (
    Sql("SELECT set_config('lock_timeout', '{patience}ms', true)", columns=("text",)),
    Sql(
        "SELECT pg_advisory_lock({stream_lock}, {partition_key}) IS NULL",
        columns=("boolean",),
        stream_lock=locks.STREAM,
        partition_key=PARTITION_KEY,
    ),
)
HISTORY = Sql("SELECT pg_catalog.concat(id, '/', incarnation) FROM {schema}.node", columns=("text",))


def entering(schema: str, inbox: str, above: int, first: int | None) -> Operation[str]:
    """Take the inbox for this session, and return what its clocks are of: they mean nothing in another history.

    Raises `ConfigurationError` if `first`, the clock of the first message above another, is that no more.
    """
    yield from finding(schema, inbox)
    for statement in LOCK:
        yield statement.at(schema=schema, inbox=inbox, patience=str(PATIENCE_MS))()
    if first is not None and (yield from finding_lowest(schema, inbox, above)) != first:
        raise ConfigurationError(
            f"Another consumer took messages of inbox {inbox!r} while the stream's connection was lost, and the batch "
            "under way may lack them. Stop it; then name another checkpointLocation, which has the stream read all "
            "that is in the inbox, also what it may have read before."
        )
    [(history,)] = yield HISTORY.at(schema=schema)()
    return f"{inbox}@{history}"


# The n-th message after the start, else the last one. All that was delivered up to there is visible, so none of it is
# missed, but for what is parked: its clocks would have been passed by the time it is replayed.
# A worker that has nothing to do holds "asleep"; deliveries try for the same lock in another mode.
PLAN = Sql(
    """
WITH nth AS MATERIALIZED (
    SELECT clock, message_id FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > %(start)s::bigint AND %(number)s::bigint IS NOT NULL
    ORDER BY {by_clock} OFFSET %(number)s::bigint - 1 LIMIT 1),
last AS MATERIALIZED (
    SELECT clock, message_id FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > %(start)s::bigint AND NOT EXISTS (SELECT FROM nth)
    ORDER BY {by_clock} DESC LIMIT 1)
SELECT coalesce((SELECT clock FROM nth), (SELECT clock FROM last)),
       coalesce((SELECT message_id FROM nth), (SELECT message_id FROM last))::text,
       EXISTS (SELECT FROM {schema}.key_state WHERE inbox = '{inbox}' AND retry_at = 'infinity'),
       EXISTS (SELECT FROM {schema}.parked WHERE inbox = '{inbox}' AND clock <= %(start)s::bigint),
       EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'
               AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
               AND classid = {asleep_lock}::oid AND objid::bigint = {partition_key}::bigint & 4294967295)
""",
    columns=("bigint", "text", "boolean", "boolean", "boolean"),
    by_clock=BY_CLOCK,
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
)

# A delivery commits asynchronously. What a crash of the server undoes is delivered again, with other clocks; so nothing
# is given out before it is durable: this commit waits until the log is on disk, with all commits that were visible.
DURABLE = (
    Sql("SELECT set_config('synchronous_commit', 'on', true)", columns=("text",)),
    Sql("SELECT pg_catalog.pg_logical_emit_message(true, 'mailroom'::text, ''::text) IS NULL", columns=("boolean",)),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a batch ends: the clock of its last message, and that message's id; 0 and None before the first one."""

    clock: int = 0
    message_id: str | None = None


def finding_last(schema: str, inbox: str) -> Operation[Place]:
    """Return where the inbox ends now."""
    yield PIN.at()()
    [(clock, message_id, *_)] = yield PLAN.at(schema=schema, inbox=inbox)(start=0, number=None)
    return Place() if clock is None else Place(int(clock), message_id)


def planning(schema: str, inbox: str, start: int, number: int | None) -> Operation[Place | None]:
    """Return where a batch of `number` messages (None: all) ends that begins above `start`; None if there is none."""
    yield PIN.at()()
    [(end, message_id, parked, passed, workers)] = yield PLAN.at(schema=schema, inbox=inbox)(start=start, number=number)
    if passed:
        raise ConfigurationError(
            f"Messages of inbox {inbox!r} are parked which the stream has passed, and it may not have read them. Stop "
            f"it, and discard them (mailroom parked list {inbox}); or replay them, and start it with another "
            "checkpointLocation, which has it read again all that is in the inbox."
        )
    if parked:
        raise ConfigurationError(
            f"Keys of inbox {inbox!r} are parked, and a stream would pass them by for ever. Stop it, replay or discard "
            f"them (mailroom parked list {inbox}), and start it again."
        )
    if workers:
        raise ConfigurationError(
            f"A worker reads inbox {inbox!r}, and a stream must have it alone. Stop the worker, or make an inbox for "
            "the stream that subscribes to the same topics (mailroom inbox create)."
        )
    if end is None:
        return None
    for statement in DURABLE:
        yield statement.at()()
    return Place(int(end), message_id)


LEFT = Sql(
    """
SELECT last.clock, last.message_id::text, extract(epoch FROM clock_timestamp() - first.delivered_at)::float8
FROM (SELECT delivered_at FROM {schema}.inbox_{inbox} WHERE {by_clock} > %(above)s::bigint
      ORDER BY {by_clock} LIMIT 1) AS first,
     (SELECT clock, message_id FROM {schema}.inbox_{inbox} WHERE {by_clock} > %(above)s::bigint
      ORDER BY {by_clock} DESC LIMIT 1) AS last
""",
    columns=("bigint", "text", "float8"),
    by_clock=BY_CLOCK,
)


def finding_left(schema: str, inbox: str, above: Place) -> Operation[tuple[Place, float]]:
    """Return where the inbox ends, and how many seconds ago the first message above a place was delivered."""
    yield PIN.at()()
    for last, message_id, waiting_s in (yield LEFT.at(schema=schema, inbox=inbox)(above=above.clock)):
        return Place(int(last), message_id), max(0.0, waiting_s)
    return above, 0.0


# After the dispatch lock: a clock given out by a delivery that has yet to commit is one whose messages are not seen.
COMPARE = Sql(
    """
SELECT (SELECT last_value FROM {schema}.clock) >= %(clock)s::bigint,
       EXISTS (SELECT FROM {schema}.inbox_{inbox}
               WHERE {by_clock} > (SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}')
                 AND {by_clock} <= %(clock)s::bigint),
       EXISTS (SELECT FROM {schema}.inbox_{inbox}
               WHERE {by_clock} = %(clock)s::bigint AND message_id = %(message_id)s::uuid)
""",
    columns=("boolean", "boolean", "boolean"),
    by_clock=BY_CLOCK,
)


def comparing(schema: str, inbox: str, place: Place) -> Operation[None]:
    """Raise `ConfigurationError` if the checkpoint is of a time that this database lacks.

    Either its clock has yet to be given out here. Or it has been given to another message: what was read up to there is
    deleted in clock order, so as long as anything is left of it, its last message is. After this, no message can turn
    up at that clock or below.
    """
    yield PIN.at()()
    yield clock.LOCK.at(schema=schema)()
    compared = yield COMPARE.at(schema=schema, inbox=inbox)(clock=place.clock, message_id=place.message_id)
    [(given_out, is_left, is_last)] = compared
    if not given_out or (is_left and not is_last):
        raise ConfigurationError(
            f"The checkpoint is at a message with clock {place.clock}, and inbox {inbox!r} has not what it had up to "
            "there: the database was restored to an earlier time, or another consumer took messages of the stream. "
            "Name another checkpointLocation; the stream then reads all that is in the inbox, also what it may have "
            "read before."
        )


LOWEST = Sql(
    "SELECT clock FROM {schema}.inbox_{inbox} WHERE {by_clock} > %(above)s::bigint ORDER BY {by_clock} LIMIT 1",
    columns=("bigint",),
    by_clock=BY_CLOCK,
)


def finding_lowest(schema: str, inbox: str, above: int) -> Operation[int | None]:
    """Return the clock of the first message above a clock."""
    yield PIN.at()()
    rows = yield LOWEST.at(schema=schema, inbox=inbox)(above=above)
    return rows[0][0] if rows else None


REAP = Sql(
    """
WITH doomed AS MATERIALIZED (
    SELECT clock FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > greatest(%(above)s::bigint,
                                (SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}'))
      AND {by_clock} <= %(upto)s::bigint
    ORDER BY {by_clock} LIMIT {reaped_rows}),
gone AS (
    DELETE FROM {schema}.inbox_{inbox}
    WHERE {by_clock} >= (SELECT min(clock) FROM doomed) AND {by_clock} <= (SELECT max(clock) FROM doomed))
SELECT max(clock) FROM doomed
""",
    columns=("bigint",),
    by_clock=BY_CLOCK,
    reaped_rows=REAPED_ROWS,
)


def reaping(schema: str, inbox: str, above: int, upto: int) -> Operation[int | None]:
    """Delete the first messages above a clock and up to another; returns the last one's clock, None if there is none.

    What somebody else has locked is waited for: it has been read, whatever he does.
    """
    yield PIN.at()()
    [(reached,)] = yield REAP.at(schema=schema, inbox=inbox)(above=above, upto=upto)
    return None if reached is None else int(reached)


Method: TypeAlias = "Callable[Concatenate[InboxStreamReader, P], T]"


def _resumed(method: "Method[P, T]") -> "Method[P, T]":
    """Have a method that was cut off with its session begin anew on another one: none does harm when it runs twice."""

    @wraps(method)
    def resumed(self: "InboxStreamReader", /, *arguments: P.args, **named: P.kwargs) -> T:
        failures = 0
        while True:
            try:
                return method(self, *arguments, **named)
            except (psycopg.OperationalError, ConnectionFailed) as error:
                failures += 1
                # A first connection that cannot be made is the user's to know of, a later one is not.
                if failures == ATTEMPTS or not (self._identity and self._is_lost(error)):
                    raise
                log.info("stream %s: %s, connecting anew", self._inbox, type(error).__name__)
            self.stop()
            sleep(pause_s(failures, LONGEST_PAUSE_S))

    return resumed


class InboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The sole consumer of an inbox: every message that is delivered is in exactly one batch, and then reaped.

    Raises `UnknownInbox`; `ConfigurationError` while another stream or a worker reads the inbox, or keys of it are
    parked, or when the checkpoint is of another inbox, or of a time that the database lacks. A connection that is lost
    is made anew, ten times at most; `ConfigurationError` if somebody has taken messages meanwhile.
    """

    def __init__(self, node: Node, inbox: str, partitions: int | None, max_messages: int) -> None:
        self._node = node
        self._inbox = inbox
        self._number = partitions
        self._max_messages = max_messages
        self._connection: psycopg.Connection | None = None
        self._identity = ""
        self._known: set[Place] = set()  # given out or compared by this session, and not below the last commit
        self._first: tuple[int, int | None] = (0, None)  # above which clock the last batch begins, and with which
        self._reached: Place | None = None  # where the next batch starts, for 4.1, which does not tell
        self._target: Place | None = None

    # -- in the driver ------------------------------------------------------------------------------------------------

    @_resumed
    def initialOffset(self) -> Offset:
        """Start before the first message."""
        return self._offset(Place())

    def getDefaultReadLimit(self) -> "ReadLimit":
        """Take `maxMessages` in a batch."""
        return ReadMaxRows(self._max_messages)

    @_resumed
    def prepareForTriggerAvailableNow(self) -> None:
        """Stop at what there is now."""
        self._target = self._run(finding_last)

    @_resumed
    def latestOffset(self, start: Offset | None = None, limit: "ReadLimit | None" = None) -> Offset:
        """Return the last message of the next batch, or where it starts if there is none."""
        # 4.1 does not tell where to start; if no other call of it has, nothing can be counted from there.
        reached = (self._reached or Place()) if start is None else self._place(start)
        limited = self._reached is not None if start is None else isinstance(limit, ReadMaxRows)
        number = self._max_messages if limited else None
        end = self._run(planning, reached.clock, number) or reached
        if self._target is not None and self._target.clock < end.clock:
            end = max(reached, self._target, key=lambda place: place.clock)
        if end != reached:
            self._first = reached.clock, self._run(finding_lowest, reached.clock)
        return self._offset(end)

    @_resumed
    def reportLatestOffset(self) -> Offset:
        """Tell Spark's progress where the inbox ends, and how far the batch just planned is behind that.

        `lag_clocks` is at most how many messages are left: other inboxes' have clocks too. `lag_s` is how long ago the
        first of them was delivered.
        """
        reached = self._reached or Place()
        end, waiting_s = self._run(finding_left, reached)
        lag = {"lag_clocks": end.clock - reached.clock, "lag_s": waiting_s}
        return {"inbox": self._identity, "clock": end.clock, "message_id": end.message_id, **lag}

    @_resumed
    def partitions(self, start: Offset, end: Offset) -> list[Range]:
        """Cut the clocks of a batch into ranges."""
        above, upto = self._place(start).clock, self._place(end)
        lowest = self._run(finding_lowest, above)
        self._first, self._reached = (above, lowest), upto
        return self._run(cutting, above if lowest is None else lowest - 1, upto.clock, self._number)

    @_resumed
    def commit(self, end: Offset) -> None:
        """Reap everything up to `end`: it has been read, and what was made of it is durable."""
        upto, above = self._place(end).clock, 0
        if self._first[0] < upto:
            self._first = (0, None)
        while (reached := self._run(reaping, above, upto)) is not None:
            above = reached
        self._known = {place for place in self._known if place.clock >= upto}

    def stop(self) -> None:
        """Let the inbox go."""
        self._known = set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _is_lost(self, error: Exception) -> bool:
        # psycopg gives up some sessions without a word of the server's, and does not call them broken.
        return is_lost(error, self._connection) or not sqlstate(error)

    def _offset(self, place: Place) -> Offset:
        self._session()
        self._reached = place
        self._known.add(place)
        return {"inbox": self._identity, "clock": place.clock, "message_id": place.message_id}

    def _place(self, offset: Offset) -> Place:
        self._session()
        if offset["inbox"] != self._identity:
            raise ConfigurationError(
                f"The checkpoint is of {offset['inbox']}, and this is {self._identity}: their clocks do not compare. "
                "Name another checkpointLocation."
            )
        place = Place(int(offset["clock"]), offset["message_id"])
        if place.clock and place not in self._known:
            self._run(comparing, place)
            self._known.add(place)
        return place

    def _run(self, operation: Callable[..., Operation[T]], *values: object) -> T:
        connection = self._session()
        with connection.transaction():
            return run(connection, operation(self._node.schema, self._inbox, *values))

    def _session(self) -> psycopg.Connection:
        if self._connection is None:
            connection = self._node.connect(f"stream {self._inbox}", autocommit=True)
            with contextlib.ExitStack() as unless_entered:
                unless_entered.callback(connection.close)
                self._identity = self._enter(connection)
                unless_entered.pop_all()
            self._connection = connection
        return self._connection

    def _enter(self, connection: psycopg.Connection) -> str:
        if isinstance(connection, PooledConnection):
            raise ConfigurationError(
                "A stream holds a lock for as long as it runs, which a pooler in transaction mode does not keep: give "
                "it a connection string that names the server itself."
            )
        try:
            with connection.transaction():
                return run(connection, entering(self._node.schema, self._inbox, *self._first))
        except psycopg.errors.LockNotAvailable:
            raise ConfigurationError(
                f"Another stream reads inbox {self._inbox!r}, and each would have a part of the messages. Stop it, or "
                "make an inbox of its own for each (mailroom inbox create)."
            ) from None

    # -- in the executors ---------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one range."""
        return batches(self._node, self._inbox, cast(Range, partition))
