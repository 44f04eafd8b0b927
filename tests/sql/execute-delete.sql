-- DELETE in dispatcher/executor/targets/target.py
-- $1 keys
DELETE FROM "mailroom".store WHERE key = ANY($1::text[]::text[])
