-- TAKE in dispatcher/lanes/doorbell.py
SELECT pg_try_advisory_lock(1835100524, ('"mailroom".outbox'::regclass::oid::bigint - 2147483648)::integer)
