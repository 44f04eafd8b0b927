-- RAISE in dispatcher/housekeeping/janitor.py
-- $1 floor
UPDATE "mailroom".inbox_registry SET floor = $1::bigint WHERE name = 'shipping' AND floor < $1::bigint
