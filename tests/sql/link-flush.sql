-- FLUSH in dispatcher/links/acknowledge.py
SELECT pg_catalog.pg_logical_emit_message(true, 'mailroom'::text, ''::text) IS NULL
