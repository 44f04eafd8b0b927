-- ACKNOWLEDGE in dispatcher/links/at_source/acknowledge.py
-- $1 seq, $2 link, $3 run
WITH told AS (
    UPDATE "mailroom".link SET acked = $1::bigint, seen_at = clock_timestamp()
    WHERE number = $2::bigint AND run = $3::uuid AND acked <> $1::bigint)
SELECT EXISTS (SELECT FROM "mailroom".link WHERE number = $2::bigint AND run = $3::uuid)
