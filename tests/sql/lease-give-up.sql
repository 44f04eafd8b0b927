-- GIVE_UP in dispatcher/lanes/lease.py
-- $1 role, $2 holder
UPDATE "mailroom".lease SET until = clock_timestamp() - interval '1 s', state = 'stopped'
WHERE role = $1::text AND holder = $2::uuid
