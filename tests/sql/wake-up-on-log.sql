-- WAKE_UP_ON_LOG in inbox/sessions/wakeup.py
SELECT pg_advisory_unlock_shared(1835100527, ('"mailroom".log_orders'::regclass::oid::bigint - 2147483648)::integer), pg_advisory_unlock_shared(1835100527, ('"mailroom".inbox_shipping'::regclass::oid::bigint - 2147483648)::integer)
