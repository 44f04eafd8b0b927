-- WRITE in dispatcher/executor/batch/accounting.py
-- $1 keys, $2 minutes, $3 counts, $4 sizes
INSERT INTO "mailroom".accounting (key, minute, count, bytes)
SELECT * FROM unnest($1::text[], $2::timestamptz[], $3::bigint[], $4::bigint[])
              AS g (key, minute, count, bytes)
ORDER BY key, minute
ON CONFLICT (key, minute) DO UPDATE SET count = excluded.count, bytes = excluded.bytes
