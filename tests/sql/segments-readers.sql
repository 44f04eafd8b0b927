-- READERS in mailroom/logs/segments.py
SELECT name FROM "mailroom".inbox_registry WHERE log IS NOT NULL ORDER BY name
