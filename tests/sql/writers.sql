-- WRITERS in dispatcher/delivery/writers.py
WITH held AS MATERIALIZED (SELECT * FROM pg_locks WHERE granted AND pid IS DISTINCT FROM pg_backend_pid()),
newest AS MATERIALIZED (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS id)
SELECT virtualtransaction, min(id - ((id - transactionid::text::bigint + 2147483648) & 4294967295) + 2147483648)
FROM newest, held
WHERE (mode, locktype) IN (('RowExclusiveLock', 'relation'), ('ExclusiveLock', 'transactionid'))
  AND virtualtransaction IN (
    SELECT virtualtransaction FROM held
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND relation = '"mailroom".outbox'::regclass::oid
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
GROUP BY virtualtransaction
