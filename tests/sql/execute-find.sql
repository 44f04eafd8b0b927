-- FIND in dispatcher/executor/targets/target.py
-- $1 keys
SELECT t.key::text, t.value, t.number::bigint FROM "mailroom".store AS t WHERE t.key = ANY($1::text[]::text[]) ORDER BY t.key
