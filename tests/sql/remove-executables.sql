-- REMOVE in dispatcher/executor/batch/take.py
-- $1 positions
WITH gone AS (DELETE FROM "mailroom".outbox_executable WHERE position = ANY($1::bigint[]) RETURNING 1)
SELECT count(*) FROM gone
