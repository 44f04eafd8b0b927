-- RAISE in dispatcher/housekeeping/total_floor.py
-- $1 floor
UPDATE "mailroom".inbox_registry SET sent_floor = $1::bigint
WHERE name = 'shipping' AND sent_floor < $1::bigint
