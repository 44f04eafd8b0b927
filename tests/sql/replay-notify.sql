-- NOTIFY in inbox/by_key/parked_keys.py
SELECT pg_notify('mailroom:' || '"mailroom".inbox_shipping'::regclass::oid::text, '') IS NULL
