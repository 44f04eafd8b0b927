-- INSERT in dispatcher/executor/targets/target.py
-- $1 keys, $2 values, $3 numbers
WITH begun AS (INSERT INTO "mailroom".store (key, value, number) SELECT g.key::text, g.value, g.number::bigint FROM unnest($1::text[], $2::bytea[], $3::bigint[]) AS g (key, value, number) ORDER BY g.key ON CONFLICT (key) DO NOTHING RETURNING 1) SELECT count(*) FROM begun
