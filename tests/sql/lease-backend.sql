-- BACKEND in dispatcher/lanes/lease.py
SELECT a.pid::bigint, a.backend_start FROM (SELECT set_config('role', 'none', true)) AS acting (role), LATERAL pg_stat_get_activity(CASE WHEN acting.role IS NOT NULL THEN pg_backend_pid() END) AS a
