-- BOUND in mailroom/sql/operation.py
SELECT relrowsecurity, pg_catalog.row_security_active(oid) FROM pg_catalog.pg_class WHERE oid OPERATOR(pg_catalog.=) '"mailroom".outbox'::regclass
