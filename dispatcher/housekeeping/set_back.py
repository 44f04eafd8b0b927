"""Keys that wait for a time which lies ahead only because the server's clock was, when it was noted.

When a key may be tried again is a time of the server's clock. If that is set back, the key would wait for as long as
the clock was ahead, beside its own time. The attempt that was recorded then says by how much: it lies ahead as well.
"""

from dispatcher.lanes.lease import LEAST, noting
from mailroom.registry.breakers import DEFERRED_S
from mailroom.sql.operation import Operation, Sql

# In the lease of the dispatcher, whose housekeeping this is.
NOTE = f"""UPDATE {{schema}}.lease AS l SET {noting(by="m.by", keys="m.keys")}
FROM (SELECT count(*) AS keys, max(by) AS by FROM moved) AS m
WHERE l.role = 'dispatcher' AND m.by >= {LEAST}"""

# There are none as long as the clock goes on, so this is one look into the index on `at`. The attempt becomes one of
# now, or its key would be moved again by each round. A key that is locked is left for a later one.
ATTEMPTED = Sql(
    """
WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS now),
ahead AS MATERIALIZED (
    SELECT id, inbox, key, at - (SELECT now FROM moment) AS by FROM {schema}.attempt
    WHERE at > (SELECT now FROM moment) ORDER BY at LIMIT %(rows)s::bigint),
held AS MATERIALIZED (
    SELECT s.inbox, s.key FROM {schema}.key_state AS s
    WHERE (s.inbox, s.key) IN (SELECT inbox, key FROM ahead) ORDER BY s.inbox, s.key FOR UPDATE SKIP LOCKED),
noted AS (
    UPDATE {schema}.attempt AS a SET at = a.at - n.by, retry_at = a.retry_at - n.by FROM ahead AS n
    WHERE a.id = n.id AND ((n.inbox, n.key) IN (SELECT inbox, key FROM held) OR NOT EXISTS (
        SELECT FROM {schema}.key_state AS s WHERE s.inbox = n.inbox AND s.key = n.key))),
moved AS (
    UPDATE {schema}.key_state AS s SET
        retry_at = CASE WHEN s.retry_at < 'infinity' THEN s.retry_at - n.by ELSE s.retry_at END,
        resume_at = CASE WHEN s.resume_at < 'infinity' THEN s.resume_at - n.by ELSE s.resume_at END
    FROM held AS h, LATERAL (SELECT max(by) AS by FROM ahead WHERE inbox = h.inbox AND key = h.key) AS n
    WHERE s.inbox = h.inbox AND s.key = h.key RETURNING n.by)
{note}
""",
    note=NOTE,
)
# Of a key without an attempt: it was in a batch that failed, and is due since; or the breaker of its prefix is open,
# and it is put off.
SUSPECTED = Sql(
    """
WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS now),
latest AS MATERIALIZED (
    SELECT now + CASE WHEN EXISTS (SELECT FROM {schema}.breaker WHERE inbox = '{inbox}') THEN interval '{deferred_s} s'
                      ELSE interval '0' END AS at FROM moment),
held AS MATERIALIZED (
    SELECT key, retry_at FROM {schema}.key_state
    WHERE inbox = '{inbox}' AND retry_at > (SELECT at FROM latest) AND retry_at < 'infinity' AND attempts = 0
    ORDER BY key LIMIT %(rows)s::bigint FOR UPDATE SKIP LOCKED),
moved AS (
    UPDATE {schema}.key_state AS s SET retry_at = (SELECT at FROM latest) FROM held AS h
    WHERE s.inbox = '{inbox}' AND s.key = h.key RETURNING h.retry_at - (SELECT at FROM latest) AS by)
{note}
""",
    note=NOTE,
    deferred_s=str(DEFERRED_S),
)


def bringing_back_attempted(schema: str, rows: int) -> Operation[None]:
    """Have failing keys wait for no longer than their backoff from now, if the clock was set back since they failed."""
    yield ATTEMPTED.at(schema=schema)(rows=rows)


def bringing_back_suspected(schema: str, inbox: str, rows: int) -> Operation[None]:
    """Do the same for keys of an inbox that wait without an attempt of their own."""
    yield SUSPECTED.at(schema=schema, inbox=inbox)(rows=rows)
