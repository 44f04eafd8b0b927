-- RELEASE in dispatcher/lanes/doorbell.py
SELECT pg_advisory_unlock(1835100524, ('"mailroom".outbox'::regclass::oid::bigint - 2147483648)::integer)
