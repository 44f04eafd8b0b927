-- UNLOCKED in inbox/sessions/alive.py
-- $1 mine
WITH numbers AS MATERIALIZED (
    SELECT DISTINCT process_number FROM "mailroom".my_worker
    WHERE inbox = 'shipping' AND process_number IS DISTINCT FROM $1::integer)
SELECT process_number FROM numbers
WHERE process_number IS NULL OR pg_try_advisory_xact_lock_shared(1835100530, process_number)
