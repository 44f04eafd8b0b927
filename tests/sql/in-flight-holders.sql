-- HOLDERS in inbox/worker/in_flight.py
-- $1 id
SELECT l.pid::bigint FROM "mailroom".my_worker AS w JOIN pg_locks AS l ON l.transactionid::text::bigint = w.xact & 4294967295 AND l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid IS NOT NULL
WHERE w.id = $1::uuid
