-- DURABLE in mailroom/order/clock.py
SELECT set_config('synchronous_commit', 'on', true)
