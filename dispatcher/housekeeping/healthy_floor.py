"""The healthy floor of an inbox: all messages up to it are of failing keys, so claims of other keys begin above it.

So the cost of a claim does not depend on how many keys wait for their next attempt. Unlike the other floors it affects
correctness: a claim above it must not take a key that has messages below, or those would be overtaken. So each key that
the floor passes is marked (`key_state.alone_to`) and stays a failing key until it is reaped up to that clock. A
statement that deletes its key_state row checks this too.
"""

from inbox.by_key.claim import HEALTHY
from mailroom.order.expressions import BY_CLOCK
from mailroom.sql.operation import Operation, Sql

STEP = 1_000  # clocks it may lag behind where no key fails
PASSED_ROWS = 1_000  # rows per transaction: sessions that record a failure wait for it

# True if the first message above the floor is of a failing key, or if enough clocks below it were reaped that their
# dead index entries matter. Mostly neither holds, and there is nothing to do.
LAGS = Sql(
    """
SELECT NOT {healthy} OR i.clock - greatest(r.floor, r.healthy_floor) > {step}
FROM {schema}.inbox_registry AS r, LATERAL (
    SELECT key, clock FROM {schema}.inbox_{inbox} WHERE {by_clock} > greatest(r.floor, r.healthy_floor)
    ORDER BY {by_clock} LIMIT 1) AS i
WHERE name = '{inbox}'
""",
    columns=("boolean",),
    healthy=HEALTHY % "i.key",
    step=STEP,
    by_clock=BY_CLOCK,
)
# SKIP LOCKED: a replay locks this row until its caller commits, since it lowers this floor too.
HOLD = Sql(
    "SELECT true FROM {schema}.inbox_registry WHERE name = '{inbox}' FOR NO KEY UPDATE SKIP LOCKED", ("boolean",)
)
# The floor stops below the first message of a key that is healthy, or whose key_state row another session has locked:
# that session may be about to delete the row, in an older snapshot that lacks some of the key's messages here. A
# session that waits for a row marked here sees the mark once it gets the lock, since PostgreSQL rereads a changed row;
# at REPEATABLE READ it gets 40001. Messages that this snapshot does not see yet have higher clocks, or are being
# replayed, and the replay lowers the floor. `healthy` only keeps the statement from locking more rows than it passes.
# D-doorbell-9: The healthy floor is more than a hint.
PASS = Sql(
    """
WITH oldest AS MATERIALIZED (
    SELECT key, clock FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > (SELECT greatest(floor, healthy_floor) FROM {schema}.inbox_registry WHERE name = '{inbox}')
    ORDER BY {by_clock} LIMIT %(rows)s::bigint),
healthy AS MATERIALIZED (
    SELECT clock FROM (SELECT * FROM oldest) AS o
    WHERE {healthy}
    ORDER BY clock LIMIT 1),
held AS MATERIALIZED (
    SELECT s.key FROM (
        SELECT DISTINCT key FROM oldest
        WHERE clock < coalesce((SELECT clock FROM healthy), {max_clock})) AS o, LATERAL (
        SELECT key FROM {schema}.key_state AS k WHERE k.inbox = '{inbox}' AND k.key = o.key
        FOR NO KEY UPDATE SKIP LOCKED) AS s),
stop AS MATERIALIZED (
    SELECT min(clock) AS clock FROM oldest WHERE NOT EXISTS (SELECT FROM held WHERE held.key = oldest.key)),
passed AS MATERIALIZED (
    SELECT key, max(clock) AS clock FROM oldest
    WHERE clock < coalesce((SELECT clock FROM stop), {max_clock}) GROUP BY key),
marked AS (
    UPDATE {schema}.key_state AS s SET alone_to = p.clock FROM passed AS p
    WHERE s.inbox = '{inbox}' AND s.key = p.key AND s.alone_to < p.clock)
UPDATE {schema}.inbox_registry SET healthy_floor = reached.clock
FROM (SELECT coalesce((SELECT clock FROM stop) - 1, (SELECT max(clock) FROM oldest)) AS clock) AS reached
WHERE name = '{inbox}' AND healthy_floor < reached.clock
RETURNING (SELECT clock FROM stop) IS NULL AND (SELECT count(*) FROM oldest) = %(rows)s::bigint
""",
    columns=("boolean",),
    by_clock=BY_CLOCK,
    healthy=HEALTHY % "o.key",
    max_clock=2**63 - 1,
)


def lagging(schema: str, inbox: str) -> Operation[bool]:
    """Return whether the healthy floor is worth raising."""
    rows = yield LAGS.at(schema=schema, inbox=inbox)()
    return bool(rows and rows[0][0])


def raising(schema: str, inbox: str, rows: int = PASSED_ROWS) -> Operation[bool]:
    """Raise the healthy floor past up to `rows` messages of failing keys, in a READ COMMITTED transaction of its own.

    Return whether it stopped only because of `rows`. The registry's row is locked first, so that the statement that
    raises the floor has a later snapshot.
    """
    names = {"schema": schema, "inbox": inbox}
    if not (yield HOLD.at(**names)()):
        return False
    passed = yield PASS.at(**names)(rows=rows)
    return bool(passed and passed[0][0])
