-- DURABLE in mailroom/clock.py
SELECT set_config('synchronous_commit', 'on', true)
