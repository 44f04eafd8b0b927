-- LOST in inbox/by_log/lanes.py
-- $1 clock, $2 told
SELECT lost, lost_since, lost_to FROM "mailroom".inbox_registry
WHERE name = 'shipping' AND lost_to > greatest($1::bigint, $2::bigint)
  AND lost_at > now() - interval '7 days'
