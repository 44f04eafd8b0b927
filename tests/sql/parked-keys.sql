-- KEYS in inbox/by_key/parked_keys.py
-- $1 keys, $2 matching, $3 limit
WITH chosen AS MATERIALIZED (
    SELECT key, attempts, parked_at, last_error FROM "mailroom".key_state
    WHERE inbox = 'shipping' AND retry_at = 'infinity' AND parked_at IS NOT NULL
      AND ($1::text[] IS NULL OR key = ANY($1::text[]))
      AND ($2::text IS NULL OR position($2::text IN last_error) > 0)
    ORDER BY parked_at, key LIMIT $3::bigint)
SELECT key, messages, clock, attempts::bigint, parked_at, last_error
FROM chosen AS c, LATERAL (SELECT count(*) AS messages, min(clock) AS clock FROM (
    SELECT clock FROM "mailroom".parked WHERE inbox = 'shipping' AND key = c.key
    UNION ALL SELECT clock FROM "mailroom".inbox WHERE inbox = 'shipping' AND key = c.key) AS held) AS h
ORDER BY parked_at, key
