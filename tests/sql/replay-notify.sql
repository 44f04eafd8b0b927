-- NOTIFY in inbox/parked_keys.py
SELECT pg_notify('mailroom:' || '"mailroom".inbox_shipping'::regclass::oid::text, '') IS NULL
