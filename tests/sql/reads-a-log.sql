-- READS in inbox/sessions/wakeup.py
SELECT log FROM "mailroom".inbox_registry WHERE name = 'shipping' AND log IS NOT NULL
