-- KEEPING in dispatcher/housekeeping/outstayed.py
SELECT name FROM "mailroom".inbox_registry WHERE keep_s IS NOT NULL ORDER BY name
