"""How a node is doing: what waits where and for how long, who dispatches, where the clock stands."""

import json
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.routing import ROUTE
from mailroom.schema import checking
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import AnyConnection, run

__all__ = [
    "DispatcherStatus",
    "InboxStatus",
    "Status",
    "dispatcher_status",
    "executable_backlog",
    "executor_status",
    "outbox_backlog",
    "status",
]

Role: TypeAlias = Literal["dispatcher", "executor"]


@dataclass(frozen=True, slots=True)
class InboxStatus:
    """One inbox. Lags are ages in seconds of the oldest message that waits, 0 when none does.

    `on_the_way` counts its messages in the outbox, `dispatcher_lag_s` is the age of the oldest of them; `backlog`
    counts its messages that are there to be reaped, `consumer_lag_s` is for how long the oldest of them has been.
    `lag_s` is the age since the send of the oldest of both. `waiting_keys` have failed and wait for their next try;
    `parked_keys` are held until somebody acts, with `parked_messages`: those moved aside, which are not in `backlog`.
    """

    name: str
    on_the_way: int
    backlog: int
    lag_s: float
    dispatcher_lag_s: float
    consumer_lag_s: float
    waiting_keys: int
    parked_keys: int
    parked_messages: int


@dataclass(frozen=True, slots=True)
class DispatcherStatus:
    """The dispatcher, or the executor, that leads, or with `leads` false the last one that did.

    `state` is awake, asleep or stopped, as of its last renewal of the lease; `lease_left_s` is for how long that
    holds, negative once it has run out. `counts` is what it has done so far.
    """

    leads: bool
    state: str
    host: str
    pid: int
    epoch: int
    lease_left_s: float
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Status:
    """A node. `outbox_backlog` counts committed messages that wait for the dispatcher, `scheduled` those not yet due.

    `bulk_backlog` counts messages of large batches of Spark that are decided and still to be moved into the outbox.
    `outbox_lag_s` is the age in seconds of the oldest one in the outbox, 0 if it is empty; `executable_backlog` and
    `executable_lag_s` say the same of the other outbox, which waits for the executor. The clock stands at `clock` and
    may go up to `clock_ceiling` before that is raised. `dispatcher` and `executor` are None if there has never been
    one.
    """

    schema: str
    clock: int
    clock_ceiling: int
    outbox_backlog: int
    outbox_lag_s: float
    bulk_backlog: int
    executable_backlog: int
    executable_lag_s: float
    scheduled: int
    dead_letters: int
    dispatcher: DispatcherStatus | None
    executor: DispatcherStatus | None
    inboxes: tuple[InboxStatus, ...]


def status(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> Status:
    """Return the status of the node `schema`; takes about as long as it takes to count what waits.

    Raises `SchemaError` if there is no such node. Reads only what is committed, waits for nobody.
    """
    return run(connection, reading_status(schema_name(schema)))


def dispatcher_status(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> DispatcherStatus | None:
    """Return who dispatches on the node `schema`, None if nobody ever has; one row is read."""
    return run(connection, reading_dispatcher(schema_name(schema)))


def executor_status(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> DispatcherStatus | None:
    """Return who executes on the node `schema`, None if nobody ever has; one row is read."""
    return run(connection, reading_dispatcher(schema_name(schema), "executor"))


DISPATCHER = Sql(
    """
SELECT until > clock_timestamp(), state, host, pid::bigint, epoch,
       extract(epoch FROM until - clock_timestamp())::float8, counts::text
FROM {schema}.lease WHERE role = %(role)s::text
""",
    columns=("boolean", "text", "text", "bigint", "bigint", "float8", "text"),
)


def reading_dispatcher(schema: str, role: Role = "dispatcher") -> Operation[DispatcherStatus | None]:
    """`dispatcher_status` as an operation, or `executor_status`."""
    yield from checking(schema)
    return (yield from _reading_leader(schema, role))


def _reading_leader(schema: str, role: Role) -> Operation[DispatcherStatus | None]:
    rows = yield DISPATCHER.at(schema=schema)(role=role)
    if not rows:
        return None
    [(leads, state, host, pid, epoch, lease_left_s, counts)] = rows
    return DispatcherStatus(leads, state, host, pid, epoch, lease_left_s, json.loads(counts))


BACKLOG = Sql("SELECT count(*) FROM {schema}.{outbox}", columns=("bigint",))


def outbox_backlog(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> int:
    """Count the committed messages that wait for the dispatcher of the node `schema`."""
    return run(connection, _counting(schema_name(schema), "outbox"))


def executable_backlog(connection: AnyConnection, schema: str = DEFAULT_SCHEMA) -> int:
    """Count the committed executables that wait for the executor of the node `schema`."""
    return run(connection, _counting(schema_name(schema), "outbox_executable"))


def _counting(schema: str, outbox: str) -> Operation[int]:
    [(count,)] = yield BACKLOG.at(schema=schema, outbox=outbox)()
    return int(count)


NODE = Sql(
    """
SELECT c.last_value, n.clock_ceiling, o.messages, o.lag_s, e.executables, e.lag_s,
       (SELECT count(*) FROM {schema}.scheduled), (SELECT count(*) FROM {schema}.dead_letter),
       (SELECT coalesce(pg_catalog.sum(messages - moved), 0::numeric)::bigint FROM {schema}.spark_bulk)
FROM {schema}.node AS n, {schema}.clock AS c,
     (SELECT count(*) AS messages, extract(epoch FROM clock_timestamp() - min(sent_at))::float8 AS lag_s
      FROM {schema}.outbox) AS o,
     (SELECT count(*) AS executables, extract(epoch FROM clock_timestamp() - min(sent_at))::float8 AS lag_s
      FROM {schema}.outbox_executable) AS e
""",
    columns=("bigint", "bigint", "bigint", "float8", "bigint", "float8", "bigint", "bigint", "bigint"),
)
# The floor lets the counts begin above dead rows; with the oldest found by clock, an index is all that is read of it.
INBOXES = Sql(
    """
WITH outgoing AS MATERIALIZED (
    SELECT topic, kind = 'E' AS event, count(*) AS messages, min(sent_at) AS since
    FROM {schema}.outbox GROUP BY topic, kind = 'E'),
{route},
coming AS MATERIALIZED (
    SELECT inbox, sum(messages)::bigint AS messages, min(since) AS since
    FROM outgoing JOIN route USING (topic) WHERE subscribed OR NOT event GROUP BY inbox)
SELECT r.name, coalesce(c.messages, 0), i.messages,
       extract(epoch FROM clock_timestamp() - least(c.since, oldest.sent_at))::float8,
       extract(epoch FROM clock_timestamp() - c.since)::float8,
       extract(epoch FROM clock_timestamp() - oldest.delivered_at)::float8,
       (SELECT count(*) FROM {schema}.key_state AS k
        WHERE k.inbox = r.name AND k.retry_at > clock_timestamp() AND k.retry_at < 'infinity'),
       (SELECT count(*) FROM {schema}.key_state AS k WHERE k.inbox = r.name AND k.retry_at = 'infinity'),
       (SELECT count(*) FROM {schema}.parked AS p WHERE p.inbox = r.name)
FROM {schema}.inbox_registry AS r
LEFT JOIN coming AS c ON c.inbox = r.name
CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM {schema}.inbox WHERE inbox = r.name AND clock + 0 > r.floor) AS i
LEFT JOIN LATERAL (
    SELECT sent_at, delivered_at FROM {schema}.inbox WHERE inbox = r.name AND clock + 0 > r.floor
    ORDER BY clock + 0 LIMIT 1) AS oldest ON true
ORDER BY r.name
""",
    columns=("text", "bigint", "bigint", "float8", "float8", "float8", "bigint", "bigint", "bigint"),
    route=ROUTE,
)


def reading_status(schema: str) -> Operation[Status]:
    """`status` as an operation."""
    dispatcher = yield from reading_dispatcher(schema)
    executor = yield from _reading_leader(schema, "executor")
    [(clock, ceiling, *waiting, scheduled, dead_letters, bulk_backlog)] = yield NODE.at(schema=schema)()
    outbox_backlog, outbox_lag_s, executable_backlog, executable_lag_s = waiting
    inboxes = yield INBOXES.at(schema=schema)()
    return Status(
        schema, clock, ceiling, outbox_backlog, _lag(outbox_lag_s), bulk_backlog, executable_backlog,
        _lag(executable_lag_s), scheduled, dead_letters, dispatcher, executor,
        tuple(
            InboxStatus(name, on_the_way, backlog, _lag(lag_s), _lag(dispatcher_s), _lag(consumer_s), *troubles)
            for name, on_the_way, backlog, lag_s, dispatcher_s, consumer_s, *troubles in inboxes
        ),
    )  # fmt: skip


def _lag(seconds: float | None) -> float:
    # A sender may have given a sent_at that lies ahead.
    return max(0.0, seconds or 0.0)
