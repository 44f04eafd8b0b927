"""The server: settings that lose commits, what is nearly used up, and versions."""

from mailroom.doctor.finding import FOUND, DoctorCheck, asking
from mailroom.embedded import SUPPORTED_MAJORS
from mailroom.schema.checks import HEAD, RELEASE
from mailroom.sql.operation import Sql

UNSAFE = Sql(
    """
SELECT s.name, pg_catalog.format('%%s is off', s.name)
FROM pg_catalog.unnest('{fsync,full_page_writes}'::text[]) AS s (name) WHERE current_setting(s.name) = 'off'
""",
    columns=FOUND,
)
# What sessions begin with. One of its own accord may have it off, as workers have for what no crash makes wrong.
NOT_SYNCHRONOUS = Sql(
    """
SELECT 'ALTER SYSTEM SET synchronous_commit = on; SELECT pg_reload_conf();', 'of the server'
FROM pg_settings AS s WHERE s.name = 'synchronous_commit' AND s.reset_val = 'off'
  AND s.source NOT IN ('client', 'user', 'database', 'database user')
UNION ALL
SELECT pg_catalog.format('ALTER %%s RESET synchronous_commit;', o.what), pg_catalog.concat('of ', o.what)
FROM pg_db_role_setting AS r LEFT JOIN pg_database AS d ON d.oid = r.setdatabase
LEFT JOIN pg_roles AS l ON l.oid = r.setrole,
LATERAL (SELECT CASE WHEN l.rolname IS NULL THEN pg_catalog.format('DATABASE %%I', d.datname)
                     WHEN d.datname IS NULL THEN pg_catalog.format('ROLE %%I', l.rolname)
                     ELSE pg_catalog.format('ROLE %%I IN DATABASE %%I', l.rolname, d.datname) END AS what) AS o
WHERE (d.datname IS NULL OR d.datname = current_database()) AND 'synchronous_commit=off' = ANY (r.setconfig)
""",
    columns=FOUND,
)
# `reserved_connections` came with PostgreSQL 16. The limits of a role and of a database do not bind superusers. A role
# of limit 0 is one that is kept out on purpose.
CONNECTIONS = Sql(
    """
SELECT 'ALTER SYSTEM SET max_connections = 500;',
       pg_catalog.format('%%s of %%s connections are used', u.used, u.most)
FROM (SELECT sum(s.numbackends)::bigint AS used,
             current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
             - coalesce(current_setting('reserved_connections', true)::bigint, 0) AS most
      FROM pg_stat_database AS s) AS u
WHERE u.used::float8 >= u.most::float8 * %(connections_share)s::float8
UNION ALL
SELECT pg_catalog.format('ALTER %%s CONNECTION LIMIT %%s;', m.what, 2 * greatest(m.most, m.used)),
       pg_catalog.format('%%s of %%s connections of %%s are used', m.used, m.most, m.what)
FROM (SELECT pg_catalog.format('ROLE %%I', r.rolname) AS what, r.rolconnlimit::bigint AS most,
             (SELECT count(*) FROM pg_stat_activity AS a WHERE a.usesysid = r.oid AND {counted}) AS used
      FROM pg_roles AS r WHERE r.rolconnlimit > 0 AND NOT r.rolsuper
        AND has_schema_privilege(r.oid, '{schema}'::regnamespace::oid, 'USAGE')
      UNION ALL
      SELECT pg_catalog.format('DATABASE %%I', d.datname), d.datconnlimit::bigint,
             (SELECT count(*) FROM pg_stat_activity AS a WHERE a.datid = d.oid AND {counted})
      FROM pg_database AS d WHERE d.datname = current_database() AND d.datconnlimit >= 0) AS m
WHERE m.used::float8 >= m.most::float8 * %(connections_share)s::float8
""",
    columns=FOUND,
    counted="coalesce(a.backend_type, 'client backend') IN ('client backend', 'walsender')",
)
# A session waits in COMMIT, with all its locks, until a standby has answered. What counts is how long the first one has
# waited. A standby that stands still is connected until `wal_sender_timeout`.
STANDBY = Sql(
    """
SELECT '', pg_catalog.format('%%s sessions wait in COMMIT, the first for %%s; synchronous_standby_names is %%L; %%s',
       count(*), date_trunc('second'::text, clock_timestamp() - min(a.query_start)),
       current_setting('synchronous_standby_names'), coalesce((
           SELECT string_agg(pg_catalog.format('%%s (pid %%s) is %%s, %%s, and last answered %%s ago',
                                               r.application_name, r.pid, r.state, r.sync_state,
                                               date_trunc('second'::text, clock_timestamp() - r.reply_time)),
                             '; '::text ORDER BY r.application_name, r.pid)
           FROM pg_stat_replication AS r), 'no standby is connected'))
FROM pg_stat_activity AS a WHERE a.wait_event = 'SyncRep'
HAVING min(a.query_start) <= clock_timestamp() - %(lock_s)s::float8 * interval '1 s'
""",
    columns=FOUND,
)
QUEUE = Sql(
    """
SELECT '',
    pg_catalog.format('%%s %%%% of the queue are used; a session that listens in an open transaction keeps it%%s',
                  round((u.used * 100::float8)::numeric, 1), (
    SELECT ': pid ' || string_agg(a.pid::text, ', '::text) FROM pg_stat_activity AS a
    WHERE a.state LIKE 'idle in transaction%%' AND a.xact_start <= clock_timestamp() - interval '1 min'))
FROM (SELECT pg_notification_queue_usage() AS used) AS u WHERE u.used >= %(queue_share)s::float8
""",
    columns=FOUND,
)
SERVER = Sql(
    """
SELECT '', pg_catalog.format('PostgreSQL %%s', current_setting('server_version'))
WHERE current_setting('server_version_num')::integer / 10000 NOT BETWEEN %(lowest)s::integer AND %(highest)s::integer
""",
    columns=FOUND,
)
REVISION = Sql(
    """
SELECT CASE WHEN v.version_num::text < %(head)s::text THEN 'mailroom migrate'
            ELSE 'pip install -U pg-mailroom' END,
       pg_catalog.format('the schema is at revision %%s, this program is of %%s', v.version_num, %(head)s::text)
FROM {schema}.alembic_version AS v
WHERE v.version_num::text < %(head)s::text OR left(v.version_num::text, 2)::integer > %(newest)s::integer
""",
    columns=FOUND,
)

CHECKS = (
    DoctorCheck("M028", asking(UNSAFE), "ALTER SYSTEM SET {first} = on; SELECT pg_reload_conf();"),
    DoctorCheck("M029", asking(NOT_SYNCHRONOUS), "{first}"),
    DoctorCheck("M030", asking(CONNECTIONS), "{first}"),
    DoctorCheck(
        "M031", asking(QUEUE), "SELECT pid, state, xact_start, application_name FROM pg_stat_activity ORDER BY 3;"
    ),
    DoctorCheck(
        "M033",
        asking(SERVER, lowest=SUPPORTED_MAJORS[0], highest=SUPPORTED_MAJORS[-1]),
        "pg_upgrade --help",
    ),
    DoctorCheck("M050", asking(STANDBY), "ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf();"),
    DoctorCheck("M034", asking(REVISION, head=HEAD, newest=RELEASE + 1), "{first}", of_tables=True),
)
