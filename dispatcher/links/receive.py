"""Receive: take in a batch of another node, in one statement: number, route, insert, and write the receipt.

Everything here runs inside one transaction of the target, which `dispatcher.links.receiver` begins and ends. The newest
receipt says what has arrived. It does not matter who reads the source, how many do, or what happened to their answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from dispatcher.delivery.deliver import DELIVERY_SESSION
from dispatcher.links.at_source.bounds import Position
from dispatcher.links.at_source.fetch import FetchedBatch
from mailroom.links.handshake.wire import FURTHEST, MARK, READ, SPREAD
from mailroom.logs.writing import HAS_LOGS, IS_INBOX, LOGGED, LOGGED_ROWS, WOKEN_BY_LOGS
from mailroom.message.columns import MESSAGE
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.order.total import BOUNDS, LATE, RINGING, raising_stable
from mailroom.registry.routing import ORIGIN_LOG_ROUTE, ORIGIN_ROUTE, ORIGIN_SINCE, SINCE
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql.operation import Operation, Sql, filled

# The planner assumes that an array has ten rows, and would compare each message with each topic.
RECEIVING_SESSION = DELIVERY_SESSION | {"enable_nestloop": "off"}

# What the source sent that is taken. {spread} are the arrays; `nth` counts from 1.
SPREAD_ROWS = """(
        SELECT {read}, reason, clock, nth
        FROM (SELECT {spread}, pg_catalog.unnest(%(reasons)s::text[]) AS reason,
                     pg_catalog.unnest((SELECT clocks FROM numbered)) AS clock,
                     pg_catalog.generate_series(1::bigint, %(rows)s::bigint) AS nth) AS r
        WHERE nth <= (SELECT taken FROM batch))"""

# Why a message has no inbox. A pattern gets no commands and no replies.
REASON = """CASE WHEN receivers > 1
    THEN pg_catalog.format('a command needs exactly one inbox, its topic has %%s', receivers)
    WHEN since IS NULL THEN pg_catalog.concat('no inbox subscribes to this topic of ', {name})
    WHEN {gets_since} IS NULL THEN 'no inbox gets this topic: patterns get no commands and no replies'
    ELSE pg_catalog.concat('no inbox subscribed to this topic of ', {name}, ' as early as that') END"""

# Per topic: the clock after which any inbox gets it, and the one after which any total inbox does.
REACH = """reach AS MATERIALIZED (
    SELECT topic, min(since) AS since, min(named) AS named, min(since) FILTER (WHERE is_bounded) AS bounded_since,
           min(named) FILTER (WHERE is_bounded) AS bounded_named,
           pg_catalog.array_agg(named) FILTER (WHERE named IS NOT NULL) AS each_named
    FROM route GROUP BY topic)"""
RECEIVERS = """CASE kind WHEN 'C' THEN (
    SELECT count(*) FROM pg_catalog.unnest(each_named) AS e (named) WHERE e.named < sent_clock) END"""
BOUNDED_SINCE = filled(SINCE, since="bounded_since", named="bounded_named")

# The ways of a topic to the inboxes, with the clock above which each gets messages, or commands and replies; and how
# far a total inbox was given out already. What comes too late for that is never put into it.
WAY = """(
        SELECT topic, inbox, since AS of_all, named AS of_named, is_bounded, coalesce(stable, 0) AS stable{of_log}
        FROM route LEFT JOIN total USING (inbox))"""
GETS = "outcome = 'delivered' AND sent_clock > CASE WHEN kind IN ('M', 'E') THEN of_all ELSE of_named END"

# The steps, in order: `source` (who sent it, unless that was stopped), `newest` (the position here), `came` (the clocks
# of its rows), `furthest` and `batch` (how many are taken: those before a clock that is too high), `numbered` (the
# rows' clocks by Lamport's rule; a mark is not an event and gets none, but what comes after it is later), `stamp`
# (whether it goes on), `route` and `reach` (who gets what), `stamped` (each message's outcome). Scalar subqueries where
# DELIVER joins (RECEIVING_SESSION). Rows are numbered without their messages, which each step would copy; clocks are an
# array beside theirs.
#
# An expired message is dropped, but no total inbox may lack what another has. One that the database refused (`reason`)
# is kept as a dead letter, but not if a total inbox wants it: the caller is told, and takes it back.
# D-links-1: The target pulls.
# D-links-20: Received rows are numbered without their messages.
TEXT = """
WITH moment AS MATERIALIZED (SELECT coalesce(%(now)s::timestamptz, clock_timestamp()) AS now),
source AS MATERIALIZED (
    SELECT id, name FROM {schema}.origin WHERE number = %(origin)s::bigint AND state = 'open' AND id IS NOT NULL),
newest AS MATERIALIZED (
    SELECT last, last_id, stamped_at FROM {schema}.receipt WHERE origin = %(origin)s::bigint
    ORDER BY last DESC LIMIT 1),
came AS MATERIALIZED (
    SELECT pg_catalog.unnest(%(seq)s::bigint[]) AS seq, pg_catalog.unnest(%(sent_clock)s::bigint[]) AS sent_clock,
           pg_catalog.unnest(%(kind)s::text[]) AS kind,
           pg_catalog.generate_series(1::bigint, %(rows)s::bigint) AS nth),
furthest AS MATERIALIZED (SELECT {furthest} AS clock FROM {schema}.node),
batch AS MATERIALIZED (
    SELECT least(%(most)s::bigint, max(nth),
                 min(nth) FILTER (WHERE sent_clock > (SELECT clock FROM furthest)) - 1) AS taken,
           bool_and(seq = %(at_seq)s::bigint + nth) AS runs_on
    FROM came),
numbered AS MATERIALIZED (
    SELECT max(clock) AS top, pg_catalog.array_agg(clock ORDER BY nth) AS clocks
    FROM (SELECT nth, events + greatest((SELECT last_value FROM {schema}.clock), max(shown) OVER received) AS clock
          FROM (SELECT nth, events, sent_clock - events + (kind <> '{mark}')::integer AS shown
                FROM (SELECT came.*, count(*) FILTER (WHERE kind <> '{mark}') OVER received AS events FROM came
                      WHERE nth <= (SELECT taken FROM batch)
                      WINDOW received AS (ORDER BY nth ROWS UNBOUNDED PRECEDING)) AS r) AS s
          WINDOW received AS (ORDER BY nth ROWS UNBOUNDED PRECEDING)) AS n),
stamp AS MATERIALIZED (
    SELECT top, CASE WHEN NOT EXISTS (SELECT FROM source) THEN 'closed'{guard}
                     WHEN EXISTS (SELECT FROM {schema}.fan_out) THEN 'waits'
                     WHEN (SELECT (last, last_id, stamped_at) FROM newest) IS DISTINCT FROM
                          (SELECT (%(at_seq)s::bigint, %(at_id)s::uuid, %(at_time)s::timestamptz)
                           WHERE %(at_seq)s::bigint > 0) THEN 'elsewhere'
                     WHEN runs_on IS NOT true THEN 'hole'
                     WHEN taken = 0 THEN 'clock'
                     WHEN top > (SELECT clock_ceiling FROM {schema}.node) THEN 'ceiling'
                     ELSE 'taken' END AS outcome
    FROM batch, numbered),
{route},
{bounds},
{reach},
twin AS MATERIALIZED (
    SELECT message_id FROM {schema}.known
    WHERE origin = %(origin)s::bigint AND message_id = ANY (%(message_id)s::uuid[])
      AND EXISTS (SELECT FROM {schema}.known WHERE origin = %(origin)s::bigint)),
stamped AS MATERIALIZED (
    SELECT w.*, CASE WHEN kind = '{mark}' THEN 'mark'
                     WHEN message_id IN (SELECT message_id FROM twin) THEN 'known'
                     WHEN is_expired AND NOT is_bounded_wanted THEN 'expired'
                     WHEN reason IS NOT NULL THEN 'refused'
                     WHEN receivers > 1 THEN 'dead'
                     WHEN is_wanted THEN 'delivered'
                     WHEN kind = 'E' THEN 'unrouted'
                     ELSE 'dead' END AS outcome
    FROM (SELECT n.*, since, named, {receivers} AS receivers,
                 coalesce(expires_at <= (SELECT now FROM moment), false) AS is_expired,
                 coalesce(sent_clock > {gets_since}, false) AS is_wanted,
                 coalesce(sent_clock > {bounded_since}, false) AS is_bounded_wanted
          FROM {rows} AS n LEFT JOIN reach USING (topic)
          WHERE (SELECT outcome = 'taken' FROM stamp)) AS w),
width AS MATERIALIZED (
    SELECT CASE WHEN (SELECT count(*) FROM {schema}.inbox_registry) > {partitions}
                THEN (SELECT pg_catalog.count(DISTINCT inbox) FROM route
                      WHERE topic IN (SELECT topic FROM stamped WHERE outcome = 'delivered')) > {partitions}
                ELSE false END AS is_wide),
fanned AS (
    INSERT INTO {schema}.fan_out (clock, sent_clock, origin, {message})
    SELECT clock, sent_clock, {sender}, {message} FROM stamped
    WHERE outcome = 'delivered' AND NOT is_expired AND (SELECT is_wide FROM width) ORDER BY nth
    RETURNING 1),
fanned_way AS (
    INSERT INTO {schema}.fan_out_way (inbox, topic, messages_after, events_after, others_after)
    SELECT inbox, topic, since, since, named FROM route
    WHERE NOT is_bounded AND (SELECT is_wide FROM width){keyed}
      AND topic IN (SELECT topic FROM stamped WHERE outcome = 'delivered')
    ORDER BY inbox, topic),
delivered AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT r.inbox, clock, sent_clock, {sender}, {message}
    FROM stamped JOIN {way} AS r USING (topic)
    WHERE {gets} AND (is_bounded OR NOT (is_expired OR (SELECT is_wide FROM width))) AND sent_clock > stable{keyed}
    ORDER BY r.inbox, key, clock
    RETURNING inbox),{logged}
late AS (
    INSERT INTO {schema}.dead_letter (stage, reason, inbox, clock, origin, sent_clock, {message})
    SELECT 'order', '{late}', r.inbox, clock, {sender}, sent_clock, {message}
    FROM stamped JOIN {way} AS r USING (topic)
    WHERE EXISTS (SELECT FROM total) AND {gets} AND is_bounded AND sent_clock <= stable ORDER BY nth, r.inbox
    RETURNING 1),
dead AS (
    INSERT INTO {schema}.dead_letter ({letter}, origin, sent_clock, {message})
    SELECT {told}, {sender}, sent_clock, {message}
    FROM stamped WHERE outcome IN ('dead', 'refused') ORDER BY nth),
received AS (
    INSERT INTO {schema}.receipt (origin, first, last, last_id, stamped_at, sent_clock, ids)
    SELECT %(origin)s::bigint, %(at_seq)s::bigint + 1, %(at_seq)s::bigint + taken, (%(message_id)s::uuid[])[taken],
           (%(stamped_at)s::timestamptz[])[taken], (%(sent_clock)s::bigint[])[taken],
           (%(message_id)s::uuid[])[1:taken]
    FROM batch WHERE (SELECT outcome = 'taken' FROM stamp)
    RETURNING last, last_id, stamped_at, sent_clock),
outcomes AS MATERIALIZED (
    SELECT count(*) AS rows, max(clock) AS clock, count(*) FILTER (WHERE outcome = 'mark') AS marks,
           count(*) FILTER (WHERE outcome = 'known') AS known,
           count(*) FILTER (WHERE outcome = 'expired') AS expired,
           count(*) FILTER (WHERE outcome = 'unrouted') AS unrouted,
           count(*) FILTER (WHERE outcome IN ('dead', 'refused')) AS dead,
           min(nth) FILTER (WHERE outcome = 'refused' AND is_bounded_wanted) AS barred
    FROM stamped),
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('{schema}.inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT stamp.outcome, rows, marks, (SELECT coalesce(sum(rows), 0)::bigint FROM touched){logged_rows}, expired, unrouted,
       dead + (SELECT count(*) FROM late), known,
       CASE WHEN stamp.outcome = 'clock' THEN (SELECT sent_clock FROM came WHERE nth = 1)
            ELSE setval('{schema}.clock'::regclass, clock) END,
       CASE WHEN stamp.outcome = 'ceiling' THEN top END, barred, (SELECT {ringing} FROM touched){woken_by_logs},
       (SELECT coalesce(pg_catalog.array_agg(inbox), '{}'::text[]) FROM touched), EXISTS (SELECT FROM fanned),
       EXISTS (SELECT FROM total),
       (SELECT last FROM received), (SELECT last_id FROM received), (SELECT stamped_at FROM received),
       (SELECT sent_clock FROM received)
FROM stamp, outcomes
"""
# The fields of `Reception`, whether there are total inboxes, and the new position.
RESULT = {
    "outcome": "text",
    **dict.fromkeys(("rows", "marks", "delivered", "expired", "unrouted", "dead", "known", "clock"), "bigint"),
    "ceiling": "bigint",
    "barred": "bigint",
    "woken": "bigint",
    "inboxes": "text[]",
    "waits": "boolean",
    "has_bounds": "boolean",
    "seq": "bigint",
    "last_id": "uuid",
    "stamped_at": "timestamptz",
    "sent_clock": "bigint",
}


# On a node without logs a text without parts for them: that rests on its own snapshot, in which there are none.
WITHOUT_LOGS: dict[str, Any] = {
    "route": ORIGIN_ROUTE,
    "guard": f"""
                     WHEN {HAS_LOGS} THEN 'logs'""",
    "keyed": "",
    "of_log": "",
    "logged": "",
    "logged_rows": "",
    "woken_by_logs": "",
}
WITH_LOGS: dict[str, Any] = {
    "route": ORIGIN_LOG_ROUTE,
    "guard": "",
    "keyed": f" AND {IS_INBOX}",
    "of_log": ", lanes, segment",
    "logged": filled(
        LOGGED,
        stamped="(SELECT *, {sender} AS origin FROM stamped WHERE outcome = 'delivered' AND NOT is_expired) AS s",
        ways="(SELECT topic, inbox, lanes, segment, since AS of_all FROM route) AS r",
        top="(SELECT max(clock) FROM stamped)",
    ).replace("AND kind IN ('M', 'E')", "AND kind IN ('M', 'E') AND sent_clock > of_all"),
    "logged_rows": f" + {LOGGED_ROWS}",
    "woken_by_logs": WOKEN_BY_LOGS,
}


def _receive(of: dict[str, Any], *, spread: str = "", read: str = "", sender: str, letter: str, told: str) -> Sql:
    """Return the statement; what `spread` and `read` add are columns of the rows beside those of the wire."""
    return Sql(
        TEXT,
        columns=RESULT,
        **{name: part for name, part in of.items() if name != "of_log"},
        rows=SPREAD_ROWS,
        spread=SPREAD + spread,
        read=READ + read,
        sender=sender,
        letter=letter,
        told=told,
        mark=MARK,
        furthest=FURTHEST.format(now="(SELECT now FROM moment)"),
        source="source",
        sent="(SELECT pg_catalog.unnest(%(topic)s::text[]) AS topic) AS came",
        bounds=BOUNDS,
        way=filled(WAY, of_log=of["of_log"]),
        gets=GETS,
        late=LATE,
        reach=REACH,
        receivers=RECEIVERS,
        bounded_since=BOUNDED_SINCE,
        why=REASON,
        name="(SELECT name FROM source)",
        gets_since=ORIGIN_SINCE,
        message=MESSAGE,
        ringing=RINGING,
        partitions=PARTITIONS,
    )


RECEIVED: dict[str, str] = {
    "sender": "(SELECT id FROM source)", "letter": "stage, reason", "told": "'receive', coalesce(reason, {why})"
}  # fmt: skip
RECEIVE = _receive(WITHOUT_LOGS, **RECEIVED)
RECEIVE_LOGS = _receive(WITH_LOGS, **RECEIVED)
# From a broker, where messages of several nodes may stand in one log, and others that no node has sent. What cannot be
# decoded has a reason.
# D-bridges-19: A bridge in receives by the statement of links.
TAKEN_IN: dict[str, str] = {
    "spread": ", pg_catalog.unnest(%(senders)s::uuid[]) AS sender",
    "read": ", sender",
    "sender": "coalesce(sender, (SELECT id FROM source))",
    "letter": "stage, reason, bridge",
    "told": "'take in', coalesce(reason, {why}), {name}",
}
TAKE_IN = _receive(WITHOUT_LOGS, **TAKEN_IN)
TAKE_IN_LOGS = _receive(WITH_LOGS, **TAKEN_IN)

Outcome: TypeAlias = Literal["taken", "elsewhere", "closed", "logs", "waits", "hole", "clock", "ceiling"]


@dataclass(frozen=True, slots=True)
class Reception:
    """What one batch did. Unless `outcome` is "taken", it did nothing.

    `elsewhere`: the newest receipt is not the position given; read it again. `closed`: the origin is stopped, excluded
    or gone. `hole`: the rows do not run on from the position. `clock`: the first row's sent_clock, `clock`, is above
    what is taken now. `ceiling`: this node's clock must first have the ceiling `ceiling`. `waits`: what a batch before
    has left must first be fanned out (`dispatcher.delivery.fan_out`). `logs`: the node has logs, and this was the
    statement for nodes without.

    `rows` counts what was taken, `marks` among them; `delivered` the copies in inboxes and logs; `known` what had been
    received from a history that its node lost. `position` is the new one. `inboxes` got something. `barred` is the
    number, in the batch, of the first row with a reason that a total inbox wants: then this must not be committed. If
    it `waits`, messages of it are to be fanned out.
    """

    outcome: Outcome
    rows: int
    marks: int
    delivered: int
    expired: int
    unrouted: int
    dead: int
    known: int
    clock: int | None
    ceiling: int | None
    barred: int | None
    woken: int
    inboxes: list[str] = field(default_factory=list)
    waits: bool = False
    position: Position | None = None
    has_logs: bool = False


REPORTED = [each.name for each in fields(Reception) if each.name not in ("position", "has_logs")]


def receiving(
    schema: str,
    origin: int,
    batch: FetchedBatch,
    position: Position,
    *,
    most: int | None = None,
    reasons: Sequence[str | None] = (),
    now: datetime | None = None,
    partitions: int | None = None,
    senders: Sequence[UUID | None] | None = None,
    has_logs: bool = False,
) -> Operation[Reception]:
    """Receive a batch that begins right after `position`; of it at most `most` rows.

    Rows that have one of `reasons`, by their number in the batch, go to `dead_letter`. What is for more inboxes than so
    many `partitions` (None: what the server has room for) is to be fanned out; total inboxes have got theirs. A batch
    that is taken in from a broker has `senders`: the node that sent each message, None if none of ours did. `has_logs`
    as the reception before has told; a wrong one costs another statement.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    given = {
        **batch.columns,
        "origin": origin,
        "at_seq": position.seq,
        "at_id": position.last_id,
        "at_time": position.stamped_at,
        "rows": batch.rows,
        "most": most,
        "reasons": list(reasons),
        "now": now,
        "partitions": partitions,
    }
    without, with_logs = (RECEIVE, RECEIVE_LOGS) if senders is None else (TAKE_IN, TAKE_IN_LOGS)
    if senders is not None:
        given["senders"] = list(senders)
    row = None
    if not has_logs:
        [row] = RECEIVE.named((yield without.at(schema=schema)(**given)))
    if row is None or row.outcome == "logs":
        [row] = RECEIVE.named((yield with_logs.at(schema=schema)(**given)))
        has_logs = True
    if row.has_bounds and row.seq is not None:
        yield from raising_stable(schema, row.inboxes)
    received = None if row.seq is None else Position(row.seq, row.last_id, row.stamped_at, row.sent_clock)
    return Reception(**{name: getattr(row, name) for name in REPORTED}, position=received, has_logs=has_logs)
