"""The status of a node: what waits, where and for how long, which dispatcher leads, and the clock."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mailroom.figures.leaders import (
    ClockSetBack,
    DispatcherStatus,
    LaneFailure,
    Role,
    reading_leaders,
    reading_set_back,
)
from mailroom.links.states import DONE, SourceState, reading_sources
from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.order.sequences import Numbers, finding_behind
from mailroom.order.total import Waiting
from mailroom.order.total import waiting as waiting_totals
from mailroom.registry.routing import CARRIES, GETS, LINK_ROUTE, ROUTE
from mailroom.schema import checking
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql.locked import LockedTable, locked_inboxes, reading_locked
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, seeing, the_one
from mailroom.sql.waits import Wait, reading_waits

__all__ = [
    "ClockSetBack",
    "DispatcherStatus",
    "InboxStatus",
    "LaneFailure",
    "LinkStatus",
    "Status",
    "dispatcher_status",
    "dispatcher_status_async",
    "executable_backlog",
    "executable_backlog_async",
    "executor_status",
    "executor_status_async",
    "links_status",
    "links_status_async",
    "outbox_backlog",
    "outbox_backlog_async",
    "status",
    "status_async",
]

SHOWN_S = 0.1  # a shorter wait for a lock is that of any busy server


@dataclass(frozen=True, slots=True)
class InboxStatus:
    """One inbox. A lag is the age in seconds of the oldest waiting message, 0 if none waits.

    `on_the_way` counts its messages in the outbox, and `dispatcher_lag_s` is the age of the oldest of them. `backlog`
    counts its delivered messages, and `consumer_lag_s` is how long ago the oldest of them was delivered. `lag_s` is how
    long ago the oldest of both was sent. `waiting_keys` counts failing keys that wait for their next attempt,
    `parked_keys` those that are held until an operator acts. `parked_messages` counts the messages that were moved to
    `parked`; they are not in `backlog`. `expired` counts the messages that waited for longer than the
    inbox's `expire_s` and were removed, since it was created. `paused_at` is since when the inbox is paused, None if it
    is not, and `paused_by` says by whom and why. `paused_keys` counts the keys that are paused by themselves.
    `breaker_opened_at` is since when its breaker is open, None if it is not, and `breaker_why` says what had failed. If
    it has one for each prefix of a key, that is since the first of them opened, and it names three of them.

    `order` is key or total. Of a total inbox, `held_back` counts the messages of `backlog` that may not be reaped yet,
    and `waits_for` names the node that they wait for: the one that has shown the lowest clock. If `is_stopped`, this
    node has lost history, and they wait for `mailroom link resume`.
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
    expired: int
    order: str = "key"
    held_back: int = 0
    waits_for: str | None = None
    is_stopped: bool = False
    paused_at: datetime | None = None
    paused_by: str | None = None
    paused_keys: int = 0
    breaker_opened_at: datetime | None = None
    breaker_why: str | None = None


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One node that reads messages of this one, or a bridge to a broker.

    `state` is open or cut; for a cut link nothing is stamped any more. That of a bridge is also stopped, unreachable or
    failing, while nothing is published: `mailroom bridge status` says why.

    `on_the_way` counts its messages in the outbox. `backlog` counts what was stamped for it and is not acknowledged:
    the reader has not yet received it durably. `lag_s` is the age in seconds of the oldest of both, 0 if there is none.
    """

    name: str
    state: str
    on_the_way: int
    backlog: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class Status:
    """A node. `outbox_backlog` counts committed messages that wait for the dispatcher, `scheduled` those not yet due.

    `bulk_backlog` counts messages of large batches of Spark that are decided and not yet moved into the outbox.
    `outbox_lag_s` is the age in seconds of the oldest message in the outbox, 0 if it is empty. `executable_backlog` and
    `executable_lag_s` are the same for the outbox of executables. `clock` is the last clock given out, and
    `clock_ceiling` the highest that may be given out before the ceiling is raised. `dispatcher` and `executor` are None
    if there has never been one. `links` are the nodes that read messages of this one, `sources` those that it reads.
    `waits` are the sessions of Mailroom in this database that wait for a lock now, with who has it. `locked` are the
    tables that cannot be read now: an inbox among them is not in `inboxes`. `behind` are the
    columns whose sequences are behind their rows, as after a move without them, as far as this role may read them.
    `set_back` tells that the server's clock was set back within the last hour.
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
    links: tuple[LinkStatus, ...] = ()
    sources: tuple[SourceState, ...] = ()
    waits: tuple[Wait, ...] = ()
    locked: tuple[LockedTable, ...] = ()
    behind: tuple[Numbers, ...] = ()
    set_back: ClockSetBack | None = None


def reading_dispatcher(*, schema: str = DEFAULT_SCHEMA) -> Operation[DispatcherStatus | None]:
    """Return the dispatcher of the node `schema`, None if there has never been one. This reads one row."""
    return _reading_leader(schema_name(schema), "dispatcher")


def reading_links(*, schema: str = DEFAULT_SCHEMA) -> Operation[DispatcherStatus | None]:
    """Return what reads other nodes for the node `schema`, None if there has never been one. This reads one row."""
    return _reading_leader(schema_name(schema), "links")


def reading_executor(*, schema: str = DEFAULT_SCHEMA) -> Operation[DispatcherStatus | None]:
    """Return the executor of the node `schema`, None if there has never been one. This reads one row."""
    return _reading_leader(schema_name(schema), "executor")


def _reading_leader(schema: str, role: Role) -> Operation[DispatcherStatus | None]:
    yield from checking(schema)
    return next(iter((yield from reading_leaders(schema, [role]))), None)


BACKLOG = Sql("SELECT count(*) FROM {schema}.{outbox}", columns=("bigint",))


def counting_outbox(*, schema: str = DEFAULT_SCHEMA) -> Operation[int]:
    """Count the committed messages that wait for the dispatcher of the node `schema`."""
    return _counting(schema_name(schema), "outbox")


def counting_executables(*, schema: str = DEFAULT_SCHEMA) -> Operation[int]:
    """Count the committed executables that wait for the executor of the node `schema`."""
    return _counting(schema_name(schema), "outbox_executable")


def _counting(schema: str, outbox: str) -> Operation[int]:
    yield from checking(schema)
    yield from seeing(schema, outbox)
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
# What the outbox holds for each inbox.
COMING = Sql(
    """
WITH outgoing AS MATERIALIZED (
    SELECT topic, kind, count(*) AS messages, min(sent_at) AS since FROM {schema}.outbox GROUP BY topic, kind),
{route}
SELECT inbox, sum(messages)::bigint, extract(epoch FROM clock_timestamp() - min(since))::float8
FROM outgoing JOIN route USING (topic) WHERE {gets} GROUP BY inbox
""",
    columns=("text", "bigint", "float8"),
    route=ROUTE,
    sent="outgoing",
    gets=GETS,
)
NAMES = Sql(
    "SELECT name, {partitions} FROM {schema}.inbox_registry ORDER BY name",
    columns=("text", "bigint"),
    partitions=PARTITIONS,
)
# The counts start at the floor, above dead rows. The oldest message is found by its clock, through an index. The names
# are in the text twice: so the plan locks their partitions only, and not those of all inboxes.
INBOXES = Sql(
    """
SELECT r.name, i.messages, extract(epoch FROM clock_timestamp() - oldest.sent_at)::float8,
       extract(epoch FROM clock_timestamp() - oldest.delivered_at)::float8,
       (SELECT count(*) FROM {schema}.key_state AS k
        WHERE k.inbox = r.name AND k.retry_at > clock_timestamp() AND k.retry_at < 'infinity'),
       (SELECT count(*) FROM {schema}.key_state AS k
        WHERE k.inbox = r.name AND k.retry_at = 'infinity' AND k.parked_at IS NOT NULL),
       (SELECT count(*) FROM {schema}.parked AS p WHERE p.inbox = r.name), r.expired, r.paused_at, r.paused_by,
       (SELECT count(*) FROM {schema}.key_state AS k
        WHERE k.inbox = r.name AND k.retry_at = 'infinity' AND k.paused_at IS NOT NULL),
       b.opened_at, b.why
FROM {schema}.inbox_registry AS r
CROSS JOIN LATERAL (
    SELECT min(o.opened_at) AS opened_at,
           string_agg(o.why, '; ' ORDER BY o.nth) FILTER (WHERE o.nth <= 3)
           || CASE WHEN count(*) > 3 THEN pg_catalog.format('; and %%s more', count(*) - 3) ELSE '' END AS why
    FROM (SELECT u.opened_at, u.why, row_number() OVER (ORDER BY u.opened_at, u.why) AS nth
          FROM (SELECT opened_at, opened_why AS why FROM {schema}.limits
                WHERE inbox = r.name AND opened_at IS NOT NULL
                UNION ALL
                SELECT opened_at, pg_catalog.format('prefix %%s: %%s', prefix, opened_why)
                FROM {schema}.breaker WHERE inbox = r.name) AS u) AS o) AS b
CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM {schema}.inbox
    WHERE inbox = r.name AND inbox IN ('{names}') AND clock + 0 > r.floor) AS i
LEFT JOIN LATERAL (
    SELECT sent_at, delivered_at FROM {schema}.inbox
    WHERE inbox = r.name AND inbox IN ('{names}') AND clock + 0 > r.floor ORDER BY clock + 0 LIMIT 1) AS oldest ON true
WHERE r.name IN ('{names}') ORDER BY r.name
""",
    columns=(
        "text", "bigint", "float8", "float8", "bigint", "bigint", "bigint", "bigint", "timestamptz", "text", "bigint",
        "timestamptz", "text",
    ),
)  # fmt: skip


def _reading_inboxes(schema: str, but: set[str]) -> Operation[list[InboxStatus]]:
    """Read the inboxes, as many per statement as one transaction may meet; in autocommit each lets its locks go."""
    totals = {each.inbox: each for each in (yield from waiting_totals(schema, but))}
    coming = {inbox: (messages, lag_s) for inbox, messages, lag_s in (yield COMING.at(schema=schema)())}
    found = yield NAMES.at(schema=schema)(partitions=None)
    names, most = [name for name, _ in found if name not in but], found[0][1] if found else 1
    inboxes = []
    for first in range(0, len(names), most):
        listed = "', '".join(names[first : first + most])
        for name, backlog, sent_s, delivered_s, *counts, since, by, keys, opened_at, opened_why in (
            yield INBOXES.at(schema=schema, names=listed)()
        ):
            more = _of_total(totals.get(name)) | {"paused_at": since, "paused_by": by, "paused_keys": keys}
            more |= {"breaker_opened_at": opened_at, "breaker_why": opened_why}
            on_the_way, coming_s = coming.get(name, (0, None))
            inboxes.append(
                InboxStatus(
                    name, on_the_way, backlog, max(_lag(coming_s), _lag(sent_s)), _lag(coming_s), _lag(delivered_s),
                    *counts, **more,
                )
            )  # fmt: skip
    return inboxes


# Sequences have no gaps, so what is not acknowledged is counted by its ends, which an index finds.
LINKS = Sql(
    """
WITH outgoing AS MATERIALIZED (
    SELECT topic, kind, count(*) AS messages, min(sent_at) AS since FROM {schema}.outbox
    WHERE EXISTS (SELECT FROM {schema}.link) GROUP BY topic, kind),
{route},
{link_route},
coming AS MATERIALIZED (
    SELECT link, sum(messages)::bigint AS messages, min(since) AS since
    FROM outgoing JOIN link_route USING (topic) WHERE {carries} GROUP BY link)
SELECT l.name, CASE l.state WHEN 'open' THEN coalesce(b.trouble, b.state, l.state) ELSE l.state END,
       coalesce(c.messages, 0), greatest(coalesce(newest.seq, 0::bigint) - l.acked - {done}, 0::bigint),
       extract(epoch FROM clock_timestamp() - least(c.since, oldest.sent_at))::float8
FROM {schema}.link AS l
LEFT JOIN {schema}.bridge_out AS b ON b.link = l.number
LEFT JOIN coming AS c ON c.link = l.number
LEFT JOIN LATERAL (
    SELECT seq FROM {schema}.transit AS t WHERE t.link = l.number ORDER BY seq DESC LIMIT 1) AS newest ON true
LEFT JOIN LATERAL (
    SELECT sent_at FROM {schema}.transit AS t WHERE t.link = l.number AND t.seq > l.acked
    ORDER BY seq LIMIT 1) AS oldest ON true
ORDER BY l.name
""",
    columns=("text", "text", "bigint", "bigint", "float8"),
    route=ROUTE,
    link_route=LINK_ROUTE,
    sent="outgoing",
    carries=CARRIES,
    done=DONE,
)


def reading_status(*, schema: str = DEFAULT_SCHEMA) -> Operation[Status]:
    """Return the status of the node `schema`. This counts all waiting messages, and takes about as long.

    Raises `SchemaError` if there is no such node. It reads only committed rows, and waits for no lock but a strong one
    on a table of the whole node: limit that by `lock_timeout`. An inbox whose own table has one is passed over. In a
    transaction it keeps a lock on each inbox until that ends; a node of thousands is better read in autocommit.
    """
    return _reading_status(schema_name(schema))


def _reading_status(schema: str) -> Operation[Status]:
    yield from checking(schema)
    locked = yield from reading_locked(schema)
    leaders = {each.role: each for each in (yield from reading_leaders(schema, ["dispatcher", "executor"]))}
    rows = yield NODE.at(schema=schema)()
    clock, ceiling, *waiting, scheduled, dead_letters, bulk_backlog = the_one(rows, NODE_ROW, schema)
    outbox_backlog, outbox_lag_s, executable_backlog, executable_lag_s = waiting
    inboxes = yield from _reading_inboxes(schema, locked_inboxes(locked))
    links = yield LINKS.at(schema=schema)()
    return Status(
        schema, clock, ceiling, outbox_backlog, _lag(outbox_lag_s), bulk_backlog, executable_backlog,
        _lag(executable_lag_s), scheduled, dead_letters, leaders.get("dispatcher"), leaders.get("executor"),
        tuple(inboxes),
        tuple(
            LinkStatus(name, state, on_the_way, backlog, _lag(lag_s))
            for name, state, on_the_way, backlog, lag_s in links
        ),
        (yield from reading_sources(schema)),
        tuple((yield from reading_waits(at_least_s=SHOWN_S))),
        tuple(locked),
        tuple((yield from finding_behind(schema))),
        (yield from reading_set_back(schema)),
    )  # fmt: skip


def _of_total(found: Waiting | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "order": "total",
        "held_back": found.held_back,
        "waits_for": found.waits_for,
        "is_stopped": found.is_stopped,
    }


def _lag(seconds: float | None) -> float:
    # A sender may have given a sent_at in the future.
    return max(0.0, seconds or 0.0)


# What users call: each of these on a sync and on an async connection.
status, status_async = on_connections("status", reading_status)
dispatcher_status, dispatcher_status_async = on_connections("dispatcher_status", reading_dispatcher)
links_status, links_status_async = on_connections("links_status", reading_links)
executor_status, executor_status_async = on_connections("executor_status", reading_executor)
outbox_backlog, outbox_backlog_async = on_connections("outbox_backlog", counting_outbox)
executable_backlog, executable_backlog_async = on_connections("executable_backlog", counting_executables)
