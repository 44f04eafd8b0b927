"""VACUUM: whether it runs, keeps up, and freezes rows in time."""

from mailroom.doctor.finding import FOUND, DoctorCheck, asking
from mailroom.sql.operation import Sql

SERVER = Sql(
    """
SELECT s.name, pg_catalog.format('%%s is off', s.name)
FROM pg_catalog.unnest('{autovacuum,track_counts}'::text[]) AS s (name) WHERE current_setting(s.name) = 'off'
""",
    columns=FOUND,
)
TABLES = Sql(
    """
SELECT c.oid::regclass::text, c.oid::regclass::text FROM pg_class AS c
WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r'
  AND pg_catalog.array_to_string(c.reloptions, ' '::text) LIKE '%%autovacuum_enabled%%'
  AND EXISTS (SELECT FROM pg_options_to_table(c.reloptions) AS o
              WHERE o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean)
ORDER BY c.relname
""",
    columns=FOUND,
)
# Both limits: on a busy node a table may get many dead rows between two visits of autovacuum. Where something keeps
# VACUUM from removing them, that is a finding of its own.
BEHIND = Sql(
    """
WITH dead AS MATERIALIZED (
    SELECT c.oid, c.relname, c.reltuples, c.reloptions, pg_stat_get_dead_tuples(c.oid) AS rows,
           greatest(pg_stat_get_last_autovacuum_time(c.oid), pg_stat_get_last_vacuum_time(c.oid)) AS last
    FROM pg_class AS c
    WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r' AND pg_stat_get_dead_tuples(c.oid) > 0)
SELECT d.oid::regclass::text, pg_catalog.format('%%s: %%s dead rows, threshold %%s, last vacuumed %%s',
    d.oid::regclass, d.rows,
       t.threshold, coalesce(date_trunc('second'::text, clock_timestamp() - d.last)::text || ' ago', 'never'))
FROM dead AS d, LATERAL (
    SELECT round(coalesce(max(o.option_value::float8) FILTER (WHERE o.option_name = 'autovacuum_vacuum_threshold'),
                          current_setting('autovacuum_vacuum_threshold')::float8)
                 + greatest(d.reltuples, 0) * coalesce(
                     max(o.option_value::float8) FILTER (WHERE o.option_name = 'autovacuum_vacuum_scale_factor'),
                     current_setting('autovacuum_vacuum_scale_factor')::float8)) AS threshold
    FROM pg_options_to_table(d.reloptions) AS o) AS t
WHERE d.rows::float8 >= t.threshold * %(dead_times)s::float8
  AND coalesce(d.last <= clock_timestamp() - %(vacuum_s)s::float8 * interval '1 s', true)
  AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v WHERE v.relid = d.oid)
ORDER BY d.rows DESC
""",
    columns=FOUND,
)
# Of all databases: the server stops writes in all of them for the oldest one.
FROZEN = Sql(
    """
SELECT d.datname::text, pg_catalog.format('database %%s: %%s transactions, %%s multixacts', d.datname,
    age(d.datfrozenxid),
       mxid_age(d.datminmxid))
FROM pg_database AS d
WHERE greatest(age(d.datfrozenxid), mxid_age(d.datminmxid)) >= %(frozen_xids)s::bigint
ORDER BY greatest(age(d.datfrozenxid), mxid_age(d.datminmxid)) DESC
""",
    columns=FOUND,
)

CHECKS = (
    DoctorCheck("M007", asking(SERVER), "ALTER SYSTEM SET {first} = on; SELECT pg_reload_conf();"),
    DoctorCheck("M008", asking(TABLES), "ALTER TABLE {first} RESET (autovacuum_enabled);"),
    DoctorCheck("M009", asking(BEHIND), "VACUUM (VERBOSE) {first};"),
    DoctorCheck("M010", asking(FROZEN), "vacuumdb --freeze --jobs 2 {first}"),
)
