-- HOLDER in dispatcher/lanes/lease.py
-- $1 role
SELECT holder, backend_pid::bigint, backend_from FROM "mailroom".lease WHERE role = $1::text
