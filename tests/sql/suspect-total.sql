-- SUSPECT in inbox/total_order/total_failure.py
-- $1 error, $2 keys, $3 clocks
INSERT INTO "mailroom".my_key_state AS s (inbox, key, clock, attempts, retry_at, last_error, alone_to, suspect_to)
SELECT 'shipping', '', clock, 0, clock_timestamp(), $1::text, sent_clock, sent_clock
FROM (SELECT i.clock, i.sent_clock
      FROM unnest($2::text[], $3::bigint[]) AS u (key, clock), LATERAL (
          SELECT clock, sent_clock, origin FROM "mailroom".inbox_shipping AS i
          WHERE i.key = u.key AND i.clock = u.clock) AS i
      ORDER BY i.sent_clock DESC, i.origin DESC LIMIT 1) AS last
ON CONFLICT (inbox, key) DO UPDATE SET
    alone_to = greatest(s.alone_to, excluded.alone_to), suspect_to = excluded.suspect_to,
    last_error = excluded.last_error
    WHERE s.suspect_to < excluded.suspect_to
