-- UNLOCKED in inbox/worker/life.py
-- $1 mine
WITH lives AS MATERIALIZED (
    SELECT DISTINCT life FROM "mailroom".my_worker
    WHERE inbox = 'shipping' AND life IS DISTINCT FROM $1::integer)
SELECT life FROM lives WHERE life IS NULL OR pg_try_advisory_xact_lock_shared(1835100530, life)
