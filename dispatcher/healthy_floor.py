"""The healthy floor of an inbox: up to it, all that waits is of keys in trouble, and claims of others begin above it.

So what a claim costs does not depend on how many keys wait for their next attempt. Unlike the other floors it is not
only a hint. A key must not be looked for above it as long as it has messages below, or those would be overtaken. So
each key that the floor passes is marked (`key_state.alone_to`), and stays in trouble until it is reaped up to there:
who takes its note away asks for that in the statement that deletes it.
"""

from inbox.claim import HEALTHY
from mailroom.schema import BY_CLOCK
from mailroom.sql.operation import Operation, Sql

STEP = 1_000  # clocks it may lag behind, where there is no trouble
PASSED_ROWS = 1_000  # in one transaction: records of failures wait for it

# Is the key of the first message above in trouble, or has much been reaped below it, which may lie dead in the index?
# Mostly neither, and there is nothing to do.
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
# Passed over while a replay has it, for as long as its caller does not commit: it lowers this floor, too.
HOLD = Sql(
    "SELECT true FROM {schema}.inbox_registry WHERE name = '{inbox}' FOR NO KEY UPDATE SKIP LOCKED", ("boolean",)
)
# The floor stops below the first message of a key that is healthy, or whose note somebody else has: who is about to
# delete that may not see, in a snapshot older than this one, all that the key has here. Whoever waits for a note that
# is marked here finds the mark when it is let go, since PostgreSQL looks at a changed row anew; at REPEATABLE READ it
# gets 40001. What this snapshot cannot see yet has a higher clock than what it sees, or is being replayed, and then
# the replay lowers the floor. `well` only keeps it from locking more than is passed.
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
    """Tell whether the healthy floor is worth raising."""
    rows = yield LAGS.at(schema=schema, inbox=inbox)()
    return bool(rows and rows[0][0])


def raising(schema: str, inbox: str, rows: int = PASSED_ROWS) -> Operation[bool]:
    """Raise the healthy floor past messages of keys in trouble, in a READ COMMITTED transaction of its own.

    Past as many as `rows`; tells whether it stopped for that alone. The registry's row is locked first, so that the
    floor is read, and what is passed is looked for, in a later snapshot.
    """
    names = {"schema": schema, "inbox": inbox}
    if not (yield HOLD.at(**names)()):
        return False
    passed = yield PASS.at(**names)(rows=rows)
    return bool(passed and passed[0][0])
