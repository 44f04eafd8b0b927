"""Open breakers of prefixes of keys, and how they close. `inbox.breakers` is what workers do while one is open.

A key's prefix is what it has before the first separator, or the whole key. While the breaker of a prefix is open, its
keys have rows in `key_state`, as failing keys have that are not due: so claims pass them, and the order of each is kept
by what keeps it anyway. A row that is there for no other reason has no attempt, and is deleted when the breaker closes.

Every change here locks the row of the breaker first, and rows of `key_state` in key order after that.
"""

from dataclasses import dataclass

from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql

WHY = "the breaker of its prefix is open"  # the last error of keys that wait for nothing else
NOW = "coalesce(%(now)s::timestamptz, clock_timestamp())"
# Between the prefix itself and the keys that go on with the separator are those of other prefixes: 'a', 'a+', 'a/1'.
OF_PREFIX = """{key} >= %(prefix)s::text AND {key} < %(end)s::text
      AND ({key} = %(prefix)s::text OR {key} >= %(start)s::text)"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of keys, with the separator that ends it."""

    prefix: str
    separator: str

    @property
    def bounds(self) -> dict[str, str]:
        """The parameters of `OF_PREFIX`: keys compare by their bytes."""
        return {
            "prefix": self.prefix,
            "start": self.prefix + self.separator,
            "end": self.prefix + chr(ord(self.separator) + 1),
        }


def prefix_of(key: str, separator: str) -> str:
    """Return what the key has before the first separator; the whole key if it has none."""
    return key.partition(separator)[0]


BREAKER_LOCK = Sql(
    """
SELECT prefix, separator FROM {schema}.{breaker}
WHERE inbox = '{inbox}' AND prefix = coalesce(%(prefix)s::text, prefix) ORDER BY prefix FOR UPDATE
""",
    columns=("text", "text"),
)
# First the locks, and then a statement with a later snapshot: the healthy floor may have passed a key in the meantime,
# which then has to stay a failing key up to there (`alone_to`). A row that is locked has a message in hand. If that was
# the snapshot's fault alone, it waits until its time, an hour at most.
LOCK_KEYS = Sql(
    """
SELECT count(*) FROM (
    SELECT FROM {schema}.{key_state} WHERE inbox = '{inbox}' AND {of_prefix} ORDER BY key FOR UPDATE SKIP LOCKED) AS k
""",
    columns=("bigint",),
    of_prefix=OF_PREFIX.format(key="key"),
)
# A key that was paused meanwhile goes on when it is resumed, and a parked one when it is replayed.
RELEASE = Sql(
    """
WITH healthy AS (
    UPDATE {schema}.{key_state} SET deleted = true WHERE inbox = '{inbox}' AND {of_prefix} AND {is_healthy})
UPDATE {schema}.{key_state} SET
    retry_at = CASE WHEN retry_at < 'infinity' THEN {now} ELSE retry_at END,
    resume_at = CASE WHEN resume_at < 'infinity' THEN {now} END
WHERE inbox = '{inbox}' AND {of_prefix} AND NOT ({is_healthy})
  AND greatest(nullif(retry_at, 'infinity'), nullif(resume_at, 'infinity')) <= {now} + interval '{longest_s} s'
""",
    now=NOW,
    of_prefix=OF_PREFIX.format(key="key"),
    is_healthy="parked_at IS NULL AND paused_at IS NULL AND attempts = 0 AND alone_to = 0 AND suspect_to = 0",
)
DELETE = Sql("UPDATE {schema}.{breaker} SET deleted = true WHERE inbox = '{inbox}' AND prefix = %(prefix)s::text")
# Sleeping workers of the inbox wake up, and look.
NOTIFY = Sql(
    "SELECT pg_notify({partition_channel}, '') IS NULL",
    columns=("boolean",),
    partition_channel=locks.channel("'{schema}.inbox_{inbox}'::regclass"),
)
# How long keys wait if no worker renews that: longer than any time between two tries. A failing key whose own time is
# later than that keeps it, so it has to be told apart when the breaker closes.
DEFERRED_S = 3_600


def closing_prefixes(
    schema: str, inbox: str, prefix: str | None = None, *, by_hand: bool = False
) -> Operation[list[str]]:
    """Close the breaker of a prefix, or all of the inbox; return the prefixes that had an open one.

    Their keys are due at once, and sleeping workers wake up at the COMMIT. `by_hand`: an operator writes the tables
    themselves, since the views are for those who may take messages.
    """
    names = {"schema": schema, "inbox": inbox}
    tables = {"breaker": "breaker" if by_hand else "my_breaker"}
    key_state = {"key_state": "key_state" if by_hand else "my_key_state"}
    found = [Prefix(*row) for row in (yield BREAKER_LOCK.at(**names, **tables)(prefix=prefix))]
    for each in found:
        yield LOCK_KEYS.at(**names, **key_state)(**each.bounds)
        yield RELEASE.at(longest_s=str(DEFERRED_S), **names, **key_state)(now=None, **each.bounds)
        yield DELETE.at(**names, **tables)(prefix=each.prefix)
    if found:
        yield NOTIFY.at(**names)()
    return [each.prefix for each in found]
