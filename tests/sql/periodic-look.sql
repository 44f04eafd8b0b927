-- LOOK in dispatcher/housekeeping/periodic.py
-- $1 now, $2 held
SELECT extract(epoch FROM next_at - coalesce($1::timestamptz, clock_timestamp()))::float8
FROM "mailroom".periodic WHERE NOT paused AND name <> ALL ($2::text[]) ORDER BY next_at LIMIT 1
