-- SUSPECT in inbox/by_log/log_failure.py
-- $1 error, $2 keys, $3 clocks
INSERT INTO "mailroom".my_key_state AS s (inbox, key, clock, attempts, retry_at, last_error, alone_to, suspect_to)
SELECT 'shipping', key, clock, 0, clock_timestamp(), $1::text, clock, clock
FROM unnest($2::text[], $3::bigint[]) AS u (key, clock)
WHERE (u.clock > (SELECT r.clock FROM "mailroom".receipts_shipping AS r
       WHERE r.lane = "mailroom".lane_of(u.key, 64) ORDER BY r.epoch DESC, r.clock DESC LIMIT 1)
       OR EXISTS (SELECT FROM "mailroom".inbox_shipping AS i WHERE i.key = u.key AND i.clock <= u.clock))
ORDER BY key
ON CONFLICT (inbox, key) DO UPDATE SET
    alone_to = greatest(s.alone_to, excluded.alone_to), suspect_to = excluded.suspect_to,
    last_error = excluded.last_error
    WHERE s.suspect_to < excluded.suspect_to
