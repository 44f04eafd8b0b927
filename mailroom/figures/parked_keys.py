"""Which keys are parked, of one inbox or of all; how many of each inbox, error and age; and how much they hold."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias, get_args

from mailroom.figures.failing_keys import COUNTED, ERROR, FITS
from mailroom.figures.keys import PARKED
from mailroom.order.traits import chosen
from mailroom.sql.operation import Operation, Sql, filled

# For less than an hour, for less than a day and not the last hour, and so on.
Age: TypeAlias = Literal["hour", "day", "week", "older"]
AGES: tuple[Age, ...] = get_args(Age)
GROUPS_SHOWN = 20  # of each kind
KEY_MESSAGES = 1_000  # messages of one key that are counted
MESSAGES = 10_000  # and those of all that one act changes

AGE = """CASE WHEN s.parked_at > statement_timestamp() - interval '1 hour' THEN 'hour'
              WHEN s.parked_at > statement_timestamp() - interval '1 day' THEN 'day'
              WHEN s.parked_at > statement_timestamp() - interval '7 days' THEN 'week' ELSE 'older' END"""
# Inbox by inbox through key_state_due: it reads no key that is only failing.
SHOWN = filled(
    "{parked} AND {fits} AND (%(age)s::text IS NULL OR {age} = %(age)s::text)",
    parked=filled(PARKED, row="s"),
    fits=FITS,
    age=AGE,
)


@dataclass(frozen=True, slots=True)
class ParkedLook:
    """A key that is parked since `parked_at`, for `reason`. The key '' stands for the whole of a total inbox.

    `attempts` is how often its message has failed.
    """

    inbox: str
    key: str
    attempts: int
    parked_at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class ParkedFilter:
    """Which parked keys are meant: of an inbox, of an error, whose reason contains a text, of an age; None is any."""

    inbox: str | None = None
    error: str | None = None
    matching: str | None = None
    age: Age | None = None

    @property
    def values(self) -> dict[str, object]:
        """What statements are given of it."""
        return {"inbox": self.inbox, "error": self.error, "matching": self.matching, "age": self.age}


@dataclass(frozen=True, slots=True)
class ParkedGroup:
    """How many parked keys have something in common: `what` is inbox, error or age, and `of` which of them."""

    what: str
    of: str
    keys: int


@dataclass(frozen=True, slots=True)
class Keeping:
    """An inbox that keeps what is discarded for so many days, and whether it can be replayed from there."""

    inbox: str
    days: int
    replays: bool


FIELDS = "s.inbox, s.key, s.attempts::bigint AS attempts, s.parked_at, coalesce(s.last_error, '') AS reason"
KEYS = Sql(
    """
SELECT k.* FROM (
    SELECT name FROM {schema}.inbox_registry
    WHERE name >= %(inbox_after)s::text AND (%(inbox)s::text IS NULL OR name = %(inbox)s::text) ORDER BY name) AS r
CROSS JOIN LATERAL (
    SELECT {fields} FROM {schema}.key_state AS s
    WHERE s.inbox = r.name AND {shown} AND (r.name > %(inbox_after)s::text OR s.key > %(after)s::text)
    ORDER BY s.retry_at, s.key LIMIT %(limit)s::bigint) AS k
ORDER BY k.inbox, k.key LIMIT %(limit)s::bigint
""",
    into=ParkedLook,
    fields=FIELDS,
    shown=SHOWN,
)
# No index has this order: it reads all that are shown.
OLDEST = Sql(
    """
SELECT k.* FROM (
    SELECT name FROM {schema}.inbox_registry WHERE %(inbox)s::text IS NULL OR name = %(inbox)s::text) AS r
CROSS JOIN LATERAL (
    SELECT {fields} FROM {schema}.key_state AS s
    WHERE s.inbox = r.name AND {shown}
      AND (%(at)s::timestamptz IS NULL
           OR (s.parked_at, s.inbox, s.key) > (%(at)s::timestamptz, %(inbox_after)s::text, %(after)s::text))
    ORDER BY s.parked_at, s.key LIMIT %(limit)s::bigint) AS k
ORDER BY k.parked_at, k.inbox, k.key LIMIT %(limit)s::bigint
""",
    into=ParkedLook,
    fields=FIELDS,
    shown=SHOWN,
)
GROUPS = Sql(
    """
WITH shown AS MATERIALIZED (
    SELECT k.* FROM (
        SELECT name FROM {schema}.inbox_registry WHERE %(inbox)s::text IS NULL OR name = %(inbox)s::text) AS r
    CROSS JOIN LATERAL (
        SELECT s.inbox, coalesce({error}, '') AS error, {age} AS age FROM {schema}.key_state AS s
        WHERE s.inbox = r.name AND {shown} LIMIT {counted} + 1) AS k
    LIMIT {counted} + 1)
SELECT g.what, g.of, g.keys FROM (
    SELECT v.what, v.of, count(*) AS keys,
           row_number() OVER (PARTITION BY v.what ORDER BY count(*) DESC, v.of) AS nth
    FROM shown CROSS JOIN LATERAL (
        VALUES ('inbox', shown.inbox), ('error', shown.error), ('age', shown.age)) AS v (what, of)
    GROUP BY v.what, v.of) AS g
WHERE g.nth <= {most} ORDER BY g.what, g.nth
""",
    into=ParkedGroup,
    error=ERROR,
    age=AGE,
    shown=SHOWN,
    counted=COUNTED,
    most=GROUPS_SHOWN,
)
# The inboxes are named in the text, so that the plan has their partitions alone. A total inbox has its messages there,
# whatever their keys.
HELD = """
    SELECT FROM {schema}.parked WHERE inbox = k.inbox AND key = k.key
    UNION ALL
    SELECT FROM {schema}.inbox WHERE inbox = k.inbox AND inbox IN ('{names}') AND key = k.key
    UNION ALL
    SELECT FROM {schema}.inbox WHERE inbox = k.inbox AND inbox IN ('{names}') AND k.key = ''"""
OF_EACH = Sql(
    """
SELECT (SELECT count(*) FROM ({held} LIMIT {most} + 1) AS m)
FROM unnest(%(inboxes)s::text[], %(keys)s::text[]) WITH ORDINALITY AS k (inbox, key, nth) ORDER BY nth
""",
    columns=("bigint",),
    held=HELD,
    most=KEY_MESSAGES,
)
OF_ALL = Sql(
    """
SELECT count(*) FROM (
    SELECT FROM unnest(%(inboxes)s::text[], %(keys)s::text[]) AS k (inbox, key) CROSS JOIN LATERAL ({held}) AS m
    LIMIT {most} + 1) AS c
""",
    columns=("bigint",),
    held=HELD,
    most=MESSAGES,
)
# Of total order the archive keeps messages, and cannot replay them.
KEEPING = Sql(
    """
SELECT name, keep_reaped_days::bigint, {replays} FROM {schema}.inbox_registry
WHERE name = ANY (%(inboxes)s::text[]) AND keep_reaped_days IS NOT NULL ORDER BY name
""",
    into=Keeping,
    replays=chosen(takes_replays=True),
)


def reading_parked(
    schema: str, of: ParkedFilter, *, limit: int, after: tuple[str, str] = ("", "")
) -> Operation[list[ParkedLook]]:
    """Return parked keys by inbox and key, those `after` one of them."""
    found: list[ParkedLook] = KEYS.named(
        (yield KEYS.at(schema=schema)(**of.values, limit=limit, inbox_after=after[0], after=after[1]))
    )
    return found


def reading_oldest(
    schema: str, of: ParkedFilter, *, limit: int, after: tuple[datetime, str, str] | None = None
) -> Operation[list[ParkedLook]]:
    """Return parked keys, the longest parked first, those `after` one of them."""
    at, inbox, key = after or (None, "", "")
    found: list[ParkedLook] = OLDEST.named(
        (yield OLDEST.at(schema=schema)(**of.values, limit=limit, at=at, inbox_after=inbox, after=key))
    )
    return found


def reading_groups(schema: str, of: ParkedFilter) -> Operation[list[ParkedGroup]]:
    """Return how many parked keys there are of each inbox, each error and each age, the most first.

    At most 100,001 keys are looked through, and of each kind 20 are returned. Of ages there are four.
    """
    found: list[ParkedGroup] = GROUPS.named((yield GROUPS.at(schema=schema)(**of.values)))
    return found


def reading_keeping(schema: str, inboxes: Collection[str]) -> Operation[list[Keeping]]:
    """Return which of these inboxes have an archive."""
    found: list[Keeping] = KEEPING.named((yield KEEPING.at(schema=schema)(inboxes=sorted(set(inboxes)))))
    return found


def counting_each(schema: str, of: Sequence[tuple[str, str]], but: Collection[str]) -> Operation[list[int | None]]:
    """Return how many messages each key holds, given with its inbox; None if more than 1,000, or unknown.

    The tables of the inboxes in `but` are not read.
    """
    if not of:
        return []
    rows = yield OF_EACH.at(schema=schema, names=_names(of, but))(**_pairs(of))
    return [
        number if number <= KEY_MESSAGES and inbox not in but else None
        for (inbox, _), (number,) in zip(of, rows, strict=True)
    ]


def counting_all(schema: str, of: Sequence[tuple[str, str]]) -> Operation[int]:
    """Return how many messages these keys hold together, 10,001 if more than 10,000."""
    if not of:
        return 0
    [(number,)] = yield OF_ALL.at(schema=schema, names=_names(of, ()))(**_pairs(of))
    return int(number)


def _names(of: Sequence[tuple[str, str]], but: Collection[str]) -> str:
    return "', '".join(name for name in dict.fromkeys(inbox for inbox, _ in of) if name not in but)


def _pairs(of: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    return {"inboxes": [inbox for inbox, _ in of], "keys": [key for _, key in of]}
