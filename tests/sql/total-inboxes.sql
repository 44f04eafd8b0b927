-- BOUNDED in dispatcher/housekeeping/total_floor.py
SELECT name FROM "mailroom".inbox_registry WHERE "order" = 'total' ORDER BY name
