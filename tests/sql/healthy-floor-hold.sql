-- HOLD in dispatcher/housekeeping/healthy_floor.py
SELECT true FROM "mailroom".inbox_registry WHERE name = 'shipping' FOR NO KEY UPDATE SKIP LOCKED
