"""Claims of a total inbox: one queue, by (sent_clock, origin), which one transaction at a time works on.

Where other inboxes lock the head of a key, this locks the head of the inbox, its lowest message. That requires the
rights of its consumers, and does not hold up the dispatcher or the janitor. A claim locks the head first and reads in a
later statement, which sees all that the last holder has done. It takes the lowest messages up to the newest row of
`stable` (`mailroom.order.total`); nothing that belongs before those can come any more.

The whole inbox plays the part of a key: its failures and attempts are recorded under the key '', which no message has.
When it is parked, its messages stay where they are, since they hold up no other key. Where `key_state` has clocks up to
which a key is suspected, these are sent_clocks.
"""

from collections.abc import Sequence
from uuid import UUID

from inbox.by_key.claim import FITTING, KEY_STATE, NULLS, OPEN, PIN, SIZE, UNPINNED, Claimed, Share, unregistered
from inbox.by_key.due import ANSWERED, ENDED, HANDED_OUT, NOW, ending
from inbox.keeping import KEEPS, keeping
from mailroom.message.answer import ASKS, MAY_ANSWER
from mailroom.message.columns import MESSAGE
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.order.expressions import BY_CLOCK, BY_SENT
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql

# `sent_floor` only saves the way over dead rows: nothing stands at or below it (`dispatcher.housekeeping.total_floor`).
BOUND = f"""bound AS MATERIALIZED (
    SELECT {OPEN % "r.sent_floor"} AS low, r.paused_at IS NULL AS is_open, r.{KEEPS} AS keeps, (
        SELECT s.clock FROM {{schema}}.stable AS s WHERE s.inbox = '{{inbox}}' ORDER BY s.clock DESC LIMIT 1) AS top
    FROM {{schema}}.inbox_registry AS r WHERE r.name = '{{inbox}}')"""
LOWEST = f"""FROM {{schema}}.inbox_{{inbox}}
        WHERE {BY_SENT} > (SELECT low FROM bound) AND {BY_SENT} <= (SELECT top FROM bound)
        ORDER BY {BY_SENT}, origin"""
# Whether the head exists, is locked now, and was locked before. It is selected first and then locked, never by LIMIT 1
# FOR UPDATE, which would lock the second message if another transaction works on the first. A head that was deleted
# since the snapshot counts as locked by others, who go on. A claim that does not get the lock runs no later statement,
# so this one also reads the time and unpins the plans.
# D-links-9: A total inbox is locked by its lowest message.
LOCK = Sql(
    """
WITH {bound},
head AS MATERIALIZED (SELECT clock, xmax {lowest} LIMIT 1),
mine AS MATERIALIZED (
    SELECT FROM head, LATERAL (
        SELECT FROM {schema}.inbox_{inbox} AS i WHERE {by_clock} = head.clock FOR UPDATE SKIP LOCKED) AS i)
SELECT CASE WHEN EXISTS (SELECT FROM bound) THEN EXISTS (SELECT FROM head) END, EXISTS (SELECT FROM mine),
    EXISTS (SELECT FROM head WHERE xmax <> '0'), (
    SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM {schema}.my_key_state
    WHERE inbox = '{inbox}' AND key = '' AND retry_at < 'infinity' AND (SELECT is_open FROM bound)),
    (SELECT keeps FROM bound), CASE WHEN NOT EXISTS (SELECT FROM mine) THEN {unpinned} END
""",
    columns={
        **dict.fromkeys(("is_there", "is_mine", "was_locked"), "boolean"),
        "due_in_s": "float8",
        "keeps": "boolean",
        "is_unpinned": "boolean",
    },
    bound=BOUND,
    lowest=LOWEST,
    by_clock=BY_CLOCK,
    unpinned=UNPINNED,
)
# A claim that takes the message that failed, and all that are suspected, ends the failure. The message may be gone: it
# was recorded after somebody had consumed it.
IS_PAST = f"""(s.clock IN (SELECT clock FROM gone)
         OR NOT EXISTS (SELECT FROM {{schema}}.inbox_{{inbox}} WHERE {BY_CLOCK} = s.clock))"""
REAP = Sql(
    """
WITH {bound},
picked AS MATERIALIZED (
    SELECT place, row_number() OVER (ORDER BY sent_clock, origin) AS clock, bytes, value_json FROM (
        SELECT ctid AS place, sent_clock, origin, octet_length(value) AS bytes, value_json
        {lowest} LIMIT CASE WHEN {healthy} THEN {rows} ELSE 0 END) AS i),
{fitting},
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*){archived},
healed AS (
    UPDATE {schema}.my_key_state AS s SET deleted = true
    WHERE s.inbox = '{inbox}' AND s.key = '' AND s.suspect_to <= (SELECT max(sent_clock) FROM gone) AND {is_past})
SELECT {selected}, NULL::boolean, NULL::float8, NULL::boolean FROM gone
UNION ALL
SELECT {nulls}, (SELECT count(*) = {rows} OR count(*) > (SELECT count(*) FROM gone) FROM picked),
       (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM {schema}.my_key_state
        WHERE inbox = '{inbox}' AND key = '' AND retry_at < 'infinity'),
       {unpinned} OR ({held} AND {schema}.hold_batch())
ORDER BY sent_clock, origin
""",
    columns=COLUMNS | {"left": "boolean", "due_in_s": "float8", "is_unpinned": "boolean"},
    bound=BOUND,
    lowest=LOWEST,
    healthy=KEY_STATE % "''" + f" AND ({{due}} = 0 OR s.retry_at > {NOW})) IS NULL{{but_orphaned}}",
    fitting=FITTING % SIZE,
    is_past=IS_PAST,
    selected=SELECTED,
    nulls=NULLS,
    unpinned=UNPINNED,
)


# Whose worker has died, as in `inbox.by_key.due`. Entries are read only if the head was locked before.
BUT_ORPHANED = " AND NOT EXISTS (SELECT FROM {schema}.orphaned_keys('{inbox}', %(mine)s::uuid[]))"


def reaping_total(schema: str, inbox: str, share: Share) -> Operation[Claimed]:
    """Take up to `share.most` of the lowest messages, unless another transaction works on the inbox or it waits.

    `Claimed.messages` are by (sent_clock, origin).
    """
    yield IN_TRANSACTION
    names = {"schema": schema, "inbox": inbox}
    yield PIN.at()()
    [head] = LOCK.named((yield LOCK.at(**names)()))
    if head.is_there is None:
        raise unregistered(schema, inbox)
    if not head.is_mine:
        return Claimed([], head.due_in_s, is_all=True)
    held = "EXISTS (SELECT FROM gone)" if share.hold else "false"
    due = str(int(share.due_too))
    but_orphaned, entries = _but_orphaned(share.mine, ask=share.hold and head.was_locked)
    parts = keeping(head.keeps) | {"but_orphaned": but_orphaned, "rows": str(share.most), "held": held, "due": due}
    reap = REAP.at(**parts, **names)
    *taken, last = yield reap(**entries)
    [end] = REAP.named([last])
    return Claimed(messages(taken), end.due_in_s, not (taken and end.left))


def _but_orphaned(mine: Sequence[UUID], *, ask: bool) -> tuple[str, dict[str, list[UUID]]]:
    return (BUT_ORPHANED, {"mine": list(mine)}) if ask else ("", {})


# -- Failure ----------------------------------------------------------------------------------------------------------

# As in `inbox.by_key.due`: one message at a time, and one that has used up its attempts ends here. Parking leaves it in
# its place, but as another version of its row: a claim with an older snapshot, at REPEATABLE READ, gets 40001 and not
# the message.
TAKE = Sql(
    """
WITH failing AS MATERIALIZED (
    SELECT clock, suspect_to FROM {schema}.my_key_state
    WHERE inbox = '{inbox}' AND key = '' AND retry_at <= {now}{but_orphaned}),
{bound},
head AS MATERIALIZED (
    SELECT ctid AS place, clock {lowest} LIMIT (SELECT count(*) FROM failing)),
last AS MATERIALIZED (
    SELECT attempt, outcome, error, error_class FROM {schema}.my_attempt
    WHERE inbox = '{inbox}' AND key = '' AND clock = (SELECT clock FROM head) ORDER BY id DESC LIMIT 1),
kept AS (
    UPDATE {schema}.inbox_{inbox} AS i SET inbox = i.inbox FROM head, last
    WHERE i.ctid = head.place AND last.outcome = 'park' RETURNING i.*),
parked AS (
    UPDATE {schema}.my_key_state AS s
    SET clock = kept.clock, attempts = last.attempt, retry_at = 'infinity', parked_at = clock_timestamp(),
        last_error = last.error
    FROM kept, last WHERE s.inbox = '{inbox}' AND s.key = ''),
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING head
    WHERE i.ctid = head.place AND (SELECT outcome FROM last) IS DISTINCT FROM 'park' RETURNING i.*){archived},
dead AS (
    INSERT INTO {schema}.dead_letter (stage, reason, inbox, clock, attempts, origin, sent_clock, {message})
    SELECT 'reap', last.error, gone.inbox, gone.clock, last.attempt, gone.origin, gone.sent_clock, {answered}
    FROM gone, last WHERE last.outcome = 'skip'),
healed AS (
    UPDATE {schema}.my_key_state AS s SET deleted = true
    WHERE s.inbox = '{inbox}' AND s.key = '' AND EXISTS (SELECT FROM failing)
      AND (SELECT outcome FROM last) = 'skip' AND s.suspect_to <= (SELECT sent_clock FROM gone) AND {is_past})
SELECT {selected}, (SELECT outcome FROM last WHERE outcome IN ('park', 'skip')),
       (SELECT coalesce(error_class, 'Skip') FROM last WHERE outcome = 'skip' AND {asks}),
       (SELECT {may_answer} FROM last WHERE outcome = 'skip' AND {asks}), NULL::float8, NULL::boolean
FROM (SELECT * FROM gone UNION ALL SELECT * FROM kept) AS taken
UNION ALL
SELECT {nulls}, NULL, NULL, NULL,
       (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM {schema}.my_key_state
        WHERE inbox = '{inbox}' AND key = '' AND retry_at < 'infinity'
          AND (retry_at > {now} OR (SELECT max(sent_clock) FROM gone) < suspect_to)),
       {unpinned} OR ({held} AND {schema}.hold_batch())
ORDER BY sent_clock, origin
""",
    columns=ENDED,
    now=NOW,
    bound=BOUND,
    lowest=LOWEST,
    message=MESSAGE,
    answered=ANSWERED,
    is_past=IS_PAST,
    asks=ASKS,
    may_answer=MAY_ANSWER,
    selected=SELECTED,
    nulls=NULLS,
    unpinned=UNPINNED,
)
# A row of `key_state` is stale if nothing that it suspects is left.
HEAL_GONE = Sql(
    """
UPDATE {schema}.my_key_state AS s SET deleted = true
WHERE s.inbox = '{inbox}' AND s.key = '' AND s.retry_at <= {now}
  AND NOT EXISTS (SELECT FROM {schema}.inbox_{inbox} WHERE {by_sent} <= s.suspect_to)
""",
    now=NOW,
    by_sent=BY_SENT,
)
HELD = "EXISTS (SELECT FROM gone) AND NOT EXISTS (SELECT FROM last WHERE outcome = 'skip')"


def reaping_total_due(schema: str, inbox: str, *, hold: bool = False, mine: Sequence[UUID] = ()) -> Operation[Claimed]:
    """Take the lowest message of a failing inbox that is due; end it if it has used up its attempts.

    As `inbox.by_key.due.reaping_due`, and to be followed by `healing_total`.
    """
    yield IN_TRANSACTION
    names = {"schema": schema, "inbox": inbox}
    yield PIN.at()()
    [head] = LOCK.named((yield LOCK.at(**names)()))
    if not head.is_there:
        yield HEAL_GONE.at(**names)()
    if not head.is_mine:
        return Claimed([], head.due_in_s, is_all=True)
    but_orphaned, entries = _but_orphaned(mine, ask=hold and head.was_locked)
    parts = keeping(head.keeps, HANDED_OUT) | {"but_orphaned": but_orphaned, "held": HELD if hold else "false"}
    *taken, last = yield TAKE.at(**parts, **names)(**entries)
    if not taken:
        return Claimed([], TAKE.named([last])[0].due_in_s, is_all=True)
    return (yield from ending(schema, inbox, TAKE, taken, last))


NEXT = f"""
    SELECT retry_at FROM {{schema}}.attempt
    WHERE inbox = '{{inbox}}' AND key = '' AND clock = (
        SELECT clock FROM {{schema}}.inbox_{{inbox}}
        WHERE {BY_SENT} > (SELECT sent_floor FROM {{schema}}.inbox_registry WHERE name = '{{inbox}}')
        ORDER BY {BY_SENT}, origin LIMIT 1)
    ORDER BY id DESC LIMIT 1"""
HEAL = Sql(
    """
WITH gone AS (SELECT %(clock)s::bigint AS clock),
healed AS (
    UPDATE {schema}.my_key_state AS s SET deleted = true
    WHERE s.inbox = '{inbox}' AND s.key = '' AND s.suspect_to <= %(sent_clock)s::bigint AND {is_past})
UPDATE {schema}.my_key_state AS s SET retry_at = greatest(clock_timestamp(), ({next}))
WHERE s.inbox = '{inbox}' AND s.key = '' AND s.retry_at < 'infinity'
  AND NOT (s.suspect_to <= %(sent_clock)s::bigint AND {is_past})
""",
    is_past=IS_PAST,
    next=NEXT,
)


def healing_total(schema: str, inbox: str, message: Message) -> Operation[None]:
    """Record that a failing inbox was handled up to `message`: it is healthy, or its next message becomes due."""
    yield HEAL.at(schema=schema, inbox=inbox)(clock=message.clock, sent_clock=message.sent_clock)
