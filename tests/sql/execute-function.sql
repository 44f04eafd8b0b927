-- CALL in dispatcher/executor/targets/function.py
-- $1 arguments
SELECT pg_catalog.to_jsonb("pg_catalog"."jsonb_typeof"($1::text::jsonb))::text
