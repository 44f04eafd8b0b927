-- FALL_ASLEEP_ON_LOG in inbox/sessions/wakeup.py
SELECT pg_advisory_lock_shared(1835100527, ('"mailroom".inbox_shipping'::regclass::oid::bigint - 2147483648)::integer) IS NULL, pg_advisory_lock_shared(1835100527, ('"mailroom".log_orders'::regclass::oid::bigint - 2147483648)::integer) IS NULL
