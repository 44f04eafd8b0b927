"""The statements of an inbox's stream: who has the inbox, where a batch ends, and what was read is deleted.

Each operation runs in a transaction of its own.
"""

from dataclasses import dataclass

from inbox.by_key.claim import OPEN, PIN
from inbox.keeping import KEEPS, keeping
from inbox.order import finding_in_parts
from inbox.sessions.wakeup import PARTITION_KEY
from mailroom.errors import ConfigurationError
from mailroom.figures.keys import HELD
from mailroom.order import clock
from mailroom.order.expressions import BY_CLOCK
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql
from spark_jobs.read.deliveries import awaiting_delivery

REAPED_ROWS = 10_000  # in one transaction
PATIENCE_MS = 30_000  # for the lock: the server may take so long to notice that the session before is gone


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """Where a batch ends: the clock of its last message, and that message's id; 0 and None before the first one.

    And the batch itself: its number in its checkpoint, from 1, how many messages it has, and their digest. `ahead` are
    the lanes of a log, with their clocks, that the inbox had read further when the stream began
    (`spark_jobs.read.log_stream`).
    """

    clock: int = 0
    message_id: str | None = None
    batch: int = 0
    messages: int = 0
    digest: int = 0
    ahead: tuple[tuple[int, int], ...] = ()

    def ahead_of(self, clock: int) -> tuple[tuple[int, int], ...]:
        """Return the lanes that are ahead of a clock."""
        return tuple((lane, at) for lane, at in self.ahead if at > clock)


# Held as long as the driver's session: two streams would each have a part of the messages.
STREAM_LOCK = (
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
    """Lock the inbox for this session, and name the history of its clocks: in another one they mean nothing.

    Raises `UnknownInbox`, and `ConfigurationError` unless `first` (None: any) is the clock of the first message above
    `above`.
    """
    yield from finding_in_parts(schema, inbox)
    for statement in STREAM_LOCK:
        yield statement.at(schema=schema, inbox=inbox, patience=str(PATIENCE_MS))()
    if first is not None and (yield from finding_lowest(schema, inbox, above)) != first:
        raise ConfigurationError(
            f"Another consumer took messages of inbox {inbox!r} while the stream's connection was lost, and the batch "
            "under way may lack them. Stop that consumer. Then name another checkpointLocation: the stream then "
            "reads all that is in the inbox, also what it may have read before.",
            code="MR-spark-messages-gone",
        )
    [(history,)] = yield HISTORY.at(schema=schema)()
    return f"{inbox}@{history}"


# -- what is there ----------------------------------------------------------------------------------------------------

# Deliveries commit in the order of their clocks: what was delivered up to the last clock is visible with it, and what
# comes later has a higher one. Below the floor are dead rows.
LEFT = f"""{BY_CLOCK} > greatest(%(above)s::bigint,
                           (SELECT floor FROM {{schema}}.inbox_registry WHERE name = '{{inbox}}'))"""
ENDS = Sql(
    """
SELECT first.clock, extract(epoch FROM clock_timestamp() - first.delivered_at)::float8, last.clock,
       last.message_id::text
FROM (SELECT clock, delivered_at FROM {schema}.inbox_{inbox} WHERE {left} ORDER BY {by_clock} LIMIT 1) AS first,
     (SELECT clock, message_id FROM {schema}.inbox_{inbox} WHERE {left} ORDER BY {by_clock} DESC LIMIT 1) AS last
""",
    columns=("bigint", "float8", "bigint", "text"),
    left=LEFT,
    by_clock=BY_CLOCK,
)


@dataclass(frozen=True, slots=True)
class Ends:
    """The clock of the first message, how many seconds ago it was delivered, and the last message."""

    first: int
    waiting_s: float
    last: BatchEnd


def finding_ends(schema: str, inbox: str, above: int = 0) -> Operation[Ends | None]:
    """Return what there is above a clock; None if there is nothing."""
    yield PIN.at()()
    for first, waiting_s, last, message_id in (yield ENDS.at(schema=schema, inbox=inbox)(above=above)):
        return Ends(int(first), max(0.0, waiting_s), BatchEnd(int(last), message_id))
    return None


def finding_lowest(schema: str, inbox: str, above: int) -> Operation[int | None]:
    """Return the clock of the first message above a clock."""
    ends = yield from finding_ends(schema, inbox, above)
    return ends.first if ends else None


# The n-th message after the start, else the last one. All that was delivered up to there is visible, so none of it is
# missed, but for what is parked: its clocks would have been passed by the time it is replayed; nor may the stream have
# the messages of a paused key. A paused inbox has nothing for it, as for all: `start` is then above all clocks.
# A worker that has nothing to do holds "asleep"; deliveries try for the same lock in another mode.
PLAN = Sql(
    """
WITH start AS MATERIALIZED (
    SELECT {start} AS clock FROM {schema}.inbox_registry WHERE name = '{inbox}'),
nth AS MATERIALIZED (
    SELECT clock, message_id FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > (SELECT clock FROM start) AND %(number)s::bigint IS NOT NULL
    ORDER BY {by_clock} OFFSET %(number)s::bigint - 1 LIMIT 1),
last AS MATERIALIZED (
    SELECT clock, message_id FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > (SELECT clock FROM start) AND NOT EXISTS (SELECT FROM nth)
    ORDER BY {by_clock} DESC LIMIT 1)
SELECT coalesce((SELECT clock FROM nth), (SELECT clock FROM last)),
       coalesce((SELECT message_id FROM nth), (SELECT message_id FROM last))::text,
       EXISTS (SELECT FROM {schema}.my_key_state WHERE inbox = '{inbox}' AND {held}),
       EXISTS (SELECT FROM {schema}.my_parked WHERE inbox = '{inbox}' AND clock <= %(start)s::bigint),
       EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'
               AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
               AND classid = {asleep_lock}::oid AND objid::bigint = {partition_key}::bigint & 4294967295)
""",
    columns=("bigint", "text", "boolean", "boolean", "boolean"),
    start=OPEN % "%(start)s::bigint",
    held=HELD,
    by_clock=BY_CLOCK,
    asleep_lock=locks.ASLEEP,
    partition_key=PARTITION_KEY,
)
# Writes to the log, so that the COMMIT has something to wait for.
LOGGED = Sql(
    "SELECT pg_catalog.pg_logical_emit_message(true, 'mailroom'::text, ''::text) IS NULL", columns=("boolean",)
)


def planning(schema: str, inbox: str, start: int, number: int | None) -> Operation[BatchEnd | None]:
    """Return where a batch of `number` messages (None: all) ends that begins above `start`; None if there is none.

    None too while the inbox is paused. Raises `ConfigurationError` where a message may be missed: keys are parked or
    paused, or a worker reads the inbox.
    """
    yield PIN.at()()
    [(end, message_id, parked, passed, workers)] = yield PLAN.at(schema=schema, inbox=inbox)(start=start, number=number)
    if passed:
        raise ConfigurationError(
            f"Messages of inbox {inbox!r} are parked which the stream has passed, and it may not have read them. Stop "
            f"it, and discard them (mailroom parked list {inbox}); or replay them, and start it with another "
            "checkpointLocation, which has it read again all that is in the inbox.",
            code="MR-spark-keys-parked",
        )
    if parked:
        raise ConfigurationError(
            f"Keys of inbox {inbox!r} are parked or paused, and a stream would pass them by for ever. Stop it, replay, "
            f"discard or resume them (mailroom parked list {inbox}, mailroom inbox paused {inbox}), and start it "
            "again.",
            code="MR-spark-keys-parked",
        )
    if workers:
        raise ConfigurationError(
            f"A worker reads inbox {inbox!r}, and a stream must have it alone. Stop the worker, or make an inbox for "
            "the stream that subscribes to the same topics (mailroom inbox create).",
            code="MR-spark-inbox-shared",
        )
    if end is None:
        return None
    # A delivery commits asynchronously. What a crash of the server undoes is delivered again, with other clocks. So
    # this COMMIT waits until the log is on disk, with all that was visible: only then is a place in it given out.
    yield clock.DURABLE.at()()
    yield LOGGED.at()()
    return BatchEnd(int(end), message_id)


# -- what a checkpoint says -------------------------------------------------------------------------------------------

# Before the delivery under way has ended, and the rest after it: a clock given out by a delivery that has yet to commit
# is one whose messages are not seen.
GIVEN_OUT = Sql("SELECT last_value >= %(clock)s::bigint FROM {schema}.clock", columns=("boolean",))
COMPARE = Sql(
    """
SELECT EXISTS (SELECT FROM {schema}.inbox_{inbox}
               WHERE {by_clock} > (SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}')
                 AND {by_clock} <= %(clock)s::bigint),
       EXISTS (SELECT FROM {schema}.inbox_{inbox}
               WHERE {by_clock} = %(clock)s::bigint AND message_id = %(message_id)s::uuid)
""",
    columns=("boolean", "boolean"),
    by_clock=BY_CLOCK,
)


def comparing(schema: str, inbox: str, place: BatchEnd) -> Operation[None]:
    """Raise `ConfigurationError` if the checkpoint is of a time that this database lacks.

    Either its clock has yet to be given out here. Or it has been given to another message: what was read up to there is
    deleted in clock order, so as long as anything is left of it, its last message is. After this, no message can turn
    up at that clock or below.
    """
    yield PIN.at()()
    [(given_out,)] = yield GIVEN_OUT.at(schema=schema)(clock=place.clock)
    yield from awaiting_delivery(schema)
    compared = yield COMPARE.at(schema=schema, inbox=inbox)(clock=place.clock, message_id=place.message_id)
    [(is_left, is_last)] = compared
    if not given_out or (is_left and not is_last):
        raise not_there(inbox, place)


def not_there(inbox: str, place: BatchEnd) -> ConfigurationError:
    """Return the error for a checkpoint of a time that the database lacks."""
    return ConfigurationError(
        f"The checkpoint is at a message with clock {place.clock}, and inbox {inbox!r} has not what it had up to "
        "there: the database was restored to an earlier time, or another consumer took messages of the stream. "
        "Name another checkpointLocation; the stream then reads all that is in the inbox, also what it may have "
        "read before.",
        code="MR-spark-checkpoint-ahead",
    )


# -- reaping ----------------------------------------------------------------------------------------------------------

KEPT = Sql("SELECT {keeps} FROM {schema}.inbox_registry WHERE name = '{inbox}'", columns=("boolean",), keeps=KEEPS)
REAP = Sql(
    """
WITH doomed AS MATERIALIZED (
    SELECT clock FROM {schema}.inbox_{inbox}
    WHERE {left} AND {by_clock} <= %(upto)s::bigint
    ORDER BY {by_clock} LIMIT {reaped_rows}),
gone AS (
    DELETE FROM {schema}.inbox_{inbox}
    WHERE {by_clock} >= (SELECT min(clock) FROM doomed) AND {by_clock} <= (SELECT max(clock) FROM doomed)
    {returning}){archived}
SELECT max(clock) FROM doomed
""",
    columns=("bigint",),
    left=LEFT,
    by_clock=BY_CLOCK,
    reaped_rows=REAPED_ROWS,
)


def reaping(schema: str, inbox: str, above: int, upto: int) -> Operation[int | None]:
    """Delete the first messages above a clock and up to another; returns the last one's clock, None if there is none.

    Waits for rows that others have locked: they have been read, whatever the others do.
    """
    yield PIN.at()()
    keeps = (yield KEPT.at(schema=schema, inbox=inbox)()) == [(True,)]
    parts = {"returning": "RETURNING *" if keeps else "", "archived": keeping(keeps)["archived"]}
    [(reached,)] = yield REAP.at(**parts, schema=schema, inbox=inbox)(above=above, upto=upto)
    return None if reached is None else int(reached)
