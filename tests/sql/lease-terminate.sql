-- TERMINATE[0] in dispatcher/lanes/lease.py
-- $1 backend_pid, $2 backend_from
SELECT pg_terminate_backend(a.pid)
FROM (SELECT set_config('role', 'none', true)) AS acting (role), LATERAL pg_stat_get_activity(CASE WHEN acting.role IS NOT NULL THEN $1::integer END) AS a JOIN pg_roles AS r ON r.oid = a.usesysid
     JOIN pg_database AS d ON d.oid = a.datid,
     (SELECT rolsuper AS is_super FROM pg_roles WHERE rolname = session_user) AS me
WHERE a.backend_start = $2::timestamptz AND d.datname = current_database()
  AND (is_super OR NOT r.rolsuper AND (pg_has_role(a.usesysid, 'USAGE')
                                       OR pg_has_role('pg_signal_backend'::name, 'USAGE')))
