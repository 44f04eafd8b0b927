"""A failed attempt, recorded by itself: counted in the rolled-back transaction, it would never count."""

from mailroom.message import Message
from mailroom.operation import Operation, Sql

MAX_ERROR_LENGTH = 500

# The message's row is locked first, waiting for whoever tries it meanwhile: if it is gone there is nothing to record.
# Exponential back-off with jitter, so that keys which failed together do not come back together.
RECORD = Sql(
    """
WITH failed AS MATERIALIZED (
    SELECT key, clock FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text AND clock = %(clock)s::bigint FOR UPDATE)
INSERT INTO {schema}.key_state AS s (inbox, key, clock, attempts, retry_at, last_error)
SELECT '{inbox}', key, clock, 1, clock_timestamp() + backoff_s * (0.5 + random() / 2) * interval '1 s', %(error)s::text
FROM failed, {schema}.inbox_registry WHERE name = '{inbox}'
ON CONFLICT (inbox, key) DO UPDATE SET
    clock = excluded.clock, last_error = excluded.last_error,
    attempts = CASE WHEN s.clock = excluded.clock THEN s.attempts + 1 ELSE 1 END,
    retry_at = (SELECT clock_timestamp() + (0.5 + random() / 2) * interval '1 s' * least(
                    backoff_max_s,
                    backoff_s * 2 ^ CASE WHEN s.clock = excluded.clock THEN least(s.attempts, 30) ELSE 0 END)
                FROM {schema}.inbox_registry WHERE name = '{inbox}')
RETURNING attempts::bigint
""",
    columns=("bigint",),
)


def recording(schema: str, inbox: str, message: Message, error: BaseException) -> Operation[int]:
    """Record one failed attempt at `message`; its key waits. Returns the attempts so far, 0 if it is gone."""
    text = f"{type(error).__name__}: {error}".replace("\0", "")[:MAX_ERROR_LENGTH]
    text = text.encode(errors="replace").decode()
    rows = yield RECORD.at(schema=schema, inbox=inbox)(key=message.key, clock=message.clock, error=text)
    return int(rows[0][0]) if rows else 0
