"""Due: the claim of a key in trouble whose time has come, one message per transaction as long as one may fail.

Alone, so that what goes wrong is the message's own doing. A message that has had its last attempt is not tried again:
the claim moves it to where it ends. So whoever fails only writes down what follows (`inbox.failure`), and what was
written down is done although its worker died.
"""

from inbox.claim import FITTING, NULLS, PICKED, PIN, SIZE, UNPINNED, Claimed
from mailroom.message import COLUMNS, DELIVERED, MESSAGE, SELECTED, Message
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql

# A key whose head somebody holds is passed over; keys are looked at one by one until one can be had. Of the statement's
# own time, not the transaction's: what was recorded since the transaction began may be due.
NOW = "(SELECT clock_timestamp())"
LOCK_HEAD = Sql(
    """
WITH bound AS MATERIALIZED (SELECT floor FROM {schema}.inbox_registry WHERE name = '{inbox}'),
head AS MATERIALIZED (
    SELECT l.key, l.clock FROM (
        SELECT key FROM {schema}.key_state
        WHERE inbox = '{inbox}' AND retry_at <= {now} ORDER BY retry_at, key) AS d, LATERAL (
        SELECT key, clock FROM {schema}.inbox_{inbox} AS i
        WHERE i.key = d.key AND i.clock = (SELECT min(clock) FROM {schema}.inbox_{inbox}
                                           WHERE key = d.key AND clock > (SELECT floor FROM bound))
        FOR UPDATE SKIP LOCKED) AS l
    LIMIT 1)
SELECT key, clock, NULL::float8 AS due_in_s, NULL::boolean FROM head
UNION ALL
SELECT NULL, NULL, (SELECT extract(epoch FROM min(retry_at) - clock_timestamp())::float8 FROM {schema}.key_state
                    WHERE inbox = '{inbox}' AND retry_at < 'infinity' AND retry_at > {now}),
       CASE WHEN NOT EXISTS (SELECT FROM head) THEN {unpinned} END
ORDER BY clock
""",
    columns=("text", "bigint", "float8", "boolean"),
    now=NOW,
    unpinned=UNPINNED,
)
# A statement of its own, with the head's lock in hand: its snapshot has all that was recorded before the lock was let
# go. The last record of this message tells whether it ends here. It parks the message, not the key's others: a mover
# takes what stands behind it (`inbox.parked`). Taken, its note stays until its handler is done (`healing`), so that a
# failure can be recorded on another session while the message is still locked.
# Behind what is tried alone may stand what nobody suspects, if it lies below the healthy floor. That comes in batches.
# It tells when the next key is due: of those that are already, only if it had one, since it had passed them over.
OTHERS = (
    "retry_at > now() OR EXISTS (SELECT FROM gone WHERE gone.key <> key_state.key) "
    "OR (SELECT max(clock) FROM gone) < greatest(key_state.clock, key_state.alone_to)"
)
HELD = "EXISTS (SELECT FROM gone) AND NOT EXISTS (SELECT FROM last WHERE outcome IN ('park', 'skip'))"
TAKE_HEAD = Sql(
    """
WITH last AS MATERIALIZED (
    SELECT attempt, outcome, error FROM {schema}.attempt
    WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock = %(clock)s::bigint ORDER BY id DESC LIMIT 1),
share AS MATERIALIZED (
    SELECT CASE WHEN greatest(clock, suspect_to) < %(clock)s::bigint THEN %(limit)s::bigint ELSE 1 END AS rows
    FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = %(key)s::text AND retry_at <= {now}),
picked AS MATERIALIZED (
    SELECT i.* FROM share, LATERAL (
        SELECT {picked} FROM {schema}.inbox_{inbox}
        WHERE key = %(key)s::text AND clock >= %(clock)s::bigint ORDER BY clock LIMIT share.rows) AS i),
{fitting},
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*),
parked AS (
    INSERT INTO {schema}.parked ({delivered}) SELECT {delivered} FROM gone WHERE (SELECT outcome = 'park' FROM last)),
held AS (
    UPDATE {schema}.key_state AS s
    SET clock = gone.clock, attempts = last.attempt, retry_at = 'infinity', parked_at = clock_timestamp(),
        last_error = last.error
    FROM gone, last WHERE s.inbox = '{inbox}' AND s.key = gone.key AND last.outcome = 'park'),
dead AS (
    INSERT INTO {schema}.dead_letter (stage, reason, inbox, clock, attempts, {message})
    SELECT 'reap', last.error, gone.inbox, gone.clock, last.attempt, {message}
    FROM gone, last WHERE last.outcome = 'skip'),
well AS (
    DELETE FROM {schema}.key_state AS s USING gone, last
    WHERE s.inbox = '{inbox}' AND s.key = gone.key AND last.outcome = 'skip' AND s.alone_to <= gone.clock)
SELECT {selected}, (SELECT outcome FROM last WHERE outcome IN ('park', 'skip')), NULL::float8, NULL::boolean FROM gone
UNION ALL
SELECT {nulls}, NULL,
       (SELECT extract(epoch FROM min(retry_at) - clock_timestamp())::float8 FROM {schema}.key_state
        WHERE inbox = '{inbox}' AND retry_at < 'infinity' AND ({others})),
       {unpinned} OR ({held} AND {schema}.hold_batch())
ORDER BY clock
""",
    columns=(*COLUMNS, "text", "float8", "boolean"),
    now=NOW,
    picked=PICKED,
    fitting=FITTING % SIZE,
    delivered=DELIVERED,
    message=MESSAGE,
    selected=SELECTED,
    nulls=NULLS,
    others=OTHERS,
    unpinned=UNPINNED,
)


def reaping_due(schema: str, inbox: str, limit: int = 1, *, hold: bool = False) -> Operation[Claimed]:
    """Take one message of a key in trouble whose time has come, if one can be had; end it if it had its last attempt.

    Of a key of which nothing is suspected any more, up to `limit`. For a READ COMMITTED transaction. `healing` belongs
    to it, once the messages are handled. `hold` is that of `Share`.
    """
    held = HELD if hold else "false"
    names = {"schema": schema, "inbox": inbox}
    yield IN_TRANSACTION
    while True:
        yield PIN.at()()
        *heads, last = yield LOCK_HEAD.at(**names)()
        if not heads:
            return Claimed([], last[-2], is_all=True)
        [(key, clock, _, _)] = heads
        *taken, last = yield TAKE_HEAD.at(**names, held=held)(key=key, clock=clock, limit=limit)
        if taken:
            messages, end = [Message(*row[:-3]) for row in taken], taken[0][-3]
            return Claimed([] if end else messages, last[-2], is_all=True, ended=messages[0] if end else None)
        # It is not due any more: somebody tried it meanwhile.


# A key that is not through goes on at once, behind all others that are due: a deep one would hold them up. What stands
# next may have failed already, in a batch with those before it: then its own time counts.
HEAL = Sql(
    """
WITH well AS (
    DELETE FROM {schema}.key_state WHERE inbox = '{inbox}' AND key = %(key)s::text
        AND clock <= %(clock)s::bigint AND alone_to <= %(clock)s::bigint)
UPDATE {schema}.key_state AS s SET retry_at = greatest(clock_timestamp(), (
    SELECT retry_at FROM {schema}.attempt
    WHERE inbox = '{inbox}' AND key = %(key)s::text
      AND clock = (SELECT min(clock) FROM {schema}.inbox_{inbox}
                   WHERE key = %(key)s::text AND clock > %(clock)s::bigint)
    ORDER BY id DESC LIMIT 1))
WHERE s.inbox = '{inbox}' AND s.key = %(key)s::text AND s.retry_at < 'infinity'
  AND (s.clock > %(clock)s::bigint OR s.alone_to > %(clock)s::bigint)
"""
)


def healing(schema: str, inbox: str, message: Message) -> Operation[None]:
    """Say that a key in trouble is handled up to this message: it is well, or goes on with the next, in its time."""
    yield HEAL.at(schema=schema, inbox=inbox)(key=message.key, clock=message.clock)
