"""Failed attempts and their outcome, recorded in a separate transaction while the batch still locks the message.

An attempt recorded in the batch's own transaction would be rolled back with it. Recorded after the rollback, other
workers could try the message in between. The record only states the outcome: the next claim of the key moves a message
that has used up its attempts (`inbox.by_key.due`), since only the holder of its lock can move it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast
from uuid import UUID

from inbox.exceptions import Park, Retry, Skip
from mailroom.errors import DecodeError, NoHandler, coded
from mailroom.message.message import Message
from mailroom.session.settings import of_this_process
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import APPLICATION

MAX_ERROR_LENGTH = 500
MAX_CLASS_NAME_LENGTH = 200

# A retry cannot mend these.
ALWAYS_FATAL: tuple[type[BaseException], ...] = (DecodeError, NoHandler)

Outcome: TypeAlias = Literal["gone", "alone", "retry", "park", "skip"]

# `failure` is the kind of failure: fail, fatal (no further attempt), park or skip.
# `attempt` holds the history of the message. `key_state` holds what claims need to know of its key: when it is tried
# next, up to which clock apart from other keys (`alone_to`), and up to which clock one message at a time
# (`suspect_to`). A message after others of its key (not `is_head`) is counted like any other: the earlier ones are
# tried at once, and it when its own time comes (`inbox.by_key.due.HEAL`).
# History is deleted after a while, so the count of a key's last failed message is also in the key's row.
# A parked key stays parked, whatever is recorded late for its other messages: its first one is held already. So does a
# key that was paused while the message was in hand, and `resume_at` keeps when it is tried next.
# The backoff is exponential with jitter, so that keys which failed together are not retried together.
# D-workers-1: An attempt is recorded before the rollback.
DECIDED = """decided AS MATERIALIZED (
    SELECT *, CASE WHEN %(failure)s::text IN ('park', 'skip') THEN %(failure)s::text
                   WHEN %(failure)s::text = 'fatal' OR attempt >= max_attempts THEN on_failure
                   ELSE 'retry' END AS outcome,
           clock_timestamp() + interval '1 s' * coalesce(
               %(after_s)s::float8, (0.5::float8 + random() / 2::float8)
               * least(backoff_max_s, backoff_s * 2::float8 ^ least(attempt - 1, 30)::float8)) AS retry_at
    FROM tried)"""
RECORDED = ("text", "bigint", "float8", "bigint")
# Who records an attempt. Sessions of a worker have long names, which are cut off, and say no more than its inbox.
RECORDER = f"""pg_catalog.ltrim(pg_catalog.concat(
               CASE WHEN application ^@ '{APPLICATION}worker' THEN '{APPLICATION}worker' ELSE application END,
               %(process)s::text))"""
TRIED = """
WITH tried AS MATERIALIZED (
    SELECT r.*,
           {is_head} AS is_head,
           1 + greatest(0, (SELECT attempt FROM {schema}.my_attempt
                            WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock = %(clock)s::bigint
                            ORDER BY id DESC LIMIT 1),
                        (SELECT attempts FROM {schema}.my_key_state
                         WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock = %(clock)s::bigint)) AS attempt
    FROM {schema}.inbox_registry AS r
    WHERE name = '{inbox}'
      AND {is_there}
      AND NOT EXISTS (SELECT FROM {schema}.my_key_state
                      WHERE inbox = '{inbox}' AND key = %(key)s::text AND parked_at IS NOT NULL)),
{decided},
changed AS (
    INSERT INTO {schema}.my_key_state AS s (inbox, key, clock, attempts, retry_at, last_error, alone_to, suspect_to)
    SELECT name, %(key)s::text, %(clock)s::bigint, attempt,
           CASE WHEN is_head AND outcome = 'retry' THEN retry_at ELSE clock_timestamp() END, %(error)s::text,
           %(clock)s::bigint, %(clock)s::bigint
    FROM decided
    ON CONFLICT (inbox, key) DO UPDATE SET
        clock = excluded.clock, attempts = excluded.attempts,
        retry_at = CASE WHEN s.paused_at IS NULL THEN excluded.retry_at ELSE s.retry_at END,
        resume_at = CASE WHEN s.paused_at IS NOT NULL THEN excluded.retry_at END,
        last_error = excluded.last_error, alone_to = greatest(s.alone_to, s.clock, excluded.alone_to),
        suspect_to = greatest(s.suspect_to, s.clock, excluded.suspect_to)
        WHERE s.parked_at IS NULL
    RETURNING extract(epoch FROM nullif(retry_at, 'infinity') - clock_timestamp())::float8 AS due_in_s),
history AS (
    INSERT INTO {schema}.my_attempt (inbox, key, clock, message_id, attempt, outcome, retry_at, error, error_class,
                                     worker)
    SELECT name, %(key)s::text, %(clock)s::bigint, %(id)s::uuid, attempt, outcome,
           CASE outcome WHEN 'retry' THEN retry_at END, %(error)s::text, %(error_class)s::text,
           {recorder}
    FROM decided CROSS JOIN pg_catalog.current_setting('application_name'::text) AS s (application))
SELECT outcome, attempt::bigint, (SELECT due_in_s FROM changed), max_attempts::bigint FROM decided
"""
RECORD = Sql(
    TRIED,
    columns=RECORDED,
    decided=DECIDED,
    recorder=RECORDER,
    is_head="%(clock)s::bigint = (SELECT min(clock) FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text)",
    is_there="EXISTS (SELECT FROM {schema}.inbox_{inbox} WHERE key = %(key)s::text AND clock = %(clock)s::bigint)",
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The outcome of a failed attempt: the message is tried again (`retry`), its key parked, or the message skipped.

    `gone` means that another transaction has consumed the message or parked its key in the meantime; `alone`, that it
    is not known which message of the batch failed, so that each is tried alone. `attempt` counts from 1, up to the
    inbox's `max_attempts`. `due_in_s` is the number of seconds until the key is tried next, None if it is not.
    """

    outcome: Outcome
    attempt: int
    due_in_s: float | None
    max_attempts: int = 0


GONE = Recorded("gone", 0, None)


def described(error: BaseException) -> str:
    """Return an error as the tables store it: its type and text, truncated."""
    name = type(error).__name__
    try:
        text = str(error) if isinstance(error, Park | Skip | Retry) else f"{coded(name, error)}: {error}"
    except Exception as raised:  # the `__str__` of a user's exception class may fail
        text = f"{name} (its text raised {type(raised).__name__})"
    return text.replace("\0", "")[:MAX_ERROR_LENGTH].encode(errors="replace").decode()


def class_name(error: BaseException) -> str:
    """Return the name of an error's class, as the answer to a command names it."""
    return type(error).__name__[:MAX_CLASS_NAME_LENGTH]


def failure_kind(error: BaseException, fatal: tuple[type[BaseException], ...]) -> str:
    """Return the kind of failure that an exception of a handler stands for: park, skip, fatal or fail."""
    match error:
        case Park():
            return "park"
        case Skip():
            return "skip"
        case _:
            return "fatal" if isinstance(error, (*ALWAYS_FATAL, *fatal)) else "fail"


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed attempt at a message, as it is recorded. `kind` is that of `failure_kind`."""

    key: str
    clock: int
    id: UUID
    error: str
    error_class: str
    kind: str = "fail"
    after_s: float | None = None


def failed(message: Message, error: BaseException, fatal: tuple[type[BaseException], ...] = ()) -> Failed:
    """Return what is recorded of an attempt at `message` that ended with this error."""
    after_s = error.after_s if isinstance(error, Retry) else None
    text, name, kind = described(error), class_name(error), failure_kind(error, fatal)
    return Failed(message.key, message.clock, message.id, text, name, kind, after_s)


def recording(schema: str, inbox: str, attempt: Failed, statement: Sql = RECORD, **names: str) -> Operation[Recorded]:
    """Record one failed attempt, and its outcome: the message's key waits, or the message ends."""
    rows = yield statement.at(**names, schema=schema, inbox=inbox)(
        key=attempt.key, clock=attempt.clock, id=attempt.id, error=attempt.error, error_class=attempt.error_class,
        failure=attempt.kind, after_s=attempt.after_s, process=of_this_process(""),
    )  # fmt: skip
    if not rows:
        return GONE
    [(outcome, number, due_in_s, max_attempts)] = rows
    return Recorded(cast(Outcome, outcome), number, due_in_s, max_attempts)


def last_clocks(messages: Sequence[Message]) -> dict[str, int]:
    """Return each key of these messages with its last clock; the messages are in clock order."""
    return {message.key: message.clock for message in messages}


# Keys are locked in key order, as everywhere, so that two of these statements cannot deadlock. A key of the batch may
# be failing already: above `suspect_to` its messages are claimed in batches too (`inbox.by_key.due`).
SUSPECTED = """
INSERT INTO {schema}.my_key_state AS s (inbox, key, clock, attempts, retry_at, last_error, alone_to, suspect_to)
SELECT '{inbox}', key, clock, 0, clock_timestamp(), %(error)s::text, clock, clock
FROM unnest(%(keys)s::text[], %(clocks)s::bigint[]) AS u (key, clock)
WHERE {is_there}
ORDER BY key
ON CONFLICT (inbox, key) DO UPDATE SET
    alone_to = greatest(s.alone_to, excluded.alone_to), suspect_to = excluded.suspect_to,
    last_error = excluded.last_error
    WHERE s.suspect_to < excluded.suspect_to
"""
SUSPECT = Sql(
    SUSPECTED,
    is_there="EXISTS (SELECT FROM {schema}.inbox_{inbox} AS i WHERE i.key = u.key AND i.clock <= u.clock)",
)


def suspecting(
    schema: str, inbox: str, keys: Sequence[str], clocks: Sequence[int], error: str, statement: Sql = SUSPECT,
    **names: str,
) -> Operation[None]:  # fmt: skip
    """Have these keys of a failed batch tried one message at a time, each up to its last clock in the batch.

    Use it for the messages that were handled before the one that failed; or for the whole batch if nobody knows which
    message failed, because its COMMIT failed or its worker died.
    """
    yield statement.at(**names, schema=schema, inbox=inbox)(keys=list(keys), clocks=list(clocks), error=error)


# Of a batch whose worker has died.
WAS_IN_BATCH = Sql(
    """
SELECT EXISTS (
    SELECT FROM {there} AS i, LATERAL (
        SELECT FROM {schema}.my_key_state AS s
        WHERE s.inbox = '{inbox}' AND s.key = {failing} AND s.last_error = %(error)s::text AND s.suspect_to >= {upto}
          AND NOT EXISTS (SELECT FROM {schema}.my_attempt AS a
                          WHERE a.inbox = '{inbox}' AND a.key = {failing} AND a.clock = i.clock)) AS s
    WHERE i.key = %(key)s::text AND i.clock = %(clock)s::bigint)
""",
    columns=("boolean",),
)


def was_in_batch(
    schema: str, inbox: str, key: str, clock: int, error: str, *, failing: str = "i.key", upto: str = "i.clock",
    there: str = "{schema}.inbox_{inbox}",
) -> Operation[bool]:  # fmt: skip
    """Return whether this message was in a batch that ended with this error, and no attempt was counted since.

    `failing` and `upto` are the key that it fails under, and by which clocks it is suspected; `there` has its key and
    clock as long as it waits.
    """
    names = {"there": there, "failing": failing, "upto": upto, "schema": schema, "inbox": inbox}
    [(found,)] = yield WAS_IN_BATCH.at(**names)(key=key, clock=clock, error=error)
    return bool(found)
