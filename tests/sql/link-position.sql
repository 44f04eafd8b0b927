-- POSITION in dispatcher/links/at_source/bounds.py
-- $1 origin
SELECT last, last_id, stamped_at, sent_clock FROM "mailroom".receipt WHERE origin = $1::bigint
ORDER BY last DESC LIMIT 1
