"""The claim of a failing key that is due: one message per transaction, as long as a message of it may fail.

A message is tried alone, so that whatever goes wrong is its own fault. A message that has used up its attempts is not
tried again: the claim moves it to `parked` or `dead_letter`. So a worker only records the outcome of a failure
(`inbox.by_key.failure`), and the next claim carries it out even if that worker has died.
"""

import logging
from collections.abc import Sequence
from uuid import UUID

from inbox.by_key.claim import FITTING, FLOOR, NULLS, PICKED, PIN, SIZE, UNPINNED, Claimed
from inbox.keeping import KEEPS, keeping
from mailroom.message.answer import ASKS, MAY_ANSWER, Undone, answering_undone
from mailroom.message.columns import DELIVERED, MESSAGE, MOVING, listed
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.sql.operation import IN_TRANSACTION, Operation, Row, Sql

log = logging.getLogger("mailroom.inbox")

# A worker does not take a key whose last try has killed its worker, until that is counted. Its entry was there before
# the handler ran (`inbox.worker.in_flight`), so the next holder of the key's lock finds it.
BUT_ORPHANED = " AND key NOT IN (SELECT {schema}.orphaned_keys('{inbox}', %(mine)s::uuid[]))"
# Keys are tried one by one until the head of one can be locked; those with a locked head are skipped. The time is the
# statement's, not the transaction's: a failure recorded since the transaction began may be due.
NOW = "(SELECT clock_timestamp())"
LOCK_HEAD = Sql(
    """
WITH bound AS MATERIALIZED (
    SELECT {floor}, paused_at IS NULL AS is_open, {keeps} AS keeps FROM {schema}.inbox_registry
    WHERE name = '{inbox}'),
due_next AS MATERIALIZED (
    SELECT (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM {schema}.my_due
            WHERE inbox = '{inbox}' AND retry_at < 'infinity' AND retry_at > {now} LIMIT 1) AS in_s),
head AS MATERIALIZED (
    SELECT l.key, l.clock FROM (
        SELECT key FROM {schema}.my_due
        WHERE inbox = '{inbox}' AND retry_at <= {now}{but_orphaned} ORDER BY retry_at, key) AS d, LATERAL (
        SELECT key, clock FROM {schema}.inbox_{inbox} AS i
        WHERE i.key = d.key AND i.clock = (SELECT min(clock) FROM {schema}.inbox_{inbox}
                                           WHERE key = d.key AND clock > (SELECT floor FROM bound))
        FOR UPDATE SKIP LOCKED) AS l
    LIMIT 1)
SELECT key, clock, (SELECT keeps FROM bound) AS keeps, NULL::float8 AS due_in_s, NULL::boolean FROM head
UNION ALL
SELECT NULL, NULL, NULL, (SELECT in_s FROM due_next),
       CASE WHEN NOT EXISTS (SELECT FROM head) THEN {unpinned} END
ORDER BY clock
""",
    columns={"key": "text", "clock": "bigint", "keeps": "boolean", "due_in_s": "float8", "is_unpinned": "boolean"},
    floor=FLOOR,
    keeps=KEEPS,
    now="(SELECT clock_timestamp() FROM bound WHERE is_open)",  # null, and so no key is due, while the inbox is paused
    unpinned=UNPINNED,
)
# This is a statement of its own, run with the head's lock held: its snapshot sees everything that was recorded before
# the lock was released. The last attempt recorded for this message says whether it ends here. Only this message is
# parked; the dispatcher moves the messages after it (`inbox.by_key.parked_keys`). The key_state row of a message that
# is taken stays until its handler is done (`healing`), so that another session can record a failure while the message
# is locked.
# Messages above suspect_to are not suspected. They are claimed here only because they are below the healthy floor, and
# so in batches of up to `limit`.
# The statement also returns when the next key is due. Keys that are due already count only if this claim took one:
# otherwise LOCK_HEAD has just skipped them.
# D-workers-3: Recording does not move a message; the next claim does.
OTHERS = (
    "retry_at > now() OR EXISTS (SELECT FROM gone WHERE gone.key <> d.key) "
    "OR (SELECT max(clock) FROM gone) < greatest(d.clock, d.alone_to)"
)
# A command that is skipped is answered here, and not by a part of the statement: an INSERT of no rows would ring the
# dispatcher's doorbell all the same, and a consumer that never answers needs no right to send. A dead letter that was
# answered loses its reply_to, so that requeued it is not answered a second time. A role that may not send leaves the
# reply_to, and so the answer to the requeue or discard of the dead letter: no command may end a worker by asking.
# D-messages-5: Status 500 is sent by a statement of its own.
ANSWERED = listed(MOVING, headers=f"CASE WHEN {ASKS} AND {MAY_ANSWER} THEN headers - 'reply_to'::text ELSE headers END")
# Null for what was sent here, where the clock is that of the send: a requeue stamps it anew.
ELSEWHERE = ", ".join(
    f"CASE WHEN gone.sent_clock <> gone.clock THEN gone.{name} END" for name in ("origin", "sent_clock")
)
# Of a claim of what is due: the outcome of the last attempt of a message that it ended, and if that is to be answered
# the error, and whether this role may; and in the last row, when the next key is due.
ENDED = COLUMNS | {
    "outcome": "text", "skipped": "text", "may_answer": "boolean", "due_in_s": "float8", "is_unpinned": "boolean",
}  # fmt: skip
HANDED_OUT = "(SELECT outcome IN ('park', 'skip') FROM last) IS NOT TRUE"
HELD = "EXISTS (SELECT FROM gone) AND NOT EXISTS (SELECT FROM last WHERE outcome IN ('park', 'skip'))"
TAKE_HEAD = Sql(
    """
WITH last AS MATERIALIZED (
    SELECT attempt, outcome, error, error_class FROM {schema}.my_attempt
    WHERE inbox = '{inbox}' AND key = %(key)s::text AND clock = %(clock)s::bigint ORDER BY id DESC LIMIT 1),
share AS MATERIALIZED (
    SELECT CASE WHEN greatest(clock, suspect_to) < %(clock)s::bigint THEN %(limit)s::bigint ELSE 1 END AS rows
    FROM {schema}.my_key_state
    WHERE inbox = '{inbox}' AND key = %(key)s::text AND retry_at <= {now}{but_orphaned}),
picked AS MATERIALIZED (
    SELECT i.* FROM share, LATERAL (
        SELECT {picked} FROM {schema}.inbox_{inbox}
        WHERE key = %(key)s::text AND clock >= %(clock)s::bigint ORDER BY clock LIMIT share.rows) AS i),
{fitting},
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*){archived},
parked AS (
    INSERT INTO {schema}.parked ({delivered}) SELECT {delivered} FROM gone WHERE (SELECT outcome = 'park' FROM last)),
held AS (
    UPDATE {schema}.my_key_state AS s
    SET clock = gone.clock, attempts = last.attempt, retry_at = 'infinity', parked_at = clock_timestamp(),
        last_error = last.error
    FROM gone, last WHERE s.inbox = '{inbox}' AND s.key = gone.key AND last.outcome = 'park'),
dead AS (
    INSERT INTO {schema}.dead_letter (stage, reason, inbox, clock, attempts, origin, sent_clock, {message})
    SELECT 'reap', last.error, gone.inbox, gone.clock, last.attempt, {elsewhere}, {answered}
    FROM gone, last WHERE last.outcome = 'skip'),
healed AS (
    UPDATE {schema}.my_key_state AS s SET deleted = true FROM gone, last
    WHERE s.inbox = '{inbox}' AND s.key = gone.key AND last.outcome = 'skip' AND s.alone_to <= gone.clock
      AND s.paused_at IS NULL)
SELECT {selected}, (SELECT outcome FROM last WHERE outcome IN ('park', 'skip')),
       (SELECT coalesce(error_class, 'Skip') FROM last WHERE outcome = 'skip' AND {asks}),
       (SELECT {may_answer} FROM last WHERE outcome = 'skip' AND {asks}), NULL::float8, NULL::boolean
FROM gone
UNION ALL
SELECT {nulls}, NULL, NULL, NULL,
       (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM {schema}.my_due AS d
        WHERE inbox = '{inbox}' AND retry_at < 'infinity' AND ({others}) LIMIT 1),
       {unpinned} OR ({held} AND {schema}.hold_batch())
ORDER BY clock
""",
    columns=ENDED,
    now=NOW,
    answered=ANSWERED,
    elsewhere=ELSEWHERE,
    asks=ASKS,
    may_answer=MAY_ANSWER,
    picked=PICKED,
    fitting=FITTING % SIZE,
    delivered=DELIVERED,
    message=MESSAGE,
    selected=SELECTED,
    nulls=NULLS,
    others=OTHERS,
    unpinned=UNPINNED,
)


def reaping_due(
    schema: str, inbox: str, limit: int = 1, *, hold: bool = False, mine: Sequence[UUID] = ()
) -> Operation[Claimed]:
    """Take one message of a failing key that is due, if there is one; end it if it has used up its attempts.

    Of a key none of whose messages is suspected any more, take up to `limit`. Run this in a READ COMMITTED transaction,
    and `healing` in the same transaction once the messages are handled. `hold` and `mine` are as in `Share`.
    """
    names = {"schema": schema, "inbox": inbox}
    but_orphaned, entries = (BUT_ORPHANED, {"mine": list(mine)}) if hold else ("", {})
    yield IN_TRANSACTION
    while True:
        yield PIN.at()()
        *heads, last = yield LOCK_HEAD.at(but_orphaned=but_orphaned, **names)(**entries)
        if not heads:
            return Claimed([], LOCK_HEAD.named([last])[0].due_in_s, is_all=True)
        [head] = LOCK_HEAD.named(heads)
        names_of_head = keeping(head.keeps, HANDED_OUT) | {"held": HELD if hold else "false"}
        *taken, last = yield TAKE_HEAD.at(but_orphaned=but_orphaned, **names_of_head, **names)(
            key=head.key, clock=head.clock, limit=limit, **entries
        )
        if taken:
            return (yield from ending(schema, inbox, TAKE_HEAD, taken, last))
        # The key is no longer due: another worker has tried it in the meantime.


def ending(schema: str, inbox: str, statement: Sql, taken: list[Row], last: Row) -> Operation[Claimed]:
    """Return what a claim of `ENDED` columns has taken, or ended; and answer what it has skipped."""
    claimed, ends, [end] = messages(taken), statement.named(taken), statement.named([last])
    yield from answering_skipped(schema, inbox, claimed, [(each.skipped, each.may_answer) for each in ends])
    is_over = bool(ends[0].outcome)
    return Claimed([] if is_over else claimed, end.due_in_s, is_all=True, ended=claimed[0] if is_over else None)


def answering_skipped(
    schema: str, inbox: str, messages: list[Message], answers: list[tuple[str | None, bool | None]]
) -> Operation[None]:
    """Answer the commands among `messages` that the claim has skipped.

    `answers` has the class of the error of each, and whether this role may send; None for what was not skipped.
    """
    undone = []
    for message, (error, may_answer) in zip(messages, answers, strict=True):
        if may_answer:
            undone.append(Undone(message.id, message.key, message.headers, error))
        elif may_answer is not None:
            log.warning(
                "%s: command %s was skipped and not answered, since this role may not send. Give it the writer's "
                "grants; requeuing or discarding the dead letter answers it.",
                inbox, message.id,
            )  # fmt: skip
    yield from answering_undone(schema, undone)


# A key that still has messages to be tried alone is due at once, but after all other keys that are due, so that a deep
# key does not hold them up. Its next message may have failed already, in a batch together with earlier ones; then that
# message's own retry_at counts.
HEAL = Sql(
    """
WITH healed AS (
    UPDATE {schema}.my_key_state SET deleted = true WHERE inbox = '{inbox}' AND key = %(key)s::text
        AND clock <= %(clock)s::bigint AND alone_to <= %(clock)s::bigint AND paused_at IS NULL)
UPDATE {schema}.my_key_state AS s SET retry_at = greatest(clock_timestamp(), (
    SELECT retry_at FROM {schema}.my_attempt
    WHERE inbox = '{inbox}' AND key = %(key)s::text
      AND clock = (SELECT min(clock) FROM {schema}.inbox_{inbox}
                   WHERE key = %(key)s::text AND clock > %(clock)s::bigint)
    ORDER BY id DESC LIMIT 1))
WHERE s.inbox = '{inbox}' AND s.key = %(key)s::text AND s.retry_at < 'infinity'
  AND (s.clock > %(clock)s::bigint OR s.alone_to > %(clock)s::bigint)
"""
)


def healing(schema: str, inbox: str, message: Message) -> Operation[None]:
    """Record that a failing key was handled up to `message`: the key is healthy, or its next message becomes due."""
    yield HEAL.at(schema=schema, inbox=inbox)(key=message.key, clock=message.clock)
