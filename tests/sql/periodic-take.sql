-- TAKE in dispatcher/housekeeping/periodic.py
-- $1 now, $2 held, $3 only, $4 rows
SELECT p.name, cron, time_zone, missed, jitter_s, due_at, n.id, m.now
FROM "mailroom".periodic AS p, "mailroom".node AS n,
     (SELECT coalesce($1::timestamptz, clock_timestamp()) AS now OFFSET 0) AS m
WHERE NOT paused AND next_at <= m.now AND p.name <> ALL ($2::text[])
  AND ($3::text IS NULL OR p.name = $3::text)
ORDER BY next_at LIMIT $4::bigint FOR UPDATE OF p SKIP LOCKED
