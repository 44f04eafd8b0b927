-- LET_GO_ALL in inbox/worker/in_flight.py
-- $1 number
UPDATE "mailroom".my_worker SET xact = NULL
WHERE process_number = $1::integer
  AND CASE WHEN xact < pg_snapshot_xmax(pg_current_snapshot())::text::bigint
           THEN pg_xact_status(xact::text::xid8) = 'aborted' END
