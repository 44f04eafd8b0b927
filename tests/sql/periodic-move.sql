-- MOVE in dispatcher/housekeeping/periodic.py
-- $1 names, $2 due_at, $3 next_at, $4 last_at
UPDATE "mailroom".periodic AS p
SET due_at = m.due_at, next_at = m.next_at, last_at = coalesce(m.last_at, p.last_at), last_error = NULL
FROM unnest($1::text[], $2::timestamptz[], $3::timestamptz[], $4::timestamptz[])
     AS m (name, due_at, next_at, last_at)
WHERE p.name = m.name
