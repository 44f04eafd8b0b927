-- WAKE_UP in dispatcher/links/at_source/asleep.py
SELECT pg_advisory_unlock_shared(1835100527, ('"mailroom".transit'::regclass::oid::bigint - 2147483648)::integer)
