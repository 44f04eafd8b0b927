-- LET_GO in inbox/worker/in_flight.py
-- $1 mine
UPDATE "mailroom".my_worker SET xact = NULL
WHERE id = ANY ($1::uuid[])
  AND CASE WHEN xact < pg_snapshot_xmax(pg_current_snapshot())::text::bigint
           THEN pg_xact_status(xact::text::xid8) = 'aborted' END
