-- FIND in dispatcher/executor/batch/accounting.py
-- $1 keys, $2 minutes
SELECT a.key, a.minute, a.count, a.bytes
FROM unnest($1::text[], $2::timestamptz[]) AS g (key, minute),
     LATERAL (SELECT * FROM "mailroom".accounting AS a WHERE a.key = g.key AND a.minute = g.minute OFFSET 0) AS a
