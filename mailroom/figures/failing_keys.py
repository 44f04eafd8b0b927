"""Which keys are failing: tried, not yet done, and tried again; of one inbox or of all, and by their errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from mailroom.figures.keys import TRIED
from mailroom.sql.operation import Operation, Sql, filled

COUNTED = 100_000  # failing keys of an inbox that are looked through for their errors
LONGEST = 200  # characters of an error by which keys are grouped

# The row of a key that is well again may stay, with a time of -infinity.
IS_FAILING = filled(f"{TRIED} AND {{row}}.retry_at > '-infinity'", row="s")
# An error begins with its class, and what follows is of one message. What a handler says itself may have no class.
ERROR = f"pg_catalog.left(pg_catalog.split_part(s.last_error, ':'::text, 1), {LONGEST})"
FITS = """(%(error)s::text IS NULL OR coalesce({error}, ''::text) = %(error)s::text)
      AND (%(matching)s::text IS NULL OR position(%(matching)s::text IN s.last_error) > 0)""".replace("{error}", ERROR)
# A key that is due is tried anyway. One of a prefix whose breaker is open waits for that, and for no time of its own.
WAITS = f"""{IS_FAILING} AND s.retry_at > (SELECT clock_timestamp()) AND NOT EXISTS (
        SELECT FROM {{schema}}.breaker AS b WHERE b.inbox = s.inbox
          AND (s.key = b.prefix OR s.key ^@ (b.prefix || b.separator)))"""
CHOSEN = f"(%(keys)s::text[] IS NULL OR s.key = ANY (%(keys)s::text[])) AND {FITS}"


@dataclass(frozen=True, slots=True)
class FailingKey:
    """A key that is tried again at `retry_at`, or at once if that is over; `reason` is its last failure.

    `attempts` is how often its message has failed, and `since` when it first did: None if that is not on record any
    more, or if only its batch has failed. The key '' stands for the whole of a total inbox.
    """

    inbox: str
    key: str
    attempts: int
    retry_at: datetime
    reason: str
    since: datetime | None


@dataclass(frozen=True, slots=True)
class FailingError:
    """An error with which keys of an inbox fail: how many, the most attempts of one, and when the first is tried.

    `error` is what the failures of these keys begin with, up to the first colon: the class of what was raised. `reason`
    is one of them. `waiting` of the keys wait for a time that is to come: `FailingKeys.retry` would have them tried at
    once.
    """

    inbox: str
    error: str
    keys: int
    attempts: int
    retry_at: datetime
    reason: str
    waiting: int


# Inbox by inbox through key_state_due, in the order in which they are tried.
KEYS = Sql(
    """
SELECT k.inbox, k.key, k.attempts::bigint, k.retry_at, k.last_error, (
    SELECT min(a.at) FROM {schema}.attempt AS a
    WHERE a.inbox = k.inbox AND a.key = k.key AND a.clock = k.clock AND a.outcome <> 'replay')
FROM (
    SELECT name FROM {schema}.inbox_registry WHERE %(inbox)s::text IS NULL OR name = %(inbox)s::text) AS r
CROSS JOIN LATERAL (
    SELECT s.inbox, s.key, s.clock, s.attempts, s.retry_at, coalesce(s.last_error, '') AS last_error
    FROM {schema}.key_state AS s
    WHERE s.inbox = r.name AND {is_failing} AND {chosen}
      AND s.retry_at >= coalesce(%(at)s::timestamptz, '-infinity')
      AND (%(at)s::timestamptz IS NULL
           OR (s.retry_at, s.inbox, s.key) > (%(at)s::timestamptz, %(after_inbox)s::text, %(after)s::text))
    ORDER BY s.retry_at, s.key LIMIT %(limit)s::bigint) AS k
ORDER BY k.retry_at, k.inbox, k.key LIMIT %(limit)s::bigint
""",
    into=FailingKey,
    is_failing=IS_FAILING,
    chosen=CHOSEN,
)
ERRORS = Sql(
    """
SELECT k.inbox, k.error, count(*), max(k.attempts)::bigint, min(k.retry_at), min(k.last_error),
       count(*) FILTER (WHERE k.waits)
FROM (
    SELECT name FROM {schema}.inbox_registry WHERE %(inbox)s::text IS NULL OR name = %(inbox)s::text) AS r
CROSS JOIN LATERAL (
    SELECT s.inbox, coalesce({error}, '') AS error, s.attempts, s.retry_at, coalesce(s.last_error, '') AS last_error,
           {waits} AS waits
    FROM {schema}.key_state AS s
    WHERE s.inbox = r.name AND {is_failing}
      AND (%(matching)s::text IS NULL OR position(%(matching)s::text IN s.last_error) > 0)
    ORDER BY s.retry_at, s.key LIMIT {counted}) AS k
GROUP BY k.inbox, k.error ORDER BY 3 DESC, 1, 2 LIMIT %(limit)s::bigint
""",
    into=FailingError,
    error=ERROR,
    is_failing=IS_FAILING,
    waits=WAITS,
    counted=COUNTED,
)
NUMBERS = Sql(
    """
SELECT count(*), count(*) FILTER (WHERE f.waits) FROM (
    SELECT k.waits FROM (
        SELECT name FROM {schema}.inbox_registry WHERE %(inbox)s::text IS NULL OR name = %(inbox)s::text) AS r
    CROSS JOIN LATERAL (
        SELECT {waits} AS waits FROM {schema}.key_state AS s
        WHERE s.inbox = r.name AND {is_failing} AND {fits} LIMIT {counted} + 1) AS k
    LIMIT {counted} + 1) AS f
""",
    columns=("bigint", "bigint"),
    waits=WAITS,
    is_failing=IS_FAILING,
    fits=FITS,
    counted=COUNTED,
)
NEXT = Sql(
    """
SELECT k.inbox, k.key FROM (
    SELECT name FROM {schema}.inbox_registry WHERE %(inbox)s::text IS NULL OR name = %(inbox)s::text) AS r
CROSS JOIN LATERAL (
    SELECT s.inbox, s.key, s.retry_at FROM {schema}.key_state AS s
    WHERE s.inbox = r.name AND {waits} AND {fits} ORDER BY s.retry_at, s.key LIMIT %(limit)s::bigint) AS k
ORDER BY k.retry_at, k.inbox, k.key LIMIT %(limit)s::bigint
""",
    columns=("text", "text"),
    waits=WAITS,
    fits=FITS,
)


def reading_failing(
    schema: str, inbox: str | None, *, matching: str | None = None, error: str | None = None,
    keys: Sequence[str] | None = None, limit: int | None = None, after: FailingKey | None = None,
) -> Operation[list[FailingKey]]:  # fmt: skip
    """Return the failing keys of an inbox or of all, the one that is tried next first, those `after` one of them."""
    at, after_inbox, last = (None, None, None) if after is None else (after.retry_at, after.inbox, after.key)
    found: list[FailingKey] = KEYS.named((yield KEYS.at(schema=schema)(
        inbox=inbox, keys=None if keys is None else list(keys), matching=matching, error=error, limit=limit, at=at,
        after_inbox=after_inbox, after=last,
    )))  # fmt: skip
    return found


def reading_errors(
    schema: str, inbox: str | None, *, matching: str | None = None, limit: int | None = None
) -> Operation[list[FailingError]]:
    """Return with which errors keys of an inbox or of all fail, that of the most keys first.

    Of each inbox 100,000 failing keys are looked through.
    """
    found: list[FailingError] = ERRORS.named(
        (yield ERRORS.at(schema=schema)(inbox=inbox, matching=matching, limit=limit))
    )
    return found


def counting_failing(
    schema: str, inbox: str | None, *, matching: str | None = None, error: str | None = None
) -> Operation[tuple[int, int]]:
    """Return how many keys of an inbox or of all fail, and how many of them wait for a time that is to come.

    At most 100,001 keys are looked through.
    """
    [(number, waiting)] = yield NUMBERS.at(schema=schema)(inbox=inbox, matching=matching, error=error)
    return int(number), int(waiting)


def reading_next(
    schema: str, inbox: str | None, *, matching: str | None = None, error: str | None = None, limit: int
) -> Operation[list[tuple[str, str]]]:
    """Return the inboxes and keys that wait for a time that is to come, the one that is tried next first."""
    rows = yield NEXT.at(schema=schema)(inbox=inbox, matching=matching, error=error, limit=limit)
    return [(name, key) for name, key in rows]
