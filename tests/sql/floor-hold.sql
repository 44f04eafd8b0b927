-- HOLD in dispatcher/housekeeping/janitor.py
SELECT floor FROM "mailroom".inbox_registry WHERE name = 'shipping' FOR NO KEY UPDATE SKIP LOCKED
