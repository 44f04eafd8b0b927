-- KEYS in inbox/total_order/total_parked.py
-- $1 keys, $2 matching, $3 limit
SELECT key, (SELECT count(*) FROM "mailroom".inbox WHERE inbox = 'shipping'),
       (SELECT clock FROM "mailroom".inbox WHERE inbox = 'shipping' ORDER BY (sent_clock + 0), origin LIMIT 1), attempts::bigint,
       parked_at, last_error
FROM (
    SELECT key, attempts, parked_at, last_error FROM "mailroom".key_state
    WHERE inbox = 'shipping' AND retry_at = 'infinity' AND parked_at IS NOT NULL
      AND ($1::text[] IS NULL OR key = ANY($1::text[]))
      AND ($2::text IS NULL OR position($2::text IN last_error) > 0)
    ORDER BY parked_at, key LIMIT $3::bigint) AS c
