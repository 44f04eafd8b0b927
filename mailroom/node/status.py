"""The status of a node: what waits, where and for how long, which dispatcher leads, and the clock."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mailroom.figures.inboxes import Coming, InboxBacklog, reading_coming, reading_inboxes
from mailroom.figures.leaders import (
    ClockSetBack,
    DispatcherStatus,
    LaneFailure,
    Role,
    reading_leaders,
    reading_set_back,
)
from mailroom.figures.links import reading_link_backlogs
from mailroom.figures.logs import LogReading, LogState, reading_logs, reading_readers
from mailroom.figures.node import counting_waiting, reading_backlog, reading_place
from mailroom.links.states import SourceState, reading_sources
from mailroom.order.sequences import Numbers, finding_behind
from mailroom.order.total import Waiting
from mailroom.order.total import waiting as waiting_totals
from mailroom.schema import checking
from mailroom.sql.locked import LockedTable, locked_inboxes, reading_locked
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation
from mailroom.sql.sight import seeing
from mailroom.sql.waits import Wait, reading_waits
from mailroom.values.names import DEFAULT_SCHEMA, schema_name
from mailroom.values.readable import ReadableRepr

__all__ = [
    "ClockSetBack",
    "DispatcherStatus",
    "InboxStatus",
    "LaneFailure",
    "LinkStatus",
    "LogStatus",
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


@dataclass(frozen=True, slots=True, repr=False)
class InboxStatus(ReadableRepr):
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

    `order` is key, total or log; `backlog` of an inbox that reads a log counts what it has yet to read of it, too. Of a
    total inbox, `held_back` counts the messages of `backlog` that may not be reaped yet, and `waits_for` names the node
    that they wait for: the one that has shown the lowest clock. If `is_stopped`, this node has lost history, and they
    wait for `mailroom link resume`.
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


@dataclass(frozen=True, slots=True, repr=False)
class LinkStatus(ReadableRepr):
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


@dataclass(frozen=True, slots=True, repr=False)
class LogStatus(ReadableRepr):
    """One log: how many segments it has, and its size on disk in bytes.

    `held_bytes` of that are older than the log keeps messages, and stay since `held_since`, because the inboxes in
    `held_by` have not read them.
    """

    name: str
    segments: int
    bytes: int
    held_bytes: int
    held_by: tuple[str, ...]
    held_since: datetime | None


@dataclass(frozen=True, slots=True, repr=False)
class Status(ReadableRepr):
    """A node: its schema and name, and in which database on which server it is, by the address that the server has.

    `outbox_backlog` counts committed messages that wait for the dispatcher, `scheduled` those not yet due.

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
    node: str
    database: str
    server: str
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
    logs: tuple[LogStatus, ...] = ()


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


def counting_outbox(*, schema: str = DEFAULT_SCHEMA) -> Operation[int]:
    """Count the committed messages that wait for the dispatcher of the node `schema`."""
    return _counting(schema_name(schema), "outbox")


def counting_executables(*, schema: str = DEFAULT_SCHEMA) -> Operation[int]:
    """Count the committed executables that wait for the executor of the node `schema`."""
    return _counting(schema_name(schema), "outbox_executable")


def _counting(schema: str, outbox: str) -> Operation[int]:
    yield from checking(schema)
    yield from seeing(schema, outbox)
    return (yield from counting_waiting(schema, outbox))


def _reading_inboxes(schema: str, locked: list[LockedTable]) -> Operation[tuple[InboxStatus, ...]]:
    totals = {each.inbox: each for each in (yield from waiting_totals(schema, locked_inboxes(locked)))}
    coming = yield from reading_coming(schema)
    found = yield from reading_inboxes(schema, locked)
    return tuple(_inbox(each, coming.get(each.name), totals.get(each.name)) for each in found)


def _inbox(found: InboxBacklog, coming: Coming | None, total: Waiting | None) -> InboxStatus:
    shown = found._asdict()
    sent_s, delivered_s = shown.pop("sent_s"), shown.pop("delivered_s")
    coming_s = _lag(coming.lag_s) if coming else 0.0
    return InboxStatus(
        on_the_way=coming.messages if coming else 0,
        lag_s=max(coming_s, _lag(sent_s)),
        dispatcher_lag_s=coming_s,
        consumer_lag_s=_lag(delivered_s),
        **shown,
        **_of_total(total),
    )


def reading_status(*, schema: str = DEFAULT_SCHEMA) -> Operation[Status]:
    """Return the status of the node `schema`. This counts all waiting messages, and takes about as long.

    Raises `SchemaError` if there is no such node. It reads only committed rows, and waits for no lock but a strong one
    on a table of the whole node: limit that by `lock_timeout`. An inbox is passed over if its own table has one, or the
    log that it reads. In a transaction it keeps a lock on each inbox until that ends; a node of thousands is better
    read in autocommit.
    """
    return _reading_status(schema_name(schema))


def _reading_status(schema: str) -> Operation[Status]:
    yield from checking(schema)
    locked = yield from reading_locked(schema)
    leaders = {each.role: each for each in (yield from reading_leaders(schema, ["dispatcher", "executor"]))}
    place = yield from reading_place(schema)
    node = yield from reading_backlog(schema)
    inboxes = yield from _reading_inboxes(schema, locked)
    return Status(
        schema=schema,
        node=place.name,
        database=place.database,
        server=place.server,
        clock=node.clock,
        clock_ceiling=node.clock_ceiling,
        outbox_backlog=node.outbox,
        outbox_lag_s=_lag(node.outbox_s),
        bulk_backlog=node.bulk,
        executable_backlog=node.executables,
        executable_lag_s=_lag(node.executables_s),
        scheduled=node.scheduled,
        dead_letters=node.dead_letters,
        dispatcher=leaders.get("dispatcher"),
        executor=leaders.get("executor"),
        inboxes=inboxes,
        links=tuple(LinkStatus(*each[:-1], _lag(each.lag_s)) for each in (yield from reading_link_backlogs(schema))),
        sources=(yield from reading_sources(schema)),
        waits=tuple((yield from reading_waits(at_least_s=SHOWN_S))),
        locked=tuple(locked),
        behind=tuple((yield from finding_behind(schema))),
        set_back=(yield from reading_set_back(schema)),
        logs=(yield from _reading_logs(schema, locked)),
    )


def _reading_logs(schema: str, locked: list[LockedTable]) -> Operation[tuple[LogStatus, ...]]:
    logs = yield from reading_logs(schema, locked)
    readers = (yield from reading_readers(schema, locked)) if logs else []
    return tuple(_log(each, [of for of in readers if of.log == each.log and of.held_segments]) for each in logs)


def _log(found: LogState, holders: list[LogReading]) -> LogStatus:
    # Who holds the most holds all that the others hold, but for segments of which each reads another part.
    return LogStatus(
        name=found.log,
        segments=found.segments,
        bytes=found.bytes,
        held_bytes=max((each.held_bytes for each in holders), default=0),
        held_by=tuple(each.inbox for each in holders),
        held_since=min((each.held_since for each in holders if each.held_since), default=None),
    )


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
