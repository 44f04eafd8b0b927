-- FALL_ASLEEP in dispatcher/links/at_source/asleep.py
SELECT pg_advisory_lock_shared(1835100527, ('"mailroom".transit'::regclass::oid::bigint - 2147483648)::integer) IS NULL
