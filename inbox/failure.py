"""What becomes of a message whose handler failed, recorded in a transaction of its own.

Counted in the rolled-back transaction, an attempt would never count. Only the head of its key counts, and a worker
counts only a message that it knows to be at fault: what failed in a batch with others is first tried alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from inbox.verdict import Park, Retry, Skip
from mailroom.message import DELIVERED, MESSAGE, Message
from mailroom.operation import Operation, Sql

MAX_ERROR_LENGTH = 500

Fate: TypeAlias = Literal["gone", "alone", "retry", "park", "skip"]

# The message's row is locked first, waiting for whoever tries it meanwhile: if it is gone there is nothing to record.
HOLD = Sql(
    "SELECT clock FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text AND clock = %(clock)s::bigint FOR UPDATE",
    columns=("bigint",),
)
# `verdict` is what the handler or the worker says: fail, fatal (no further attempt), park or skip. Not the head of its
# key (`alone`): the messages before it are still to be had, so it is not counted; the key is tried one message at a
# time up to it. Parking moves exactly the head; a mover takes what stands behind it (`inbox.parked`).
# A key that is parked stays so, whatever is recorded late of its other messages: its first one is held already.
# Exponential back-off with jitter, so that keys which failed together do not come back together.
RECORD = Sql(
    f"""
WITH tried AS MATERIALIZED (
    SELECT r.*, coalesce((SELECT attempts FROM {{schema}}.key_state
                          WHERE inbox = '{{inbox}}' AND key = %(key)s::text AND clock = %(clock)s::bigint), 0) + 1
                AS attempt,
           %(clock)s::bigint = (SELECT min(clock) FROM {{schema}}.inbox_{{inbox}} WHERE key = %(key)s::text) AS is_head
    FROM {{schema}}.inbox_registry AS r WHERE name = '{{inbox}}' AND NOT EXISTS (
        SELECT FROM {{schema}}.key_state
        WHERE inbox = '{{inbox}}' AND key = %(key)s::text AND parked_at IS NOT NULL)),
fated AS MATERIALIZED (
    SELECT *, CASE WHEN NOT is_head THEN 'alone' WHEN %(verdict)s::text IN ('park', 'skip') THEN %(verdict)s::text
                   WHEN %(verdict)s::text = 'fatal' OR attempt >= max_attempts THEN on_failure ELSE 'retry' END AS fate
    FROM tried),
noted AS (
    INSERT INTO {{schema}}.key_state AS s (inbox, key, clock, attempts, retry_at, parked_at, last_error)
    SELECT name, %(key)s::text, %(clock)s::bigint, CASE WHEN is_head THEN attempt ELSE 0 END,
           CASE fate WHEN 'park' THEN 'infinity' WHEN 'alone' THEN clock_timestamp()
                     ELSE clock_timestamp() + interval '1 s' * coalesce(
                         %(after_s)s::float8, (0.5::float8 + random() / 2::float8)
                         * least(backoff_max_s, backoff_s * 2::float8 ^ least(attempt - 1, 30)::float8)) END,
           CASE fate WHEN 'park' THEN clock_timestamp() END, %(error)s::text
    FROM fated WHERE fate <> 'skip'
    ON CONFLICT (inbox, key) DO UPDATE SET
        clock = excluded.clock, attempts = excluded.attempts, retry_at = excluded.retry_at,
        parked_at = excluded.parked_at, last_error = excluded.last_error
        WHERE s.parked_at IS NULL
    RETURNING extract(epoch FROM nullif(retry_at, 'infinity') - clock_timestamp())::float8 AS due_in_s),
gone AS (
    DELETE FROM {{schema}}.inbox_{{inbox}} WHERE key = %(key)s::text AND clock = %(clock)s::bigint
        AND (SELECT fate IN ('park', 'skip') FROM fated)
    RETURNING *),
parked AS (
    INSERT INTO {{schema}}.parked ({DELIVERED}) SELECT {DELIVERED} FROM gone, fated WHERE fate = 'park'),
dead AS (
    INSERT INTO {{schema}}.dead_letter (stage, reason, inbox, clock, attempts, {MESSAGE})
    SELECT 'reap', %(error)s::text, name, clock, attempt, {MESSAGE} FROM gone, fated WHERE fate = 'skip'),
well AS (
    DELETE FROM {{schema}}.key_state WHERE inbox = '{{inbox}}' AND key = %(key)s::text
        AND (SELECT fate = 'skip' FROM fated)),
history AS (
    INSERT INTO {{schema}}.attempt (inbox, key, clock, message_id, attempt, outcome, error)
    SELECT name, %(key)s::text, %(clock)s::bigint, %(id)s::uuid, attempt, fate, %(error)s::text
    FROM fated WHERE is_head)
SELECT fate, attempt::bigint, (SELECT due_in_s FROM noted) FROM fated
""",
    columns=("text", "bigint", "float8"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of a message: tried again (`retry`), its key parked, or the message skipped.

    `alone`: it was not counted, its key is tried one message at a time. `gone`: somebody else has consumed it,
    or has parked its key meanwhile.
    `attempt` is which attempt it was; `due_in_s` in how many seconds its key is tried next, None if it is not.
    """

    fate: Fate
    attempt: int
    due_in_s: float | None


GONE = Recorded("gone", 0, None)


def described(error: BaseException) -> str:
    """Return an error as the tables keep it: its type and text, cut."""
    text = str(error) if isinstance(error, Park | Skip | Retry) else f"{type(error).__name__}: {error}"
    return text.replace("\0", "")[:MAX_ERROR_LENGTH].encode(errors="replace").decode()


def verdict(error: BaseException, fatal: tuple[type[BaseException], ...]) -> str:
    """Return what an exception says of its message."""
    match error:
        case Park():
            return "park"
        case Skip():
            return "skip"
        case _:
            return "fatal" if isinstance(error, fatal) else "fail"


def recording(
    schema: str, inbox: str, message: Message, error: BaseException, fatal: tuple[type[BaseException], ...] = ()
) -> Operation[Recorded]:
    """Record one failed attempt at `message`, and do what follows from it; its key waits, is parked or goes on."""
    after_s = error.after_s if isinstance(error, Retry) else None
    return recording_failure(
        schema, inbox, message.key, message.clock, message.id, described(error), verdict(error, fatal), after_s
    )


def recording_failure(
    schema: str, inbox: str, key: str, clock: int, id: object, error: str, verdict: str, after_s: float | None = None
) -> Operation[Recorded]:
    """`recording` of what is known of a message without having it."""
    names = {"schema": schema, "inbox": inbox}
    if not (yield HOLD.at(**names)(key=key, clock=clock)):
        return GONE
    rows = yield RECORD.at(**names)(key=key, clock=clock, id=id, error=error, verdict=verdict, after_s=after_s)
    if not rows:
        return GONE
    [(fate, attempt, due_in_s)] = rows
    return Recorded(cast(Fate, fate), attempt, due_in_s)


# In key order, as everything that locks several keys, so that two of these cannot deadlock.
SUSPECT = Sql(
    """
INSERT INTO {schema}.key_state (inbox, key, clock, attempts, retry_at, last_error)
SELECT '{inbox}', key, clock, 0, clock_timestamp(), %(error)s::text
FROM unnest(%(keys)s::text[], %(clocks)s::bigint[]) AS u (key, clock)
WHERE EXISTS (SELECT FROM {schema}.inbox_{inbox} AS i WHERE i.key = u.key AND i.clock <= u.clock)
ORDER BY key
ON CONFLICT (inbox, key) DO NOTHING
"""
)


def suspecting(schema: str, inbox: str, keys: Sequence[str], clocks: Sequence[int], error: str) -> Operation[None]:
    """Have the keys of a failed batch tried one message at a time, each up to the clock it had in the batch.

    For a batch that failed with nobody knowing on which message: at its COMMIT, or by the death of its worker.
    """
    yield SUSPECT.at(schema=schema, inbox=inbox)(keys=list(keys), clocks=list(clocks), error=error)
