"""Statistics of the last 48 hours, which processes that are asked to keep them have written minute by minute."""

from datetime import datetime
from typing import NamedTuple

from mailroom.metrics.minutes import BUCKETS, NODE
from mailroom.schema import checking, finding
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, inbox_name, schema_name
from mailroom.values.numbers import whole

MOST_M = 48 * 60


class MinuteStatistics(NamedTuple):
    """What happened in one minute, in all processes that keep statistics.

    `minute` is its beginning by the database's clock, and `inbox` None for the node as a whole, of which only
    `delivered` counts: the messages that the dispatcher delivered, each copy. Of an inbox, `reaped` are the messages of
    committed `batches`, `failed` the failed attempts of messages, `parked` and `skipped` those of them after which the
    key was parked or the message skipped, and `handle_s` how long handlers took together, in seconds. Half of the
    reaped messages were not older than `age_p50_s` seconds when they were, since their send, and 99 % not older than
    `age_p99_s`; None if none was. Ages are counted in buckets, so these are estimates within one.
    """

    minute: datetime
    inbox: str | None
    delivered: int
    reaped: int
    failed: int
    parked: int
    skipped: int
    batches: int
    handle_s: float
    age_p50_s: float | None
    age_p99_s: float | None


class InboxStatistics(NamedTuple):
    """What happened in an inbox over some time; `minutes` counts those in which something did.

    The rest is as in `MinuteStatistics`. Ages are those of all its messages of that time.
    """

    inbox: str | None
    minutes: int
    delivered: int
    reaped: int
    failed: int
    parked: int
    skipped: int
    batches: int
    handle_s: float
    age_p50_s: float | None
    age_p99_s: float | None


SINCE = "coalesce(%(now)s::timestamptz, clock_timestamp()) - %(since_m)s::float8 * interval '1 min'"
BY_MINUTE = Sql(
    """
SELECT minute, delivered, reaped, failed, parked, skipped, batches, handle_s, age_p50_s, age_p99_s
FROM {schema}.statistics WHERE inbox = %(inbox)s::text AND minute > {since} ORDER BY minute
""",
    columns=("timestamptz", *("bigint",) * 6, "float8", "float8", "float8"),
    since=SINCE,
)
# Bucket by bucket in the text: to unnest the arrays took twenty times as long.
BY_INBOX = Sql(
    """
SELECT s.inbox, s.minutes, s.delivered, s.reaped, s.failed, s.parked, s.skipped, s.batches, s.handle_s,
       {schema}.age_percentile(s.ages, 0.5), {schema}.age_percentile(s.ages, 0.99)
FROM (SELECT inbox, count(*) AS minutes, sum(delivered)::bigint AS delivered, sum(reaped)::bigint AS reaped,
             sum(failed)::bigint AS failed, sum(parked)::bigint AS parked, sum(skipped)::bigint AS skipped,
             sum(batches)::bigint AS batches, sum(handle_s) AS handle_s, ARRAY[{ages}] AS ages
      FROM {schema}.stat_minute WHERE minute > {since} GROUP BY inbox) AS s
ORDER BY s.inbox
""",
    columns=("text", *("bigint",) * 7, "float8", "float8", "float8"),
    since=SINCE,
    ages=", ".join(f"sum(ages[{nth}])::bigint" for nth in range(1, BUCKETS + 1)),
)


def reading_statistics(
    *, since_m: int = 60, now: datetime | None = None, schema: str = DEFAULT_SCHEMA
) -> Operation[list[InboxStatistics]]:
    """Return what happened in the last `since_m` minutes, at most 2,880: for the node first, then for each inbox.

    Inboxes where nothing happened are left out, and so is what processes without `--statistics` did. `now` is when that
    time ends; None is the database's clock. Raises `InvalidMessage` for a wrong `since_m`, and `SchemaError` if there
    is no such node.
    """
    whole(since_m, "since_m", 1, MOST_M)
    return _reading_by_inbox(schema_name(schema), since_m, now)


def _reading_by_inbox(schema: str, since_m: int, now: datetime | None) -> Operation[list[InboxStatistics]]:
    yield from checking(schema)
    rows = yield BY_INBOX.at(schema=schema)(since_m=since_m, now=now)
    return [InboxStatistics(inbox or None, *numbers) for inbox, *numbers in rows]


def reading_minutes(
    inbox: str | None, *, since_m: int = 60, now: datetime | None = None, schema: str = DEFAULT_SCHEMA
) -> Operation[list[MinuteStatistics]]:
    """Return what happened in an inbox, None for the node as a whole, in the last `since_m` minutes, at most 2,880.

    Minutes in which nothing happened are left out. `now` is when that time ends; None is the database's clock. Raises
    `UnknownInbox`; `InvalidMessage` for a wrong `since_m`; and `SchemaError` if there is no such node.
    """
    whole(since_m, "since_m", 1, MOST_M)
    return _reading_by_minute(schema_name(schema), None if inbox is None else inbox_name(inbox), since_m, now)


def _reading_by_minute(
    schema: str, inbox: str | None, since_m: int, now: datetime | None
) -> Operation[list[MinuteStatistics]]:
    yield from checking(schema)
    if inbox is not None:
        yield from finding(schema, inbox)
    rows = yield BY_MINUTE.at(schema=schema)(inbox=NODE if inbox is None else inbox, since_m=since_m, now=now)
    return [MinuteStatistics(minute, inbox, *numbers) for minute, *numbers in rows]


statistics, statistics_async = on_connections("statistics", reading_statistics)
minute_statistics, minute_statistics_async = on_connections("minute_statistics", reading_minutes)
