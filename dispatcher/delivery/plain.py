"""The deliver statement of a plain batch: each message is due and goes to an inbox, and no link is there to carry it.

It has no part for anything else, so a small batch starts a smaller plan, and the rows of a large one are copied once.
"""

from typing import Any

from dispatcher.delivery.floor import START
from mailroom.logs.writing import HAS_LOGS, IS_INBOX, LOGGED, LOGGED_ROWS, WOKEN_BY_LOGS
from mailroom.message.columns import MESSAGE
from mailroom.order.total import HAS_BOUNDS, RINGING
from mailroom.registry.routing import GETS, LOG_ROUTE, ROUTE
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql.operation import Sql, filled

OLDEST = """
    FROM {schema}.outbox WHERE position > (SELECT position FROM start) ORDER BY position LIMIT %(rows)s::bigint"""
# It may meet no more inboxes than one transaction has room for: each message alone is counted, which costs nothing.
# Without IS TRUE, bool_and would pass over a message whose topic no inbox gets. A batch of no messages is plain.
IS_PLAIN = """bool_and((
        deliver_at IS NULL AND expires_at IS NULL
        AND CASE kind WHEN 'M' THEN receivers IS NOT NULL WHEN 'E' THEN subscribed
                      WHEN 'C' THEN receivers = 1 ELSE receivers > 0 END) IS TRUE) IS NOT FALSE
           AND (sum(bytes) <= %(bytes)s::bigint) IS NOT FALSE AND NOT EXISTS (SELECT FROM {schema}.link)
           AND NOT EXISTS (SELECT FROM {schema}.fan_out){no_logs}
           AND ((sum(ways) <= {partitions}) IS NOT FALSE
                OR (SELECT true FROM {tables} OFFSET {partitions} LIMIT 1) IS NULL)"""
# What a delivery returns: fields of `dispatcher.delivery.deliver.Delivery`, which says what they mean.
PLAIN_RESULT = {
    **dict.fromkeys(("taken", "delivered", "last", "clock", "ceiling", "woken"), "bigint"),
    "more": "boolean",
    "inboxes": "text[]",
    "drawn": "bigint",
    "running": "text[]",
    "has_bounds": "boolean",
}
# The steps are those of `dispatcher.delivery.deliver`. `taken` and `delivered` read the same rows, since they have one
# snapshot and one range, and the dispatch lock keeps every other deliverer away. If the batch is not plain, or the
# clock would pass its ceiling, `last` is null and nothing is taken.
# D-deliver-9: A plain batch has a statement of its own.
TEXT = """
WITH {start},
{route},
reach AS MATERIALIZED (
    SELECT topic, count(*)::integer AS ways, count(*) FILTER (WHERE named) AS receivers,
           bool_or(subscribed) AS subscribed
    FROM route GROUP BY topic),
batch AS MATERIALIZED (
    SELECT max(position) AS last, count(*) AS messages, max(after_clock) AS after_clock,
           count(*) = %(rows)s::bigint AS more, {is_plain} AS is_plain,
           {has_bounds} AS has_bounds
    FROM (SELECT position, topic, kind, deliver_at, expires_at, after_clock,
                 coalesce(octet_length(value), pg_catalog.pg_column_size(value_json)) AS bytes {oldest}) AS o
         LEFT JOIN reach USING (topic)),
stamp AS MATERIALIZED (
    SELECT CASE WHEN is_plain AND base + messages <= n.clock_ceiling THEN last END AS last, is_plain, messages, more,
           base, base + messages AS top, base + messages <= n.clock_ceiling AS fits, has_bounds, n.id AS origin
    FROM (SELECT last, messages, after_clock, more, has_bounds,
                 is_plain AND NOT (%(whole)s::boolean AND has_bounds) AS is_plain FROM batch) AS b, {schema}.node AS n,
         LATERAL (SELECT greatest(last_value, after_clock) FROM {schema}.clock) AS c (base)),
taken AS (
    DELETE FROM {schema}.outbox
    WHERE position > (SELECT position FROM start) AND position <= (SELECT last FROM stamp)
    RETURNING position),
delivered AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT inbox, clock, clock, (SELECT origin FROM stamp), {message}
    FROM (SELECT {message}, (SELECT base FROM stamp) + row_number() OVER (ORDER BY position) AS clock
          FROM {schema}.outbox
          WHERE position > (SELECT position FROM start) AND position <= (SELECT last FROM stamp)) AS o
         JOIN route USING (topic)
    WHERE {gets}{keyed}
    ORDER BY key, inbox, clock
    RETURNING inbox),{logged}
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('{schema}.inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT taken, {rows}, t.last, CASE WHEN taken > 0 THEN setval('{schema}.clock'::regclass, top) END,
       CASE WHEN is_plain AND NOT fits THEN top END, woken{woken_by_logs}, more, inboxes,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.outbox_position_seq),
       (SELECT running FROM start), has_bounds{has_logs}, is_plain
FROM stamp, (SELECT count(*), max(position) FROM taken) AS t (taken, last),
     (SELECT coalesce(sum(rows), 0)::bigint, coalesce(pg_catalog.array_agg(inbox), '{}'::text[]), {ringing}
      FROM touched) AS d (rows, inboxes, woken)
"""
PARTS: dict[str, Any] = {
    "start": START,
    "partitions": PARTITIONS,
    "sent": f"(SELECT topic {OLDEST}) AS s",
    "oldest": OLDEST,
    "gets": GETS,
    "message": MESSAGE,
    "ringing": RINGING,
    "has_bounds": HAS_BOUNDS,
}
DELIVER_PLAIN = Sql(
    TEXT,
    PLAIN_RESULT | {"is_plain": "boolean"},
    is_plain=IS_PLAIN,
    no_logs=f"\n           AND NOT {HAS_LOGS}",
    tables="{schema}.inbox_registry",
    route=ROUTE,
    keyed="",
    logged="",
    rows="rows",
    woken_by_logs="",
    has_logs="",
    **PARTS,
)
# The same with logs. What a log gets is stamped by the same rule from the same rows.
DELIVER_PLAIN_LOGS = Sql(
    TEXT,
    PLAIN_RESULT | {"has_logs": "boolean", "is_plain": "boolean"},
    is_plain=IS_PLAIN,
    no_logs="",
    tables="(SELECT FROM {schema}.inbox_registry UNION ALL SELECT FROM {schema}.log_registry) AS r",
    route=LOG_ROUTE,
    keyed=f" AND {IS_INBOX}",
    logged=filled(
        LOGGED,
        ways="route",
        stamped="""(SELECT {message}, clock, clock AS sent_clock, (SELECT origin FROM stamp) AS origin
          FROM (SELECT {message}, (SELECT base FROM stamp) + row_number() OVER (ORDER BY position) AS clock
                FROM {schema}.outbox
                WHERE position > (SELECT position FROM start) AND position <= (SELECT last FROM stamp)) AS o) AS o""",
        top="(SELECT top FROM stamp)",
    ),
    rows=f"rows + {LOGGED_ROWS}",
    woken_by_logs=WOKEN_BY_LOGS,
    has_logs=f", {HAS_LOGS}",
    **PARTS,
)
