-- ATTEMPTS in inbox/parked.py
-- $1 key, $2 limit
SELECT at, key, clock, message_id, attempt::bigint, outcome, error, worker FROM "mailroom".attempt
WHERE inbox = 'shipping' AND ($1::text IS NULL OR key = $1::text) ORDER BY id DESC LIMIT $2::bigint
