"""The segments of logs: one a day, made ahead of nothing, emptied once they are over and read, and then dropped.

A delivery writes into the newest segment, however old. What is done here happens in functions of the schema, with the
rights of its owner. Each operation of the janitor runs in a transaction of its own, and gives way to a change of the
schema meanwhile: there is another round.
"""

from dataclasses import dataclass
from datetime import datetime

from mailroom.order.clock import DISPATCH_LOCK
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql

PATIENCE_MS = 100  # a session that waits for a lock keeps later ones waiting
SWEPT_ROWS = 10_000

NOW = "coalesce(%(now)s::timestamptz, statement_timestamp())"
DAY = "interval '1 day'"
# D-logs-14: Whether a segment was read is asked without bitmaps.
ALONE = Sql(
    """
SELECT pg_try_advisory_xact_lock({lock}, hashtext('{node}')), set_config('lock_timeout', '{patience}ms', true),
       set_config('enable_bitmapscan', 'off', true)
""",
    columns=("boolean", "text", "text"),
    lock=locks.DDL,
    patience=PATIENCE_MS,
)
OLD_LOGS = Sql(
    """
SELECT name FROM {schema}.log_registry AS l WHERE NOT EXISTS (
    SELECT FROM {schema}.log_segment AS s WHERE s.log = l.name AND s.opened_at > {now} - {day}) ORDER BY name
""",
    columns=("text",),
    now=NOW,
    day=DAY,
)
MAKE = Sql("SELECT {schema}.make_log_segment('{log}', {now})", columns=("bigint",), now=NOW)


@dataclass(frozen=True, slots=True)
class Over:
    """A segment that may go: all in it is older than its log keeps messages. `readers` are the inboxes of the log."""

    segment: int
    log: str
    is_empty: bool
    drop_unread: bool
    readers: tuple[str, ...]


# What is in a segment was delivered before the next one was made.
OVER = Sql(
    """
SELECT s.segment, s.log, s.emptied_at IS NOT NULL, l.drop_unread,
       ARRAY(SELECT r.name FROM {schema}.inbox_registry AS r WHERE r.log = s.log ORDER BY r.name)
FROM {schema}.log_registry AS l JOIN {schema}.log_segment AS s ON s.log = l.name
JOIN LATERAL (SELECT n.opened_at FROM {schema}.log_segment AS n
              WHERE n.log = s.log AND n.segment > s.segment ORDER BY n.segment LIMIT 1) AS n ON true
WHERE n.opened_at < {now} - l.keep_days::float8 * {day} ORDER BY s.segment
""",
    into=Over,
    now=NOW,
    day=DAY,
)
HOLDS = Sql(
    """
SELECT EXISTS (
    SELECT FROM (SELECT DISTINCT ON (lane) lane, clock FROM {schema}.log_receipt WHERE inbox = '{inbox}'
                 ORDER BY lane, epoch DESC, clock DESC) AS at, LATERAL (
        SELECT FROM {schema}.log AS o
        WHERE o.log = '{log}' AND o.segment = {segment} AND o.lane = at.lane AND o.clock > at.clock
        ORDER BY o.clock LIMIT 1) AS unread)
""",
    columns=("boolean",),
)
# How much of a segment each lane of an inbox has not read, and how far it has read.
UNREAD = Sql(
    """
SELECT at.lane::bigint, at.clock, (
    SELECT count(*) FROM {schema}.log AS o
    WHERE o.log = '{log}' AND o.segment = {segment} AND o.lane = at.lane AND o.clock > at.clock)
FROM (SELECT DISTINCT ON (lane) lane, clock FROM {schema}.log_receipt WHERE inbox = '{inbox}'
      ORDER BY lane, epoch DESC, clock DESC) AS at ORDER BY at.lane
""",
    columns=("bigint", "bigint", "bigint"),
)
LOCK = Sql("SELECT {schema}.lock_log_segment({segment})", columns=("boolean",))
# What was read of the segment since: of each lane from the clock that it was read to then.
READ_SINCE = Sql(
    """
SELECT coalesce(sum((
    SELECT count(*) FROM {schema}.log AS o
    WHERE o.log = '{log}' AND o.segment = {segment} AND o.lane = at.lane AND o.clock > was.clock
      AND o.clock <= at.clock)), 0::numeric)::bigint
FROM (SELECT DISTINCT ON (lane) lane, clock FROM {schema}.log_receipt WHERE inbox = '{inbox}'
      ORDER BY lane, epoch DESC, clock DESC) AS at
JOIN ROWS FROM (pg_catalog.unnest(%(lanes)s::bigint[]), pg_catalog.unnest(%(clocks)s::bigint[])) AS was (lane, clock)
  ON was.lane = at.lane
""",
    columns=("bigint",),
)
LOSE = Sql(
    """
UPDATE {schema}.inbox_registry SET lost = lost + %(messages)s::bigint, lost_at = {now},
    lost_since = coalesce(lost_since, {now}), lost_to = greatest(lost_to, (
        SELECT n.first_clock - 1 FROM {schema}.log_segment AS n
        WHERE n.log = '{log}' AND n.segment > {segment} ORDER BY n.segment LIMIT 1))
WHERE name = '{inbox}'
""",
    now=NOW,
)
EMPTY = Sql("SELECT {schema}.empty_log_segment({segment}, {now})", columns=("boolean",), now=NOW)
DROP = Sql("SELECT {schema}.drop_log_segment({segment}, {now})", columns=("boolean",), now=NOW)


def listing_old_logs(schema: str, now: datetime | None = None) -> Operation[list[str]]:
    """Return the logs whose newest segment is older than a day."""
    return [name for (name,) in (yield OLD_LOGS.at(schema=schema)(now=now))]


def making_segment(schema: str, log: str, now: datetime | None = None) -> Operation[int | None]:
    """Make a new segment of a log; return its number, or None while the schema is changed."""
    if not (yield from _alone(schema)):
        return None
    yield DISPATCH_LOCK.at(schema=schema)()
    [(number,)] = yield MAKE.at(schema=schema, log=log)(now=now)
    return None if number is None else int(number)


def listing_over(schema: str, now: datetime | None = None) -> Operation[list[Over]]:
    """Return the segments that are older than their logs keep messages."""
    return OVER.named((yield OVER.at(schema=schema)(now=now)))


@dataclass(frozen=True, slots=True)
class Emptied:
    """What became of a segment that is over. `holders` are the inboxes that have not read it, while it stays.

    `lost` are those of which messages were dropped unread, and how many.
    """

    is_emptied: bool = False
    holders: tuple[str, ...] = ()
    lost: tuple[tuple[str, int], ...] = ()


def emptying(schema: str, over: Over, now: datetime | None = None) -> Operation[Emptied]:
    """Empty a segment that is over, if all inboxes have read it, or the log drops what is unread.

    Fails with 55P03 if the segment is in use for 0.1 s. Positions go back under the lock of changes of the schema only,
    so what was passed stays passed.
    """
    if not (yield from _alone(schema)):
        return Emptied()
    names = {"schema": schema, "log": over.log, "segment": str(over.segment)}
    holders = []
    for inbox in over.readers:
        [(holds,)] = yield HOLDS.at(inbox=inbox, **names)()
        if holds:
            holders.append(inbox)
    if holders and not over.drop_unread:
        return Emptied(holders=tuple(holders))
    lost = yield from _losing(names, holders, now)
    [(is_emptied,)] = yield EMPTY.at(schema=schema, segment=names["segment"])(now=now)
    return Emptied(bool(is_emptied), lost=tuple(lost) if is_emptied else ())


def _losing(names: dict[str, str], inboxes: list[str], now: datetime | None) -> Operation[list[tuple[str, int]]]:
    """Note what these inboxes lose with a segment, and return it.

    To count it may take long. So that happens before readers are kept out; a batch in hand ends before that.
    """
    unread: dict[str, tuple[list[int], list[int], int]] = {}
    for inbox in inboxes:
        rows = yield UNREAD.at(inbox=inbox, **names)()
        unread[inbox] = [lane for lane, _, _ in rows], [clock for _, clock, _ in rows], sum(row[2] for row in rows)
    if unread:
        yield LOCK.at(schema=names["schema"], segment=names["segment"])()
    lost = []
    for inbox, (lanes, clocks, messages) in unread.items():
        [(read,)] = yield READ_SINCE.at(inbox=inbox, **names)(lanes=lanes, clocks=clocks)
        if messages > read:
            yield LOSE.at(inbox=inbox, **names)(messages=messages - read, now=now)
            lost.append((inbox, messages - read))
    return lost


def dropping_segment(schema: str, over: Over, now: datetime | None = None) -> Operation[None]:
    """Drop a segment that was emptied a minute ago. Fails with 55P03 if the log is in use for 0.1 s."""
    if (yield from _alone(schema)):
        yield DROP.at(schema=schema, segment=str(over.segment))(now=now)


# -- Ticks and receipts -----------------------------------------------------------------------------------------------

TICKS = Sql(
    """
WITH old AS MATERIALIZED (
    SELECT t.log, t.clock FROM {schema}.log_registry AS l, LATERAL (
        SELECT t.log, t.clock FROM {schema}.log_tick AS t
        WHERE t.log = l.name AND t.clock < (
            SELECT s.first_clock FROM {schema}.log_segment AS s
            WHERE s.log = l.name AND s.emptied_at IS NULL ORDER BY s.segment LIMIT 1)
        ORDER BY t.clock LIMIT %(rows)s::bigint) AS t),
gone AS (
    DELETE FROM {schema}.log_tick AS t USING old WHERE t.log = old.log AND t.clock = old.clock RETURNING 1)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)
RECEIPTS = Sql(
    """
WITH newest AS MATERIALIZED (
    SELECT DISTINCT ON (lane) lane, epoch, clock FROM {schema}.log_receipt WHERE inbox = '{inbox}'
    ORDER BY lane, epoch DESC, clock DESC),
old AS MATERIALIZED (
    SELECT r.lane, r.epoch, r.clock FROM newest AS n, LATERAL (
        SELECT r.lane, r.epoch, r.clock FROM {schema}.log_receipt AS r
        WHERE r.inbox = '{inbox}' AND r.lane = n.lane AND (r.epoch, r.clock) < (n.epoch, n.clock)
        LIMIT %(rows)s::bigint) AS r),
gone AS (
    DELETE FROM {schema}.log_receipt AS r USING old
    WHERE r.inbox = '{inbox}' AND r.lane = old.lane AND r.epoch = old.epoch AND r.clock = old.clock RETURNING 1)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)
READERS = Sql("SELECT name FROM {schema}.inbox_registry WHERE log IS NOT NULL ORDER BY name", columns=("text",))


def listing_readers(schema: str) -> Operation[list[str]]:
    """Return the inboxes that read logs."""
    return [name for (name,) in (yield READERS.at(schema=schema)())]


def sweeping_ticks(schema: str, rows: int = SWEPT_ROWS) -> Operation[int]:
    """Delete ticks from before the oldest message of their log, up to `rows` of each log; return how many."""
    [(gone,)] = yield TICKS.at(schema=schema)(rows=rows)
    return int(gone)


def sweeping_receipts(schema: str, inbox: str, rows: int = SWEPT_ROWS) -> Operation[int]:
    """Delete receipts that newer ones have replaced, up to `rows` of each lane; return how many."""
    [(gone,)] = yield RECEIPTS.at(schema=schema, inbox=inbox)(rows=rows)
    return int(gone)


def _alone(schema: str) -> Operation[bool]:
    [(is_mine, _, _)] = yield ALONE.at(node=schema)()
    return bool(is_mine)
