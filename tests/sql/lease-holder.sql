-- HOLDER in dispatcher/lanes/lease.py
-- $1 lease_s, $2 role
SELECT holder, backend_pid::bigint, backend_from, until > clock_timestamp() + $1::float8 * interval '1 s' FROM "mailroom".lease WHERE role = $2::text
