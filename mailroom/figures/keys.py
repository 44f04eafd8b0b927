"""How a failing, parked or paused key looks: a row in `key_state`. Those who write such rows are in `inbox/by_key`.

A failing key waits until `retry_at`. That is infinity while the key is parked, which `parked_at` tells, and while it is
paused, which `paused_at` tells; a key may be both. A row can outlast its trouble: then its time is -infinity.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from mailroom.sql.operation import Operation, Sql, filled

# Conditions for a row; `{row}` is its alias. An index finds parked keys by `PARKED`. For a row that is at hand,
# `IS_PARKED` is enough.
IS_PARKED = "{row}.parked_at IS NOT NULL"
HELD = "retry_at = 'infinity'"  # parked or paused
IN_TROUBLE = "{row}.retry_at > '-infinity'"
WAITS = "{row}.retry_at > {now} AND {row}.retry_at < 'infinity'"
PARKED = f"{{row}}.{HELD} AND {IS_PARKED}"
PAUSED = f"{{row}}.{HELD} AND {{row}}.paused_at IS NOT NULL"
TRIED = "{row}.retry_at < 'infinity' AND {row}.attempts > 0"
# When it is tried again; null for a key that is held.
NEXT_TRY = "nullif({row}.retry_at, 'infinity')"


@dataclass(frozen=True, slots=True)
class KeyLook:
    """A key that is failing, parked or paused: since when, and when it is tried again."""

    inbox: str
    key: str
    state: str
    attempts: int
    since: datetime | None
    retry_at: datetime | None


# What stands in its columns. A key that is both is called paused: it is replayed in vain until somebody resumes it.
FIELDS = """inbox, key, CASE WHEN paused_at IS NOT NULL THEN 'paused' WHEN retry_at = 'infinity' THEN 'parked'
            ELSE 'failing' END, attempts::bigint, coalesce(paused_at, parked_at), nullif(retry_at, 'infinity')"""
# Where failing keys are so many that ordering all takes long, any of them will do.
WORST = Sql(
    """
SELECT {fields}
FROM (SELECT inbox, key, attempts, paused_at, parked_at, retry_at FROM {schema}.key_state
      WHERE {in_trouble} LIMIT 10000) AS k
ORDER BY retry_at < 'infinity', coalesce(paused_at, parked_at), attempts DESC, inbox, key LIMIT %(most)s::bigint
""",
    into=KeyLook,
    fields=FIELDS,
    in_trouble=filled(IN_TROUBLE, row="key_state"),
)


def reading_worst(schema: str, most: int) -> Operation[list[KeyLook]]:
    """Return at most that many keys that are in trouble, the worst first."""
    return WORST.named((yield WORST.at(schema=schema)(most=most)))


class KeyCounts(NamedTuple):
    """The keys of an inbox: how many wait for their next attempt, are parked and not paused, and were tried.

    `due_s` is for how long the first of them may be tried again, None if none may.
    """

    inbox: str
    waiting: int
    parked: int
    due_s: float | None
    tried: int


# A key whose time has come is no longer late on purpose. The one that has waited longest is first by `key_state_due`.
# D-metrics-1: The leader counts failing keys, on its own clock.
COUNTS = Sql(
    """
SELECT inbox, count(*) FILTER (WHERE retry_at > now AND retry_at < 'infinity'),
       count(*) FILTER (WHERE retry_at = 'infinity' AND paused_at IS NULL),
       max(extract(epoch FROM now - retry_at)::float8) FILTER (WHERE retry_at <= now),
       count(*) FILTER (WHERE attempts > 0 AND retry_at < 'infinity')
FROM (SELECT inbox, attempts, retry_at, paused_at, coalesce(%(now)s::timestamptz, clock_timestamp()) AS now
      FROM {schema}.key_state WHERE retry_at > '-infinity') AS k
GROUP BY inbox
""",
    into=KeyCounts,
)


def counting_keys(schema: str, now: datetime | None) -> Operation[list[KeyCounts]]:
    """Return how many keys of each inbox are in trouble at `now`; None is the database's clock."""
    return COUNTS.named((yield COUNTS.at(schema=schema)(now=now)))


# A loop over an index, since DISTINCT would read every failing key.
WITH_PARKED = Sql(
    """
SELECT name FROM {schema}.inbox_registry AS r
WHERE EXISTS (SELECT FROM {schema}.key_state AS k WHERE k.inbox = r.name AND {parked}) ORDER BY name
""",
    columns=("text",),
    parked=filled(PARKED, row="k"),
)


def inboxes_with_parked(schema: str) -> Operation[list[str]]:
    """Return the inboxes that hold parked keys."""
    return [name for (name,) in (yield WITH_PARKED.at(schema=schema)())]
