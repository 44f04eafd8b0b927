-- LOWER in inbox/by_key/parked_keys.py
-- $1 lowest
UPDATE "mailroom".inbox_registry
SET floor = least(floor, $1::bigint - 1), healthy_floor = least(healthy_floor, $1::bigint - 1)
WHERE name = 'shipping'
