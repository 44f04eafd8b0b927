"""Deliver: stamp the oldest committed messages of the outbox and move them into the inboxes, in one statement.

No row travels through Python, and no value is decoded. Everything here runs inside one transaction, which
`dispatcher.delivery.deliverer` begins and ends.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dispatcher.delivery.floor import FIRST, START, ScanStart
from dispatcher.delivery.plain import DELIVER_PLAIN, DELIVER_PLAIN_LOGS, PLAIN_RESULT
from dispatcher.delivery.single import DELIVER_ONE
from mailroom.links.marks import IS_WANTED
from mailroom.logs.writing import HAS_LOGS, IS_INBOX, LOGGED, LOGGED_ROWS, WOKEN_BY_LOGS
from mailroom.message.columns import MESSAGE
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.order.total import HAS_BOUNDS, RINGING, raising_stable
from mailroom.registry.routing import GETS, LINK_ROUTE, LOG_ROUTE, ROUTE
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql, Together, filled
from mailroom.sql.sight import NODE_ROW, the_one

# A batch is sorted and joined in memory. A plan that was made for an empty outbox must not scan a full one. Planning
# costs as much as delivering ten messages, and without force_generic_plan PostgreSQL plans each delivery anew.
# D-deliver-7: A delivery commits asynchronously.
DELIVERY_SESSION = {
    "work_mem": "64MB",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "synchronous_commit": "off",
}
DELIVERY_SESSION |= {"plan_cache_mode": "force_generic_plan"}

TRANSIT = "'{schema}.transit'::regclass"
LINK_RINGING = locks.ringing(locks.link_channel(TRANSIT, "link"), locks.key(TRANSIT))

# The oldest messages above `start`, and which of them fit into a batch of `bytes`. The first one always fits.
OLDEST_FITTING = """
    SELECT position, after_clock, deliver_at, expires_at, row_number() OVER oldest = 1 OR %(bytes)s::bigint >=
           sum(coalesce(octet_length(value), pg_catalog.pg_column_size(value_json))) OVER oldest AS fits
    FROM {schema}.outbox WHERE position > (SELECT position FROM start)
    WINDOW oldest AS (ORDER BY position ROWS UNBOUNDED PRECEDING)
    ORDER BY position LIMIT %(rows)s::bigint"""
# The steps, in order: `start` (where the scan begins), `batch` (the oldest messages up to the limits), `stamp` (the
# clock before and after), `taken` (deleted by range, twice as fast as by ids; the same snapshot, so exactly the rows
# of `batch`), `route` and `link_route` (which inboxes get a topic, which links carry it), `reach` (how many of both),
# `stamped` (each message's clock and outcome; numbered by position before the join, so that a message has one clock
# however many inboxes get it).
# Inserting in key order is 1.5 times as fast as in the order taken. The inbox comes second: most rows have the same,
# and comparing it first would cost a delivery of 10,000 rows 6 % more. No clock above the ceiling is given out: then
# nothing is taken, and the result says how high the ceiling must be.
TEXT = """
WITH {start},
batch AS MATERIALIZED (
    SELECT max(position) FILTER (WHERE fits) AS last, count(*) FILTER (WHERE fits) AS messages,
           max(after_clock) FILTER (WHERE fits) AS after_clock,
           count(*) = %(rows)s::bigint OR NOT bool_and(fits) AS more
    FROM ({oldest_fitting}) AS o),
stamp AS MATERIALIZED (
    SELECT last, more, base, base + messages AS top, base + messages <= n.clock_ceiling AS fits, n.id AS origin,
           coalesce(%(now)s::timestamptz, clock_timestamp()) AS now, EXISTS (SELECT FROM {schema}.link) AS has_links,
           EXISTS (SELECT FROM {schema}.fan_out) AS waits,
           {receivers} > {partitions} AS has_many,
           {has_logs} AS has_logs
    FROM batch, {schema}.node AS n,
         LATERAL (SELECT greatest(last_value, after_clock) FROM {schema}.clock) AS c (base)),
taken AS (
    DELETE FROM {schema}.outbox
    WHERE position > (SELECT position FROM start) AND position <= (
        SELECT CASE WHEN fits AND NOT waits{guard} THEN last END FROM stamp)
    RETURNING position, deliver_at, {message}),
{route},{link_route}
reach AS MATERIALIZED (
    SELECT topic, count(*) AS ways, count(*) FILTER (WHERE subscribed) AS subscribers,
           count(*) FILTER (WHERE named) AS receivers{links_of_topic}
    FROM {ways} GROUP BY topic),
stamped AS MATERIALIZED (
    SELECT n.*, ways, receivers,{links_of_message}
           CASE WHEN expires_at <= now THEN 'expired'
                WHEN deliver_at > now THEN 'scheduled'
                WHEN kind = 'C' AND receivers > 1 THEN 'dead'
                WHEN CASE kind WHEN 'M' THEN ways WHEN 'E' THEN subscribers ELSE receivers END > 0 THEN 'delivered'
                WHEN kind = 'E' THEN 'unrouted'
                ELSE 'dead' END AS outcome
    FROM (SELECT t.*, base + row_number() OVER (ORDER BY position) AS clock, origin, now FROM taken t, stamp) AS n
    LEFT JOIN reach USING (topic)),{widen}
delivered AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT inbox, clock, clock, origin, {message} FROM stamped JOIN route USING (topic)
    WHERE outcome = 'delivered' AND {gets}{keyed}{narrow}
    ORDER BY key, inbox, clock
    RETURNING inbox),{logged}{carry}
scheduled AS (
    INSERT INTO {schema}.scheduled (deliver_at, position, {message})
    SELECT deliver_at, position, {message} FROM stamped WHERE outcome = 'scheduled'),
dead AS (
    INSERT INTO {schema}.dead_letter (stage, reason, {message})
    SELECT 'deliver', CASE WHEN receivers > 1
                           THEN pg_catalog.format('a command needs exactly one inbox, its topic has %%s', receivers)
                           WHEN ways > 0 THEN 'no inbox gets this topic: patterns get no commands and no replies{nor}'
                           ELSE 'no inbox gets this topic' END, {message}
    FROM stamped WHERE outcome = 'dead' ORDER BY clock),
outcomes AS MATERIALIZED (
    SELECT max(clock) AS clock, max(position) AS last, count(*) AS taken,
           count(*) FILTER (WHERE outcome = 'scheduled') AS scheduled,
           count(*) FILTER (WHERE outcome = 'expired') AS expired,
           count(*) FILTER (WHERE outcome = 'unrouted') AS unrouted, count(*) FILTER (WHERE outcome = 'dead') AS dead
    FROM stamped),
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('{schema}.inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT taken, {rows}, outcomes.last, setval('{schema}.clock'::regclass, clock), CASE WHEN NOT fits THEN top END,
       (SELECT {ringing} FROM touched){woken_by_logs}{link_bells}, coalesce(more, false), inboxes,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.outbox_position_seq),
       (SELECT running FROM start), {has_bounds}, outcomes.scheduled, outcomes.expired, unrouted, dead,
       has_links, has_many, {held}, has_logs{of_links}
FROM outcomes, stamp, (SELECT coalesce(sum(rows), 0)::bigint, coalesce(pg_catalog.array_agg(inbox), '{}'::text[])
                       FROM touched) AS t (rows, inboxes)
"""
RESULT = PLAIN_RESULT | {  # a plain delivery has none of these
    **dict.fromkeys(("scheduled", "expired", "unrouted", "dead"), "bigint"),
    **dict.fromkeys(("has_links", "has_many", "waits", "has_logs"), "boolean"),
}
PARTS: dict[str, Any] = {
    "start": START,
    "has_logs": HAS_LOGS,
    "sent": "taken",
    "gets": GETS,
    "oldest_fitting": OLDEST_FITTING,
    "message": MESSAGE,
    "ringing": RINGING,
    "has_bounds": HAS_BOUNDS,
    "partitions": PARTITIONS,
}

# Parts for links cost a small delivery more than a quarter of its time even if they find nothing: 1.40 of it with one
# message, 1.31 with ten. So a node without links, and with no more inboxes than one transaction may meet, does without
# them. That rests on the snapshot of the delivery itself: if there is a link in it, nothing is taken.
# D-deliver-10: Parts for links are in a text of their own.
DELIVER = Sql(
    TEXT,
    RESULT,
    route=ROUTE,
    receivers="(SELECT count(*) FROM {schema}.inbox_registry)",
    guard=" AND NOT has_links AND NOT has_many AND NOT has_logs",
    keyed="",
    logged="",
    rows="rows",
    woken_by_logs="",
    widen="",
    narrow="",
    held="waits",
    link_route="",
    links_of_topic="",
    ways="route",
    links_of_message="",
    carry="",
    link_bells="",
    of_links="",
    nor="",
    **PARTS,
)
# `ends` (the last seq of each link that carries something) is right since every delivery holds the dispatch lock until
# it has committed. `departed` makes the transaction commit synchronously, and only one from which something leaves: a
# reader may keep what it saw here, and if a crash then undid that, other messages would get the same seq and clock.
# `departure.at` is read once per execution, whatever `now` a caller gives, and so tells two histories apart.
# D-links-3: What leaves commits synchronously, by the delivery's own decision.
CARRY = """
ends AS MATERIALIZED (
    SELECT link, coalesce((SELECT t.seq FROM {schema}.transit AS t WHERE t.link = l.link ORDER BY t.seq DESC LIMIT 1),
                          0::bigint) AS seq
    FROM (SELECT DISTINCT pg_catalog.unnest(links) FROM stamped
          WHERE outcome = 'delivered' AND EXISTS (SELECT FROM link_route)) AS l (link)),
departure AS MATERIALIZED (SELECT clock_timestamp() AS at),
carried AS (
    INSERT INTO {schema}.transit (link, seq, sent_clock, stamped_at, {message})
    SELECT link, seq + row_number() OVER (PARTITION BY link ORDER BY clock), clock, at, {message}
    FROM (SELECT clock, {message}, pg_catalog.unnest(links) AS link FROM stamped
          WHERE outcome = 'delivered' AND EXISTS (SELECT FROM ends)) AS s JOIN ends USING (link) CROSS JOIN departure
    RETURNING link),
departed AS MATERIALIZED (
    SELECT link, count(*) AS rows, set_config('synchronous_commit', 'on', true) FROM carried GROUP BY link),"""
# A message for more inboxes than one transaction may use is not inserted but fanned out: see
# `dispatcher.delivery.fan_out`.
WIDEN = """
width AS MATERIALIZED (
    SELECT has_many AND (
        SELECT pg_catalog.count(DISTINCT inbox)
        FROM (SELECT DISTINCT topic, kind FROM stamped WHERE outcome = 'delivered') AS s JOIN route USING (topic)
        WHERE {gets}) > {partitions} AS is_wide
    FROM stamp),
fanned AS (
    INSERT INTO {schema}.fan_out (clock, sent_clock, origin, {message})
    SELECT clock, clock, origin, {message} FROM stamped
    WHERE outcome = 'delivered' AND (SELECT is_wide FROM width) ORDER BY clock
    RETURNING 1),
fanned_way AS (
    INSERT INTO {schema}.fan_out_way (inbox, topic, messages_after, events_after, others_after)
    SELECT inbox, topic, 0, CASE WHEN subscribed THEN 0 END, CASE WHEN named THEN 0 END FROM route
    WHERE (SELECT is_wide FROM width) AND topic IN (SELECT topic FROM stamped WHERE outcome = 'delivered')
      AND {keyed}
    ORDER BY inbox, topic),"""
# D-logs-10: A log is written at once, also where inboxes are fanned out.
NARROW = " AND NOT (SELECT is_wide FROM width)"
DELIVER_FULL = Sql(
    TEXT,
    RESULT | {"carried": "bigint", "is_mark_wanted": "boolean"},
    route=LOG_ROUTE,
    receivers="(SELECT count(*) FROM {schema}.inbox_registry) + (SELECT count(*) FROM {schema}.log_registry)",
    guard="",
    widen=filled(WIDEN, keyed=IS_INBOX),
    narrow=NARROW,
    keyed=f" AND {IS_INBOX}",
    logged=filled(
        LOGGED,
        ways="route",
        stamped="(SELECT *, clock AS sent_clock FROM stamped WHERE outcome = 'delivered') AS s",
        top="(SELECT max(clock) FROM stamped)",
    ),
    rows=f"rows + {LOGGED_ROWS}",
    woken_by_logs=WOKEN_BY_LOGS,
    held="waits OR EXISTS (SELECT FROM fanned)",
    link_route=f"\n{LINK_ROUTE},",
    links_of_topic=""",
           pg_catalog.array_agg(link) FILTER (WHERE link IS NOT NULL) AS links,
           pg_catalog.array_agg(link) FILTER (WHERE link IS NOT NULL AND named) AS named_links""",
    ways="""(SELECT topic, subscribed, named, NULL::bigint FROM route
          UNION ALL SELECT topic, true, named, link FROM link_route) AS w (topic, subscribed, named, link)""",
    links_of_message=" CASE WHEN kind IN ('M', 'E') THEN links ELSE named_links END AS links,",
    carry=CARRY,
    link_bells=" + (SELECT {link_ringing} FROM departed)",
    of_links=", (SELECT coalesce(sum(rows), 0)::bigint FROM departed), {is_wanted}",
    nor=", nor do readers and bridges without the topic by its name (mailroom link allow, mailroom bridge out)",
    is_wanted=IS_WANTED,
    link_ringing=LINK_RINGING,
    **PARTS,
)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one delivery did. `taken` counts messages, `delivered` the copies in inboxes, `carried` those for links.

    `last` is the largest position taken, `clock` the last clock given out. If `ceiling` is set, nothing was taken: the
    clock's ceiling must first be raised to at least that. `more`: the batch was full. `inboxes` are those that got a
    message. `woken` counts the inboxes and links whose sleepers were rung for. `drawn` and `running` are for the floor.
    `has_bounds`: the node has total inboxes. `has_logs`: it has logs. `has_links`: it has links, if only such as were
    cut. `has_many`: it has more inboxes than one transaction may meet. `waits`: some messages wait to be fanned out, of
    this delivery or of one before, and then it took nothing (`dispatcher.delivery.fan_out`). `is_mark_wanted`: a reader
    asks for a mark (`mailroom.links.marks`).
    """

    taken: int
    delivered: int
    last: int | None
    clock: int | None
    ceiling: int | None
    woken: int
    more: bool
    inboxes: list[str] = field(default_factory=list)
    drawn: int = 0
    running: list[str] = field(default_factory=list)
    has_bounds: bool = False
    scheduled: int = 0
    expired: int = 0
    unrouted: int = 0
    dead: int = 0
    has_links: bool = False
    has_many: bool = False
    waits: bool = False
    has_logs: bool = False
    carried: int = 0
    is_mark_wanted: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether every message went to an inbox, and nothing else happened to any: the next ones may be the same."""
        is_wide = self.has_many and self.more  # such a batch may meet many inboxes
        return not (self.has_links or is_wide or self.scheduled or self.expired or self.unrouted or self.dead)

    @property
    def is_single(self) -> bool:
        """Whether it took the only message that waited."""
        return self.taken == 1 and not self.more


def delivering(
    schema: str,
    *,
    start: ScanStart = FIRST,
    rows: int,
    max_bytes: int,
    now: datetime | None = None,
    has_links: bool = False,
    has_many: bool = False,
    has_bounds: bool = False,
    has_logs: bool = False,
    is_plain: bool = True,
    is_single: bool = False,
    partitions: int | None = None,
) -> Operation[Delivery]:
    """Deliver up to `rows` messages and `max_bytes` of values (at least one message) from `start` on.

    It meets at most `partitions` inboxes, None for as many as the server has room for: the rest `waits`, and
    is to be fanned out. `has_links`, `has_many`, `has_bounds`, `has_logs` and `is_plain`, as the delivery before has
    found them, only save time. So does `is_single`: probably one message waits, or none.

    A plain batch is a transaction by itself where there is no total inbox, which has to be raised in the same one.
    """
    lock = DISPATCH_LOCK.at(schema=schema)()
    if is_single and rows > 1 and is_plain and not (start.gaps or has_links or has_bounds or has_logs):
        one = DELIVER_ONE.at(schema=schema)(start=start.position, partitions=partitions)
        found = _the_result(DELIVER_ONE, schema, (yield Together((lock, one))))
        if found.pop("is_plain"):
            return Delivery(**found)
    values = {**start.values(), "rows": rows, "bytes": max_bytes, "now": now, "partitions": partitions}
    if is_plain and not has_links:
        is_whole = not has_bounds
        statement = DELIVER_PLAIN_LOGS if has_logs else DELIVER_PLAIN
        plain = statement.at(schema=schema)(**values, whole=is_whole)
        if not is_whole:
            yield lock
        found = _the_result(statement, schema, (yield Together((lock, plain)) if is_whole else plain))
        is_plain = found.pop("is_plain")
        if is_whole and not is_plain:
            yield lock
    else:
        yield lock
    is_full = has_links or ((has_many or has_logs) and not is_plain)
    if not is_plain and not is_full:
        found = yield from _running(DELIVER, schema, values)
        is_full = (found["has_links"] or found["has_many"] or found["has_logs"]) and not found["waits"]
    if is_full:
        found = yield from _running(DELIVER_FULL, schema, values)
    delivery = Delivery(**found)
    if delivery.has_bounds and delivery.clock is not None and not delivery.waits:
        yield from raising_stable(schema, delivery.inboxes)
    return delivery


def _running(statement: Sql, schema: str, values: dict[str, object]) -> Operation[dict[str, Any]]:
    return _the_result(statement, schema, (yield statement.at(schema=schema)(**values)))


def _the_result(statement: Sql, schema: str, rows: list[Any]) -> dict[str, Any]:
    found = statement.named(rows)
    the_one(found, NODE_ROW, schema)
    fields: dict[str, Any] = found[0]._asdict()
    return fields


# Due messages go back to the outbox, so that only DELIVER stamps, routes and expires messages. The INSERT rings the
# doorbell.
# D-deliver-11: Scheduled messages go back to the outbox.
RELEASE = Sql(
    """
WITH due AS MATERIALIZED (
    SELECT deliver_at, position FROM {schema}.scheduled
    WHERE deliver_at <= coalesce(%(now)s::timestamptz, clock_timestamp())
    ORDER BY deliver_at, position LIMIT %(rows)s::bigint FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM {schema}.scheduled s USING due WHERE (s.deliver_at, s.position) = (due.deliver_at, due.position)
    RETURNING s.*),
back AS (
    INSERT INTO {schema}.outbox ({message}) SELECT {message} FROM gone ORDER BY deliver_at, position RETURNING 1)
SELECT count(*) FROM back
""",
    columns=("bigint",),
    message=MESSAGE,
)


DUE = Sql(
    "SELECT EXISTS (SELECT FROM {schema}.scheduled WHERE deliver_at <= coalesce(%(now)s::timestamptz, "
    "clock_timestamp()))",
    columns=("boolean",),
)


def releasing(schema: str, *, rows: int = 10_000, now: datetime | None = None) -> Operation[int]:
    """Move scheduled messages that are due back to the outbox; return how many."""
    # Checked first: the doorbell's trigger fires even for an INSERT of no rows, and would wake an idle dispatcher.
    [(due,)] = yield DUE.at(schema=schema)(now=now)
    if not due:
        return 0
    [(count,)] = yield RELEASE.at(schema=schema)(rows=rows, now=now)
    return int(count)


OLDEST = Sql("SELECT min(position) FROM {schema}.outbox", columns=("bigint",))


def reading_oldest(schema: str) -> Operation[int | None]:
    """Return the position of the oldest message, None if there is none."""
    [(position,)] = yield OLDEST.at(schema=schema)()
    return None if position is None else int(position)


# Whether a delivery could do anything: it would take a row that this snapshot has, fan out what was left, or a link's
# reader asks for a mark.
# D-doorbell-1: On the way to sleep the dispatcher looks once more.
LOOK = Sql(
    """
WITH {start}
SELECT EXISTS (SELECT FROM {schema}.outbox WHERE position > (SELECT position FROM start))
       OR EXISTS (SELECT FROM {schema}.link) OR EXISTS (SELECT FROM {schema}.fan_out)
""",
    columns=("boolean",),
    start=START,
)


def looking(schema: str, start: ScanStart = FIRST) -> Operation[bool]:
    """Return whether a delivery from `start` on, with the same snapshot, might find something to do."""
    [(found,)] = yield LOOK.at(schema=schema)(**start.values())
    return bool(found)
