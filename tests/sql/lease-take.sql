-- TAKE in dispatcher/lanes/lease.py
-- $1 role, $2 holder, $3 lease_s, $4 host, $5 pid, $6 backend_pid, $7 backend_from, $8 state, $9 counts
INSERT INTO "mailroom".lease AS l
    (role, holder, epoch, until, host, pid, backend_pid, backend_from, state, counts)
VALUES ($1::text, $2::uuid, 1, clock_timestamp() + $3::float8 * interval '1 s',
        $4::text, $5::bigint, $6::bigint, $7::timestamptz, $8::text,
        $9::text::jsonb)
ON CONFLICT (role) DO UPDATE SET
    holder = excluded.holder, epoch = l.epoch + (l.holder <> excluded.holder)::integer, until = excluded.until,
    host = excluded.host, pid = excluded.pid, backend_pid = excluded.backend_pid, backend_from = excluded.backend_from,
    state = excluded.state, counts = excluded.counts
WHERE l.holder = excluded.holder OR l.until < clock_timestamp()
RETURNING epoch
