-- LOCK in inbox/parked.py
-- $1 keys, $2 matching, $3 limit
SELECT s.key FROM (
    SELECT key, attempts, parked_at, last_error FROM "mailroom".key_state
    WHERE inbox = 'shipping' AND retry_at = 'infinity' AND parked_at IS NOT NULL
      AND ($1::text[] IS NULL OR key = ANY($1::text[]))
      AND ($2::text IS NULL OR position($2::text IN last_error) > 0)
    ORDER BY parked_at, key LIMIT $3::bigint) AS c JOIN "mailroom".key_state AS s ON s.inbox = 'shipping' AND s.key = c.key
WHERE s.parked_at IS NOT NULL ORDER BY s.key FOR UPDATE OF s
