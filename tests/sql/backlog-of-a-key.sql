-- BACKLOG_KEY in inbox/by_key/peek.py
-- $1 key
SELECT count(*) FROM "mailroom".inbox_shipping WHERE key = $1::text
