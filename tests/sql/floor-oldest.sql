-- OLDEST in dispatcher/housekeeping/janitor.py
-- $1 floor
SELECT clock FROM "mailroom".inbox_shipping WHERE (clock + 0) > $1::bigint ORDER BY (clock + 0) LIMIT 1
