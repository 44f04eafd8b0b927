"""The days of the archive: partitions of `reaped`, made ahead, emptied once their day is over, and then dropped.

A message that is reaped today and kept for N days is in the partition of today + N + 1, so that it is kept for N whole
days. What is done here happens in functions of the schema, with the rights of its owner. Each operation of the janitor
runs in a transaction of its own, and gives way to a change of the schema meanwhile: there is another round.
"""

from datetime import date, datetime

from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql

PATIENCE_MS = 100  # a session that waits for a lock keeps later ones waiting

NOW = "coalesce(%(now)s::timestamptz, statement_timestamp())"
MAKE = Sql("SELECT {schema}.make_reaped_days({now})", columns=("bigint",), now=NOW)
# How many days too few there are ahead, as the function counts them.
LACKING = Sql(
    """
SELECT max(keep_reaped_days)::bigint + 15::bigint
       - (SELECT count(*) FROM {schema}.reaped_day WHERE day > ({now} AT TIME ZONE 'UTC'::text)::date
          AND to_regclass(pg_catalog.concat('{schema}.reaped_', to_char(day, 'YYYYMMDD'))) IS NOT NULL)
FROM {schema}.inbox_registry
""",
    columns=("bigint",),
    now=NOW,
)
ALONE = Sql(
    """
SELECT pg_try_advisory_xact_lock({lock}, hashtext('{node}')), set_config('lock_timeout', '{patience}ms', true)
""",
    columns=("boolean", "text"),
    lock=locks.DDL,
    patience=PATIENCE_MS,
)
OVER = Sql(
    """
SELECT day::text, emptied_at IS NOT NULL FROM {schema}.reaped_day
WHERE day < ({now} AT TIME ZONE 'UTC'::text)::date ORDER BY day
""",
    columns=("text", "boolean"),
    now=NOW,
)
EMPTY = Sql("SELECT {schema}.empty_reaped_day(%(day)s::text::date, {now})", columns=("boolean",), now=NOW)
DROP = Sql("SELECT {schema}.drop_reaped_day(%(day)s::text::date, {now})", columns=("boolean",), now=NOW)


def making_days(schema: str, now: datetime | None = None) -> Operation[int]:
    """Make the partitions that are missing ahead; return how many. The caller has the lock of changes of the schema."""
    [(made,)] = yield MAKE.at(schema=schema)(now=now)
    return int(made)


def lacking(schema: str, now: datetime | None = None) -> Operation[bool]:
    """Return whether days are missing ahead."""
    [(days,)] = yield LACKING.at(schema=schema)(now=now)
    return days is not None and days > 0


def making_ahead(schema: str, now: datetime | None = None) -> Operation[int]:
    """Make the partitions that are missing ahead; return how many."""
    return (yield from making_days(schema, now)) if (yield from _alone(schema)) else 0


def listing_over(schema: str, now: datetime | None = None) -> Operation[list[tuple[date, bool]]]:
    """Return the days that are over, and of each whether it is empty."""
    return [(date.fromisoformat(day), is_empty) for day, is_empty in (yield OVER.at(schema=schema)(now=now))]


def emptying(schema: str, day: date, now: datetime | None = None) -> Operation[bool]:
    """Empty the partition of a day that is over; return whether it was. Fails with 55P03 if it is in use for 0.1 s."""
    return (yield from _alone(schema)) and (yield EMPTY.at(schema=schema)(day=day.isoformat(), now=now)) == [(True,)]


def dropping_day(schema: str, day: date, now: datetime | None = None) -> Operation[bool]:
    """Drop the partition of a day that was emptied a minute ago; return whether it was.

    Batches in hand that write into the archive hold it up: then it fails with 55P03 after 0.1 s.
    """
    return (yield from _alone(schema)) and (yield DROP.at(schema=schema)(day=day.isoformat(), now=now)) == [(True,)]


def _alone(schema: str) -> Operation[bool]:
    [(is_mine, _)] = yield ALONE.at(node=schema)()
    return bool(is_mine)
