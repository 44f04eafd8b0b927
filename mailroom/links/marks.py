"""Marks on demand: if the total inboxes of a node wait for another node, it asks that node to show a clock.

A mark is a row of `transit` without a message. Its sent_clock is the source's clock, and says that everything up to
there was stamped before. The reader asks for one only while it holds messages that its inboxes may not give out yet, or
when an inbox joins. So idle nodes write nothing.
"""

from mailroom.order.clock import DISPATCH_LOCK, DURABLE, raising_ceiling
from mailroom.order.expressions import BY_SENT
from mailroom.order.total import BOUNDS, ORIGINS
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql

# -- At the target ----------------------------------------------------------------------------------------------------

# What is missing of each origin: its first clock after joining; and after it was included again, a clock that does not
# stand below what was given out meanwhile.
WANTS = Sql(
    """
WITH {bounds},
{origins}
SELECT inbox, stable, number, received, clock, greatest(started, joined, stable * (clock < stable)::integer)
FROM shown WHERE state = 'open' ORDER BY inbox, number
""",
    columns={"inbox": "text", **dict.fromkeys(("stable", "number", "received", "shown", "clock"), "bigint")},
    bounds=BOUNDS,
    origins=ORIGINS,
)
HIGHEST = Sql(
    "SELECT sent_clock FROM {schema}.inbox_{inbox} WHERE {by_sent} > %(stable)s::bigint "
    "ORDER BY {by_sent} DESC LIMIT 1",
    columns=("bigint",),
    by_sent=BY_SENT,
)


def wanting_marks(schema: str) -> Operation[list[tuple[int, int]]]:
    """Return the origins of which a mark is wanted, by number, each with the clock that it has to show.

    Ask only those of which nothing is left to be fetched: a message shows a clock as well as a mark does.
    """
    wanted: dict[int, int] = {}
    highest: dict[str, int] = {}
    for each in WANTS.named((yield WANTS.at(schema=schema)())):
        if each.inbox not in highest:
            rows = yield HIGHEST.at(schema=schema, inbox=each.inbox)(stable=each.stable)
            highest[each.inbox] = rows[0][0] if rows else 0
        least = max(each.clock, highest[each.inbox] if highest[each.inbox] > each.shown else 0)
        if least > each.received:
            wanted[each.number] = max(least, wanted.get(each.number, 0))
    return sorted(wanted.items())


# The dispatcher at the source sees the wish when it is rung, or at its next poll at the latest.
ASK = Sql(
    """
SELECT {schema}.link_want(l.number, %(run)s::uuid, %(clock)s::bigint), pg_notify({outbox_channel}, '') IS NULL
FROM {schema}.link AS l
WHERE l.number = %(link)s::bigint AND l.run = %(run)s::uuid AND coalesce((
    SELECT t.sent_clock FROM {schema}.transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1), 0)
    < %(clock)s::bigint
""",
    columns=("boolean", "boolean"),
    outbox_channel=locks.channel("'{schema}.outbox'::regclass"),
)


def asking_mark(schema: str, link: int, run: object, clock: int) -> Operation[bool]:
    """At the source: ask for a mark of at least this clock, and ring its dispatcher; return whether that was needed.

    It is not if a row with such a clock is there to be fetched, or if another daemon has the link by now. The source
    raises its clock by 2^32 at once, and so comes to a clock that is further ahead when it is asked again and again.
    """
    return bool((yield ASK.at(schema=schema)(link=link, run=run, clock=clock)))


# -- At the source ----------------------------------------------------------------------------------------------------

# For the deliver statement. The newest row of a link is found by one probe; without links there is nothing to probe.
# D-links-2: A position is the newest row, found by one descending probe.
WANTED = """
    SELECT l.number, l.wanted_clock, coalesce(n.seq, 0) AS seq FROM {schema}.link AS l LEFT JOIN LATERAL (
        SELECT t.seq, t.sent_clock FROM {schema}.transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1) AS n
        ON true
    WHERE l.state = 'open' AND l.wanted_clock > coalesce(n.sent_clock, 0)"""
IS_WANTED = f"EXISTS ({WANTED})"

NEXT = Sql(
    """
SELECT greatest(c.last_value, (SELECT max(wanted_clock) FROM ({wanted}) AS w)), n.clock_ceiling
FROM {schema}.clock AS c, {schema}.node AS n WHERE {is_wanted}
""",
    columns=("bigint", "bigint"),
    wanted=WANTED,
    is_wanted=IS_WANTED,
)
# Its id is new at each execution, and no message has it: so it serves as a witness of the history, as a message's id
# does.
MARK = Sql(
    """
WITH wanted AS MATERIALIZED ({wanted}),
marked AS (
    INSERT INTO {schema}.transit (
        link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, sent_at)
    SELECT number, seq + 1, %(clock)s::bigint, clock_timestamp(), gen_random_uuid(), '', '', 'H'::"char", 'U'::"char",
           clock_timestamp()
    FROM wanted ORDER BY number RETURNING link),
rung AS MATERIALIZED (
    SELECT pg_catalog.count(pg_notify({link_channel}, '')) FROM marked)
SELECT (SELECT count(*) FROM marked), setval('{schema}.clock'::regclass, %(clock)s::bigint), (SELECT count FROM rung)
""",
    columns=("bigint", "bigint", "bigint"),
    wanted=WANTED,
    link_channel="'mailroom:' || '{schema}.transit'::regclass::oid::text || ':' || link::text",
)


def marking(schema: str) -> Operation[int]:
    """Append a mark to each link whose reader wants one, in a transaction of its own; return how many.

    The clock rises to what is wanted, and whatever is stamped later gets a higher one. The commit is synchronous: a
    mark that was read is a promise.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    rows = yield NEXT.at(schema=schema)()
    if not rows:
        return 0
    [(clock, ceiling)] = rows
    if clock > ceiling:
        yield from raising_ceiling(schema, clock)
    yield DURABLE.at()()
    [(marked, _, _)] = yield MARK.at(schema=schema)(clock=clock)
    return int(marked)
