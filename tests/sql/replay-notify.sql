-- NOTIFY in inbox/parked.py
SELECT pg_notify('mailroom:' || '"mailroom".inbox_shipping'::regclass::oid::text, '') IS NULL
