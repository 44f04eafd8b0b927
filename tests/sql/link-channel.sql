-- CHANNEL in dispatcher/links/at_source/asleep.py
-- $1 link
SELECT 'mailroom:' || '"mailroom".transit'::regclass::oid::text || ':' || ($1::bigint)::text
