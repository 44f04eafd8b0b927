"""The floor of a total inbox, by sent_clock, and what is left of `stable`.

Nothing stands at or below the floor, and nothing will: it never passes the newest row of `stable`, below which nothing
comes any more, nor a message. So claims start above the rows that were reaped, which stay in the index as long as a
snapshot is held anywhere. The floor of other inboxes cannot serve, since it is one of clocks, which rise with the
sent_clocks of one origin only. Messages of a parked inbox stay where they are, so it never has to be lowered.
"""

from mailroom.order.expressions import BY_SENT
from mailroom.order.total import IS_BOUNDED, R_IS_BOUNDED
from mailroom.sql.operation import Operation, Sql

STEP = 1_000  # sent_clocks it may lag behind before raising it is worth a transaction

# Both in one snapshot. A message that comes later has a sent_clock above what is stable in it.
LAG = Sql(
    """
SELECT r.sent_floor, least(s.clock, coalesce((
    SELECT sent_clock FROM {schema}.inbox_{inbox} WHERE {by_sent} > r.sent_floor
    ORDER BY {by_sent}, origin LIMIT 1) - 1, s.clock))
FROM {schema}.inbox_registry AS r, LATERAL (
    SELECT clock FROM {schema}.stable WHERE inbox = '{inbox}' ORDER BY clock DESC LIMIT 1) AS s
WHERE r.name = '{inbox}' AND {is_bounded}
""",
    columns=("bigint", "bigint"),
    is_bounded=R_IS_BOUNDED,
    by_sent=BY_SENT,
)
RAISE = Sql(
    """
UPDATE {schema}.inbox_registry SET sent_floor = %(floor)s::bigint
WHERE name = '{inbox}' AND sent_floor < %(floor)s::bigint
"""
)


def raising_sent_floor(schema: str, inbox: str) -> Operation[bool]:
    """Raise the floor of a total inbox if it is worth it; return whether it was raised.

    In autocommit, or at READ COMMITTED. A message that is being reaped still counts, since its claim may roll back.
    """
    rows = yield LAG.at(schema=schema, inbox=inbox)()
    if not rows or rows[0][1] - rows[0][0] < STEP:
        return False
    yield RAISE.at(schema=schema, inbox=inbox)(floor=rows[0][1])
    return True


BOUNDED = Sql(
    "SELECT name FROM {schema}.inbox_registry WHERE {is_bounded} ORDER BY name",
    columns=("text",),
    is_bounded=IS_BOUNDED,
)


def listing_total(schema: str) -> Operation[list[str]]:
    """Return the total inboxes."""
    return [name for (name,) in (yield BOUNDED.at(schema=schema)())]


# Never the newest: it says how far the inbox may be given out, and must not fall.
OLD = Sql(
    """
WITH old AS MATERIALIZED (
    SELECT clock FROM {schema}.stable WHERE inbox = '{inbox}' AND clock < (
        SELECT clock FROM {schema}.stable WHERE inbox = '{inbox}' ORDER BY clock DESC LIMIT 1)
    ORDER BY clock LIMIT %(rows)s::bigint),
gone AS (
    DELETE FROM {schema}.stable WHERE inbox = '{inbox}' AND clock <= (SELECT max(clock) FROM old) RETURNING 1)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)


def sweeping_stable(schema: str, inbox: str, rows: int) -> Operation[int]:
    """Delete up to `rows` of the oldest rows of `stable` of an inbox, but not its newest; return how many."""
    [(deleted,)] = yield OLD.at(schema=schema, inbox=inbox)(rows=rows)
    return int(deleted)
