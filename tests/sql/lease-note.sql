-- NOTE in dispatcher/lanes/lease.py
-- $1 lease_s, $2 role
UPDATE "mailroom".lease AS l SET set_back_at = clock_timestamp(),
    set_back_by = greatest(l.until - (clock_timestamp() + $1::float8 * interval '1 s'), CASE WHEN l.set_back_at BETWEEN clock_timestamp() - interval '1 minute' AND clock_timestamp() THEN l.set_back_by END),
    brought_back = 0 + CASE WHEN l.set_back_at BETWEEN clock_timestamp() - interval '1 minute' AND clock_timestamp() THEN l.brought_back ELSE 0 END WHERE l.role = $2::text AND l.until >= clock_timestamp() + $1::float8 * interval '1 s' + interval '1 s'
