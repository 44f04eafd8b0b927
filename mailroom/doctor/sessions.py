"""What keeps VACUUM from removing dead rows: transactions that are open for long, slots and standbys.

The deleted rows of our tables stay then, and each claim and delivery reads past them.
"""

from mailroom.doctor.finding import FOUND, DoctorCheck, asking
from mailroom.sql.operation import Sql

# A session, in words. Never its query, which may hold values.
DESCRIBED = """pg_catalog.format('pid %%s (%%s, role %%s, database %%s), %%s, transaction open for %%s', a.pid,
           coalesce(nullif(a.application_name, ''), 'no application name'), a.usename, a.datname,
           coalesce(a.state, 'unknown state'), date_trunc('second'::text, clock_timestamp() - a.xact_start))"""

# A snapshot counts in its own database, the id of a writing transaction in all. VACUUM has both and holds up nothing.
SNAPSHOTS = Sql(
    """
SELECT a.pid::text, {session} FROM pg_stat_activity AS a
WHERE a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
  AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL AND a.datname = current_database())
  AND a.xact_start <= clock_timestamp() - %(snapshot_s)s::float8 * interval '1 s'
  AND a.pid NOT IN (SELECT v.pid FROM pg_stat_progress_vacuum AS v)
ORDER BY a.xact_start
""",
    columns=FOUND,
    session=DESCRIBED,
)
PREPARED = Sql(
    """
SELECT pg_catalog.quote_literal(p.gid),
    pg_catalog.format('prepared transaction %%L of role %%s in database %%s, for %%s', p.gid, p.owner,
       p.database, date_trunc('second'::text, clock_timestamp() - p.prepared))
FROM pg_prepared_xacts AS p
WHERE p.prepared <= clock_timestamp() - %(snapshot_s)s::float8 * interval '1 s' ORDER BY p.prepared
""",
    columns=FOUND,
)
SLOTS = Sql(
    """
SELECT pg_catalog.quote_literal(s.slot_name),
    pg_catalog.format('%%s slot %%s, %%s, keeps %%s transactions and %%s of WAL', s.slot_type,
       s.slot_name, CASE WHEN s.active THEN pg_catalog.format('used by pid %%s',
           s.active_pid) ELSE 'used by nobody' END,
       coalesce(k.xids, 0), pg_size_pretty(coalesce(k.bytes, 0)))
FROM pg_replication_slots AS s, LATERAL (
    SELECT greatest(age(s.xmin), age(s.catalog_xmin)) AS xids,
           pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
                           s.restart_lsn)::bigint AS bytes) AS k
WHERE k.xids >= %(behind_xids)s::bigint OR k.bytes >= %(wal_bytes)s::bigint
ORDER BY k.xids DESC NULLS LAST, k.bytes DESC
""",
    columns=FOUND,
)
# Of a standby that uses a slot, the slot says it.
STANDBYS = Sql(
    """
SELECT a.pid::text, pg_catalog.format('%%s (pid %%s) keeps %%s transactions',
                           coalesce(nullif(a.application_name, ''), 'a standby'), a.pid, age(a.backend_xmin))
FROM pg_stat_replication AS a WHERE age(a.backend_xmin) >= %(behind_xids)s::bigint ORDER BY age(a.backend_xmin) DESC
""",
    columns=FOUND,
)
TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid IN ({all});"

CHECKS = (
    DoctorCheck("M001", asking(SNAPSHOTS), TERMINATE, ends=True),
    DoctorCheck("M002", asking(PREPARED), "ROLLBACK PREPARED {first};"),
    DoctorCheck("M003", asking(SLOTS), "SELECT pg_drop_replication_slot({first});"),
    DoctorCheck("M004", asking(STANDBYS), "ALTER SYSTEM SET hot_standby_feedback = off; SELECT pg_reload_conf();"),
)
