"""Paused keys: an operator holds them; their messages wait in the inbox, in order, and deliveries go on.

A paused key has a row in `key_state` with `paused_at`, whether it has messages or not, and `retry_at = 'infinity'`. So
claims see it as one that waits, and the healthy floor passes its messages as those of any failing key. What `retry_at`
would be is kept in `resume_at`, also if a message that was in hand at the pause fails later. A key may be parked and
paused. Only a resume ends a pause: other code that deletes or frees rows of `key_state` leaves these.
"""

from dataclasses import dataclass
from datetime import datetime

from inbox.by_key.parked_keys import HELD
from mailroom.sql.operation import Operation, Sql


@dataclass(frozen=True, slots=True)
class PausedKey:
    """A paused key: how many messages it holds, since when it is paused, and by whom and why.

    `is_parked`: it is parked too, and stays so when it is resumed.
    """

    key: str
    messages: int
    paused_at: datetime
    paused_by: str
    is_parked: bool


# It waits for a transaction that deletes the key's row: the claim of a failing key.
PAUSE = Sql(
    """
INSERT INTO {schema}.key_state AS s (inbox, key, clock, attempts, retry_at, paused_at, paused_by)
VALUES ('{inbox}', %(key)s::text, 0, 0, 'infinity', clock_timestamp(), %(by)s::text)
ON CONFLICT (inbox, key) DO UPDATE SET
    retry_at = excluded.retry_at, resume_at = CASE WHEN s.parked_at IS NULL THEN s.retry_at END,
    paused_at = excluded.paused_at, paused_by = excluded.paused_by
    WHERE s.paused_at IS NULL
RETURNING true
""",
    columns=("boolean",),
)


def pausing_key(schema: str, inbox: str, key: str, by: str) -> Operation[bool]:
    """Pause a key; return whether it was not paused before."""
    return bool((yield PAUSE.at(schema=schema, inbox=inbox)(key=key, by=by)))


# First the lock, and then a statement with a later snapshot: the healthy floor may have passed the key in the meantime,
# which then has to stay a failing key up to there (`alone_to`).
LOCK = Sql(
    """
SELECT true FROM {schema}.key_state
WHERE inbox = '{inbox}' AND key = %(key)s::text AND paused_at IS NOT NULL FOR UPDATE
""",
    columns=("boolean",),
)
RESUME = Sql(
    """
WITH healthy AS (
    DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = %(key)s::text AND {is_healthy})
UPDATE {schema}.key_state
SET retry_at = CASE WHEN parked_at IS NULL THEN coalesce(resume_at, clock_timestamp()) ELSE retry_at END,
    paused_at = NULL, paused_by = NULL, resume_at = NULL
WHERE inbox = '{inbox}' AND key = %(key)s::text AND NOT ({is_healthy})
""",
    is_healthy="parked_at IS NULL AND resume_at IS NULL AND alone_to = 0 AND suspect_to = 0",
)


def resuming_key(schema: str, inbox: str, key: str) -> Operation[bool]:
    """Make a key what it would be if it had not been paused; return whether it was paused."""
    if not (yield LOCK.at(schema=schema, inbox=inbox)(key=key)):
        return False
    yield RESUME.at(schema=schema, inbox=inbox)(key=key)
    return True


LIST = Sql(
    """
SELECT key, (SELECT count(*) FROM ({held}) AS held), paused_at, paused_by, parked_at IS NOT NULL
FROM {schema}.key_state AS c
WHERE inbox = '{inbox}' AND retry_at = 'infinity' AND paused_at IS NOT NULL
ORDER BY paused_at, key LIMIT %(limit)s::bigint
""",
    columns=("text", "bigint", "timestamptz", "text", "boolean"),
    held=HELD.format(columns="1", key="c.key"),
)


def listing_paused(schema: str, inbox: str, limit: int | None) -> Operation[list[PausedKey]]:
    """Return the paused keys, the longest paused first."""
    return [PausedKey(*row) for row in (yield LIST.at(schema=schema, inbox=inbox)(limit=limit))]
