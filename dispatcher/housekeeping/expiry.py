"""Inboxes whose messages expire (`expire_s`): the janitor removes what waits there for longer."""

from mailroom.figures.keys import IS_PARKED
from mailroom.order.expressions import BY_CLOCK
from mailroom.sql.operation import Operation, Sql, filled

EXPIRING = Sql("SELECT name FROM {schema}.inbox_registry WHERE expire_s IS NOT NULL ORDER BY name", columns=("text",))


def listing_expiring(schema: str) -> Operation[list[str]]:
    """Return the inboxes whose messages expire."""
    return [name for (name,) in (yield EXPIRING.at(schema=schema)())]


# The oldest rows are read first, and then their age is checked: otherwise an inbox in which nothing is old would be
# read to its end. Like a claim this locks the heads of keys, and takes nothing of a key that another transaction works
# on. The registry's row is locked without waiting: a replay locks it until its caller commits. Parked messages stand
# behind `parked_at` until the janitor moves them to `parked`; they wait for an operator. A replayed message has the
# time of its delivery, and would expire at once: so its time counts from the replay. A pause stops no time: it is
# as if the consumers were down. What a stream of Spark has given out stays until it is read: the stream would end for
# good if a batch that it has planned were not all there.
# D-reap-17: What expires is found by reading the oldest rows, and then their age.
EXPIRED = Sql(
    """
WITH registered AS MATERIALIZED (
    SELECT floor, clock_timestamp() - expire_s * interval '1 second' AS since FROM {schema}.inbox_registry
    WHERE name = '{inbox}' FOR NO KEY UPDATE SKIP LOCKED),
oldest AS MATERIALIZED (
    SELECT ctid AS place, key, clock, delivered_at FROM {schema}.inbox_{inbox}
    WHERE {by_clock} > greatest((SELECT floor FROM registered),
                                (SELECT max(upto) FROM {schema}.spark_stream WHERE inbox = '{inbox}'))
    ORDER BY {by_clock} LIMIT %(rows)s::bigint),
old AS MATERIALIZED (SELECT place, key, clock FROM oldest WHERE delivered_at < (SELECT since FROM registered)),
head AS MATERIALIZED (
    SELECT l.key FROM (SELECT key, min(clock) AS clock FROM old GROUP BY key) AS o, LATERAL (
        SELECT key FROM {schema}.inbox_{inbox} AS i
        WHERE i.key = o.key AND i.clock = o.clock
          AND (SELECT s.clock FROM {schema}.key_state AS s
               WHERE s.inbox = '{inbox}' AND s.key = o.key AND {is_parked}) IS NULL
          AND NOT EXISTS (SELECT FROM {schema}.attempt AS a
                          WHERE a.inbox = '{inbox}' AND a.key = o.key AND a.outcome = 'replay'
                            AND a.at > (SELECT since FROM registered))
        FOR UPDATE SKIP LOCKED) AS l),
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING old
    WHERE i.ctid = old.place AND old.key IN (SELECT key FROM head) RETURNING 1),
counted AS (
    UPDATE {schema}.inbox_registry SET expired = expired + (SELECT count(*) FROM gone)
    WHERE name = '{inbox}' AND EXISTS (SELECT FROM gone))
SELECT count(*) FROM gone
""",
    columns=("bigint",),
    by_clock=BY_CLOCK,
    is_parked=filled(IS_PARKED, row="s"),
)


def expiring(schema: str, inbox: str, rows: int) -> Operation[int]:
    """Remove the messages that have expired, of an inbox's `rows` oldest; return how many."""
    [(expired,)] = yield EXPIRED.at(schema=schema, inbox=inbox)(rows=rows)
    return int(expired)
