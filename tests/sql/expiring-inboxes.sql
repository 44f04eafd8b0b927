-- EXPIRING in dispatcher/housekeeping/expiry.py
SELECT name FROM "mailroom".inbox_registry WHERE expire_s IS NOT NULL ORDER BY name
