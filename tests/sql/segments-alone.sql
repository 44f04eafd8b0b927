-- ALONE in mailroom/logs/segments.py
SELECT pg_try_advisory_xact_lock(1835100526, hashtext('mailroom')), set_config('lock_timeout', '100ms', true),
       set_config('enable_bitmapscan', 'off', true)
