-- FLUSH in dispatcher/links/at_source/acknowledge.py
SELECT pg_catalog.pg_logical_emit_message(true, 'mailroom'::text, ''::text) IS NULL
