"""Leaders: whether there is one, whether it works, and whether it has ended if its lease has."""

from mailroom.doctor.finding import FOUND, DoctorCheck, asking
from mailroom.figures.leaders import LED, NOTED, WITH_SESSIONS
from mailroom.sql.operation import Sql

WHAT = """CASE l.role WHEN 'links' THEN 'another node or a broker is to be served'
            ELSE pg_catalog.format('something waits for the %%s', l.role) END
       || pg_catalog.format(' since %%s', date_trunc('second'::text, clock_timestamp() - l.since))"""
NOBODY = Sql(
    """
{led}
SELECT CASE l.role WHEN 'executor' THEN 'executor' ELSE 'dispatcher' END,
       {what} || CASE WHEN l.until IS NULL THEN ', and none has ever run' ELSE pg_catalog.format(
           '; %%s pid %%s led until %%s ago', l.host, l.pid,
           date_trunc('second'::text, clock_timestamp() - l.until)) END
FROM led AS l
WHERE l.since <= clock_timestamp() - %(unled_s)s::float8 * interval '1 s'
  AND coalesce(l.until <= clock_timestamp() - %(unled_s)s::float8 * interval '1 s', true)
ORDER BY 1
""",
    columns=FOUND,
    led=LED,
    what=WHAT,
)
# One that fails pauses between its tries, and its lease may have expired in one.
LATE = Sql(
    """
{led}
SELECT CASE WHEN l.failing IS NULL THEN l.backend_pid::text
            ELSE l.failing ->> 'run' END,
       CASE WHEN l.since IS NULL THEN pg_catalog.format('nothing waits for the %%s', l.role) ELSE {what} END
       || pg_catalog.format('; %%s pid %%s leads, %%s, backend %%s', l.host, l.pid, l.state, l.backend_pid)
       || CASE WHEN l.failing IS NULL THEN '' ELSE pg_catalog.format(', and has failed %%s times in %%s s: %%s',
           l.failing ->> 'times', (l.failing ->> 'for_s')::numeric::bigint, l.failing ->> 'why') END
FROM led AS l
WHERE CASE WHEN l.failing IS NULL
           THEN l.role <> 'links' AND l.until > clock_timestamp()
                AND l.since <= clock_timestamp() - %(waiting_s)s::float8 * interval '1 s'
           ELSE l.until > clock_timestamp() - %(lease_s)s::float8 * interval '1 s'
                AND (l.failing ->> 'for_s')::float8 >= %(lease_s)s::float8 END
ORDER BY l.failing IS NULL, 2
""",
    columns=FOUND,
    led=LED,
    what=WHAT,
)
DEAD = Sql(
    """
SELECT l.backend_pid::text, pg_catalog.format('%%s on %%s pid %%s: lease expired %%s ago, backend %%s lives, %%s%%s',
    l.role,
       l.host, l.pid, date_trunc('second'::text, clock_timestamp() - l.until), a.pid,
       coalesce(a.state, 'unknown state'),
       (SELECT ', has ' || string_agg(DISTINCT pg_catalog.concat(h.mode, ' on ', coalesce(h.relation::regclass::text,
           h.locktype)),
                                      ', '::text)
        FROM pg_locks AS h WHERE h.pid = a.pid AND h.granted AND h.locktype IN ('relation', 'advisory')))
FROM {with_sessions}
WHERE l.state <> 'stopped' AND l.until <= clock_timestamp() - %(lease_s)s::float8 * interval '1 s'
ORDER BY 2
""",
    columns=FOUND,
    with_sessions=WITH_SESSIONS,
)
SET_BACK = Sql(
    """
SELECT '', pg_catalog.format('by about %%s, noticed at %%s; %%s keys that would have waited as long go on',
    date_trunc('second'::text, s.by), date_trunc('second'::text, s.at), s.keys)
FROM {noted} AS s
""",
    columns=FOUND,
    noted=NOTED,
)

CHECKS = (
    DoctorCheck("M022", asking(NOBODY), "mailroom {first} run --schema {schema}", of_tables=True),
    DoctorCheck("M023", asking(LATE), "{first}", of_tables=True, ends=True),
    DoctorCheck("M024", asking(DEAD), "{first}", of_tables=True, ends=True),
    DoctorCheck("M052", asking(SET_BACK), "", of_tables=True),
)
