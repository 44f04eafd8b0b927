-- UPDATE in dispatcher/executor/targets/target.py
-- $1 keys, $2 values, $3 numbers
UPDATE "mailroom".store AS t SET value = g.value, number = g.number::bigint FROM unnest($1::text[], $2::bytea[], $3::bigint[]) AS g (key, value, number) WHERE t.key = g.key::text
