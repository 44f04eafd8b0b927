-- BOUND in dispatcher/lanes/lease.py
-- $1 lease_s, $2 role
UPDATE "mailroom".lease SET until = clock_timestamp() + $1::float8 * interval '1 s' WHERE role = $2::text AND until > clock_timestamp() + $1::float8 * interval '1 s'
